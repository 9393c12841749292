"""Name the figures of speed in a Markdown text that no claim and no run gives which the text cites.

    python tools/figures_in_text.py README.md CHANGELOG.md [--evidence evidence]

A figure is a ratio (1.7x), a time (12 us, 1.36 ms), a rate (640 TFLOP/s) or a percentage (12% faster, 70% of peak). A
paragraph cites a claim or a run by its id, in the words or in an HTML comment; a ``generated:`` block cites all of them. A
figure is backed where a cited source gives that number, rounded as it is written. Exit code: 0 all are backed, 1 one is not.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.judge.comparison import Comparison
from flashmoe_science.judge.gate.claims import ClaimResult, Quantity, judge_claim, read_claims
from flashmoe_science.judge.standing import JudgedRun, standing
from flashmoe_science.judge.summary import groups
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import ONE_GPU
from flashmoe_science.store import read_runs

Unit = Literal["ratio", "ns", "tflops", "percent", "peak"]

_FIGURE = re.compile(
    r"(?<![\w.,])(?P<number>\d[\d,]*(?:\.\d+)?)(?:(?P<ratio>x)(?!\w)|\s?(?P<time>[mnuµ]s)\b|\s?(?P<tflops>TFLOP/s)"
    r"|\s?%\s(?P<percent>faster|slower)|\s?%\s(?P<peak>of\s[^.|]{0,30}peak))"
)
_GROUPS: dict[str, Unit] = {"ratio": "ratio", "time": "ns", "tflops": "tflops", "percent": "percent", "peak": "peak"}
_SCALE = {"ms": 1e6, "us": 1e3, "µs": 1e3, "ns": 1.0}
_CLAIMED: dict[Quantity, Unit] = {"ratio": "ratio", "time_ns": "ns"}
_GENERATED = re.compile(r"<!-- generated:(\w+) -->\n.*?<!-- end generated:\1 -->", re.DOTALL)
_PARAGRAPH = re.compile(r"(?:^[^\n]*\S[^\n]*\n?)+", re.MULTILINE)
_ROUNDING = 0.05  # 2x is no way to write 1.6x, though that rounds to it


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as it is written: ``value`` in ``unit``, rounded by at most ``half``."""

    line: int
    text: str
    unit: Unit
    value: float
    half: float

    def is_given_by(self, unit: Unit, value: float) -> bool:
        """Whether the number, rounded as the figure is written, is the figure."""
        values = [value]
        if (unit, self.unit) == ("ratio", "percent"):  # p% faster: (1 + p) times the speed, or 1 - p of the time
            unit, values = "percent", [100 * abs(value - 1), 100 * abs(1 - 1 / value)]
        return unit == self.unit and any(abs(one - self.value) <= self.half * (1 + 1e-9) for one in values)


class Sources:
    """The numbers that claims and runs give, by the id that a text cites."""

    def __init__(self, claims: Sequence[ClaimResult], pairs: Sequence[Comparison], verdicts: Sequence[Verdict]) -> None:
        self.numbers: dict[str, list[tuple[Unit, float]]] = defaultdict(list)
        for result in claims:
            unit = _CLAIMED.get(result.claim.quantity)
            # What a claim asks and does not get is no figure of anything.
            asked = result.claim.threshold if result.outcome == "holds" else None
            for value in (result.measured, result.low, result.high, asked):
                if unit is not None and value is not None:
                    self.numbers[result.claim.id].append((unit, value))
        for pair in pairs:
            self.numbers[pair.run] += _numbers_of(pair)
        for group in groups(verdicts):
            means = () if group.mean is None else (group.mean.ratio, group.mean.low, group.mean.high)
            for run in {row.run for row in group.front}:
                self.numbers[run] += [("ratio", one) for one in means]

    def giving(self, figure: Figure, ids: Sequence[str]) -> str | None:
        """The first of these ids that gives the figure."""
        return next((one for one in ids if any(figure.is_given_by(*number) for number in self.numbers[one])), None)


def _numbers_of(pair: Comparison) -> list[tuple[Unit, float]]:
    problem = parse_problem(pair.problem)
    tflops = problem.flops() / pair.time_ns / 1e3
    found: list[tuple[Unit, float]] = [("ratio", pair.interval.ratio), ("ns", pair.time_ns), ("tflops", tflops)]
    if pair.rival == ONE_GPU:
        found.append(("ratio", pair.interval.ratio / problem.gpus()))  # efficiency
    if (gpu := GPUS.get(pair.gpu)) is not None:
        found.append(("peak", tflops * 1e14 / gpu.tensor_flops_16bit / problem.gpus()))
        found.append(("peak", problem.min_bytes() / pair.time_ns * 1e11 / gpu.memory_bandwidth / problem.gpus()))
    return found


def unbacked(text: str, sources: Sources) -> list[str]:
    """The figures that no source which their paragraph cites gives: "12: 1.36 ms: no run gave this"."""
    found = []
    for start, paragraph, generated in _paragraphs(text):
        ids = [name for name in sources.numbers if generated or re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", paragraph)]
        for figure in figures_in(paragraph, start):
            if sources.giving(figure, ids) is None:
                found.append(f"{figure.line}: {figure.text}: {_why(figure, [] if generated else ids, sources)}")
    return found


def figures_in(text: str, first_line: int = 1) -> Iterator[Figure]:
    """Every figure of speed, in order."""
    for match in _FIGURE.finditer(text):
        written = match["number"].replace(",", "")
        unit = next(unit for name, unit in _GROUPS.items() if match[name])
        scale = _SCALE[match["time"]] if match["time"] else 1.0
        half = 0.5 * 10.0 ** -len(written.partition(".")[2])
        if not match["percent"] and not match["peak"]:
            half = min(half, _ROUNDING * float(written))
        line = first_line + text.count("\n", 0, match.start())
        yield Figure(line, match[0], unit, float(written) * scale, half * scale)


def _paragraphs(text: str) -> Iterator[tuple[int, str, bool]]:
    """(first line, text, whether it is generated) of each paragraph; a generated block is one."""
    for match in _GENERATED.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[0], True
    rest = _GENERATED.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in _PARAGRAPH.finditer(rest):
        yield rest.count("\n", 0, match.start()) + 1, match[0], False


def _why(figure: Figure, cited: Sequence[str], sources: Sources) -> str:
    if cited:
        return f"{' and '.join(cited)}, cited there, give no such number"
    elsewhere = sources.giving(figure, list(sources.numbers))
    return "no run gave this" if elsewhere is None else f"it cites no claim and no run; {elsewhere} gives such a number"


def sources_under(evidence: Path) -> Sources:
    """All that the claims and the runs of an evidence folder give. Raises StoreError, ClaimError."""
    judged = [JudgedRun(run) for run in read_runs(evidence)]
    verdicts = standing(judged)
    path = evidence / "claims.toml"
    claims = [judge_claim(claim, verdicts, judged) for claim in (read_claims(path) if path.is_file() else [])]
    return Sources(claims, [pair for run in judged for pair in run.believed], verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, metavar="MARKDOWN")
    parser.add_argument("--evidence", type=Path, default=Path("evidence"))
    asked = parser.parse_args()
    texts = {path: path.read_text(encoding="utf-8") for path in asked.texts}
    sources = sources_under(asked.evidence)
    wrong = [f"{path}:{line}" for path, text in texts.items() for line in unbacked(text, sources)]
    print("\n".join(wrong) or "every figure of speed is given by a claim or a run that is cited")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
