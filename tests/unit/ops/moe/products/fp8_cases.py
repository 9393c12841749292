"""Puts cases to the Gluon kernels of experts in fp8 on the CPU. Prints one JSON object: by case what is wrong.

Run as a script with TRITON_INTERPRET=1, which the other kernels of a call need.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from tests.unit import gluon_interpreter
from tests.unit.ops.moe.products.format_cases import on
from tests.unit.ops.moe.products.weights_cases import H200, Case, drawn

from flashmoe_science.formats import FORMATS
from flashmoe_science.kernel import Config
from flashmoe_science.ops.formats import SIDE, Weights, dequantized, dequantized_rows, quantized, quantized_rows
from flashmoe_science.ops.launch import Part, argument
from flashmoe_science.ops.moe.call import MoEInputs, Tensors, activation_of
from flashmoe_science.ops.moe.products.fp8_sm90 import kernel, launch, quantize
from flashmoe_science.ops.moe.products.fp8_sm90.config import tile_of
from flashmoe_science.ops.moe.proof.oracle import moe_oracle, moe_scheme
from flashmoe_science.ops.moe.pytorch import activate

RMS = 2e-3  # of the second product's error; rounding to bf16 takes 1.7e-3
# What sums are off by at most, of the root of their squared products: by 2^-13 where 128 at a time are of 14 bits, the most of
# ten thousand by 2^-11 to 2^-10; a sum of 7168 at one level by 2^-7.
SUMS = 2.0**-9

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
    Case("moe t20 e3 k2 d400 f272 bf16 w:fp8_channel_w8a8 clamped"),
    Case("moe t9 e4 k2 d256 f128 bf16 w:fp8_channel_w8a8", "a scale of gates and one of ups"),
    Case("moe t9 e6 k3 d384 f256 bf16 w:fp8_channel_static", "foreign", programs=7),
    Case("moe t20 e3 k2 d400 f272 bf16 w:fp8_channel_static gelu"),
    Case("moe t9 e4 k2 d256 f128 bf16 w:fp8_channel_static", "scales that are too small"),
    Case("moe t9 e4 k2 d256 f128 bf16 w:fp8_channel_static", "a scale of gates and one of ups"),
    Case("moe t9 e4 k2 d256 f144 bf16 w:fp8_channel_static", "one scale of all"),
    Case("moe t9 e6 k3 d256 f128 bf16 w:fp8_channel_static", "NaN in one token"),
)


def inputs_of(case: Case, device: str = "cpu") -> MoEInputs:
    problem, x, w1, w2, ids, draw = drawn(case)
    form, powers, of_inputs = FORMATS[str(problem.weight_format)], case.change == "scales of e8m0", (None, None)
    (w1, s1, _), (w2, s2, _) = quantized(w1, form, halves=True, powers=powers), quantized(w2, form, powers=powers)
    if form.static:
        largest = torch.tensor([[8.0], [8.0]]) if case.change != "scales that are too small" else torch.tensor([[2.0], [0.25]])
        of_inputs = torch.rand(2, problem.experts, generator=draw).neg().exp2() * largest / 448
    if case.change == "zeros in one token":
        x[3] = 0.0
    elif case.change == "one scale of all":
        s1, s2, of_inputs = s1[:, :1], s2[:, :1], [one[:1].expand(problem.experts) for one in of_inputs]
    elif case.change == "a scale of gates and one of ups":
        s1, s2 = s1[:, problem.hidden - 1 : problem.hidden + 1], s2[:, :1].bfloat16()
    elif case.change == "blocks 2^20 apart":
        s1[..., 1::2] *= 2.0**20
        x.unflatten(1, (-1, 128))[:, 1::2] *= 2.0**-20
    if case.change == "slices of larger tensors":
        w1, w2 = (torch.cat((one.view(torch.uint8),) * 2, -1)[..., : one.shape[-1]].view(one.dtype) for one in (w1, w2))
        s1, s2 = (torch.cat((one, one.flip(0)), -1)[..., : one.shape[-1]] for one in (s1, s2))
    tensors = Tensors(x, w1, w2, torch.rand(ids.shape, generator=draw), ids, None, None, s1, s2, None, None, *of_inputs)
    return on(MoEInputs(problem, tensors, activation_of(problem)), device)


class Between(NamedTuple):
    """What a call leaves of its products: rows by expert, of the pairs ``pair`` [P], those of an expert between two ``offsets``
    [E + 1]; of the first the codes [P, I] and their scales [P, I / 128 rounded up], of the second the rows [P, H]."""

    pair: torch.Tensor
    offsets: list[int]
    active: Weights
    rows: torch.Tensor


def between(inputs: MoEInputs, config: Config) -> Between:
    """What a call of the kernel leaves in its workspace."""
    p, device, memory = inputs.problem, inputs.tensors.x.device, list[torch.Tensor]()

    def keeping(on_gpu: bool, parts: Sequence[Part]) -> Callable[[], tuple[Any, ...]]:
        def take() -> tuple[Any, ...]:
            memory[:] = [torch.zeros(elements, dtype=dtype, device=device) for elements, dtype in parts]
            return (memory, *map(argument, memory))

        return take

    with patch.object(launch, "workspace_allocator", keeping):
        kernel.KERNEL.run(inputs, config)
    tables, _, codes, _, scales, rows, *_ = memory
    pairs = p.pairs()
    active = Weights(codes.view(pairs, p.hidden), scales.view(-1, pairs).T)
    return Between(tables[:pairs].long(), tables[2 * pairs :][: p.experts + 1].tolist(), active, rows.view(pairs, p.dim))


def wrong_between(inputs: MoEInputs, given: Between) -> list[str]:
    """What is wrong with either product, in words. A code of the first may differ from fp64's only where sums of 128 in tensor
    cores may cross a rounding boundary; the second is held to fp64 on the first's codes."""
    first, second = inputs.tensors.in_format() or ()
    found, square, square_error = list[str](), 0.0, 0.0
    for expert, (begin, end) in enumerate(pairwise(given.offsets)):
        x = inputs.tensors.x[given.pair[begin:end] // inputs.problem.top_k]
        clean = x.isfinite().all(1)
        codes, scale = (one[begin:end][clean] for one in given.active[:2])
        found += _wrong_codes(inputs, expert, x[clean], first.of(expert), Weights(codes, scale))
        right = dequantized_rows(Weights(codes, scale), torch.float64) @ dequantized(second.of(expert), torch.float64).T
        square += right.square().sum().item()
        square_error += (given.rows[begin:end][clean].double() - right).square().sum().item()
    if not square_error <= RMS**2 * square:
        found.append(f"the second product's error is {(square_error / square) ** 0.5:.1e} of the RMS")
    return found


def _wrong_codes(inputs: MoEInputs, expert: int, x: torch.Tensor, weights: Weights, active: Weights) -> list[str]:
    """What is wrong with an expert's codes, or their scales."""
    of_x, of_active = (None if one is None else one[expert] for one in inputs.tensors[11:])
    rows = dequantized_rows(quantized_rows(x, of_x), torch.float64)
    w = dequantized(weights, torch.float64, inputs.activation.halves)
    both, off = rows @ w.T, SUMS * (rows.square() @ w.square().T).sqrt()
    right, half = activate(both, inputs.activation), off.shape[1] // 2
    signs = (torch.tensor(one, device=x.device).repeat_interleave(half) for one in product((-1, 1), repeat=2))
    near = torch.stack([(activate(both + off * sign, inputs.activation) - right).abs() for sign in signs]).amax(0)
    near += 2.0**-21 * right.abs()  # the activation in fp32
    largest, most = (_of_blocks(one).amax(-1) for one in (right.abs(), near))
    far = (448 * active.scale - largest).abs() > most + 2.0**-100 if of_active is None else active.scale != of_active
    found = ["scales of the first product's codes"] if far.any() else []
    scale = active.scale.double().repeat_interleave(SIDE, 1)[:, : right.shape[1]]
    low, high = (((right + by) / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() for by in (-near, near))
    codes = active.codes.double()
    if count := int((~((low <= codes) & (codes <= high))).sum()):
        found.append(f"{count} of {codes.numel()} codes of the first product")
    return found


def _of_blocks(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % SIDE)).unflatten(1, (-1, SIDE))


def wrong(inputs: MoEInputs, out: torch.Tensor) -> list[str]:
    """What is wrong with a result, in words: it may be off by 1.1 of what the scheme is."""
    exact = moe_oracle(inputs.tensors, replace(inputs.activation, w8a8=False))
    finite, got = exact.isfinite(), out.double()
    if not torch.equal(got.isfinite(), finite):
        return ["it is not finite where the reference is, or the other way"]
    error, most = ((one - exact)[finite].norm().item() for one in (got, moe_scheme(inputs.tensors, inputs.activation)))
    return [] if error <= 1.1 * most else [f"its error is {error / most:.2f} of the scheme's"]


def main() -> None:
    launch.Build = gluon_interpreter.Build  # type: ignore[misc,assignment]
    # Triton's interpreter halves what rounds to a power of two in e4m3.
    quantize.Build = gluon_interpreter.Build  # type: ignore[misc,assignment]
    bind_all, build = kernel.bind_all, quantize.build
    quantize.build = lambda *given: gluon_interpreter.by_address(build(*given))
    kernel.bind_all = lambda inputs, config, up, down: bind_all(
        inputs, config, gluon_interpreter.by_address(up), gluon_interpreter.by_address(down)
    )
    found: dict[str, list[str]] = {}
    for case in CASES:
        if len(sys.argv) > 1 and sys.argv[1] not in str(case):
            continue
        launch.current_gpu = lambda device, case=case: replace(H200, sm_count=case.programs)  # type: ignore[misc,type-var]
        inputs = inputs_of(case)
        tiles = kernel.KERNEL.configs(inputs.problem, H200)[0], tile_of(128)
        configs = (Config(**dict(one) | {"num_stages": 3}) for one in tiles)
        found[str(case)] = []
        for config in configs:
            found[str(case)] += wrong(inputs, kernel.KERNEL.run(inputs, config))
            found[str(case)] += wrong_between(inputs, between(inputs, config))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
