"""What the producer of fwd_gluon_sm90 copies of pages, by its own functions with numbers in place of tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.ops.attention.device import tiles


class Copied:
    """Shared memory for tiles of keys: which row of which page each of its rows was copied from, None for zeros."""

    def __init__(self, block_n: int, width: int) -> None:
        self.shape, self.rows, self.first = (3, 1, 1, 1, block_n, width), [[()] * block_n for _ in range(3)], 0

    def index(self, stage: int) -> Any:
        def sliced(first: int, count: int, dim: int) -> Any:
            assert dim == 3
            return stage, first, count

        return SimpleNamespace(slice=sliced)


@settings(max_examples=300)
@given(
    page=st.sampled_from([8, 16, 64, 128, 256, 384]),
    block_n=st.sampled_from([64, 128]),
    keys=st.integers(0, 3000),
    tile=st.integers(0, 23),
    pitch=st.integers(1, 5),
    stage=st.integers(0, 2),
)
def test_each_row_of_a_tile_comes_from_its_page_or_is_zeros(
    page: int, block_n: int, keys: int, tile: int, pitch: int, stage: int
) -> None:
    """``pitch``: pages from one to the next, of which those between are other heads'."""
    count, copied, expected = min(page, block_n), Copied(block_n, 128), list[int]()
    table = {n: 1000 - 7 * n for n in range(-(-keys // page))}  # no others are read
    desc = SimpleNamespace(block_type=SimpleNamespace(shape=(1, 1, 1, count, 128), nbytes=count * 256))

    def load(desc: Any, place: tuple[int, ...], full: Any, at: tuple[int, int, int]) -> None:
        rows, end, head, row, column = place
        assert (rows, head, column, at[2]) == (tiles.RAGGED_ROWS.value, 5, 0, count)
        for n in range(count):
            inside = row + n < rows  # as the copy engine has it: past that, zeros
            copied.rows[at[0]][at[1] + n] = end - (rows - row) + n if inside else None

    language = SimpleNamespace(maximum=max, minimum=min, where=lambda condition, yes, no: yes if condition else no)
    language.static_range = range
    language.load = lambda at, mask, other: table[at] if mask else other
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "gl", language)
        for name in ("coordinates", "row_on_page"):
            patch.setattr(tiles, name, getattr(tiles, name).fn)
        patch.setattr(tiles, "tma_load", load)
        patch.setattr(tiles, "mbarrier", SimpleNamespace(expect=lambda full, count: expected.append(count)))
        pages = tiles.pages_of_tile.fn(0, len(table), tile * block_n, block_n, page)
        tiles.load_pages.fn((desc,), 5, pages, pitch * page, keys, tile * block_n, None, (copied,), stage, page)
    assert sum(expected) == block_n * 256
    for n, found in enumerate(copied.rows[stage]):
        key = tile * block_n + n
        assert found == (table[key // page] * pitch * page + key % page if key < keys else None)
