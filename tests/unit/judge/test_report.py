"""The report shows what the verdicts say, escaped, offline and the same each time."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.judge.formats import duration, microseconds, significant, times
from flashmoe_science.judge.gate.claim import Claim
from flashmoe_science.judge.report.blocks import Cell, Row, Table, columns
from flashmoe_science.judge.report.charts import colours_of, ratio_chart, speed_charts
from flashmoe_science.judge.report.page import Contents, page_of
from flashmoe_science.judge.report.write import as_csv, as_html, as_markdown, write_report
from flashmoe_science.judge.standing import verdicts
from flashmoe_science.judge.summary import front_of, groups
from flashmoe_science.store import Run

PROBLEM = "attn b2 h8 q512 d64 fp16"
EVIL = '<script>alert("|")</script>'
THEIRS = "examples/theirs.py:attention"  # as the fixture names them
Maker = Callable[..., Any]
VOID = {"meta", "line", "rect", "circle", "polyline", "br"}


class Page(HTMLParser):
    """Collects tags and text, and holds elements to being closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def render(runs: Sequence[Run]) -> str:
    claim = Claim(
        id="c", text=f"claimed {EVIL}", gpu="h200", suite="documents", clock="graph", problems=4, statistic="min", at_least=1.7
    )
    return as_html(page_of(Contents(runs, [claim])))


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(runs: list[Run]) -> None:
    page = Page(render(runs))
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe", "object")]
    links = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("href", "src", "xlink:href")]
    assert links
    assert all(str(link).startswith("#") for link in links)
    anchors = {attributes["id"] for _, attributes in page.tags if attributes.get("id")}
    assert {str(link)[1:] for link in links} <= anchors
    assert "url(" not in render(runs)
    policy = next(attributes["content"] for tag, attributes in page.tags if attributes.get("http-equiv"))
    assert str(policy).startswith("default-src 'none'")


def test_every_section_is_there_and_reached_from_the_top(runs: list[Run]) -> None:
    page = Page(render(runs))
    sections = [attributes["id"] for tag, attributes in page.tags if tag == "section"]
    named = {"summary", "candidates", "claims", "roofline", "diagnosis", "runs", "reading"}
    assert named <= set(sections)
    assert sections[0] == "summary"
    linked = {str(attributes["href"])[1:] for tag, attributes in page.tags if tag == "a"}
    assert set(sections) <= linked
    assert len(sections) == len(set(sections))


def test_pictures_say_what_they_show(runs: list[Run]) -> None:
    pictures = [attributes for tag, attributes in Page(render(runs)).tags if tag == "svg"]
    assert len(pictures) == 2
    assert all(one.get("role") == "img" and one.get("aria-label") for one in pictures)
    labels = " ".join(str(one["aria-label"]) for one in pictures)
    assert "TFLOP/s against sequence length" in labels
    assert "memory 4 TB/s, measured; tensor cores" in labels
    assert "specified" in labels


def test_values_are_escaped(runs: list[Run]) -> None:
    text = render(runs)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 15


def test_the_same_runs_give_the_same_page(runs: list[Run]) -> None:
    assert render(runs) == render(runs)


def test_the_page_tells_verdicts_claims_refusals_environment_and_the_command(runs: list[Run]) -> None:
    text = " ".join(Page(render(runs)).text.split())
    for words in (
        "3 faster, 1 refused",
        "fwd_triton against itself came out faster",
        "misses 1.7 by",
        "flashmoe prove documents",
        "NVIDIA H200, 132 SMs, 140 GiB, driver 580.1, CUDA 13.0",
        "torch 2.11, Triton 3.6.0, fa3-fwd 0.0.3",
        "c0ffee" * 6 + "cafe",
        "fa4: fa4 is not installed",
        "wrong by",
        "controls: ",
        "4 runs, 40 min 00 s, of which",
        "1.00e-04 of 1.00e-03",
        "128 blocks of 128 threads, 48 KiB shared",
    ):
        assert words in text, words


def test_a_refused_problem_has_no_dot_and_the_others_have(runs: list[Run]) -> None:
    front = front_of([row for row in verdicts(runs) if (row.gpu, row.suite) == ("h200", "documents")])
    chart = ratio_chart(front)
    assert [(row.state, row.dot is None) for row in chart.rows] == [
        ("faster", False), ("refused", True), ("faster", False), ("faster", False),
    ]  # fmt: skip
    assert all(row.low < row.dot < row.high for row in chart.rows if row.dot is not None)


