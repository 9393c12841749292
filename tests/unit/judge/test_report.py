"""The report shows what the verdicts say, escaped, offline and the same each time."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.unit.fabricated import PROBLEM, Fabricate, verdicts

from flashmoe_science.judge.gate.claims import Claim
from flashmoe_science.judge.report.blocks import Bars, Fold, Heading, Paragraph, Table
from flashmoe_science.judge.report.charts import speed_charts
from flashmoe_science.judge.report.page import Contents, cost_line, page_of
from flashmoe_science.judge.report.write import as_csv, as_html, as_markdown, write_report
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.judge.summary import groups
from flashmoe_science.records import CallPathRow, CeilingRow, OtherRow, PromiseRow, SeenLaunch
from flashmoe_science.store import Run

EVIL = '<script>alert("|")</script>'
THEIRS = "examples/theirs.py:attention"
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


@pytest.fixture
def runs() -> list[Run]:
    """A sweep on a GPU, with a refused problem, a kernel on trial that promises much, a planted script in every text that a
    record can hold; and a CPU run."""
    run = Fabricate().noted("fa4 is not installed", "fa4")
    for size in (128, 256, 512, 1024):
        problem = f"attn b2 h8 q{size} d64 fp16"
        run.control(problem=problem, off=1.3 if size == 256 else 1.0)
        run.timed("fwd_triton", 20 * size, "fa3", 24 * size, problem=problem, config="block_m=64")
        run.timed("fwd_triton", 20 * size, EVIL, 30 * size, problem=problem, config="block_m=64")
    run.refused("correctness", f"wrong by {EVIL}", "flex")
    cpu = Fabricate("cpu", gpu=None, suite="cpu").control("sdpa", clock="eager", cache="warm")
    cpu.timed("sdpa", 20_000, "sdpa_math", 60_000, clock="eager", cache="warm")
    return [run.done(), cpu.done(), on_trial(), others()]


def on_trial() -> Run:
    """A user's kernel: right on one problem, and slow; wrong on another."""
    run = Fabricate("trial", started="2026-02-01T00:00:00+00:00", suite="custom")
    run.rows.append(PromiseRow(run="trial", kernel=THEIRS, speedup=1.7))
    run.control(THEIRS).timed(THEIRS, 200_000, "sdpa", 20_000)
    place = next(place for place, row in enumerate(run.rows) if isinstance(row, CallPathRow))
    few = SeenLaunch(name="their_kernel", grid=(16, 1, 1), block=(128, 1, 1), shared_bytes=2048, registers=255)
    run.rows[place] = run.rows[place].model_copy(update={"launches": [few]})
    return run.refused("correctness", f"wrong at [0, 0, 48, 0] {EVIL}", THEIRS, "attn b2 h8 q1024 d64 fp16").done()


def others() -> Run:
    """A run with rows of every other kind that a report shows."""
    run = Fabricate("other", started="2026-02-02T00:00:00+00:00", suite="crosscheck")
    about = {"run": "other", "problem": PROBLEM, "kernel": EVIL, "config": EVIL}
    run.rows += [
        OtherRow(kind="crosscheck", **about, cache="warm", tool=EVIL, tool_version=EVIL, method=EVIL, time_ns=1010.0),
        CeilingRow(run="other", name="dram copy", unit="B/s", work=10**9, samples=[250_000], how=EVIL),
    ]  # fmt: skip
    return run.done()


@pytest.fixture
def rendered(runs: list[Run]) -> str:
    claim = Claim(
        id="c", text=f"claimed {EVIL}", gpu="h200", suite="documents", clock="graph", problems=4, statistic="min", at_least=1.7
    )
    return as_html(page_of(Contents([JudgedRun(run) for run in runs], [claim])))


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(rendered: str) -> None:
    page = Page(rendered)
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe", "object")]
    links = {str(value) for _, attributes in page.tags for key, value in attributes.items() if key in ("href", "src")}
    sections = [str(attributes["id"]) for tag, attributes in page.tags if tag == "section"]
    assert {f"#{anchor}" for anchor in sections} == links  # each section is reached from the top, and nothing else
    assert {"summary", "candidates", "claims", "roofline", "diagnosis", "runs", "reading"} <= set(sections)
    assert (sections[0], len(sections)) == ("summary", len(set(sections)))
    assert "url(" not in rendered
    policy = next(attributes["content"] for tag, attributes in page.tags if attributes.get("http-equiv"))
    assert str(policy).startswith("default-src 'none'")
    assert "<script" not in rendered  # values are escaped
    assert rendered.count("&lt;script&gt;") > 15


def test_pictures_say_what_they_show(rendered: str) -> None:
    pictures = [attributes for tag, attributes in Page(rendered).tags if tag == "svg"]
    assert len(pictures) == 2
    assert all(one.get("role") == "img" for one in pictures)
    labels = " ".join(str(one["aria-label"]) for one in pictures)
    for words in ("TFLOP/s against sequence length", "memory 4 TB/s, measured; tensor cores", "specified"):
        assert words in labels


