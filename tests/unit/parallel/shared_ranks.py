"""One rank of two whose buffers are files that both map, in place of symmetric memory (by interpreted_ranks.py).

Products are PyTorch's; their rows are put in an order of their own.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.unit.parallel import expert_ranks

from flashmoe_science import fused_moe
from flashmoe_science.ops.moe.call import Options, Rows, Tensors
from flashmoe_science.parallel import ExpertWorkspace, expert, expert_parallel_moe, peers, workspace

NAMES = "unequal", "gpt-oss", "fp32, foreign"


class Mapped:
    """In the place of ``Symmetric``."""

    made = 0

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        Mapped.made += 1
        names = [f"{sys.argv[3]}.{Mapped.made}.{rank}" for rank in range(group.size())]
        buffers = [torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name in names]
        self.size, self.own, self._group = size, buffers[group.rank()], group
        self.addresses = torch.tensor([one.data_ptr() for one in buffers])
        self._kept = buffers
        self.own.fill_(255)  # NaN, ids of no expert
        self.barrier()

    def barrier(self) -> None:
        dist.barrier(self._group)


class Case(expert_ranks.Case):
    def workspace(self, group: object, ranks: int) -> ExpertWorkspace:
        sizes = self.max_tokens, expert_ranks.DIM, self.top_k, self.per_rank * ranks, self.dtype
        return ExpertWorkspace(group, *sizes, transport="symmetric")


def rows_of(given: Any, options: Any) -> Rows:
    """In the place of ``experts_rows``."""
    tensors, how = Tensors(*given), Options(*options)._asdict()
    ids, pairs = tensors.topk_ids.reshape(-1, 1), tensors.topk_ids.numel()
    x = tensors.x.repeat_interleave(tensors.topk_ids.shape[1], 0)
    biases = {"gate_up_bias": tensors.gate_up_bias, "down_bias": tensors.down_bias}
    made = fused_moe(x, tensors.w1, tensors.w2, torch.ones(pairs, 1), ids, **biases, **how)
    here = ((ids >= 0) & (ids < len(tensors.w1))).flatten()
    order, rows, places = torch.randperm(int(here.sum())), torch.full_like(made, torch.nan), torch.full((pairs,), -1)
    rows[order], places[here] = made[here], order
    return Rows(None, rows, torch.cat((torch.full((pairs,), -9), places)).int())


def sent(case: Case, group: dist.ProcessGroup, combine: str) -> list[str]:
    """What is wrong with results whose rows go straight to the ranks of their tokens."""
    own = expert_ranks.own_of(expert_ranks.inputs_of(case, group.size()), case, group)
    by = case.workspace(group, group.size()), expert_ranks.Case(*case).workspace(group, group.size())
    biases = dict(zip(("gate_up_bias", "down_bias"), own.leaves[4:], strict=False))
    with torch.no_grad(), mock.patch.object(expert, "experts_rows", rows_of):
        given: dict[str, Any] = {"combine": combine, **biases, **dict(case.options)}
        found = [expert_parallel_moe(*own.leaves[:4], own.ids, workspace=one, **given) for one in (*by, by[0])]
        if not case.options:
            x, gate_up, *rest = own.leaves[:4]
            found.append(expert_parallel_moe(x, gate_up.chunk(2, 1), *rest, own.ids, workspace=by[0], **given))
    wrong = [] if all(torch.equal(found[0], one) for one in found[2:]) else ["a second call, or a pair, has other bits"]
    return wrong if torch.equal(found[0], found[1]) else [*wrong, "it has other bits than collectives"]


def main(group: dist.ProcessGroup, file: str) -> None:
    found: dict[str, list[str]] = {}
    with mock.patch.object(peers, "Symmetric", Mapped), mock.patch.object(workspace, "why_no_symmetric", return_value=""):
        for name in NAMES:
            case = Case(*expert_ranks.CASES[name])
            for combine in ("exact", "reduced"):
                found[f"{name}, {combine}"] = expert_ranks.faults(case, group, combine)
                if case.dtype == torch.float32:
                    found[f"{name}, {combine}, sent"] = sent(case, group, combine)
    assert not any(found.values()), found
    os._exit(0)
