"""The dispatch table holds what the records support, in an order that does not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dispatch_table import main, promote
from tests.unit.fabricated import PROBLEM, Fabricate

from flashmoe_science.judge.standing import verdicts


def winners(*runs: Any) -> list[tuple[str, str, str, str]]:
    return [
        (entry["problem"], entry["kernel"], entry["config"], entry["run"])
        for entry in promote(verdicts([run.done() for run in runs]))["entries"]
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
