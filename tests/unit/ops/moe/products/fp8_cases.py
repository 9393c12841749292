"""Puts cases to the Gluon kernels of experts in fp8 on the CPU. Prints one JSON object: by case what is wrong.

Run as a script with TRITON_INTERPRET=1, which the other kernels of a call need.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from tests.unit import gluon_interpreter
from tests.unit.ops.moe.cases import FOREIGN
from tests.unit.ops.moe.products.mxfp4_cases import H200, Case, by_address

from flashmoe_science.formats import FORMATS
from flashmoe_science.kernel import Config
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.formats import quantized
from flashmoe_science.ops.moe.call import MoEInputs, Tensors, activation_of
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.fp8_sm90 import kernel, launch, quantize
from flashmoe_science.ops.moe.products.fp8_sm90.config import tile_of
from flashmoe_science.ops.moe.proof.oracle import moe_scheme

RMS = 2.0**-8  # of which a result rounded to bf16 takes half; sums of a depth of 7168 in 14 bits are off by twice as much
INTERPRETED = 2.0**-7  # the other kernels' interpreter truncates to bf16

CASES = (
    Case("moe t1 e4 k2 d384 f256 bf16 w:fp8_block_w8a8", programs=7),  # tiles that several programs share
    Case("moe t1 e1 k1 d128 f128 bf16 w:fp8_block_w8a8", programs=5),  # fewer steps than programs
    Case("moe t20 e3 k2 d400 f272 bf16 w:fp8_block_w8a8 clamped"),  # sizes that blocks do not divide
    Case("moe t40 e4 k2 d16 f144 bf16 w:fp8_block_w8a8 gelu"),
    Case("moe t170 e2 k1 d128 f128 bf16 w:fp8_block_w8a8"),  # with 128 tokens a tile one of few and one of many
    Case("moe t9 e6 k3 d256 f128 bf16 w:fp8_block_w8a8", "foreign"),
    Case("moe t9 e4 k2 d256 f128 bf16 w:fp8_block_w8a8", "slices of larger tensors"),
    Case("moe t9 e4 k2 d512 f256 bf16 w:fp8_block_w8a8", "blocks 2^20 apart"),
    Case("moe t9 e4 k2 d256 f128 bf16 w:fp8_block_w8a8", "scales of e8m0"),
    Case("moe t9 e6 k3 d256 f128 bf16 w:fp8_block_w8a8", "NaN in one token"),
    Case("moe t9 e4 k2 d256 f128 bf16 w:fp8_block_w8a8", "zeros in one token"),
)


def inputs_of(case: Case, device: str = "cpu") -> MoEInputs:
    problem = parse_problem(case.problem)
    assert isinstance(problem, MoEProblem)
    draw, form = torch.Generator().manual_seed(0), FORMATS["fp8_block_w8a8"]
    e, h, i, t = problem.experts, problem.dim, problem.hidden, problem.tokens
    x = torch.randn(t, h, generator=draw).bfloat16()
    w1, w2 = (torch.randn(e, n, k, generator=draw) * k**-0.5 for n, k in ((2 * i, h), (h, i)))
    powers = case.change == "scales of e8m0"
    (w1, s1, _), (w2, s2, _) = quantized(w1, form, halves=True, powers=powers), quantized(w2, form, powers=powers)
    ids = torch.stack([torch.randperm(e, generator=draw)[: problem.top_k] for _ in range(t)]).int()
    if case.change == "foreign":
        foreign = FOREIGN["foreign"](e)[torch.randint(5, ids.shape, generator=draw)]
        ids = torch.where(torch.rand(ids.shape, generator=draw) < 0.5, foreign, ids)
    elif case.change == "NaN in one token":
        x[3] = torch.nan
    elif case.change == "zeros in one token":
        x[3] = 0.0
    elif case.change == "blocks 2^20 apart":
        s1[..., 1::2] *= 2.0**20
        x.unflatten(1, (-1, 128))[:, 1::2] *= 2.0**-20
    if case.change == "slices of larger tensors":
        w1, w2 = (torch.cat((one.view(torch.uint8),) * 2, -1)[..., : one.shape[-1]].view(one.dtype) for one in (w1, w2))
        s1, s2 = (torch.cat((one, one.flip(0)), -1)[..., : one.shape[-1]] for one in (s1, s2))
    tensors = Tensors(x, w1, w2, torch.rand(ids.shape, generator=draw), ids, None, None, s1, s2)
    moved = Tensors(*(None if one is None else one.to(device) for one in tensors))  # type: ignore[arg-type]
    return MoEInputs(problem, moved, activation_of(problem))


def wrong(inputs: MoEInputs, out: torch.Tensor, most: float = RMS) -> list[str]:
    """What is wrong with a result, in words; its error may be ``most`` of the RMS."""
    right, got = moe_scheme(inputs.tensors, inputs.activation), out.double()
    finite = right.isfinite()
    found = [] if torch.equal(got.isnan(), right.isnan()) else ["NaN elsewhere than in the reference"]
    if not got[finite].isfinite().all():
        found.append("it is not finite where the reference is")
    elif (error := (got - right)[finite].square().mean().sqrt() / right[finite].square().mean().sqrt()) > most:
        found.append(f"its error is {error:.1e} of the RMS")
    return found


def main() -> None:
    launch.Build = gluon_interpreter.Build  # type: ignore[misc,assignment]
    # Triton's interpreter halves what rounds to a power of two in e4m3.
    quantize.Build = gluon_interpreter.Build  # type: ignore[misc,assignment]
    bind_all, build = kernel.bind_all, quantize.build
    quantize.build = lambda *given: by_address(build(*given))
    kernel.bind_all = lambda inputs, config, up, down: bind_all(inputs, config, by_address(up), by_address(down))
    found: dict[str, list[str]] = {}
    for case in CASES:
        if len(sys.argv) > 1 and sys.argv[1] not in str(case):
            continue
        launch.current_gpu = lambda device, case=case: replace(H200, sm_count=case.programs)  # type: ignore[misc,type-var]
        inputs = inputs_of(case)
        tiles = kernel.KERNEL.configs(inputs.problem, H200)[0], tile_of(128)
        configs = (Config(**dict(one) | {"num_stages": 3}) for one in tiles)
        found[str(case)] = [one for config in configs for one in wrong(inputs, kernel.KERNEL.run(inputs, config), INTERPRETED)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
