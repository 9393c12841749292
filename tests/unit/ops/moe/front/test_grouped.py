"""Rows that are sorted already, and gradients of weights that are added to tensors, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashmoe_science as fm

E, H, F, ROWS = 5, 16, 24, 12
OFFSETS = [3, 3, 4, 9, 9]  # two experts without rows; three rows after the last


def given(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, H), (E, 2 * F, H), (E, H, F))
    return [(torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype).requires_grad_() for shape in shapes]


def by_loop(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """As torchtitan's GroupedExperts, an expert at a time."""
    out, first = [], 0
    for expert, end in enumerate(OFFSETS):
        gate, up = (x[first:end] @ w1[expert].T).chunk(2, -1)
        out.append((torch.nn.functional.silu(gate) * up) @ w2[expert].T)
        first = end
    return torch.cat([*out, torch.zeros(ROWS - first, H, dtype=x.dtype)])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_that_are_sorted_already(dtype: torch.dtype, compiled: bool) -> None:
    tensors = given()
    function = torch.compile(fm.grouped_moe, fullgraph=True, backend="aot_eager") if compiled else fm.grouped_moe
    out = function(*tensors, torch.tensor(OFFSETS, dtype=dtype))
    right = by_loop(*tensors)
    torch.testing.assert_close(out, right)
    assert not out[OFFSETS[-1] :].any()
    into = torch.randn_like(out)
    for got, want in zip(*(torch.autograd.grad(one, tensors, into) for one in (out, right)), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"offsets": [1]}, "offsets is a list; it must be a torch.Tensor"),
        ({"offsets": torch.zeros(E)}, "offsets has dtype torch.float32; it must be int32 or int64"),
        ({"offsets": torch.zeros(E + 1).int()}, r"offsets has shape \(6,\); it must be \(5,\), the row after each"),
        ({"offsets": torch.tensor([3, 2, 7, 8, 9])}, r"offsets\[1\] is 2; it must be from 3 to "),
        ({"offsets": torch.tensor([3, 3, 7, 8, 900])}, r"offsets\[4\] is 900; it must be from 8 to "),
        ({"offsets": torch.tensor([-1, 3, 7, 8, 9])}, r"offsets\[0\] is -1; it must be from 0 to "),
        ({"hidden_states": torch.zeros(2, 3, H)}, r"hidden_states has shape \(2, 3, 16\); it must be \[rows, H\]"),
        ({"gate_up_proj": None}, r"offsets has shape \(5,\); it must be \(0,\)|gate_up_proj is None"),
    ],
)
def test_rows_that_are_not_allowed_are_refused(changed: dict[str, Any], message: str) -> None:
    names = ("hidden_states", "gate_up_proj", "down_proj")
    call = dict(zip(names, given(), strict=True)) | {"offsets": torch.tensor(OFFSETS)} | changed
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        fm.grouped_moe(**call)


# Gradients that are added ----------------------------------------------------------------------------------------------------


def routed(tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
    ids = torch.randint(-1, E - 1, (ROWS, 2), generator=torch.Generator().manual_seed(1))
    return fm.fused_moe(*tensors, torch.full((ROWS, 2), 0.5), ids, **options)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("of_sum", [torch.float32, torch.bfloat16])
def test_gradients_of_weights_are_added_to_what_is_given(of_sum: torch.dtype, transposed: bool) -> None:
    tensors = given(torch.bfloat16)
    want = torch.autograd.grad(routed(tensors).sum(), tensors)
    if transposed:
        tensors = [tensors[0], *(one.detach().mT.contiguous().requires_grad_() for one in tensors[1:])]
    sums = tuple(torch.ones_like(one, dtype=of_sum) for one in tensors[1:])
    for _ in range(2):
        out = routed(tensors, weight_grads=sums, transposed=transposed)
        found = torch.autograd.grad(out.sum(), tensors, allow_unused=True)
        assert torch.equal(found[0], want[0])
        assert found[1:] == (None, None)
    for total, one in zip(sums, want[1:], strict=True):
        right = torch.ones(one.shape, dtype=of_sum).add_(one).add_(one)
        assert torch.equal(total.mT if transposed else total, right)


def test_one_of_both_is_added_and_frozen_weights_add_nothing() -> None:
    x, w1, w2 = tensors = given()
    want = torch.autograd.grad(routed(tensors).sum(), tensors)
    total = torch.zeros(w2.shape)
    found = torch.autograd.grad(routed(tensors, weight_grads=(None, total)).sum(), (x, w1))
    assert all(map(torch.equal, (*found, total), want))
    frozen = [x, w1.detach(), w2.detach()]
    sums = torch.zeros(w1.shape), torch.zeros(w2.shape)
    assert torch.equal(torch.autograd.grad(routed(frozen, weight_grads=sums).sum(), x)[0], want[0])
    assert not any(one.any() for one in sums)
    with torch.no_grad():
        assert torch.equal(routed(tensors, weight_grads=sums), routed(tensors))


@pytest.mark.filterwarnings("ignore")
def test_opcheck_of_the_operator_that_adds() -> None:
    x, w1, w2 = (one.detach() for one in given())
    routing = torch.rand(ROWS, 2), torch.randint(0, E, (ROWS, 2))
    silu = ("silu", True, False, 1.702, 7.0)
    _, z = torch.ops.flashmoe.moe_forward_saving.default(x, w1, w2, *routing, *8 * [None], *silu)
    wanted = [True, True, True, True, False, False]
    for sums in ((torch.ones_like(w1), torch.ones_like(w2)), (None, torch.ones_like(w2))):
        call = (x, w1, w2, *routing, *8 * [None], z, torch.randn_like(x), wanted, *silu, None, False, *sums)
        operator = torch.ops.flashmoe.moe_backward_adding.default
        torch.library.opcheck(operator, call, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        (torch.zeros(2), "weight_grads must be a pair"),
        ((1.0, None), r"weight_grads\[0\] is a float; it must be a torch.Tensor or None"),
        ((None, torch.zeros(E, F, H)), r"weight_grads\[1\] has shape \(5, 24, 16\); it must be \(5, 16, 24\)"),
        ((torch.zeros(E, 2 * F, H).half(), None), r"weight_grads\[0\] has dtype torch.float16; it must be float32"),
        ((None, torch.zeros(1, H, F).expand(E, H, F)), r"weight_grads\[1\] has strides \(0, 24, 1\); no two of its elements"),
        ((torch.zeros(E, 2 * F, H).requires_grad_(), None), r"weight_grads\[0\] must be on cpu, .* require no gradient"),
    ],
)
def test_what_nothing_can_be_added_to_is_refused(sums: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        routed(given(), weight_grads=sums)
    with pytest.raises(ValueError, match="weight_grads is given and kernel is 'grouped_mm'"):
        routed(given(), weight_grads=(None, None), kernel="grouped_mm")
