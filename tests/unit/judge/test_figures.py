"""A figure that no run gave is named as such; one that a cited claim or run gives is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashmoe_science.judge.figures import Sources, read, unbacked
from flashmoe_science.judge.figures_in_text import figures_in
from flashmoe_science.judge.gate.claim import Claim
from flashmoe_science.judge.gate.claims import judge_claim
from flashmoe_science.judge.standing import JudgedRun, verdicts

PROBLEM = "attn b2 h8 q512 d64 fp16"


@pytest.fixture
def sources(fabricate: Callable[..., Any]) -> Sources:
    """Run r1: fwd_triton takes 20 us and fa3 30 us. The claim 'half-again' is that it is at least 1.4 times as fast."""
    run = fabricate().control().timed("fwd_triton", 20_000, "fa3", 30_000).done()
    rows = verdicts([run])
    claim = Claim(
        id="half-again", text="", gpu="h200", clock="graph", problems=1, statistic="geomean", at_least=1.4
    )  # fmt: skip
    return Sources([judge_claim(claim, rows)], JudgedRun(run).believed, rows)


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
        ("3.7 x faster", "ratio", 3.7),
        ("3.7-fold", "ratio", 3.7),
        ("three times as fast", "ratio", 3),
        ("twice the throughput", "ratio", 2),
        ("halves the time", "ratio", 2),
        ("an order of magnitude faster", "ratio", 10),
        ("a speed-up of about **3.7**", "ratio", 3.7),
        ("**3.7**\u00a0\u00d7 faster", "ratio", 3.7),
        ("3.7$\\times$ the speed", "ratio", 3.7),
        ("<b>3.7</b>&times;", "ratio", 3.7),
        ("3.7<!-- -->x", "ratio", 3.7),
        ("\uff13.\uff17x", "ratio", 3.7),
        ("x3.7", "ratio", 3.7),
        ("37 per cent quicker", "percent", 37),
        ("faster by 37%", "percent", 37),
        ("a 37% reduction in latency", "percent", 37),
        ("cuts the latency by 37%", "percent", 37),
        ("37% of the time", "share", 37),
        ("90% of its theoretical peak", "peak", 90),
        ("97% utilization", "peak", 97),
        ("1.5e3 us", "ns", 1.5e6),
        ("24 \u03bcsec", "ns", 24e3),
        ("1.9 seconds a call", "ns", 1.9e9),
        ("0.9 PFLOP/s", "tflops", 900),
        ("90 teraflops", "tflops", 90),
        ("3 GiB/s", "gbps", 3.221225472),
        ("2 terabytes per second", "gbps", 2000),
        ("12k tokens/s", "queries", 12e3),
        ("1.5 million queries per second", "queries", 1.5e6),
        ("`1.36 ms`", "ns", 1.36e6),
        ("```\n1.36 ms\n```", "ns", 1.36e6),
    ],
)
def test_figures_of_speed_are_found(text: str, unit: str, value: float) -> None:
    (found,) = figures_in(text)
    assert (found.unit, found.value) == (unit, pytest.approx(value))


@pytest.mark.parametrize(
    "text",
    [
        "tiles of 64 x 128", "95% intervals", "200 times eagerly", "v1.7x2", "Python 3.11", "2 MB", "half the SMs",
        "a step takes 5 s", "slower: 621 of them", "64 x 3 blocks", "100% of the records", "tokens 512",
        "twice the error", "head dimensions 1 to 256", "<!-- 1.36 ms -->", "sm_80", "1x1 grids", "16 bytes",
    ],
)  # fmt: skip
def test_other_numbers_are_not(text: str) -> None:
    assert figures_in(text) == []


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("3.7-4.9x", [3.7, 4.9]),
        ("between 3.7 and 4.9 times faster", [3.7, 4.9]),
        ("from 3.7x to 4.9x", [3.7, 4.9]),
        ("12 to 15 us", [12e3, 15e3]),
        ("| kernel | us | blocks |\n|---|--:|---|\n| a | 12.5 | 3 |\n| b | ~**14** [13, 15] | 4 |", [12.5e3, 14e3]),
        (
            "| | ours | theirs |\n|-|-|-|\n| latency (ms) | 2 | 3 |\n| blocks | 4 | 5 |\n| speed-up | 1.5 | 1 |",
            [2e6, 3e6, 1.5, 1],
        ),
    ],
)
def test_a_range_has_two_and_a_table_may_say_the_unit_in_its_headings(text: str, values: list[float]) -> None:
    assert [figure.value for figure in figures_in(text)] == pytest.approx(values)


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
        "| r1, us |\n|---|\n| 20.0 |",
        "```\nrun r1\n\n20 us\n```",
        "67% of the time, in r1",
        "51.2 million queries a second, in r1",
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
    (coarse,) = unbacked("2x, half-again", sources)
    assert coarse.figure.text == "2x"


@pytest.mark.parametrize(
    ("at_least", "gpu", "outcome"), [(1.7, "h200", "fails"), (1.7, "l4", "no record"), (1.4, "h200", "holds")]
)
def test_what_a_claim_asks_backs_a_figure_only_where_it_holds(
    fabricate: Callable[..., Any], at_least: float, gpu: str, outcome: str
) -> None:
    run = fabricate().control().timed("fwd_triton", 20_000, "fa3", 30_000).done()
    claim = Claim(id="c", text="", gpu=gpu, clock="graph", problems=1, statistic="geomean", at_least=at_least)
    result = judge_claim(claim, verdicts([run]))
    assert result.outcome == outcome
    assert bool(unbacked(f"{at_least}x <!-- c -->", Sources([result], [], []))) == (outcome != "holds")


def test_what_backs_a_figure_is_told(sources: Sources) -> None:
    (one,) = read("It takes 20 us: run r1.", sources)
    assert (one.source, one.of, one.why) == ("r1", f"fwd_triton on {PROBLEM}", None)


@pytest.mark.parametrize("text", ["1e999x", "1e-999x", "0x faster", "9" * 400 + " us", "1e400 ms", "5e-324 GB/s"])
def test_a_figure_that_no_number_can_be_is_unbacked(sources: Sources, text: str) -> None:
    (found,) = unbacked(f"{text} half-again", sources)
    assert found.why == "half-again, which it cites, gives no such number"


def test_comments_that_never_end_take_no_time() -> None:
    assert [figure.text for figure in figures_in("<!--" * 200_000 + " 2.5x")] == ["2.5x"]


def test_a_citation_holds_for_its_own_paragraph(sources: Sources) -> None:
    (found,) = unbacked("See half-again.\n\nIt is 1.5x.", sources)
    assert found.why.startswith("it cites no claim and no run; half-again gives such a number")


def test_a_generated_block_may_not_hold_what_no_run_gave(sources: Sources) -> None:
    (found,) = unbacked("<!-- generated:results -->\nIt is 1.9x.\n<!-- end generated:results -->", sources)
    assert (found.figure.line, found.why) == (2, "no run gave this")