def test_the_ratio_axis_is_logarithmic_and_holds_everything(fabricate: Maker) -> None:
    run = fabricate()
    for size, rival in ((128, 10_000), (256, 20_000), (512, 40_000)):
        problem = f"attn b2 h8 q{size} d64 fp16"
        run.control(problem=problem).timed("fwd_triton", 20_000, "fa3", rival, problem=problem)
    chart = ratio_chart(front_of(verdicts([run.done()])))
    half, one, two = (row.dot for row in chart.rows)
    assert two - one == pytest.approx(one - half, rel=0.03)  # type: ignore[operator]
    assert one == pytest.approx(chart.one, abs=1)
    assert all(0 <= x <= 100 for row in chart.rows for x in (row.low, row.dot, row.high) if x is not None)
    assert next(tick.at for tick in chart.ticks if tick.label == "1x") == chart.one
    places = sorted(tick.at for tick in chart.ticks)
    assert all(after - before >= 12 for before, after in pairwise(places))


def test_speed_is_drawn_against_length_for_families_of_three(runs: list[Run]) -> None:
    rows = [row for row in verdicts(runs) if (row.gpu, row.suite) == ("h200", "documents")]
    (chart,) = speed_charts(rows, {"fwd_triton": 0, "fa3": 1})
    assert chart.title == "D 64, fp16, full, batch 2, 8 heads, h200"
    assert [(line.name, len(line.points)) for line in chart.lines] == [("fa3", 3), ("fwd_triton", 3)]
    ours, peer = chart.lines[1].points, chart.lines[0].points
    assert all(mine[1] < theirs[1] for mine, theirs in zip(ours, peer, strict=True))  # faster is higher, and y grows downward
    assert [x for x, _ in ours] == sorted(x for x, _ in ours)
    assert speed_charts([row for row in rows if "q128" in row.problem], {"fwd_triton": 0}) == []


def test_lengths_at_a_constant_number_of_tokens_are_one_family(fabricate: Maker) -> None:
    run = fabricate(suite="long")
    for batch, size in ((32, 512), (16, 1024), (8, 2048)):
        problem = f"attn b{batch} h16 q{size} d128 bf16 causal bshd"
        run.control(problem=problem).timed("fwd_triton", 500_000, "fa3", 400_000, problem=problem)
    (chart,) = speed_charts(verdicts([run.done()]), {"fwd_triton": 0})
    assert chart.title == "D 128, bf16, causal, 16384 tokens, 16 heads, bshd, h200"


def test_mixtures_of_experts_are_drawn_against_their_tokens(fabricate: Maker) -> None:
    run = fabricate(suite="experts")
    for tokens in (256, 1024, 4096):
        problem = f"moe t{tokens} e64 k8 d1024 f2048 bf16"
        run.control(problem=problem, kernel="theirs.py:moe").timed("theirs.py:moe", 5e6, "grouped_mm", 4e6, problem=problem)
    (chart,) = speed_charts(verdicts([run.done()]), {"theirs.py:moe": 0})
    assert (chart.title, chart.across) == ("64 experts, 8 a token, D 1024, F 2048, bf16, h200", "tokens")
    assert [tick.label for tick in chart.x_ticks] == ["256", "1024", "4096"]


def test_the_summary_speaks_of_one_kernel_a_problem(fabricate: Maker) -> None:
    run = fabricate().control().timed("fwd_triton", 20_000, "fa3", 24_000).timed("fwd_gluon_sm90", 16_000, "fa3", 24_000)
    (group,) = groups(verdicts([run.done()]))
    assert [row.kernel for row in group.front] == ["fwd_gluon_sm90"]
    assert group.counts["faster"] == 1
    assert group.mean is not None
    assert group.mean.ratio == pytest.approx(1.5, rel=0.01)


def test_a_refused_kernel_does_not_hide_one_that_has_a_number(fabricate: Maker) -> None:
    run = fabricate().control("fwd_gluon_sm90")
    run.prove(PROBLEM, "fwd_triton", passed=False)
    run.timed("fwd_triton", 5_000, "fa3", 24_000).timed("fwd_gluon_sm90", 30_000, "fa3", 24_000)
    (row,) = front_of(verdicts([run.done()]))
    assert (row.kernel, row.verdict) == ("fwd_gluon_sm90", "slower")


def test_csv_holds_every_verdict_and_reads_back(runs: list[Run]) -> None:
    judged = verdicts(runs)
    rows = list(csv.DictReader(io.StringIO(as_csv(judged))))
    assert len(rows) == len(judged)
    for read, row in zip(rows, judged, strict=True):
        assert (read["kernel"], read["verdict"]) == (row.kernel, row.verdict)
        assert read["ratio"] == ("" if row.ratio is None else str(row.ratio))
    assert {"<", "|"} <= set(next(row["kernel"] for row in rows if "script" in row["kernel"]))


