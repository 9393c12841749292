"""Pairs whose expert is of another rank: PyTorch's products do not compute them, and their memory enters no result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashmoe_science import fused_moe

EXPERTS, DIM, HIDDEN, TOKENS, TOP_K = 4, 16, 8, 9, 3
GROUPED_MM = F.grouped_mm


class Poisoned(torch.autograd.Function):
    """PyTorch's grouped product, which leaves NaN in the rows past the last expert's."""

    computed: list[int] = []  # noqa: RUF012  # the rows of each product of rows

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(left, right, offs)
        out = GROUPED_MM(left, right, offs=offs)
        if right.dim() == 3:
            Poisoned.computed.append(int(offs[-1]))
            out[offs[-1] :] = torch.nan
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        left, right, offs = ctx.saved_tensors
        dleft = GROUPED_MM(dout, right.mT, offs=offs)
        dleft[offs[-1] :] = torch.nan
        return dleft, GROUPED_MM(left.mT, dout, offs=offs), None


@pytest.mark.parametrize("kernel", [None, "grouped_mm"])
@pytest.mark.parametrize(
    ("unaligned", "hidden"),
    [(None, HIDDEN), (1, HIDDEN), (2, HIDDEN), (None, HIDDEN + 2)],
    ids=["aligned", "first unaligned", "second unaligned", "width unaligned"],
)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("recompute", [False, True])
def test_pairs_of_no_expert_here_are_not_computed(
    kernel: str | None, unaligned: int | None, hidden: int, transposed: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    shapes = (
        (TOKENS, DIM),
        (EXPERTS, 2 * hidden, DIM),
        (EXPERTS, DIM, hidden),
        (TOKENS, TOP_K),
        (EXPERTS, 2 * hidden),
        (EXPERTS, DIM),
    )
    leaves = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    if transposed:
        leaves[1:3] = [one.mT.contiguous() for one in leaves[1:3]]
    if unaligned is not None:  # PyTorch's grouped product does not take these weights
        leaves[unaligned] = F.pad(leaves[unaligned], (0, 1))[..., :-1]
    leaves = [one.requires_grad_() for one in leaves]
    ids = torch.randint(-1, EXPERTS + 2, (TOKENS, TOP_K))
    ids[0] = EXPERTS

    def results() -> list[torch.Tensor]:
        biases = {"gate_up_bias": leaves[4], "down_bias": leaves[5]}
        out = fused_moe(*leaves[:4], ids, **biases, transposed=transposed, recompute=recompute, kernel=kernel)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    right = results()
    Poisoned.computed.clear()
    monkeypatch.setattr(F, "grouped_mm", lambda left, right, offs: Poisoned.apply(left, right, offs))
    assert all(map(torch.equal, results(), right))
    refused = kernel is not None and hidden != HIDDEN  # each grouped product lacks a gradient
    assert set(Poisoned.computed) == (set() if refused else {int(((ids >= 0) & (ids < EXPERTS)).sum())})
