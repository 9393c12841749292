"""Weights in a format of ``formats.py`` as tensors: exact dequantisation and reference quantisers, by PyTorch's operators.

Shapes: weights [..., N, K]. mxfp4: codes uint8 [..., N, K / 2], of a byte the low four bits are the even column; scales uint8
[..., N, K / 32], the e8m0 of OCP's Microscaling Formats 1.0: 2^(s - 127), NaN for 255. fp8 blocks: codes
float8_e4m3fn [..., N, K]; scales fp32, bf16, fp16 or e8m0 [..., ceil(N / 128), ceil(K / 128)]. fp8 channels: such codes;
scales fp32, bf16 or fp16 [..., N], or [..., 1] of all rows, or [..., 2] of each half. int4: codes int32 [..., N, K / 8], the
first column in the lowest four bits, 8 more than the integer; scales bf16, fp16 or fp32 [..., N, K / 32] or [..., N, K / 128].
int4 with zero points: from such codes, from 0 to 15, that of their block is subtracted in place of 8; zero points int32
[..., ceil(N / 8), K / 32 or K / 128], those of eight rows, the first in the lowest four bits.

Rows that are two halves, gates and then ups, may have scales of blocks of each by itself, 2 ceil(N / 2 / 128) rows of them, as
where a checkpoint's two matrices are joined. Where the rows as one have as many scales, halves that no blocks divide are taken
to have their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashmoe_science.formats import FORMATS, Format

SIDE = FORMATS["fp8_block"].block[0]
_MX = 32  # columns of a scale of mxfp4
BITS = {torch.uint8: 4, torch.float8_e4m3fn: 8, torch.int32: 4}  # of a code, by what has them
_LARGEST_EXPONENT = 2  # of e2m1
_LARGEST_E4M3 = 448.0
_SUBNORMAL, _NAN = 0x400000, 0x7FC00000  # fp32: 2^-127, and what is no number


class Weights(NamedTuple):
    """Weights, their scales and, if their format has them, zero points."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None = None

    def of(self, expert: int) -> Weights:
        """The weights of one expert."""
        return Weights(self.codes[expert], self.scale[expert], None if self.zero_point is None else self.zero_point[expert])


def format_of(codes: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None = None) -> Format | None:
    """The format of weights; None of those without scales."""
    if scale is None:
        return None
    if codes.dtype == torch.uint8:
        return FORMATS["mxfp4"]
    if codes.dtype == torch.int32:
        zero = "" if zero_point is None else "_zero"
        return FORMATS[f"int4_g{columns_of(codes) // scale.shape[-1]}{zero}"]
    return FORMATS["fp8_block" if scale.dim() == codes.dim() else "fp8_channel"]