def test_markdown_tables_keep_their_columns(runs: list[Run]) -> None:
    text = as_markdown(page_of(Contents(runs)))
    assert "<script" not in text
    tables = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)]
    assert len(tables) == 6
    for lines in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert "| documents on h200, graph clock, cold cache | 3 faster, 1 refused |" in text


def test_the_projects_kernels_come_first_and_users_kernels_last(runs: list[Run]) -> None:
    sections = [section.anchor for section in page_of(Contents(runs)).sections]
    assert sections[-2:] == ["candidates", "runs"]
    summary = next(block for block in page_of(Contents(runs)).sections[0].blocks if block.block == "table")
    assert THEIRS not in " ".join(cell.text for row in summary.rows for cell in row.cells)


def test_a_users_run_opens_on_the_users_kernel(fabricate: Maker) -> None:
    run = fabricate(suite="custom").control(THEIRS).timed(THEIRS, 200_000, "fwd_triton", 20_000)
    page = page_of(Contents([run.done()]))
    assert page.title == THEIRS
    assert [section.anchor for section in page.sections[:2]] == ["summary", f"h200-custom-graph-cold-{THEIRS}"]
    big = next(block for block in page.sections[0].blocks if getattr(block, "style", "") == "big")
    assert (big.lead, big.text.split(" (")[0]) == ("slower:", "0.0998x")


def test_users_kernels_take_no_colour_from_the_peers_of_other_groups(fabricate: Maker) -> None:
    """The peers that were measured are drawn, however many users' kernels other runs hold."""
    run = fabricate().control().timed("fwd_triton", 20_000, "fa3", 24_000).timed("fwd_triton", 20_000, "sdpa", 30_000)
    others = [
        fabricate(f"u{i}", started=f"2026-03-0{i}T00:00:00+00:00", suite="custom")
        .control(f"mine{i}.py:fn")
        .timed(f"mine{i}.py:fn", 900_000, "sdpa", 20_000)
        for i in range(1, 9)
    ]
    group = next(group for group in groups(verdicts([one.done() for one in (run, *others)])) if not group.tried)
    assert set(colours_of(group.rows)) == {"fwd_triton", "fa3", "sdpa"}


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="has 1 cells; it must have 2"):
        Table("verdicts", "x", columns("a", "n:b"), [Row((Cell("1"),))])


def test_a_report_without_a_folder_is_refused_before_anything_is_judged(flashmoe: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = flashmoe("report", "--evidence", "nowhere", "--out", "")
    assert (code, out, err) == (2, "", "flashmoe: --out is empty; it must name the folder for the report\n")


def test_a_run_without_verdicts_still_reports(fabricate: Maker, tmp_path: Path) -> None:
    run = fabricate().refused("preflight", "the profiler sees no kernels", problem=None).done()
    html, markdown, sheet = write_report([run], tmp_path / "new" / "folder")
    assert "the profiler sees no kernels" in Page(html.read_text()).text
    assert "No verdict can be given" in markdown.read_text()
    assert len(sheet.read_text().splitlines()) == 1


def test_a_folder_that_cannot_be_written_is_said(fabricate: Maker, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    with pytest.raises(FileExistsError, match="plain"):
        write_report([fabricate().done()], tmp_path / "plain")


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, ""), (0.000107, "0.000107"), (0.0123, "0.0123"), (4.567, "4.57"), (612.4, "612"), (4261.7, "4262")],
)
def test_three_digits_count(value: float | None, said: str) -> None:
    assert significant(value) == said
    assert value is None or math.isclose(float(said), value, rel_tol=0.01)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([microseconds(x) for x in (None, 12.0, 5312.4, 2e6)], ["", "0.012", "5.31", "2000.00"]),
        ([times(x) for x in (None, 0.0551, 0.5, 1.7, 12.49, 309.8)], ["", "0.0551x", "0.50x", "1.70x", "12.5x", "310x"]),
        ([duration(x) for x in (None, 8.25, 192.0, 3900.0)], ["", "8.2 s", "3 min 12 s", "1 h 05 min"]),
    ],
)
def test_units_are_what_a_reader_takes_in(said: list[str], expected: list[str]) -> None:
    assert said == expected


def test_the_sheet_holds_no_formula(fabricate: Maker) -> None:
    run = fabricate(suite="=1+1").control().timed("fwd_triton", 20_000, "@peer", 24_000).done()
    cells = [cell for row in csv.reader(as_csv(verdicts([run])).splitlines()) for cell in row]
    assert {"'=1+1", "'@peer"} <= set(cells)
    assert not [cell for cell in cells if cell.startswith(("=", "@"))]
