"""The numbers of the README: drawn from verdicts, by a rule that cannot flatter."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.unit.fabricated import Fabricate, verdicts

from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.judge.verdicts import Verdict

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture(scope="module")
def numbers_module() -> ModuleType:
    sys.path.insert(0, str(DOCS))
    try:
        import numbers_from_records
    finally:
        sys.path.remove(str(DOCS))
    return numbers_from_records


def row(problem: str, ratio: float | None, suite: str = "documents", started: str = "2026-01-01T00:00:00+00:00") -> Verdict:
    """Ours beside fa4, so many times as fast; without a ratio, wrong."""
    run = Fabricate(started=started, suite=suite).control("fwd_gluon_sm90", problem=problem, noise=0)
    run.prove(problem, "fwd_triton", passed=ratio is not None)
    run.timed("fwd_triton", 20_000, "fa4", 20_000 * (ratio or 1), problem=problem, noise=0)
    return next(one for one in verdicts([run.done()]) if one.kernel == "fwd_triton")


@pytest.fixture
def numbers(numbers_module: ModuleType, tmp_path: Path):
    def of(*rows: Verdict):
        run = Fabricate().control("fwd_gluon_sm90", problem="attn b1 h1 q64 d64 fp16", noise=0).done()
        return numbers_module.Numbers(runs=[run], verdicts=rows, claimed=[], root=tmp_path)

    return of


def test_ratios_average_geometrically_and_the_least_stands_beside(numbers) -> None:
    (line,) = [
        line
        for line in numbers(row("attn b1 h1 q64 d64 fp16", 2.0), row("attn b1 h1 q65 d64 fp16", 0.5)).results().splitlines()
        if "h200" in line
    ]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["h200", "documents", "graph, cold", "2"]
    assert cells[4].startswith("1.00 [")
    assert cells[5:7] == ["0.50", "2.00"]
    assert cells[7:] == ["1", "0", "1", "0", "0"]


def test_a_refused_row_is_counted_and_has_no_number(numbers) -> None:
    found = numbers(row("attn b1 h1 q64 d64 fp16", None), row("attn b1 h1 q65 d64 fp16", 2.0))
    assert found.results().splitlines()[2].endswith("| 1 | 0 | 0 | 0 | 1 |")
    assert "1 row of ours was refused" in found.worst()
    assert "refused: wrong: its output is off by" in found.results_page()


def test_losses_are_named_worst_first(numbers) -> None:
    found = numbers(*(row(f"attn b1 h1 q{64 + i} d64 fp16", 0.9 - i / 100) for i in range(7)))
    listed = [line for line in found.worst().splitlines() if line.startswith("- ")]
    assert "7 of our 7 rows" in found.worst()
    assert len(listed) == 5
    assert listed[0].startswith("- 0.84 of fa4: `attn b1 h1 q70 d64 fp16`")


def test_losses_are_counted_by_suite(numbers) -> None:
    """The README's lines: problems that no suite has are none of a sample of use, unless there are no others."""
    asked = row("attn b1 h1 q2048 d64 fp16", 0.1, suite="custom")
    found = numbers(
        row("attn b1 h1 q64 d64 fp16", 2.0),
        row("attn b1 h1 q4096 d64 fp16", 0.5, suite="long"),
        row("attn b1 h1 q8192 d64 fp16", 0.8, suite="long"),
        row("attn b1 h1 q128 d64 fp16", None),
        asked,
    )
    first, *_, lost = found.losses().splitlines()
    assert first == "By device time a peer is faster on 2 of 3 problems:"
    assert lost == "| long prompts, 512 to 16k tokens | 2 of 2 | 0.63x | 0.50x of fa4: `attn b1 h1 q4096 d64 fp16` (h200) |"
    assert "a peer is faster on 1 of 1 problems" in numbers(asked).losses()
    assert numbers(row("attn b1 h1 q64 d64 fp16", 2.0)).losses() == "No peer is faster by device time on any of 1 problem."


def test_the_summary_holds_what_is_on_record(numbers: Callable[..., Any]) -> None:
    table = numbers(
        row("attn b1 h1 q64 d64 fp16", 2.0),
        row("attn b1 h1 q2048 d64 fp16", 9.0),  # not short
        row("attn b1 h1 q4096 d64 fp16", 0.5, suite="long"),
        row("attn b1 h1 q4096 d96 fp16", 0.8, suite="long-draw"),
        row("attn b1 h1 q1 k4096 d64 fp16", 1.2, suite="decode-draw"),
    ).summary()
    short, long, drawn, decode, memory = table.splitlines()[2:]
    assert short.startswith("| short prompts, up to 512 tokens (h200) | 1 | best peer | 2.00x [")
    assert (long.split("|")[2], long.endswith("| 0.50x |")) == (" 1 ", True)
    assert drawn.startswith("| long prompts drawn at random (h200) | 1 | best peer | 0.80x [")
    assert decode.startswith("| decoding drawn at random (h200) | 1 | best peer | 1.20x [")
    assert memory == "| memory of a call | 3 | its results | 1.00 (median) | 1.00 (the most) |"


def test_the_picture_has_each_case_its_bars_and_its_worst(numbers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    drawn = importlib.import_module("picture").picture(
        numbers(
            row("attn b1 h1 q64 d64 fp16", 2.0),
            row("attn b1 h1 q65 d64 fp16", 0.5),
            row("attn b1 h1 q1 k4096 d64 fp16", 1.2, suite="decode-draw"),
        ).cases
    )
    ElementTree.fromstring(drawn)
    for words in ("NVIDIA H200", "short prompts, up to 512 tokens", "FA4 (2)", "1.00x", "worst 0.50x of 2"):
        assert f">{words}</text>" in drawn
    assert "decoding" not in drawn  # one draw stands for all


def test_a_problem_that_a_suite_measured_since_counts_there_alone(numbers: Callable[..., Any]) -> None:
    """Whatever its layout; a run of problems named on the command line counts where no suite has them, or had them before."""
    asked = [row(f"attn b1 h1 q{q} d64 fp16", 0.5, suite="custom") for q in (1024, 2048)]
    later = row("attn b1 h1 q1024 d64 fp16 bshd", 1.5, suite="long", started="2026-01-02T00:00:00+00:00")
    earlier = row("attn b1 h1 q2048 d64 fp16 bshd", 1.5, suite="long", started="2025-12-31T00:00:00+00:00")
    found = numbers(*asked, later, earlier)
    shown = {(key[1], one.problem) for key, rows in found.groups.items() for one in rows}
    assert shown == {("custom", asked[1].problem), ("long", later.problem), ("long", earlier.problem)}


def test_a_run_without_the_kernel_that_serves_the_problem_now_says_nothing_of_us(
    numbers_module: ModuleType, tmp_path: Path
) -> None:
    """fp32_gluon_sm90 is newer than a run in which fwd_triton was half as fast as PyTorch."""
    problem = "attn b4 h16 q2048 d128 fp32"
    runs = []
    for kernel in ("fwd_triton", "fp32_gluon_sm90"):
        run = Fabricate(kernel, suite="custom").control("fwd_triton", problem=problem, noise=0)
        runs.append(run.timed("fwd_triton", 20_000, "sdpa", 10_000, problem=problem, noise=0))
    runs[1].prove(problem, "fp32_gluon_sm90", passed=False)
    for run, count in zip(runs, (0, 1), strict=True):
        judged = JudgedRun(run.done())
        found = numbers_module.Numbers([judged.run], judged.verdicts, [], tmp_path, [judged])
        assert sum(map(len, found.groups.values())) == count
