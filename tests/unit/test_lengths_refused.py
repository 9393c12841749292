"""Lengths, pages and rotary positions that cannot be are refused by name on the CPU, where reading them costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.tensors import i32, randn
from tests.unit.test_serving import CU, C, P, Q, cached, packed


def paged(**changes: Any) -> object:
    return cached(**({"k_cache": C.view(4, 4, 4, 16), "v_cache": C.view(4, 4, 4, 16), "page_table": PAGES} | changes))


PAGES, HOLES = i32(3, 1, 0, 2).view(2, 2), i32(1, -1, 0, -1).view(2, 2)
TURNS = {"rotary_cos": randn(7, 8), "rotary_sin": randn(7, 8)}
# What values say, which are read where that costs nothing.
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: packed(cu_seqlens_q=i32(1, 2, 6)), "cu_seqlens_q begins at 1; it must begin at 0"),
    (lambda: packed(cu_seqlens_k=i32(-1, 2, 6)), "cu_seqlens_k begins at -1; it must begin at 0"),
    (lambda: packed(cu_seqlens_q=i32(0, 5, 4)), "cu_seqlens_q falls from 5 to 4 at sequence 1; it must not fall"),
    (lambda: packed(cu_seqlens_q=i32(0, 5, 6)), "max_seqlen_q is 4 and sequence 0 has 5 queries; it must be at least as many"),
    (lambda: packed(cu_seqlens_q=i32(0, 4, 3)), "cu_seqlens_q falls from 4 to 3 at sequence 1; it must not fall"),
    (lambda: packed(cu_seqlens_k=i32(0, 3, -9)), "cu_seqlens_k falls from 3 to -9 at sequence 1; it must not fall"),
    (lambda: packed(cu_seqlens_k=i32(0, 3, 7)), "cu_seqlens_k ends at 7 and there are 6 keys; it must end there or"),
    (lambda: packed(cu_seqlens_k=i32(0, 1, 6)), "max_seqlen_k is 4 and sequence 1 has 5 keys; it must be at least"),
    (lambda: packed(max_seqlen_q=0), "max_seqlen_q is 0 and sequence 0 has 2 queries; it must be at least as many"),
    (lambda: packed(seqused_q=i32(2, 5)), "seqused_q is 5 for sequence 1; it must be from 0 to 4, what cu_seqlens_q"),
    (lambda: packed(seqused_q=i32(-1, 0)), "seqused_q is -1 for sequence 0; it must be from 0 to 2, what"),
    (
        lambda: packed(seqused_q=i32(2, 4), cu_seqlens_q=i32(0, 2, 9)),
        "cu_seqlens_q ends at 9 and there are 6 queries; it must end",
    ),
    (lambda: packed(seqused_k=i32(3, 4)), "seqused_k is 3 for sequence 0; it must be from 0 to 2, what cu_seqlens_k"),
    (lambda: packed(k=C[:, :3], v=C[:, :3], block_table=PAGES[0]), "block_table has shape (2,); it must be (any, any)"),
    (lambda: packed(k=C[:, :3], v=C[:, :3], block_table=[[1]]), "block_table is a list; it must be a torch.Tensor or None"),
    (lambda: packed(k=C, v=C, block_table=PAGES), "block_table is 3 for sequence 0 at 0, where it has keys; it must"),
    (
        lambda: packed(k=C, v=C, block_table=HOLES, cu_seqlens_k=None, seqused_k=i32(8, 9), max_seqlen_k=9),
        "block_table is -1 for sequence 1 at 1, where it has keys; it must be from 0 to 1",
    ),
    (
        lambda: packed(k=C, v=C, block_table=PAGES % 2, cu_seqlens_k=i32(0, 4, 2)),
        "cu_seqlens_k falls from 4 to 2 at sequence 1; it must not fall",
    ),
    (lambda: cached(cache_seqlens=i32(4, 9)), "cache_seqlens is 9 for sequence 1; it must be from 0 to 8, the capacity"),
    (lambda: cached(cache_seqlens=i32(-1, 2)), "cache_seqlens is -1 for sequence 0; it must be from 0 to 8, the"),
    (lambda: cached(cache_seqlens=9), "cache_seqlens is 9 for sequence 0; it must be from 0 to 8, the capacity"),
    (lambda: cached(cache_batch_idx=i32(0, 2)), "cache_batch_idx is 2 for sequence 1; it must be from 0 to 1"),
    (lambda: cached(cache_batch_idx=i32(-1, 1)), "cache_batch_idx is -1 for sequence 0; it must be from 0 to 1"),
    (lambda: cached(cache_leftpad=i32(0, -2)), "cache_leftpad is -2 for sequence 1; it must be from 0 to 8"),
    (lambda: cached(q=P, cu_seqlens_q=i32(0, 4, 2), max_seqlen_q=4), "cu_seqlens_q falls from 4 to 2 at sequence 1"),
    (lambda: paged(page_table=i32(3, 1)), "page_table has shape (2,); it must be (2, any)"),
    (lambda: paged(page_table=None, block_table=i32(3, 1)), "block_table has shape (2,); it must be (2, any)"),
    (lambda: paged(page_table=i32(3, 1, 0, -1).view(2, 2)), "page_table is -1 for sequence 1 at 1, where it has keys"),
    (lambda: paged(page_table=i32(3, 1, 4, 0).view(2, 2)), "page_table is 4 for sequence 1 at 0, where it has keys"),
    (lambda: paged(cache_seqlens=i32(9, 1)), "cache_seqlens is 9 for sequence 0; it must be from 0 to 8, the capacity"),
    (lambda: paged(cache_batch_idx=i32(2, 0)), "cache_batch_idx is 2 for sequence 0; it must be from 0 to 1"),
    (
        lambda: cached(k=Q, v=Q, cache_seqlens=i32(2, 6)),
        "cache_seqlens is 6 for sequence 1, which gets 3 new keys; together they must be at most 8, the capacity",
    ),
    (lambda: paged(k=Q, v=Q, page_table=i32(3, 9, 0, 2).view(2, 2)), "page_table is 9 for sequence 0 at 1, where it"),
    (lambda: paged(k=Q, v=Q, page_table=None, block_table=i32(3, 9, 0, 2).view(2, 2)), "block_table is 9 for sequence 0 at 1"),
    (lambda: paged(page_table=None, block_table=i32(3, 1, 4, 0).view(2, 2)), "block_table is 4 for sequence 1 at 0, where it"),
    (
        lambda: cached(k=P, v=P, q=P, cu_seqlens_q=CU, max_seqlen_q=4, cu_seqlens_k_new=i32(0, 3, 2)),
        "cu_seqlens_k_new falls from 3 to 2 at sequence 1; it must not fall",
    ),
    (lambda: cached(k=Q, v=Q, causal=True, **TURNS), "rotary_cos has 7 positions and sequence 1 needs 8; it must"),
    (
        lambda: cached(k=Q, v=Q, rotary_seqlens=i32(2, -1), **TURNS),
        "rotary_seqlens is -1 for sequence 1; it must be from 0 to 7, the positions of rotary_cos",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "what"), REFUSED, ids=[what[:48] for _, what in REFUSED])
def test_it_is_refused_in_one_line(call: Callable[[], object], what: str) -> None:
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)) as refusal:
            call()
        assert str(refusal.value).startswith(what), refusal.value
        assert "\n" not in str(refusal.value)


def test_what_is_not_reached_may_be_anything() -> None:
    garbage = i32(3, 2**31 - 1, 0, -7).view(2, 2)
    assert torch.equal(paged(page_table=garbage, cache_seqlens=i32(4, 0)), paged(cache_seqlens=i32(4, 0)))  # type: ignore[arg-type]
    shorter = packed(cu_seqlens_q=i32(0, 2, 5), cu_seqlens_k=i32(0, 2, 5))
    assert torch.all(shorter[5] == 0.0)  # type: ignore[index]


def test_what_is_refused_for_its_values_leaves_the_cache_as_it_was() -> None:
    caches = C.clone(), C.clone()
    for changes in ({"cache_seqlens": i32(2, 6)}, {"causal": True, **TURNS}):
        with pytest.raises(ValueError, match=r"new keys|positions"):
            cached(k=Q, v=Q, k_cache=caches[0], v_cache=caches[1], **changes)
    assert all(torch.equal(one, C) for one in caches)


def test_a_compiled_call_is_refused_too() -> None:
    compiled = torch.compile(lambda lengths: cached(cache_seqlens=lengths), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(i32(4, 5)), cached())
    with pytest.raises(ValueError, match="cache_seqlens is 9 for sequence 0; it must be from 0 to 8, the capacity"):
        compiled(i32(9, 5))


def test_gradients_are_refused_bad_lengths_too() -> None:
    q = P.clone().requires_grad_()
    with pytest.raises(ValueError, match="cu_seqlens_k begins at 1"):
        packed(q=q, cu_seqlens_k=i32(1, 2, 6))
