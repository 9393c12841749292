"""Experts of GPTQ and AWQ become int4 bit for bit, whatever their sizes; what cannot be kept is refused."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from tests.unit.ops.test_formats import word

import flashmoe_science as fm

E, H, WIDTH = 3, 96, 160
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each place of a word
Matrix = list[list[int]]


def along_rows(of: Matrix) -> Matrix:
    """[rows / 8, columns]: GPTQ's weights."""
    return [[word([of[8 * r + n][c] for n in range(8)]) for c in range(len(of[0]))] for r in range(len(of) // 8)]


def along_columns(of: Matrix, order: tuple[int, ...] = tuple(range(8))) -> Matrix:
    """[rows, columns / 8]: GPTQ's zero points, and all of AWQ."""
    return [[word([row[8 * c + n] for n in order]) for c in range(len(row) // 8)] for row in of]


def drawn(rows: int, columns: int, group: int, layout: str, chance: Random, zero: range) -> tuple[list[Any], torch.Tensor]:
    """A projection as a checkpoint has it, experts stacked, and its weights [E, columns, rows] in fp64."""
    packed, right = [], []
    for _ in range(E):
        codes = [[chance.randrange(16) for _ in range(columns)] for _ in range(rows)]
        zeros = [[chance.choice(zero) for _ in range(columns)] for _ in range(rows // group)]
        scales = [[chance.randrange(1, 2000) * 2.0**-12 for _ in range(columns)] for _ in range(rows // group)]
        stored = [[one - 1 for one in row] for row in zeros] if layout == "gptq" else zeros
        of_codes = along_columns(codes, AWQ) if layout == "awq" else along_rows(codes)
        packed.append((of_codes, scales, along_columns(stored, AWQ) if layout == "awq" else along_columns(stored)))
        of = torch.tensor(codes).double() - torch.tensor(zeros).repeat_interleave(group, 0)
        right.append((of * torch.tensor(scales).repeat_interleave(group, 0)).T)
    stacked = [torch.tensor([one[n] for one in packed]) for n in range(3)]
    return [stacked[0].int(), stacked[1].half(), stacked[2].int()], torch.stack(right)


def both(
    layout: str, group: int = 32, zero: range = range(1, 16), h: int = H, i: int = WIDTH
) -> tuple[list[Any], list[torch.Tensor]]:
    chance = Random(f"{layout} {group}")
    first, w1 = drawn(h, 2 * i, group, layout, chance, zero)
    second, w2 = drawn(i, h, group, layout, chance, zero)
    return [*first, *second], [w1, w2]


@pytest.mark.parametrize(("group", "h", "i"), [(32, 96, 160), (32, 32, 32), (128, 256, 128)])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
def test_every_weight_is_the_checkpoint_s(layout: str, group: int, h: int, i: int) -> None:
    packed, right = both(layout, group, range(layout != "gptq_v2", 16), h, i)
    made = fm.repack_experts(layout, *packed)
    assert made["weight_format"] == f"int4_g{group}_zero"
    got = fm.dequantize_experts(**made, dtype=torch.float64)
    assert all(torch.equal(*pair) for pair in zip(got, right, strict=True))
    assert all(one.is_contiguous() for one in made.values() if isinstance(one, torch.Tensor))
    x, routing = torch.randn(5, h), {"top_k_weights": torch.rand(5, 2), "top_k_ids": torch.randint(E, (5, 2))}
    out = fm.fused_moe(x, **made, **routing).double()
    torch.testing.assert_close(out, fm.fused_moe(x.double(), *right, **routing), rtol=1e-5, atol=1e-5 * out.abs().max().item())


@pytest.mark.parametrize(
    ("groups", "h", "i", "kept"), [((64, 64), 192, 64, 32), ((256, 384), 256, 384, 128), ((32, 128), 96, 128, 32)]
)
@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_other_groups_and_scales_of_whole_columns_become_several_groups(
    layout: str, groups: tuple[int, int], h: int, i: int, kept: int
) -> None:
    chance, zero = Random(layout), range(1, 16)
    (first, w1), (second, w2) = drawn(h, 2 * i, groups[0], layout, chance, zero), drawn(i, h, groups[1], layout, chance, zero)
    of_up, of_down = ((torch.arange(n) // group).expand(E, n) for n, group in zip((h, i), groups, strict=True))
    made = fm.repack_experts(layout, *first, *second, gate_up_g_idx=of_up, down_g_idx=of_down)  # type: ignore[arg-type]
    assert made["weight_format"] == f"int4_g{kept}_zero"
    assert all(torch.equal(*pair) for pair in zip(fm.dequantize_experts(**made, dtype=torch.float64), (w1, w2), strict=True))


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
def test_symmetric_checkpoints_have_no_zero_points(layout: str) -> None:
    packed, right = both(layout, zero=range(8, 9))
    made = fm.repack_experts(layout, *packed)
    assert made.keys() == {"gate_up_proj", "down_proj", "gate_up_scale", "down_scale", "weight_format"}
    assert made["weight_format"] == "int4_g32"
    assert all(torch.equal(*pair) for pair in zip(fm.dequantize_experts(**made, dtype=torch.float64), right, strict=True))


def test_the_default_device_has_no_part_in_it() -> None:
    packed, _ = both("gptq", zero=range(8, 9))
    sizes = {"gate_up_g_idx": H, "down_g_idx": WIDTH}
    orders = {name: (torch.arange(rows) // 32).expand(len(packed[0]), -1) for name, rows in sizes.items()}
    torch.set_default_device("meta")
    try:
        made = fm.repack_experts("gptq", *packed, **orders)
    finally:
        torch.set_default_device(None)
    assert made["weight_format"] == "int4_g32"


def test_zero_points_of_0_are_gptq_s_first_version_s_too_as_gptqmodel_writes_them() -> None:
    """It subtracts one of each in one subtraction of 32 bits, with what that borrows."""
    packed, right = both("gptq_v2", zero=range(16))
    for place in (2, 5):
        packed[place] = packed[place] - 0x11111111
    got = fm.dequantize_experts(**fm.repack_experts("gptq", *packed), dtype=torch.float64)
    assert all(torch.equal(*pair) for pair in zip(got, right, strict=True))


def test_rows_in_the_order_of_their_groups_are_as_none_are_given_and_others_are_refused() -> None:
    packed, _ = both("gptq")
    of_up, of_down = ((torch.arange(rows) // 32).int().expand(E, rows).contiguous() for rows in (H, WIDTH))
    made = fm.repack_experts("gptq", *packed, gate_up_g_idx=of_up, down_g_idx=of_down)
    assert torch.equal(made["gate_up_proj"], fm.repack_experts("gptq", *packed)["gate_up_proj"])
    moved = of_down.clone()
    moved[1] = of_down[1].flip(0)
    with pytest.raises(ValueError, match=r"down_g_idx is of another order \(desc_act\); it must be row // 32 of every expert"):
        fm.repack_experts("gptq", *packed, gate_up_g_idx=of_up, down_g_idx=moved)


@pytest.mark.parametrize(
    ("place", "other", "message"),
    [
        (0, torch.zeros(E, 12, 320), "gate_up_qweight has dtype torch.float32; it must be int32"),
        (
            0,
            torch.zeros(12, 320, dtype=torch.int32),
            "gate_up_qweight has shape (12, 320); it must have three dimensions, experts",
        ),
        (0, [[0]], "gate_up_qweight is a list; it must be a torch.Tensor"),
        (
            1,
            torch.zeros(E, 3, 320, device="meta").half(),
            "gate_up_scales is on meta and gate_up_qweight on cpu; they must be on",
        ),
        (3, torch.zeros(E, 20, 64, dtype=torch.int32), "down_scales has shape (3, 5, 96); it must be [3, 5, 64]"),
        (1, torch.zeros(E, 2, 320), "gate_up_scales has 2 rows to 96 of weights; it must have one to a multiple of 32"),
        (1, torch.zeros(E, 0, 320), "gate_up_scales has shape (3, 0, 320); no size of it may be 0"),
        (0, torch.zeros(0, 12, 320, dtype=torch.int32), "gate_up_qweight has shape (0, 12, 320); no size of it may be 0"),
        (1, torch.zeros(E, 3, 320).double(), "gate_up_scales has dtype torch.float64; it must be bfloat16 or"),
        (4, torch.zeros(E, 5, 97), "down_scales has shape (3, 5, 97); it must be [3, 5, 96]"),
        (5, torch.zeros(E, 5, 96, dtype=torch.int32), "down_qzeros has shape (3, 5, 96); it must be [3, 5, 12]"),
        (5, None, "down_qzeros is a NoneType; it must be a torch.Tensor"),
        (6, [0], "gate_up_g_idx is a list; it must be a torch.Tensor"),
        (6, torch.arange(H) // 32, "gate_up_g_idx has shape (96,); it must be [3, 96], the group of each row"),
    ],
)
def test_what_is_no_such_checkpoint_is_refused(place: int, other: torch.Tensor | None, message: str) -> None:
    packed, _ = both("gptq")
    packed = [*packed, None]
    packed[place] = other
    with pytest.raises((TypeError, ValueError)) as caught:
        fm.repack_experts("gptq", *packed[:6], gate_up_g_idx=packed[6])
    assert message in str(caught.value)


def test_projections_of_two_checkpoints_are_refused() -> None:
    (first, _), (other, _) = both("awq"), both("awq", h=H + 32)
    with pytest.raises(ValueError, match="gate_up_proj takes 96 columns and down_proj gives 128; they must agree"):
        fm.repack_experts("awq", *first[:3], *other[3:])
    with pytest.raises(ValueError, match="gate_up_proj has 3 experts and down_proj 2; they must have as many"):
        fm.repack_experts("awq", *first[:3], *(one[:2] for one in first[3:]))


def test_other_layouts_are_refused() -> None:
    packed, _ = both("gptq")
    with pytest.raises(ValueError, match="layout is 'marlin'; it must be one of 'gptq', 'gptq_v2', 'awq'"):
        fm.repack_experts("marlin", *packed)  # type: ignore[arg-type]
