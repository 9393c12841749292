"""Puts cases to Hopper's kernels of weights in formats on the CPU. Prints one JSON object: by case what is wrong.

Run as a script with TRITON_INTERPRET=1, which the other kernels of a call need. Cases have the tile of four consumers and that
of two in turns; with the argument ``both``, each has both.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from tests.unit import gluon_interpreter
from tests.unit.ops.moe.cases import FOREIGN
from tests.unit.ops.moe.products.format_cases import named, of_every_format, on

from flashmoe_science.formats import FORMATS
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.formats import quantized
from flashmoe_science.ops.moe.call import MoEInputs, MoEKernel, Tensors, activation_of
from flashmoe_science.ops.moe.problem import MoEProblem, parse
from flashmoe_science.ops.moe.products.weights_sm90 import kernel, launch
from flashmoe_science.ops.moe.products.weights_sm90.config import tile_of
from flashmoe_science.ops.moe.proof.oracle import moe_oracle

H200 = gpu_named("h200")
WIDE = 64, 128  # tokens of tiles that some cases are put to too
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
    Case("moe t300 e1 k1 d416 f64 bf16 w:mxfp4", programs=7),
    Case("moe t1 e4 k2 d384 f256 bf16 w:fp8_block", programs=7),
    Case("moe t20 e3 k2 d400 f272 bf16 w:fp8_block bias"),  # sizes that blocks do not divide, scales of each half
    Case("moe t9 e4 k2 d144 f112 bf16 w:fp8_block clamped interleaved"),
    Case("moe t9 e4 k2 d512 f256 bf16 w:fp8_block", "blocks 2^20 apart"),
    Case("moe t9 e4 k2 d256 f144 bf16 w:fp8_block", "scales of e8m0"),
    Case("moe t9 e6 k3 d256 f128 bf16 w:fp8_block", "foreign"),
    Case("moe t9 e4 k2 d256 f128 bf16 w:fp8_block", "codes that are no number"),
    Case("moe t150 e1 k1 d272 f96 bf16 w:fp8_block"),
    Case("moe t9 e4 k2 d208 f80 bf16 w:fp8_channel bias", "slices of larger tensors"),
    Case("moe t9 e4 k2 d208 f80 bf16 w:fp8_channel gelu interleaved", "scales of a matrix"),
    Case("moe t9 e4 k2 d384 f128 bf16 w:int4_g128"),
    Case("moe t9 e4 k2 d160 f96 bf16 w:int4_g32 bias", "scales of fp32"),
    Case("moe t9 e4 k2 d160 f96 bf16 w:int4_g32_zero interleaved", "scales of fp16"),
    Case("moe t300 e1 k1 d416 f96 bf16 w:int4_g32_zero", programs=7),
    Case("moe t9 e4 k2 d384 f128 bf16 w:int4_g128_zero", "slices of larger tensors"),
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
    problem, draw = parse(case.problem), torch.Generator().manual_seed(0)
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
    form, powers, activation = FORMATS[str(problem.weight_format)], case.change == "scales of e8m0", activation_of(problem)
    (w1, s1, z1), (w2, s2, z2) = quantized(w1, form, activation.halves, powers), quantized(w2, form, powers=powers)
    if case.change == "blocks 2^20 apart":
        s1[..., 1::2] = s1[..., 1::2] * 2.0**20 if s1.is_floating_point() else s1[..., 1::2] + 20
        x.unflatten(1, (-1, form.block[1] or 1))[:, 1::2] *= 2.0**-20
    elif case.change == "codes that are no number":
        w1.view(torch.uint8)[0, 5, 199], w1.view(torch.uint8)[1, 9, 0] = 0x7F, 0xFF
    elif case.change == "scales of a matrix":
        s1, s2 = s1[:, :1], s2[:, :1]
    elif case.change in ("scales of fp32", "scales of fp16"):
        dtype = getattr(torch, case.change.split()[-1].replace("fp", "float"))
        s1, s2 = ((one * (1 + 2.0**-9)).to(dtype) for one in (s1.float(), s2.float()))  # of more bits than bf16 has
    elif case.change.startswith("scales of") and not powers:
        scale = int(case.change.split()[-1])
        if scale == 255:
            s1[:, 6:9, 1:3] = scale
        else:  # the products stay near 1
            s1[:], x = scale, (x.double() * 2.0 ** (124 - scale)).bfloat16()
    biases = [torch.randn(w.shape[:2], generator=draw).bfloat16() if problem.bias else None for w in (w1, w2)]
    of_weights = (w1, w2, s1, s2, z1, z2)
    if case.change == "slices of larger tensors":
        of_weights = tuple(one if one is None else _slice(one) for one in of_weights)
    w1, w2, *of_scales = of_weights
    tensors = Tensors(x, w1, w2, torch.rand(ids.shape, generator=draw), ids, *biases, *of_scales)
    return on(MoEInputs(problem, tensors, activation), device)


def _slice(one: torch.Tensor) -> torch.Tensor:
    """The same numbers, in rows of twice as many."""
    return torch.cat((one, one), -1)[..., : one.shape[-1]]


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


def kernel_of(inputs: MoEInputs) -> MoEKernel:
    return kernel.KERNEL if inputs.problem.weight_format == "mxfp4" else kernel.OF_OTHERS


def main() -> None:
    launch.Build = gluon_interpreter.Build  # type: ignore[misc,assignment]
    bind_all = kernel.bind_all
    kernel.bind_all = lambda inputs, config, up, down: bind_all(
        inputs, config, gluon_interpreter.by_address(up), gluon_interpreter.by_address(down)
    )
    found: dict[str, list[str]] = {}
    both = sys.argv[1:] == ["both"]
    for number, case in enumerate(CASES):
        launch.current_gpu = lambda device, case=case: replace(H200, sm_count=case.programs)  # type: ignore[misc,type-var]
        inputs = inputs_of(case)
        served, form = kernel_of(inputs), str(inputs.problem.weight_format)
        tile = served.configs(inputs.problem, H200)[0]
        wide = WIDE if case is CASES[3] or inputs.problem.tokens >= 150 else ()
        tiles = [tile, tile_of(tile["block_m"], 2, form)]
        tiles = [*tiles, *(tile_of(tokens, form=form) for tokens in wide)] if both or wide else [tiles[number % 2]]
        each = dict.fromkeys(Config(**dict(one) | {"num_stages": 3}) for one in tiles)
        found[str(case)] = [one for config in each for one in wrong(inputs, served.run(inputs, config))]
    launch.current_gpu = lambda device: replace(H200, sm_count=3)  # type: ignore[misc,type-var]
    for name, inputs in chain(named(), of_every_format()):
        if kernel.OF_OTHERS.cannot(inputs.problem, H200):
            continue
        try:
            found[name] = wrong(inputs, kernel.OF_OTHERS.run(inputs, kernel.OF_OTHERS.configs(inputs.problem, H200)[0]))
        except CannotServe as refusal:
            found[name] = [] if "its copies need" in str(refusal) else [str(refusal)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
