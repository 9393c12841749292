"""The report in a browser: nothing is fetched, nothing is complained of, nothing runs over the edge, everything can be read."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.judge.report.write import write_report
from flashmoe_science.store import Run, read_runs

EVIDENCE = Path(__file__).parents[3] / "evidence"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed here")

# Loads the report in a frame of the width asked for, so that it is laid out as in a window of that width.
_PROBE = """<!doctype html><iframe id="frame" style="width:%dpx;height:900px;border:0" src="%s"></iframe><script>
function shade(colour) {
  const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function behind(element) {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if (!colour.endsWith(", 0)")) return colour;
  }
}
function contrast(element) {
  const [a, b] = [shade(getComputedStyle(element).color), shade(behind(element))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}
onload = () => {
  const window = document.getElementById("frame").contentWindow, page = window.document;
  page.querySelectorAll("details").forEach(one => { one.open = true; });
  const seen = [...page.querySelectorAll("p, b, i, td, th, dt, dd, a, h2, figcaption, .told")]
    .filter(e => e.offsetHeight && e.textContent.trim());
  const faint = seen.map(e => [contrast(e), e]).sort((x, y) => x[0] - y[0])[0];
  document.body.innerText = JSON.stringify({
    fetched: window.performance.getEntriesByType("resource").map(e => e.name),
    width: page.documentElement.scrollWidth,
    sections: Object.fromEntries([...page.querySelectorAll("section")].map(e => [e.id, e.offsetHeight])),
    paper: getComputedStyle(page.body).backgroundColor,
    contrast: faint[0], faintest: faint[1].outerHTML.slice(0, 120),
    unnamed: [...page.querySelectorAll("svg")].filter(e => !e.getAttribute("aria-label")).length,
  });
};
</script>"""


def chromium(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the browser without a network, with a profile of its own."""
    assert BROWSER is not None
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
    ]  # fmt: skip
    return subprocess.run([BROWSER, *flags, *arguments], capture_output=True, text=True, timeout=120, check=True)


def look(page: Path, width: int, *flags: str) -> dict[str, Any]:
    """What the browser makes of a page at a width, with what it said on its console."""
    probe = page.with_name("probe.html")
    probe.write_text(_PROBE % (width, page.name))
    done = chromium(page.parent, *flags, "--dump-dom", probe.as_uri())
    found = re.search(r"<body>(\{.*\})</body>", done.stdout, re.DOTALL)
    assert found, done.stdout[-500:]
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(found[1])) | {"console": said}


@pytest.fixture
def planted(runs: list[Run], tmp_path: Path) -> Path:
    return write_report(runs, tmp_path)[0]


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(read_runs(EVIDENCE), tmp_path_factory.mktemp("report"))[0]


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("report", ["planted", "committed"])
def test_it_needs_no_network_and_fits_the_window(request: pytest.FixtureRequest, report: str, width: int) -> None:
    found = look(request.getfixturevalue(report), width)
    assert found["console"] == []
    assert found["fetched"] == []
    assert found["width"] <= width
    assert found["unnamed"] == 0
    expected = {"summary", "roofline", "diagnosis", "runs", "reading"}
    assert expected <= set(found["sections"])
    assert all(height > 20 for height in found["sections"].values())


def test_every_text_can_be_read_by_day_and_by_night(planted: Path) -> None:
    """4.5 to 1 is what WCAG 2 asks of text."""
    day, night = look(planted, 1280), look(planted, 1280, "--force-dark-mode")
    assert day["paper"] != night["paper"]
    for found in (day, night):
        assert found["contrast"] >= 4.5, found["faintest"]


def test_what_is_fetched_or_runs_over_would_be_seen(planted: Path) -> None:
    """The test of the test: a page that fetches, runs a script and is too wide."""
    text = planted.read_text()
    spoilt = text.replace(
        "<h1>", '<img src="https://example.com/x.png"><script>1</script><div style="width:900px">wide</div><h1>'
    )
    planted.write_text(spoilt)
    found = look(planted, 400)
    assert len(found["console"]) == 2
    assert found["fetched"] == ["https://example.com/x.png"]
    assert found["width"] > 800


def test_it_prints(planted: Path) -> None:
    paper = planted.with_name("report.pdf")
    chromium(planted.parent, "--no-pdf-header-footer", f"--print-to-pdf={paper}", planted.as_uri())
    assert paper.read_bytes().startswith(b"%PDF")
