"""Attention and experts on ranks that are processes of this machine are one process's calls of all tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.forked import on_ranks
from tests.unit.interpreter import Interpreter
from tests.unit.parallel.interpreted_ranks import run

from flashmoe_science.parallel import positions, shard


@pytest.mark.parametrize(
    "ranks",
    [
        2,
        pytest.param(4, marks=[pytest.mark.slow, pytest.mark.redundant]),
        pytest.param(8, marks=[pytest.mark.slow, pytest.mark.redundant]),
    ],
)
def test_ranks_give_what_one_process_gives(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, run, "ranks", ranks, str(tmp_path / "ranks"))


def test_ranks_that_write_into_each_others_memory_give_the_same(tmp_path: Path, interpreted: Interpreter) -> None:
    assert interpreted("parallel/interpreted_ranks.py", "shared_ranks", "2", str(tmp_path / "ranks")) == 2


@pytest.mark.slow
@pytest.mark.redundant  # of a ring by PyTorch's operators there are cases in what every rank count runs
def test_keys_pass_round_our_kernels_as_round_pytorch_s(tmp_path: Path, interpreted: Interpreter) -> None:
    assert interpreted("parallel/interpreted_ranks.py", "ring_ranks", "2", str(tmp_path / "ranks")) == 2


def test_experts_of_transformers_on_ranks_give_what_one_process_gives(tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")
    on_ranks(2, run, "transformers_ranks", 2, str(tmp_path / "ranks"))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.redundant])])
def test_experts_of_torchtitan_on_ranks_give_what_one_process_gives(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, run, "torchtitan_ranks", ranks, str(tmp_path / "ranks"))


def test_virtual_ranks_take_and_write_what_is_theirs(interpreted: Interpreter) -> None:
    found = interpreted("parallel/virtual_ranks.py")
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len(found) == 15


def test_what_is_no_sequence_is_refused_before_the_group_is_looked_at() -> None:
    with pytest.raises(ValueError, match="dim is 9; x has 2 dimensions"):
        shard(torch.zeros(4, 4), 9, None)
    with pytest.raises(ValueError, match="seqlen is -1"):
        positions(-1, None)
    with pytest.raises(TypeError, match="dim is 'x'; it must be an integer"):
        shard(torch.zeros(4, 4), "x", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x is a list; it must be"):
        shard([1, 2], 0, None)  # type: ignore[arg-type]
    for starts, words in (([], "0 entries"), ([0, 50], "ends at 50"), ([0, 20], "ends at 20"), ([1, 40], "begins at 1")):
        with pytest.raises(ValueError, match=f"cu_seqlens .*{words}"):
            positions(40, None, cu_seqlens=torch.tensor(starts).int())
    for table, words in (
        ([0, 40], "is a list"),
        (torch.tensor([0.0, 40.0]), "dtype"),
        (torch.tensor([0, 40]).int()[None], "shape"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"cu_seqlens .*{words}"):
            positions(40, None, cu_seqlens=table)  # type: ignore[arg-type]
