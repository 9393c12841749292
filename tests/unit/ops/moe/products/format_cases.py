"""The numbers of formats that kernels must not get wrong: the least and greatest scales, what is no number, each code.

Run as a script with TRITON_INTERPRET=1 it puts them to the kernels in Triton's interpreter and prints one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch
from tests.unit.ops.moe.backward.traps import apart
from tests.unit.ops.moe.cases import Case, changed, dense, inputs_of

from flashmoe_science.formats import FORMATS
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.ops.formats import quantized
from flashmoe_science.ops.launch import INTERPRETING
from flashmoe_science.ops.moe.call import MoEInputs, MoEKernel
from flashmoe_science.ops.moe.front.kernels import ours

# Of e8m0, with tokens whose products with such weights are numbers of bf16; above 128 are scales that no model has.
LOW, GREAT, BOTH = ((0, 1, 64, 127, 128), 2.0**8), ((64, 127, 128, 129, 192, 253, 254), 2.0**-5), ((0, 128, 200), 2.0**8)


def saved(kernel: MoEKernel, config: Config, inputs: MoEInputs) -> torch.Tensor:
    """The first product, as the kernel saves it."""
    return kernel.run(replace(inputs, saves_z=True), config)[1]


def z_wrong(got: torch.Tensor, inputs: MoEInputs) -> str | None:
    """What is wrong with the first product of the first token's expert, the first that has tokens, each column by itself:
    columns differ by 2^190."""
    one = dense(inputs).tensors
    expert = int(one.topk_ids[0, 0])
    (token, _), right = torch.where(one.topk_ids == expert), one.x.double() @ one.w1[expert].T
    right, got = right[token], got[: len(token)].double()
    if not torch.equal(got.isnan(), right.isnan()):
        return "what is no number is not where it must be"
    off = ((got - right).abs().nan_to_num() > 2.0**-7 * right.abs().nan_to_num().amax(0)).any(0)
    return f"columns {off.nonzero().flatten().tolist()} are off" if off.any() else None


def scaled(scales: tuple[int, ...], of_x: float) -> MoEInputs:
    """A scale of a row after another, and tokens of that size."""
    inputs = inputs_of(Case("moe t5 e2 k1 d128 f64 bf16 w:mxfp4"), "cpu")
    scale = torch.tensor(scales, dtype=torch.uint8).repeat(128)[:128]
    codes = torch.randint(0, 256, inputs.tensors.w1.shape, dtype=torch.uint8)
    codes = torch.where(scale[:, None] > 252, codes & 0xBB, codes)  # 1.5 at most: a greater one is infinite in bf16
    of_all = scale[None, :, None].expand(inputs.tensors.gate_up_scale.shape).contiguous()  # type: ignore[union-attr]
    x, ids = of_x * torch.randn(5, 128).bfloat16(), torch.zeros(5, 1, dtype=torch.int32)
    return changed(inputs, w1=codes, gate_up_scale=of_all, x=x, topk_ids=ids)


def named() -> Iterator[tuple[str, MoEInputs]]:
    """Inputs by what is unusual in them, of tokens that all choose the first of two experts."""
    yield "scales to 2", scaled(*LOW)
    yield "greater scales", scaled(*GREAT)
    if not INTERPRETING:  # it has no bf16 below the least normal one
        yield "2^-127 beside 2^73", scaled(*BOTH)
    one = scaled(*GREAT)
    scale = one.tensors.gate_up_scale.clone()  # type: ignore[union-attr]
    scale[0, 7, 1], scale[1] = 255, 255  # the second expert has no tokens
    yield "a scale that is no number", changed(one, gate_up_scale=scale)
    one = scaled(*LOW)
    codes = one.tensors.w1.clone()
    codes[0, 3:9] = torch.tensor([0x00, 0x88, 0x80, 0x77, 0xFF, 0x7F], dtype=torch.uint8)[:, None]
    yield "blocks of 0, -0 and 6", changed(one, w1=codes)
    for interleaved in ("", " interleaved"):
        one = inputs_of(Case(f"moe t5 e2 k1 d200 f150 bf16 w:fp8_block{interleaved}"), "cpu")
        one = changed(one, topk_ids=torch.zeros(5, 1, dtype=torch.int32))
        scale = one.tensors.gate_up_scale
        assert scale is not None
        apart = scale * 2.0 ** torch.tensor([0, 20])[torch.arange(scale.numel()).view(scale.shape) % 2]
        yield f"neighbouring blocks 2^20 apart{interleaved}", changed(one, gate_up_scale=apart)
        powers = (torch.frexp(apart).exponent + 126).to(torch.uint8)
        yield f"scales of e8m0{interleaved}", changed(one, gate_up_scale=powers)
        yield f"such scales by PyTorch's name{interleaved}", changed(one, gate_up_scale=powers.view(torch.float8_e8m0fnu))
    apart[0, 1, 0] = torch.nan
    yield "an fp32 scale that is no number", changed(one, gate_up_scale=apart)
    bits = one.tensors.w1.view(torch.uint8).clone()
    bits[0, 5, 199], bits[0, 9, 0], bits[0, 11, 3], bits[1] = 0x7F, 0xFF, 0x7F, 0x7F
    yield "codes that are no number", changed(one, w1=bits.view(torch.float8_e4m3fn))
    torch.manual_seed(1)
    bits = torch.randint(0, 256, bits.shape, dtype=torch.uint8)
    bits = torch.where(bits & 0x7F == 0x7F, 0, bits)
    yield "every code of e4m3", changed(one, w1=bits.view(torch.float8_e4m3fn))
    for dtype in ("bf16", "fp16"):
        one = inputs_of(Case(f"moe t5 e2 k1 d200 f150 {dtype} w:fp8_channel"), "cpu")
        one = changed(one, w1=bits.view(torch.float8_e4m3fn), topk_ids=torch.zeros(5, 1, dtype=torch.int32))
        yield f"every code of e4m3 by channel, {dtype}", one
        lost = bits.clone()
        lost[0, 5, 199], lost[0, 9, 0], lost[0, 11, 3], lost[1] = 0x7F, 0xFF, 0x7F, 0x7F
        yield f"codes that are no number by channel, {dtype}", changed(one, w1=lost.view(torch.float8_e4m3fn))
        scale = one.tensors.gate_up_scale
        assert scale is not None
        yield f"scales of a tensor, {dtype}", changed(one, gate_up_scale=scale[:, :1])
        yield f"scales of gates and of ups, {dtype}", changed(one, gate_up_scale=scale[:, 149:151])
        yield f"scales of bf16, {dtype}", changed(one, gate_up_scale=scale.bfloat16())
        yield f"scales of fp16, {dtype}", changed(one, gate_up_scale=scale.half())
    apart = scale * 2.0 ** torch.tensor([-60, 60])[torch.arange(scale.numel()).view(scale.shape) % 2]
    apart[0, 7] = torch.nan
    one = inputs_of(Case("moe t5 e2 k1 d200 f150 bf16 w:fp8_channel"), "cpu")
    yield "neighbouring rows 2^120 apart", changed(one, gate_up_scale=apart, topk_ids=torch.zeros(5, 1, dtype=torch.int32))
    for group in (32, 128):
        for dtype in ("bf16", "fp16"):
            one = inputs_of(Case(f"moe t5 e2 k1 d384 f128 {dtype} w:int4_g{group}_zero"), "cpu")
            codes = torch.randint(-(2**31), 2**31, one.tensors.w1.shape).int()
            zeros = torch.randint(-(2**31), 2**31, (2, 32, 384 // group)).int()
            every = changed(one, w1=codes, gate_up_zero_point=zeros, topk_ids=torch.zeros(5, 1, dtype=torch.int32))
            yield f"every code of int4 and zero point, groups of {group}, {dtype}", every
            one = inputs_of(Case(f"moe t5 e2 k1 d384 f128 {dtype} w:int4_g{group}"), "cpu")
            one, scale = changed(one, topk_ids=torch.zeros(5, 1, dtype=torch.int32)), one.tensors.gate_up_scale
            assert scale is not None
            yield f"every code of int4, groups of {group}, {dtype}", changed(one, w1=codes)
            apart = scale.float() * 2.0 ** torch.tensor([0, 7])[torch.arange(scale.shape[2]) % 2]
            for of_scale in (torch.bfloat16, torch.float16, torch.float32):
                lost = apart.to(of_scale)
                lost[0, 9, 1], lost[1] = torch.nan, torch.nan  # the second expert has no tokens
                words = f"neighbours apart and what is no number, groups of {group}, {dtype}, {of_scale}"
                yield words, changed(one, gate_up_scale=lost)


DEEP = 2048 if INTERPRETING else 7168  # sums that are truncated to bf16 are refused at either
# A depth of each that no tile divides, where its groups allow one.
DEPTHS = {"mxfp4": 160, "fp8_block": 200, "fp8_channel": 200, "int4_g32": 160, "int4_g32_zero": 160, "int4_g128_zero": 384}


def of_every_format() -> Iterator[tuple[str, MoEInputs]]:
    """The same of each format: where numbers lie and how they differ, of tokens that all choose one expert."""
    for form, depth in DEPTHS.items():
        one = drawn(form, torch.randn(2, 256, depth))
        yield f"slices of memory that is no number, {form}", in_no_numbers(one)
        far = {name: apart(value) for name in OF_FIRST if (value := getattr(one.tensors, name)) is not None}
        far["topk_ids"] = torch.ones_like(one.tensors.topk_ids)
        yield f"an expert past the reach of 32 bits, {form}", changed(one, **far)
        yield f"zeros with a scale of 0, {form}", with_zeros(form, depth)
        if form != "fp8_channel":
            yield f"neighbours 2^20 apart along the depth, {form}", blocks_apart(form, depth)
        width = max(32, FORMATS[form].block[1] or 0)  # the least that a format has: each of the columns would show it
        deep = drawn(form, torch.rand(2, 2 * width, DEEP) / 100)
        yield f"one sign, {DEEP} deep, {form}", changed(deep, x=deep.tensors.x.abs())
    one = drawn("fp8_block", torch.randn(2, 256, 200))
    yield "scales of blocks in bf16", changed(one, gate_up_scale=one.tensors.gate_up_scale.bfloat16())  # type: ignore[union-attr]
    yield "scales of blocks in fp16", changed(one, gate_up_scale=one.tensors.gate_up_scale.half())  # type: ignore[union-attr]


OF_FIRST = ("w1", "gate_up_scale", "gate_up_zero_point")


def drawn(form: str, w1: torch.Tensor) -> MoEInputs:
    """Five tokens by experts whose first weights are these."""
    one = inputs_of(Case(f"moe t5 e2 k1 d{w1.shape[2]} f{w1.shape[1] // 2} bf16 w:{form}"), "cpu")
    codes, scale, zero_point = quantized(w1, FORMATS[form], halves=form == "fp8_block")
    zeros = {} if zero_point is None else {"gate_up_zero_point": zero_point}
    return changed(one, w1=codes, gate_up_scale=scale, topk_ids=torch.zeros(5, 1, dtype=torch.int32), **zeros)


def in_no_numbers(one: MoEInputs) -> MoEInputs:
    """The first weights as parts of larger tensors, whose other codes and scales are NaN where they can be."""
    made = {}
    for name in OF_FIRST:
        if (value := getattr(one.tensors, name)) is not None:
            rest = torch.full((2, value.shape[1] + 8, *(size + 16 for size in value.shape[2:])), -1, dtype=torch.int64)
            wide = rest.to(value.dtype) if value.dtype in (torch.uint8, torch.int32) else (rest * torch.nan).to(value.dtype)
            inside = wide[(slice(None), *(slice(size) for size in value.shape[1:]))]
            made[name] = inside.copy_(value)
    return changed(one, **made)


def with_zeros(form: str, depth: int) -> MoEInputs:
    """A block, and rows, of zeros, whose scale is 0: what a quantiser makes that divides by nothing."""
    w1, (high, wide) = torch.randn(2, 256, depth), FORMATS[form].block
    w1[:, :128, : wide or depth] = 0
    one = drawn(form, w1)
    scale = one.tensors.gate_up_scale.clone()  # type: ignore[union-attr]
    scale[(slice(None), slice(128 // high), 0)[: scale.dim()]] = 0
    return changed(one, gate_up_scale=scale)


def blocks_apart(form: str, depth: int) -> MoEInputs:
    """Every other block 2^20 times as large, and what it is multiplied with as much smaller: all have a part in a sum."""
    one, wide = drawn(form, torch.randn(2, 256, depth)), FORMATS[form].block[1]
    scale, x = one.tensors.gate_up_scale.clone(), one.tensors.x.clone()  # type: ignore[union-attr]
    if scale.dtype == torch.uint8:
        scale[..., 1::2] += 20
    else:
        scale = scale.float()
        scale[..., 1::2] *= 2.0**20
    x[:, torch.arange(depth) // wide % 2 == 1] *= 2.0**-20
    return changed(one, gate_up_scale=scale, x=x)


def on(inputs: MoEInputs, device: str) -> MoEInputs:
    moved = {name: value if value is None else value.to(device) for name, value in inputs.tensors._asdict().items()}
    return changed(inputs, **moved)


def main() -> None:
    gpu, found = gpu_named("h200"), {}
    for name, inputs in chain(named(), of_every_format()):
        for kernel in ours():
            if kernel.interpretable and kernel.cannot(inputs.problem, gpu) is None:
                config = kernel.configs(inputs.problem, gpu)[0]
                found[f"{name}: {kernel.name}"] = z_wrong(saved(kernel, config, inputs), inputs)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
