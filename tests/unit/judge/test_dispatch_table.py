"""The dispatch table holds what the records support, in an order that does not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dispatch_table import main
from tests.unit.fabricated import PROBLEM, Fabricate, verdicts

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.measure import promote
from flashmoe_science.records import CallPathRow, SeenLaunch

FIRST_GUESS = promote.first_guess


@pytest.fixture(autouse=True)
def _of_fwd_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of these runs measured it alone."""
    monkeypatch.setattr(promote, "first_guess", lambda problem, gpu: "fwd_triton")


def winners(*runs: Any) -> list[tuple[str, str, str, str]]:
    return [
        (entry["problem"], entry["kernel"], entry["config"], entry["run"])
        for entry in promote.promote(verdicts([run.done() for run in runs]), GPUS)
    ]


def test_a_wrong_kernel_a_peer_and_an_eager_time_are_never_promoted() -> None:
    run = Fabricate().control("fwd_gluon_sm90")
    run.prove(PROBLEM, "fwd_triton", passed=False)
    run.timed("fwd_triton", 5_000, "fa3", 24_000).timed("fwd_gluon_sm90", 25_000, "fa3", 24_000)
    run.control(clock="eager").timed("fwd_triton", 5_000, "sdpa", 24_000, clock="eager")
    assert [winner[1] for winner in winners(run)] == ["fwd_gluon_sm90"]


def test_the_layout_is_left_out_and_the_later_run_decides() -> None:
    early = Fabricate("early", "2026-01-01T00:00:00+00:00").control().timed("fwd_triton", 20_000, "fa3", 24_000)
    laid_out = f"{PROBLEM} bshd"
    late = Fabricate("late", "2026-01-02T00:00:00+00:00", suite="long").control(problem=laid_out)
    late.timed("fwd_triton", 21_000, "fa3", 24_000, problem=laid_out)
    assert winners(early, late) == [(PROBLEM, "fwd_triton", "", "late")]


def test_a_later_refusal_takes_a_kernel_out() -> None:
    early = Fabricate("early", "2026-01-01T00:00:00+00:00").control().timed("fwd_triton", 20_000, "fa3", 24_000)
    early.timed("fwd_gluon_sm90", 25_000, "fa3", 24_000)
    late = Fabricate("late", "2026-01-02T00:00:00+00:00", suite="quick").control("fwd_gluon_sm90")
    late.prove(PROBLEM, "fwd_triton", passed=False)
    late.timed("fwd_triton", 20_000, "fa3", 24_000)
    assert winners(early, late) == [(PROBLEM, "fwd_gluon_sm90", "", "early")]


@pytest.mark.parametrize(("more", "chosen"), [((), []), (("fwd_gluon_sm90",), ["fwd_triton"])])
def test_a_problem_enters_once_the_kernel_of_the_first_guess_is_measured(
    monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], chosen: list[str]
) -> None:
    """It may be newer than the record, or left out by --kernel, and the fastest."""
    monkeypatch.setattr(promote, "first_guess", FIRST_GUESS)
    assert FIRST_GUESS(PROBLEM, GPUS["h200"]) == "fwd_gluon_sm90"
    run = Fabricate().control().timed("fwd_triton", 20_000, "fa3", 24_000)
    for kernel in more:
        run.control(kernel).timed(kernel, 30_000, "fa3", 24_000)
    assert [one[1] for one in winners(run)] == chosen


def test_what_is_written_is_what_dispatch_reads(recorded: Callable[..., Path], tmp_path: Path) -> None:
    table = pytest.importorskip("flashmoe_science.dispatch.table")
    run = Fabricate().control(config="block_m=64")
    folder = recorded(run.timed("fwd_triton", 2e4, "sdpa", 3e4, config="block_m=64"))
    path = tmp_path / "table.json"
    arguments = ["--evidence", str(folder), "--table", str(path)]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    entry = table.parse_table(path.read_text(), "here").entries[0]
    assert (entry.gpu, str(entry.problem), entry.kernel, str(entry.config)) == ("h200", PROBLEM, "fwd_triton", "block_m=64")
    path.write_text(path.read_text().replace("fwd_triton", "fwd_gluon_sm90"))
    assert main([*arguments, "--check"]) == 1


def faster(*runs: Fabricate) -> list[tuple[str, float, str]]:
    (entry,) = promote.entries_of([JudgedRun(run.done()) for run in runs], GPUS)
    return [(one["kernel"], round(one["ratio"], 2), one["problem"]) for one in entry.get("peers", [])]


def test_a_peer_enters_where_all_of_its_interval_is_above_three_percent() -> None:
    run = Fabricate().control().timed("fwd_triton", 20_000, "fa3", 16_000)
    run.timed("fwd_triton", 20_000, "fa4", 19_000).timed("fwd_triton", 20_000, "sdpa", 19_600)
    assert faster(run) == [("fa3", 1.25, PROBLEM), ("fa4", 1.05, PROBLEM)]
    just_so = Fabricate().control().timed("fwd_triton", 20_000, "fa3", 20_000 / 1.032, noise=0.02)
    assert faster(just_so) == []


def test_neither_a_wrong_peer_nor_one_that_is_chosen_only_by_name_nor_a_slower_kernels_rival_enters() -> None:
    run = Fabricate().control().control("fwd_gluon_sm90")
    run.prove(PROBLEM, "fa3", passed=False)
    run.timed("fwd_triton", 20_000, "fa3", 10_000).timed("fwd_triton", 20_000, "sdpa_cudnn", 10_000)
    run.timed("fwd_triton", 20_000, "fa4", 12_000).timed("fwd_gluon_sm90", 10_000, "fa4", 12_000)
    assert faster(run) == []


def test_peers_are_of_the_run_and_the_memory_order_of_the_winner_and_modes_have_none() -> None:
    early = Fabricate("early", "2026-01-01T00:00:00+00:00").control().timed("fwd_triton", 20_000, "fa3", 16_000)
    laid_out = f"{PROBLEM} bshd"
    late = Fabricate("late", "2026-01-02T00:00:00+00:00", suite="long").control(problem=laid_out)
    assert faster(early, late.timed("fwd_triton", 20_000, "fa4", 16_000, problem=laid_out)) == [("fa4", 1.25, laid_out)]
    ragged = f"{PROBLEM} ragged"
    run = Fabricate().control(problem=ragged).timed("fwd_triton", 20_000, "fa3", 16_000, problem=ragged)
    assert faster(run) == []


def test_the_backend_that_pytorch_chose_is_the_one_that_was_seen() -> None:
    run = Fabricate().control().timed("fwd_triton", 20_000, "sdpa", 16_000)
    seen = SeenLaunch(name="fmha_cutlassF_f32_aligned_64x128_rf_sm80", grid=(8, 16, 1), block=(128, 1, 1), shared_bytes=0)
    rows = [
        row.model_copy(update={"launches": [seen]}) if isinstance(row, CallPathRow) and row.kernel == "sdpa" else row
        for row in run.rows
    ]
    run.rows[:] = rows
    (entry,) = promote.entries_of([JudgedRun(run.done())], GPUS)
    assert [one["backend"] for one in entry["peers"]] == ["PyTorch's memory-efficient (CUTLASS) backend"]
