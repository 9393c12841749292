"""Puts cases to the Gluon kernels of experts in mxfp4 on the CPU. Prints one JSON object: by case what is wrong.

Run as a script with TRITON_INTERPRET=1, which the other kernels of a call need.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from tests.unit import gluon_interpreter
from tests.unit.ops.moe.cases import FOREIGN
from tests.unit.ops.moe.products.format_cases import on

from flashmoe_science.formats import FORMATS
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.formats import quantized
from flashmoe_science.ops.moe.call import MoEInputs, Tensors, activation_of
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.mxfp4_sm90 import kernel, launch
from flashmoe_science.ops.moe.products.mxfp4_sm90.config import tile_of
from flashmoe_science.ops.moe.proof.oracle import moe_oracle

H200 = gpu_named("h200")
WIDE = 64, 128, 256  # tokens of tiles that some cases are put to too
RMS = 2.0**-7  # the other kernels' interpreter truncates to bf16


@dataclass(frozen=True)
class Case:
    """A problem, in what it is unusual, and the number of programs."""

    problem: str
    change: str = ""
    programs: int = 3

    def __str__(self) -> str:
        return f"{self.problem} {self.change}".strip()


CASES = (
    Case("moe t1 e4 k2 d160 f96 bf16 w:mxfp4", programs=7),  # tiles that several programs share
    Case("moe t1 e1 k1 d32 f32 bf16 w:mxfp4", programs=5),  # fewer steps than programs
    Case("moe t9 e4 k2 d160 f96 bf16 w:mxfp4 bias clamped interleaved"),
    Case("moe t20 e3 k2 d288 f192 bf16 w:mxfp4 bias"),
    Case("moe t40 e4 k2 d64 f288 bf16 w:mxfp4 gelu interleaved"),
    Case("moe t9 e6 k3 d96 f64 bf16 w:mxfp4", "foreign"),
    Case("moe t9 e4 k2 d160 f96 bf16 w:mxfp4 bias", "slices of larger tensors"),
    Case("moe t9 e4 k2 d160 f96 bf16 w:mxfp4", "blocks 2^20 apart"),
    Case("moe t9 e6 k3 d96 f64 bf16 w:mxfp4", "NaN in one token"),
    Case("moe t9 e4 k2 d160 f96 bf16 w:mxfp4 interleaved", "scales of 0"),
    Case("moe t9 e4 k2 d160 f96 bf16 w:mxfp4 interleaved", "scales of 252"),
    Case("moe t9 e4 k2 d160 f96 bf16 w:mxfp4 interleaved", "scales of 255"),
    Case("moe t150 e1 k1 d160 f96 bf16 w:mxfp4 bias"),  # wide tiles, and what is left of them
    Case("moe t300 e1 k1 d544 f128 bf16 w:mxfp4", programs=7),  # a program leaves sums of a wide tile, the next of a narrow one
)


class Drawn(NamedTuple):
    """The numbers of a case before its weights are quantised, and what draws more."""

    problem: MoEProblem
    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    ids: torch.Tensor
    draw: torch.Generator


def drawn(case: Case) -> Drawn:
    """With the changes of tokens and ids that the kernels of all formats are put to."""
    problem, draw = parse_problem(case.problem), torch.Generator().manual_seed(0)
    assert isinstance(problem, MoEProblem)
    e, h, i, t = problem.experts, problem.dim, problem.hidden, problem.tokens
    x = torch.randn(t, h, generator=draw).bfloat16()
    w1, w2 = (torch.randn(e, n, k, generator=draw) * k**-0.5 for n, k in ((2 * i, h), (h, i)))
    ids = torch.stack([torch.randperm(e, generator=draw)[: problem.top_k] for _ in range(t)]).int()
    if case.change == "foreign":
        foreign = FOREIGN["foreign"](e)[torch.randint(5, ids.shape, generator=draw)]
        ids = torch.where(torch.rand(ids.shape, generator=draw) < 0.5, foreign, ids)
    elif case.change == "NaN in one token":
        x[3] = torch.nan
    return Drawn(problem, x, w1, w2, ids, draw)


def inputs_of(case: Case, device: str = "cpu") -> MoEInputs:
    problem, x, w1, w2, ids, draw = drawn(case)
    (w1, s1, _), (w2, s2, _) = (quantized(one, FORMATS["mxfp4"]) for one in (w1, w2))
    if case.change == "blocks 2^20 apart":
        s1[..., 1::2] += 20
        x.unflatten(1, (-1, 32))[:, 1::2] *= 2.0**-20
    elif case.change.startswith("scales of"):
        scale = int(case.change.split()[-1])
        if scale == 255:
            s1[:, 6:9, 1:3] = scale
        else:  # the products stay near 1
            s1[:], x = scale, (x.double() * 2.0 ** (124 - scale)).bfloat16()
    biases = [torch.randn(w.shape[:2], generator=draw).bfloat16() if problem.bias else None for w in (w1, w2)]
    if case.change == "slices of larger tensors":
        w1, w2, s1, s2 = (torch.cat((one, one.flip(0)), -1)[..., : one.shape[-1]] for one in (w1, w2, s1, s2))
    tensors = Tensors(x, w1, w2, torch.rand(ids.shape, generator=draw), ids, *biases, s1, s2)
    return on(MoEInputs(problem, tensors, activation_of(problem)), device)


def wrong(inputs: MoEInputs, out: torch.Tensor) -> list[str]:
    """What is wrong with a result, in words."""
    right, got = moe_oracle(inputs.tensors, inputs.activation), out.double()
    finite = right.isfinite() & (right.abs() < torch.finfo(torch.bfloat16).max)
    found = [] if torch.equal(got.isnan(), right.isnan()) else ["NaN elsewhere than in the reference"]
    if not got[finite].isfinite().all():
        found.append("it is not finite where the reference is")
    elif (error := (got - right)[finite].square().mean().sqrt() / right[finite].square().mean().sqrt()) > RMS:
        found.append(f"its error is {error:.1e} of the RMS")
    return found


def by_address(product: Any) -> Any:
    """A product whose launch is given tensors, and takes addresses."""

    def bind(counts: Any) -> Any:
        start = product(counts)
        return lambda *given: start(*[one.data_ptr() if isinstance(one, torch.Tensor) else one for one in given])

    return bind


def main() -> None:
    launch.Build = gluon_interpreter.Build  # type: ignore[misc,assignment]
    bind_all = kernel.bind_all
    kernel.bind_all = lambda inputs, config, up, down: bind_all(inputs, config, by_address(up), by_address(down))
    found: dict[str, list[str]] = {}
    for case in CASES:
        if len(sys.argv) > 1 and sys.argv[1] not in str(case):
            continue
        launch.current_gpu = lambda device, case=case: replace(H200, sm_count=case.programs)  # type: ignore[misc,type-var]
        inputs = inputs_of(case)
        tile = kernel.KERNEL.configs(inputs.problem, H200)[0]
        tiles = [tile, tile_of(tile["block_m"], 2), *map(tile_of, WIDE if case in (CASES[3], *CASES[-2:]) else ())]
        each = dict.fromkeys(Config(**dict(one) | {"num_stages": 3}) for one in tiles)
        found[str(case)] = [one for config in each for one in wrong(inputs, kernel.KERNEL.run(inputs, config))]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