def columns_of(codes: torch.Tensor) -> int:
    """Weights of a row; of weights in no format as many as there are."""
    bits = 8 * codes.element_size()
    return codes.shape[-1] * (bits // BITS.get(codes.dtype, bits))


def has_own_scales(rows: int, scale_rows: int) -> bool:
    """Whether each half of so many rows, in blocks, has scales of its own."""
    return scale_rows == 2 * _blocks(rows // 2)


def dequantized(weights: Weights, dtype: torch.dtype, halves: bool = False) -> torch.Tensor:
    """[..., N, K], each code times its scale: exact in fp64, else rounded to fp32, then to the dtype. ``halves``: the rows may
    be two halves."""
    codes, scale, zero_point = weights
    wide = torch.promote_types(dtype, torch.float32)
    scale = (_powers(scale) if scale.dtype == torch.uint8 else scale).to(wide)
    form = format_of(codes, scale)
    if form is FORMATS["fp8_channel"]:
        return (codes.to(wide) * scale.repeat_interleave(codes.shape[-2] // scale.shape[-1], -1)[..., None]).to(dtype)
    if codes.dtype == torch.int32:
        integers = unpacked(codes)
        group = integers.shape[-1] // scale.shape[-1]
        zero = 8 if zero_point is None else unpacked(zero_point.mT).mT[..., : codes.shape[-2], :].repeat_interleave(group, -1)
        return ((integers - zero).to(wide) * scale.repeat_interleave(group, -1)).to(dtype)
    if form is FORMATS["mxfp4"]:
        values = _e2m1(codes.device).to(wide)[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()]
        return (values * scale.repeat_interleave(_MX, -1)).to(dtype)
    rows = codes.shape[-2]
    half = rows // 2 if halves and has_own_scales(rows, scale.shape[-2]) else rows
    row = torch.arange(rows, device=codes.device)
    of_rows = scale.index_select(-2, row // half * _blocks(half) + row % half // SIDE)
    return (codes.to(wide) * of_rows.repeat_interleave(SIDE, -1)[..., : codes.shape[-1]]).to(dtype)


def _e2m1(device: torch.device) -> torch.Tensor:
    """The value of each of the 16 codes, made on the device: a copy to it could not be captured."""
    code = torch.arange(16, device=device)
    exponent, mantissa = code >> 1 & 3, code & 1
    halves = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp(min=0))
    return torch.where(code < 8, 1, -1) * (halves / 2)


def quantized(weight: torch.Tensor, form: Format, halves: bool = False, powers: bool = False) -> Weights:
    """The nearest codes, ties to even, of fp32 or narrower weights.

    mxfp4: the scale is 2^(floor(log2 of the block's largest magnitude) - 2), as OCP has it, so that codes saturate at 6. fp8
    blocks and channels: the largest magnitude / 448 as fp32, 1 of a block of zeros; with ``powers``, of blocks, the next power
    of two, as e8m0. ``halves``, of blocks: each half of the rows by itself. int4: the largest magnitude / 7.5 as bf16, as
    compressed-tensors has it; with zero points, from the least to the largest, 0 among them, / 15.
    """
    if form.name == "mxfp4":
        return _mxfp4(weight.float())
    if form.in_channels:
        rows = _e4m3(weight.float(), (1, weight.shape[-1]), powers=False)
        return rows._replace(scale=rows.scale.squeeze(-1))
    if form.group:
        return _int4_from_zero(weight.float(), form.group) if form.zero_bits else _int4(weight.float(), form.group)
    parts = weight.chunk(2, -2) if halves else (weight,)
    made = [_e4m3(one.float(), (SIDE, SIDE), powers) for one in parts]
    return Weights(*(torch.cat([getattr(one, name) for one in made], -2) for name in ("codes", "scale")))


def quantized_rows(x: torch.Tensor, scale: torch.Tensor | None = None) -> Weights:
    """Rows in e4m3 with an fp32 scale to 128 columns, or with those that are given, of a row each or of all: what fp8 products
    take beside fp8 weights."""
    if scale is None:
        return _e4m3(x.float(), (1, SIDE), powers=False)
    of_rows = scale.float().expand(x.shape[:-1])[..., None]
    return Weights((x.float() / of_rows).clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn), of_rows)


def dequantized_rows(rows: Weights, dtype: torch.dtype) -> torch.Tensor:
    """The rows that ``quantized_rows`` gave."""
    wide = torch.promote_types(dtype, torch.float32)
    scale, columns = rows.scale.to(wide), rows.codes.shape[-1]
    scale = scale if scale.shape[-1] == 1 else scale.repeat_interleave(SIDE, -1)[..., :columns]
    return (rows.codes.to(wide) * scale).to(dtype)


def _mxfp4(weight: torch.Tensor) -> Weights:
    blocks = weight.unflatten(-1, (-1, _MX))
    largest = blocks.abs().amax(-1)  # [..., N, K / 32]
    exponent = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT + 127
    scale = torch.where(largest == 0, 0, exponent.clamp(0, 254))
    scale = torch.where(largest.isfinite(), scale, 255).to(torch.uint8)
    magnitudes = (blocks / _powers(scale)[..., None]).abs()
    # Halfway between two codes the even one is taken.
    up = (0.75, 1.75, 3.5)
    codes = sum((magnitudes >= limit if limit in up else magnitudes > limit).byte() for limit in (0.25, *up, 1.25, 2.5, 5.0))
    codes = (codes | blocks.signbit().byte() << 3).flatten(-2)
    return Weights(codes[..., 0::2] | codes[..., 1::2] << 4, scale)


def _int4(weight: torch.Tensor, group: int) -> Weights:
    groups = weight.unflatten(-1, (-1, group))
    scale = _over(groups.abs().amax(-1), 7.5).bfloat16()
    scale = torch.where(scale == 0, 1.0, scale)
    codes = (groups / scale[..., None]).nan_to_num().round().clamp(-8, 7).int() + 8
    return Weights(packed(codes.flatten(-2)), scale)


def _int4_from_zero(weight: torch.Tensor, group: int) -> Weights:
    groups = weight.unflatten(-1, (-1, group))
    least, largest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = _over(largest - least, 15.0).bfloat16()
    scale = torch.where(scale == 0, 1.0, scale)
    zero = (-least / scale).nan_to_num().round().clamp(0, 15)
    codes = ((groups / scale[..., None]).nan_to_num().round() + zero[..., None]).clamp(0, 15).int()
    rows = torch.nn.functional.pad(zero.int().mT, (0, -zero.shape[-2] % 8))
    return Weights(packed(codes.flatten(-2)), scale, packed(rows).mT.contiguous())


def packed(integers: torch.Tensor) -> torch.Tensor:
    """int32 [..., K / 8] of integers from 0 to 15, the first in the lowest four bits."""
    places = integers.int().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4, dtype=torch.int32, device=integers.device)
    words: torch.Tensor = places.sum(-1, dtype=torch.int32)
    return words


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """The integers [..., K] that ``packed`` put into words [..., K / 8]."""
    places = torch.bitwise_right_shift(words[..., None], torch.arange(0, 32, 4, dtype=torch.int32, device=words.device))
    integers: torch.Tensor = (places & 15).flatten(-2)
    return integers


def _e4m3(weight: torch.Tensor, block: tuple[int, int], powers: bool) -> Weights:
    (rows, columns), (height, width) = weight.shape[-2:], block
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))  # [..., N / height, height, K / width, width]
    scale = _over(blocks.abs().amax((-3, -1)), _LARGEST_E4M3)
    if powers:
        mantissa, exponent = torch.frexp(scale)
        exponent = (exponent - (mantissa == 0.5).int() + 127).clamp(0, 254)
        stored = torch.where(scale.isfinite(), torch.where(scale == 0, 127, exponent), 255).to(torch.uint8)
        scale = _powers(stored)
    else:
        stored = scale = torch.where(scale == 0, 1.0, scale)
    codes = (blocks / scale[..., :, None, :, None]).clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
    return Weights(codes.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous(), stored)


def _over(largest: torch.Tensor, by: float) -> torch.Tensor:
    """The quotient, correctly rounded: by a number PyTorch divides on a GPU as if by its rounded reciprocal."""
    return largest / torch.full_like(largest, by)


def _powers(scale: torch.Tensor) -> torch.Tensor:
    """fp32 of e8m0, given as uint8: all of them are exact."""
    bits = scale.int()
    bits = torch.where(bits == 0, _SUBNORMAL, torch.where(bits == 255, _NAN, bits << 23))
    return bits.view(torch.float32)


def _blocks(rows: int) -> int:
    return -(-rows // SIDE)
