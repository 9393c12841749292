"""Weights in formats: each code and scale means what the format says, and the reference quantiser gives the nearest."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

from flashmoe_science.formats import FORMATS, Format
from flashmoe_science.ops.formats import Weights, dequantized, dequantized_rows, format_of, quantized, quantized_rows

MXFP4, FP8, CHANNEL = FORMATS["mxfp4"], FORMATS["fp8_block"], FORMATS["fp8_channel"]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_every_code_of_mxfp4_with_every_scale() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(2).expand(256, 16)
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    got = dequantized(Weights(packed, scale), torch.float64)
    for row in (0, 1, 126, 127, 128, 254):
        right = [math.ldexp(one, row - 127) for one in E2M1]
        assert got[row].tolist() == 2 * (right + [-one for one in right])
    assert got[255].isnan().all()
    assert got[127, 8].signbit()  # -0
    narrow = dequantized(Weights(packed, scale), torch.bfloat16)
    assert torch.equal(narrow[:253].double(), got[:253])  # 6 x 2^126 and more are infinite
    assert narrow[254, 3] == 1.5 * 2.0**127
    assert narrow[254, 7] == math.inf


@pytest.mark.parametrize("shape", [(128, 128), (3, 200, 300), (1, 1)])
@pytest.mark.parametrize("powers", [False, True])
def test_fp8_blocks_are_read_back_within_a_rounding(shape: tuple[int, ...], powers: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.randn(shape[-2], 1).exp()
    made = quantized(weight, FP8, powers=powers)
    assert made.codes.shape == shape
    assert made.scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    got, scale = dequantized(made, torch.float64), made.scale
    of_block = (scale.double() if scale.dtype == torch.float32 else 2.0 ** (scale.double() - 127)).repeat_interleave(128, -1)
    of_block = of_block.repeat_interleave(128, -2)[..., : shape[-2], : shape[-1]]
    assert ((got - weight).abs() <= torch.maximum(weight.abs() * 2.0**-4, of_block * 2.0**-10) * (1 + 1e-6)).all()
    assert (made.codes.float().abs() <= 448).all()
    if powers:
        assert scale.dtype == torch.uint8
        assert (of_block * 448 >= weight.abs()).all()  # rounded up


def test_channels_of_fp8_are_read_back_within_a_rounding_whatever_their_neighbours() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 20, 130) * 2.0 ** torch.randint(-40, 40, (3, 20, 1))
    weight[1, 4] = 0
    made = quantized(weight, CHANNEL)
    assert (made.codes.shape, made.scale.shape) == (weight.shape, (3, 20))
    assert torch.equal(made.scale[0], weight[0].abs().amax(-1) / 448)
    assert made.scale[1, 4] == 1
    off = (dequantized(made, torch.float64) - weight).abs()
    assert (off <= torch.maximum(weight.abs() * 2.0**-4, made.scale[..., None] * 2.0**-10) * (1 + 1e-6)).all()
    halves = dequantized(Weights(made.codes, made.scale[:, :2]), torch.float64)
    assert torch.equal(halves[:, 9:11], made.codes.double()[:, 9:11] * made.scale[:, :2, None])
    of_all = dequantized(Weights(made.codes, made.scale[:, :1]), torch.float64)
    assert torch.equal(of_all, made.codes.double() * made.scale[:, :1, None])


@pytest.mark.parametrize("group", [32, 128])
def test_int4_as_compressed_tensors_packs_it(group: int) -> None:
    """Eight to an int32, the first column lowest, 8 more than the integer; the scale is bf16 of the largest / 7.5."""
    integers = torch.arange(-8, 8).repeat(16)
    words = [sum((int(one) + 8) << 4 * place for place, one in enumerate(integers[at : at + 8])) for at in range(0, 256, 8)]
    codes = torch.tensor(words).to(torch.int32)[None]  # those of 2^31 and more wrap
    scale = torch.arange(1, 256 // group + 1)[None].half()
    right = integers * scale.double().repeat_interleave(group, -1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert torch.equal(dequantized(Weights(codes, scale), dtype), right.to(dtype))
    torch.manual_seed(0)
    weight = torch.randn(3, 20, 256) * 2.0 ** torch.randint(-40, 40, (3, 20, 1))
    weight[1, 4] = 0
    made = quantized(weight, FORMATS[f"int4_g{group}"])
    assert (made.codes.shape, made.codes.dtype, made.scale.dtype) == ((3, 20, 32), torch.int32, torch.bfloat16)
    largest = weight.unflatten(-1, (-1, group)).abs().amax(-1)
    assert torch.equal(made.scale, torch.where(largest == 0, 1, largest / 7.5).bfloat16())
    off = (dequantized(made, torch.float64) - weight).abs() / made.scale.repeat_interleave(group, -1)
    assert off.max() < 0.54  # half a step, and of the scale's rounding what the largest has
    assert torch.equal(quantized(dequantized(made, torch.float32), FORMATS[f"int4_g{group}"]).codes[1, 4], made.codes[1, 4])


@pytest.mark.parametrize("group", [32, 128])
def test_zero_points_of_int4_as_compressed_tensors_packs_them(group: int) -> None:
    """Eight rows to an int32, the first lowest; a code from 0 to 15 less its block's zero point is multiplied."""
    chance = Random(group)
    rows, columns = 11, 3 * group  # the last five places have no rows
    codes = [[chance.randrange(16) for _ in range(columns)] for _ in range(rows)]
    zeros = [[chance.randrange(16) for _ in range(3)] for _ in range(rows)]
    words = [[word(row[at : at + 8]) for at in range(0, columns, 8)] for row in codes]
    of_rows = [[word([row[block] for row in zeros[at : at + 8]]) for block in range(3)] for at in (0, 8)]
    scale = torch.tensor([[math.ldexp(1 + n + 2 * block, n) for block in range(3)] for n in range(rows)])
    right = [
        [(code - zeros[n][at // group]) * scale[n][at // group].item() for at, code in enumerate(row)]
        for n, row in enumerate(codes)
    ]
    given = Weights(*(torch.tensor(one, dtype=torch.int64).int() for one in (words,)), scale, torch.tensor(of_rows).int())
    assert format_of(*given) is FORMATS[f"int4_g{group}_zero"]
    assert dequantized(given, torch.float64).tolist() == right


def word(integers: list[int]) -> int:
    """Up to eight, the first in the lowest four bits, as a signed integer of 32 bits."""
    made = sum(one << 4 * place for place, one in enumerate(integers))
    return made - 2**32 if made >= 2**31 else made


@pytest.mark.parametrize("group", [32, 128])
def test_int4_with_zero_points_is_read_back_within_half_a_step(group: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 20, 256) * 2.0 ** torch.randint(-40, 40, (3, 20, 1))
    weight[0] += 2 * weight[0].abs().amax(-1, keepdim=True)  # of one sign: 0 is the least
    weight[1, 4], weight[1, 5, 7] = 0, torch.nan
    made = quantized(weight, FORMATS[f"int4_g{group}_zero"])
    assert made.zero_point is not None
    assert (made.codes.shape, made.zero_point.shape) == ((3, 20, 32), (3, 3, 256 // group))
    assert (made.codes.dtype, made.scale.dtype, made.zero_point.dtype) == (torch.int32, torch.bfloat16, torch.int32)
    got = dequantized(made, torch.float64)
    off = (got - weight).abs() / made.scale.repeat_interleave(group, -1)
    assert (got[1, 4] == 0).all()
    assert got[1, 5, :group].isnan().all()
    assert off.nan_to_num().max() < 0.6  # half a step, and of the scale's rounding what the largest has
    symmetric = dequantized(quantized(weight, FORMATS[f"int4_g{group}"]), torch.float64)
    assert (got[0] - weight[0]).norm() < 0.6 * (symmetric[0] - weight[0]).norm()


def test_halves_of_rows_have_scales_of_their_own_where_no_blocks_divide_them() -> None:
    torch.manual_seed(0)
    gates, ups = torch.randn(2, 200, 130), 2.0**20 * torch.randn(2, 200, 130)
    joined = quantized(torch.cat((gates, ups), 1), FP8, halves=True)
    assert joined.scale.shape == (2, 4, 2)
    right = torch.cat([dequantized(quantized(one, FP8), torch.float32) for one in (gates, ups)], 1)
    assert torch.equal(dequantized(joined, torch.float32, halves=True), right)
    for rows, of_one in ((128, 2), (192, 4), (256, 4)):  # as one: 2 of 128 rows and 3 of 192
        assert quantized(torch.randn(2 * rows, 130), FP8, halves=True).scale.shape == (of_one, 2)
    whole = quantized(torch.cat((gates[:, :180], ups[:, :180]), 1)[:, :320], FP8)  # 3 rows of scales, not 4
    assert torch.equal(dequantized(whole, torch.float32, halves=True), dequantized(whole, torch.float32))


def test_the_quantiser_of_mxfp4_gives_the_nearest_code_and_the_even_one_of_two() -> None:
    halfway = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row = torch.tensor([[4.0, *halfway, 7.9, *(-one for one in halfway), 0.26, 0.74, 1.26, *13 * [0.0]]])
    made = quantized(row, MXFP4)
    assert made.scale.tolist() == [[127]]
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    expected = [4.0, *even, 6.0, *(-one for one in even), 0.5, 0.5, 1.5, *13 * [0.0]]
    assert dequantized(made, torch.float32).tolist() == [expected]
    torch.manual_seed(0)
    weight = torch.randn(64, 96, dtype=torch.bfloat16) * 2.0 ** torch.randint(-100, 100, (64, 1))
    made = quantized(weight, MXFP4)
    unit = 2.0 ** (made.scale.double() - 127).repeat_interleave(32, -1)
    values = torch.tensor([*E2M1, *(-one for one in E2M1)], dtype=torch.float64) * unit[..., None]
    nearest = (weight.double()[..., None] - values).abs().amin(-1)
    assert torch.equal((dequantized(made, torch.float64) - weight.double()).abs(), nearest)
    again = quantized(dequantized(made, torch.float32), MXFP4)
    assert torch.equal(again.codes & 0x77, made.codes & 0x77)


def test_a_block_of_zeros_and_one_with_what_is_no_number() -> None:
    weight = torch.zeros(128, 256)
    weight[0, 128] = torch.nan
    for form in (MXFP4, FP8):
        got = dequantized(quantized(weight, form), torch.bfloat16)
        assert (got[:, :128] == 0).all()
        assert got[0, 128].isnan()
        assert (got[:, 192:] == 0).all() or form is FP8  # a block of one scale has no other numbers


def test_rows_in_e4m3_have_a_scale_to_128_columns() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 300) * torch.tensor([1.0, 2.0**20, 0.0])[:, None]
    made = quantized_rows(x)
    assert (made.codes.dtype, made.scale.shape) == (torch.float8_e4m3fn, (3, 3))
    torch.testing.assert_close(dequantized_rows(made, torch.float32), x, rtol=2.0**-4, atol=2.0**-9)
    assert torch.equal(made.scale[0, 2], x[0, 256:].abs().max() / 448)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [one for one in FORMATS.values() if one.name != "fp8_block_w8a8"], ids=lambda one: one.name)
def test_a_gpu_quantises_to_the_same_bits(form: Format) -> None:
    """Also where many are halfway between codes: of a largest magnitude 2.625 multiples of 3 are."""
    weight = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0)).bfloat16().clamp(-2.625, 2.625)
    for right, got in zip(quantized(weight, form), quantized(weight.cuda(), form), strict=True):
        assert (right is None and got is None) or torch.equal(right.view(torch.uint8), got.cpu().view(torch.uint8))
    for right, got in zip(quantized_rows(weight)[:2], quantized_rows(weight.cuda())[:2], strict=True):
        assert torch.equal(right.view(torch.uint8), got.cpu().view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("form", [one for one in FORMATS.values() if one.name != "fp8_block_w8a8"], ids=lambda one: one.name)
def test_a_graph_captures_dequantising(form: Format) -> None:
    weights = Weights(*(None if one is None else one.cuda() for one in quantized(torch.randn(2, 256, 256), form)))
    dequantized(weights, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dequantized(weights, torch.bfloat16)
    graph.replay()
    assert torch.equal(captured, dequantized(weights, torch.bfloat16))
