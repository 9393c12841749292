"""What copy engines fetch: from the shards of virtual ranks it gives what each rank wants of the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashmoe_science.parallel.copies import copies_of
from flashmoe_science.parallel.layout import cut


class Group(torch.distributed.ProcessGroup):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)


def chunks_of(ranks: int, seqlen: int, layout: str) -> list[list[range]]:
    group: Any = Group(0, ranks)
    return cut(seqlen, group, layout).chunks


@pytest.mark.parametrize("layout", ["head_tail", "contiguous"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_copies_give_what_is_wanted_in_the_order_of_the_sequence(ranks: int, layout: str) -> None:
    seqlen = 61
    chunks, sequence = chunks_of(ranks, seqlen, layout), torch.arange(seqlen)
    shards = [torch.cat([sequence[one.start : one.stop] for one in held]) for held in chunks]
    for wanted in ([range(seqlen)], [range(1)], [range(5, 23), range(40, seqlen)], [range(30, 31)]):
        copies, filled = copies_of(chunks, wanted), torch.full((seqlen,), -1)
        for one in copies:
            filled[one.tokens.start : one.tokens.stop] = shards[one.rank][one.row : one.row + len(one.tokens)]
        inside = torch.tensor([any(token in one for one in wanted) for token in range(seqlen)])
        assert torch.equal(filled, torch.where(inside, sequence, -1))
        assert sum(len(one.tokens) for one in copies) == int(inside.sum()), "each token is copied once"
        assert copies == sorted(copies, key=lambda one: one.tokens.start)
