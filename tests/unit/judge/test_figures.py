"""A figure that no run gave is named as such; one that a cited claim or run gives is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashmoe_science.judge.claim import Claim
from flashmoe_science.judge.claims import judge_claim
from flashmoe_science.judge.figures import Sources, figures_in, unbacked
from flashmoe_science.judge.matchups import matchups
from flashmoe_science.judge.verdicts import verdicts

PROBLEM = "attn b2 h8 q512 d64 fp16"


@pytest.fixture
def sources(fabricate: Callable[..., Any]) -> Sources:
    """Run r1: fwd_triton takes 20 us and fa3 30 us. The claim 'half-again' is that it is at least 1.4 times as fast."""
    run = fabricate().control().timed("fwd_triton", 20_000, "fa3", 30_000).done()
    rows = verdicts([run])
    claim = Claim(
        id="half-again", text="", gpu="h200", clock="graph", problems=1, statistic="geomean", at_least=1.4
    )  # fmt: skip
    return Sources([judge_claim(claim, rows)], matchups(run), rows)


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("1.7x", "ratio", 1.7),
        ("is 1.7\u00d7 SDPA", "ratio", 1.7),
        ("8 times faster", "ratio", 8),
        ("1.5 times the speed", "ratio", 1.5),
        ("29 % slower", "percent", 29),
        ("1.36 ms", "ns", 1.36e6),
        ("0.318ms,", "ns", 318e3),
        ("12 µs and", "ns", 12e3),
        ("24 microseconds", "ns", 24e3),
        ("1,024 ns", "ns", 1024),
        ("242 TFLOP/s", "tflops", 242),
        ("470 GFLOPS", "tflops", 0.47),
        ("13 GB/s", "gbps", 13),
        ("4.8 TB/s", "gbps", 4800),
    ],
)
def test_figures_of_speed_are_found(text: str, unit: str, value: float) -> None:
    (found,) = figures_in(text)
    assert (found.unit, found.value) == (unit, pytest.approx(value))


@pytest.mark.parametrize(
    "text",
    [
        "tiles of 64 x 128", "95% intervals", "200 times eagerly", "v1.7x2", "Python 3.11", "`1.36 ms`", "2 MB",
        "```\n1.36 ms\n```", "head dimensions 1 to 256", "<!-- 1.36 ms -->", "sm_80", "1x1 grids", "16 bytes",
    ],
)  # fmt: skip
def test_other_numbers_are_not(text: str) -> None:
    assert figures_in(text) == []


def test_a_figure_that_no_run_gave_is_named_with_its_line(sources: Sources) -> None:
    (found,) = unbacked("# Title\n\nA forward took\n1.36 ms on an L4.\n", sources)
    assert (found.figure.line, found.figure.text, found.why) == (4, "1.36 ms", "no run gave this")


@pytest.mark.parametrize(
    "text",
    [
        "It is 1.5x (half-again).",
        "It is 1.4x or more. <!-- claim: half-again -->",
        "It takes 20 us, fa3 takes 30 us: run r1.",
        "50% faster, 33 % faster in the other sense, in r1",
        "| 20 us |\n| r1 |",
        "<!-- generated:results -->\nIt is 1.5x.\n<!-- end generated:results -->",
    ],
)
def test_a_figure_that_its_source_gives_is_backed(sources: Sources, text: str) -> None:
    assert unbacked(text, sources) == []


def test_a_figure_that_its_source_does_not_give_is_said(sources: Sources) -> None:
    (found,) = unbacked("It is 1.7x, see half-again.", sources)
    assert found.why == "half-again, which it cites, gives no such number"
    (rounded,) = unbacked("1.50001x half-again", sources)
    assert rounded.figure.text == "1.50001x"


def test_a_citation_holds_for_its_own_paragraph(sources: Sources) -> None:
    (found,) = unbacked("See half-again.\n\nIt is 1.5x.", sources)
    assert found.why.startswith("it cites no claim and no run; half-again gives such a number")


def test_a_generated_block_may_not_hold_what_no_run_gave(sources: Sources) -> None:
    (found,) = unbacked("<!-- generated:results -->\nIt is 1.9x.\n<!-- end generated:results -->", sources)
    assert (found.figure.line, found.why) == (2, "no run gave this")
