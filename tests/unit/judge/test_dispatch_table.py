"""The dispatch table holds what the records support, in an order that does not change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dispatch_table import as_text, main, promote

from flashmoe_science.judge.standing import verdicts
from flashmoe_science.store import RunWriter

PROBLEM = "attn b2 h8 q512 d64 fp16"
Maker = Callable[..., Any]


def write(folder: Path, run: Any) -> None:
    done = run.done()
    with RunWriter(folder / f"{done.header.run}.jsonl") as writer:
        for row in (done.header, *done.rows):
            writer.append(row)


def winners(*runs: Any) -> list[tuple[str, str, str, str]]:
    return [
        (entry["problem"], entry["kernel"], entry["config"], entry["run"])
        for entry in promote(verdicts([run.done() for run in runs]))["entries"]
    ]


def test_the_fastest_of_ours_is_promoted_with_its_ratio(fabricate: Maker) -> None:
    run = fabricate().control(config="block_m=64").timed("fwd_triton", 20_000, "fa3", 24_000, config="block_m=64")
    run.timed("fwd_gluon_sm90", 25_000, "fa3", 24_000)
    (entry,) = promote(verdicts([run.done()]))["entries"]
    assert (entry["gpu"], entry["problem"], entry["kernel"], entry["config"]) == ("h200", PROBLEM, "fwd_triton", "block_m=64")
    assert entry["ratio"] == pytest.approx(1.2, rel=0.01)
    assert entry["time_ns"] == pytest.approx(20_000, rel=0.01)
    assert isinstance(entry["time_ns"], int)
    assert entry["run"] == "r1"


def test_a_wrong_kernel_and_a_peer_are_never_promoted(fabricate: Maker) -> None:
    run = fabricate().control("fwd_gluon_sm90")
    run.prove(PROBLEM, "fwd_triton", passed=False)
    run.timed("fwd_triton", 5_000, "fa3", 24_000).timed("fwd_gluon_sm90", 25_000, "fa3", 24_000)
    assert [winner[1] for winner in winners(run)] == ["fwd_gluon_sm90"]


def test_a_users_kernel_that_is_slower_promotes_nothing(fabricate: Maker) -> None:
    """Ours was its rival: no peer was there, and no other config."""
    early = fabricate("early", "2026-01-01T00:00:00+00:00").control().timed("fwd_triton", 20_000, "fa3", 24_000)
    trial = fabricate("trial", "2026-01-02T00:00:00+00:00").control("mine.py:fn")
    trial.timed("mine.py:fn", 90_000, "fwd_triton", 20_000)
    assert [winner[3] for winner in winners(early, trial)] == ["early"]


def test_the_eager_clock_does_not_promote(fabricate: Maker) -> None:
    run = fabricate().control(clock="eager").timed("fwd_triton", 20_000, "sdpa", 24_000, clock="eager")
    assert winners(run) == []


def test_the_layout_is_left_out_and_the_later_run_decides(fabricate: Maker) -> None:
    early = fabricate("early", "2026-01-01T00:00:00+00:00").control().timed("fwd_triton", 20_000, "fa3", 24_000)
    laid_out = f"{PROBLEM} bshd"
    late = fabricate("late", "2026-01-02T00:00:00+00:00", suite="long").control(problem=laid_out)
    late.timed("fwd_triton", 21_000, "fa3", 24_000, problem=laid_out)
    assert winners(early, late) == [(PROBLEM, "fwd_triton", "", "late")]


def test_a_later_refusal_takes_a_kernel_out(fabricate: Maker) -> None:
    early = fabricate("early", "2026-01-01T00:00:00+00:00").control().timed("fwd_triton", 20_000, "fa3", 24_000)
    early.timed("fwd_gluon_sm90", 25_000, "fa3", 24_000)
    late = fabricate("late", "2026-01-02T00:00:00+00:00", suite="quick").control("fwd_gluon_sm90")
    late.prove(PROBLEM, "fwd_triton", passed=False)
    late.timed("fwd_triton", 20_000, "fa3", 24_000)
    assert winners(early, late) == [(PROBLEM, "fwd_gluon_sm90", "", "early")]


def test_a_gpu_without_a_specification_is_left_out(fabricate: Maker) -> None:
    run = fabricate(gpu="NVIDIA RTX PRO 9000 X").control().timed("fwd_triton", 20_000, "sdpa", 24_000)
    assert winners(run) == []


def test_the_text_is_ordered_and_has_an_entry_a_line(fabricate: Maker) -> None:
    run = fabricate()
    for problem in ("attn b1 h1 q1024 d64 fp16", "attn b1 h1 q128 d64 fp16", "attn b1 h1 q128 d64 bf16"):
        run.control(problem=problem).timed("fwd_triton", 20_000, "sdpa", 24_000, problem=problem)
    text = as_text(promote(verdicts([run.done()])))
    assert [entry["problem"] for entry in json.loads(text)["entries"]] == [
        "attn b1 h1 q128 d64 bf16",
        "attn b1 h1 q128 d64 fp16",
        "attn b1 h1 q1024 d64 fp16",
    ]
    assert len(text.splitlines()) == 5
    assert as_text({"schema": 1, "entries": []}) == '{"schema": 1, "entries": []}\n'


def test_what_is_written_is_what_dispatch_reads(fabricate: Maker, tmp_path: Path) -> None:
    table = pytest.importorskip("flashmoe_science.dispatch.table")
    write(
        tmp_path / "runs", fabricate().control(config="block_m=64").timed("fwd_triton", 2e4, "sdpa", 3e4, config="block_m=64")
    )
    path = tmp_path / "table.json"
    arguments = ["--evidence", str(tmp_path / "runs"), "--table", str(path)]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    entry = table.parse_table(path.read_text(), "here").entries[0]
    assert (entry.gpu, str(entry.problem), entry.kernel, str(entry.config)) == ("h200", PROBLEM, "fwd_triton", "block_m=64")
    path.write_text(path.read_text().replace("fwd_triton", "fwd_gluon_sm90"))
    assert main([*arguments, "--check"]) == 1


def test_what_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--evidence", str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