def test_the_page_tells_verdicts_claims_refusals_environment_and_the_command(rendered: str) -> None:
    text = " ".join(Page(rendered).text.split())
    for words in (
        "3 faster, 1 refused",
        "fwd_triton against itself came out faster",
        "misses 1.7x by",
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


def test_speed_is_drawn_against_length_for_families_of_three(runs: list[Run]) -> None:
    rows = [row for row in verdicts(runs) if (row.gpu, row.suite) == ("h200", "documents")]
    (chart,) = speed_charts(rows, {"fwd_triton": 0, "fa3": 1})
    assert chart.title == "D 64, fp16, full, batch 2, 8 heads, h200"
    assert [(line.name, len(line.points)) for line in chart.lines] == [("fa3", 3), ("fwd_triton", 3)]
    ours, peer = chart.lines[1].points, chart.lines[0].points
    assert all(mine[1] < theirs[1] for mine, theirs in zip(ours, peer, strict=True))  # faster is higher, and y grows downward
    assert [x for x, _ in ours] == sorted(x for x, _ in ours)
    assert speed_charts([row for row in rows if "q128" in row.problem], {"fwd_triton": 0}) == []


def test_the_summary_speaks_of_one_kernel_a_problem() -> None:
    run = Fabricate().control().timed("fwd_triton", 20_000, "fa3", 24_000).timed("fwd_gluon_sm90", 16_000, "fa3", 24_000)
    (group,) = groups(verdicts([run.done()]))
    assert [row.kernel for row in group.front] == ["fwd_gluon_sm90"]
    assert group.counts["faster"] == 1
    assert group.mean is not None
    assert group.mean.ratio == pytest.approx(1.5, rel=0.01)


def test_csv_holds_every_verdict_and_reads_back(runs: list[Run]) -> None:
    judged = verdicts(runs)
    rows = list(csv.DictReader(io.StringIO(as_csv(judged))))
    assert len(rows) == len(judged)
    for read, row in zip(rows, judged, strict=True):
        assert (read["kernel"], read["verdict"]) == (row.kernel, row.verdict)
        assert read["ratio"] == ("" if row.ratio is None else str(row.ratio))
    assert {"<", "|"} <= set(next(row["kernel"] for row in rows if "script" in row["kernel"]))
    formulas = Fabricate(suite="=1+1").control().timed("fwd_triton", 20_000, "@peer", 24_000).done()
    cells = {cell for row in csv.reader(as_csv(verdicts([formulas])).splitlines()) for cell in row}
    assert {"'=1+1", "'@peer"} <= cells  # a sheet holds no formula
    assert not [cell for cell in cells if cell.startswith(("=", "@"))]


def test_markdown_tables_keep_their_columns(runs: list[Run]) -> None:
    text = as_markdown(page_of(Contents([JudgedRun(run) for run in runs])))
    assert "<script" not in text
    tables = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)]
    assert len(tables) == 6
    for lines in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert "| documents on h200, graph clock, cold cache | 3 faster, 1 refused |" in text


def test_the_projects_kernels_come_first_and_users_kernels_last(runs: list[Run]) -> None:
    sections = [section.anchor for section in page_of(Contents([JudgedRun(run) for run in runs])).sections]
    assert sections[-2:] == ["candidates", "runs"]
    first = page_of(Contents([JudgedRun(run) for run in runs])).sections[0]
    assert THEIRS not in str(first.blocks)


def test_it_opens_on_what_won_and_lost() -> None:
    """A number and the counts, a bar each suite, the losses worst first; all else on request."""
    run = Fabricate(suite="long").control("fwd_triton")
    for length, ratio in ((64, 2.0), (128, 0.9), (256, 0.5), (512, 1.6)):
        problem = f"attn b2 h8 q{length} d64 fp16"
        run.control("fwd_triton", problem=problem, noise=0)
        run.timed("fwd_triton", 20_000, "fa3", 20_000 * ratio, problem=problem, noise=0)
    blocks = page_of(Contents([JudgedRun(run.done())])).sections[0].blocks
    number, bars, _, losses, table, rest, *_ = blocks
    assert isinstance(number, Paragraph)
    assert (number.style, number.lead, number.state) == ("big", "1.10x", "faster")
    assert number.text.endswith("on average over 4 problems: 2 faster, 2 slower.")
    assert isinstance(bars, Bars)
    assert [(bar.label, f"{bar.ratio:.2f}", bar.note) for bar in bars.bars] == [
        ("long, h200", "1.10", "worst 0.50x of 4 problems")
    ]
    assert isinstance(losses, Heading)
    assert losses.text == "Slower than the best rival: 2 of 4"
    assert isinstance(table, Table)
    assert [row.cells[0].text.split()[3] for row in table.rows] == ["q256", "q128"]
    assert isinstance(rest, Fold)


def test_a_users_run_opens_on_the_users_kernel() -> None:
    run = Fabricate(suite="custom").control(THEIRS).timed(THEIRS, 200_000, "fwd_triton", 20_000)
    page = page_of(Contents([JudgedRun(run.done())]))
    assert page.title == THEIRS
    assert [section.anchor for section in page.sections[:2]] == ["summary", f"h200-custom-graph-cold-{THEIRS}"]
    big = next(block for block in page.sections[0].blocks if getattr(block, "style", "") == "big")
    assert (big.lead, big.text.split(" (")[0]) == ("slower:", "0.0998x")


def test_a_run_without_verdicts_still_reports(tmp_path: Path) -> None:
    run = Fabricate().refused("preflight", "the profiler sees no kernels", problem=None).done()
    html, markdown, sheet = write_report([JudgedRun(run)], tmp_path / "new" / "folder")
    assert "the profiler sees no kernels" in Page(html.read_text()).text
    assert "No verdict can be given" in markdown.read_text()
    assert len(sheet.read_text().splitlines()) == 1


def test_what_runs_took_is_added_up_and_priced_only_where_a_price_is_known() -> None:
    """600 s on the wall; two pairs of half a second."""
    run = Fabricate().control().timed("fwd_triton", 20_000, "fa3", 60_000, noise=0).done()
    priced = replace(run, header=run.header.model_copy(update={"price_per_hour": 7.2}))
    assert cost_line([priced]) == "1 run, 10 min 00 s, of which 1.0 s timed: $1.20"
    both = "2 runs, 20 min 00 s, of which 2.0 s timed: $1.20 for the 1 that have a price"
    assert cost_line([priced, run]) == both
    assert cost_line([run]).endswith("no price is known")
