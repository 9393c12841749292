"""Figures of speed in a text, each asked which claim or run it comes from: "1.36 ms: no run gave this".

A paragraph cites a claim or a run by its id, in the words or in an HTML comment (``<!-- claim: documents-graph-mean -->``);
what stands between ``generated:`` marks cites all of them. A figure is backed where a source that it cites gives that number,
rounded as it is written. Code is not read, and neither is a number without a unit of speed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flashmoe_science.judge.claim import Quantity
from flashmoe_science.judge.claims import ClaimResult
from flashmoe_science.judge.matchups import Matchup
from flashmoe_science.judge.summary import groups
from flashmoe_science.judge.verdict import Verdict
from flashmoe_science.problem import parse_problem

Unit = Literal["ratio", "percent", "ns", "tflops", "gbps"]

_NUMBER = r"(?<![\w.,])(?P<number>\d[\d,]*(?:\.\d+)?)"
_MORE = r"(?:faster|slower|quicker|as fast|as slow|the speed|the throughput|speed-?up)"
_FIGURE = re.compile(
    rf"{_NUMBER}(?:"
    r"\s?(?P<time>ms|us|µs|μs|ns|milliseconds?|microseconds?|nanoseconds?)\b"
    r"|\s?(?P<rate>[TG]FLOPS?(?:/s)?|[TG]i?B/s)"
    rf"|(?P<ratio>[x\u00d7](?!\w|\s*\d)|\s?times\s+{_MORE})"
    rf"|\s?%\s+(?P<percent>{_MORE})"
    r")",
    re.IGNORECASE,
)
_NANOSECONDS = {"n": 1.0, "u": 1e3, "µ": 1e3, "μ": 1e3}
_RATES: dict[str, tuple[Unit, float]] = {
    "tf": ("tflops", 1.0), "gf": ("tflops", 1e-3), "tb": ("gbps", 1e3), "gb": ("gbps", 1.0),
    "ti": ("gbps", 1.024**4 * 1e3), "gi": ("gbps", 1.024**3),
}  # fmt: skip
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"<!-- generated:(\w+) -->\n.*?<!-- end generated:\1 -->", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_PARAGRAPH = re.compile(r"(?:^[^\n]*\S[^\n]*\n?)+", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as it is written: ``value`` and ``half`` (of its last digit) in ``unit``."""

    line: int
    text: str
    unit: Unit
    value: float
    half: float

    def is_of(self, number: Number) -> bool:
        """Whether the number, rounded as the figure is written, is the figure."""
        unit, values = number.unit, [number.value]
        if self.unit == "percent" and unit == "ratio":  # p% faster: (1 + p) times the speed, or 1 - p of the time
            unit, values = "percent", [100 * abs(number.value - 1), 100 * abs(1 - 1 / number.value)]
        return unit == self.unit and any(abs(value - self.value) <= self.half * (1 + 1e-9) for value in values)


@dataclass(frozen=True, slots=True)
class Number:
    """What a claim or a run gives, and of what."""

    unit: Unit
    value: float
    of: str


@dataclass(frozen=True, slots=True)
class Unbacked:
    """A figure that nothing backs, and why."""

    figure: Figure
    why: str


class Sources:
    """The numbers that claims and runs give, by the id that a text cites."""

    def __init__(self, claims: Sequence[ClaimResult], pairs: Iterable[Matchup], verdicts: Sequence[Verdict]) -> None:
        self.numbers: dict[str, list[Number]] = defaultdict(list)
        for result in claims:
            self.numbers[result.claim.id] = list(_of_claim(result))
        for pair in pairs:
            self.numbers[pair.run] += _of_pair(pair)
        for group in groups(verdicts):
            if group.mean is not None:
                for run in {row.run for row in group.front}:
                    self.numbers[run].append(Number("ratio", group.mean.ratio, f"the mean of {group.title}"))

    def giving(self, figure: Figure, cited: Iterable[str]) -> tuple[str, Number] | None:
        """The first of these sources that gives the figure, with what it is of."""
        found = ((name, number) for name in cited for number in self.numbers[name] if figure.is_of(number))
        return next(found, None)


def unbacked(text: str, sources: Sources) -> list[Unbacked]:
    """The figures of a Markdown text that no claim or run which they cite gives, in order."""
    found = []
    for start, paragraph, generated in _paragraphs(text):
        cited = [name for name in sources.numbers if generated or _cites(paragraph, name)]
        for figure in figures_in(paragraph, start):
            if sources.giving(figure, cited) is None:
                found.append(Unbacked(figure, _why(figure, [] if generated else cited, sources)))
    return found


def _cites(paragraph: str, name: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", paragraph) is not None


def figures_in(text: str, first_line: int = 1) -> list[Figure]:
    """Every figure of speed, outside code."""
    readable = _COMMENT.sub(_blank, _CODE.sub(_blank, text))
    return [_figure(match, first_line + readable.count("\n", 0, match.start())) for match in _FIGURE.finditer(readable)]


def _figure(match: re.Match[str], line: int) -> Figure:
    written = match["number"].replace(",", "")
    half = 0.5 * 10.0 ** -len(written.partition(".")[2])
    unit: Unit
    if match["time"]:
        unit, scale = "ns", 1e6 if match["time"].lower().startswith(("ms", "milli")) else _small(match["time"])
    elif match["rate"]:
        unit, scale = _RATES[match["rate"][:2].lower()]
    else:
        unit, scale = ("ratio", 1.0) if match["ratio"] else ("percent", 1.0)
    return Figure(line, " ".join(match[0].split()), unit, float(written) * scale, half * scale)


def _small(unit: str) -> float:
    return 1e3 if unit.lower().startswith("micro") else _NANOSECONDS[unit[0].lower()]


def _paragraphs(text: str) -> Iterator[tuple[int, str, bool]]:
    """(first line, text, whether it is generated) of each paragraph; a generated block is one."""
    blocks = [(match.start(), match.end()) for match in _BLOCK.finditer(text)]
    for start, end in blocks:
        yield text.count("\n", 0, start) + 1, text[start:end], True
    rest = _CODE.sub(lambda match: _blank(match) if "\n" in match[0] else match[0], _BLOCK.sub(_blank, text))
    for match in _PARAGRAPH.finditer(rest):
        yield rest.count("\n", 0, match.start()) + 1, match[0], False


def _blank(match: re.Match[str]) -> str:
    """As many lines, of nothing, so that what follows keeps its line."""
    return "\n" * match[0].count("\n") or " "


def _why(figure: Figure, cited: Sequence[str], sources: Sources) -> str:
    if cited:
        return f"{' and '.join(cited)}, which it cites, {'gives' if len(cited) == 1 else 'give'} no such number"
    elsewhere = sources.giving(figure, list(sources.numbers))
    if elsewhere is None:
        return "no run gave this"
    name, number = elsewhere
    return f"it cites no claim and no run; {name} gives such a number, for {number.of}"


_CLAIMED: Mapping[Quantity, Unit] = {"ratio": "ratio", "time_ns": "ns", "tflops": "tflops", "gbps": "gbps"}


def _of_claim(result: ClaimResult) -> Iterator[Number]:
    claim = result.claim
    if claim.statistic == "count" or claim.quantity not in _CLAIMED:
        return
    for value in (result.measured, result.low, result.high, claim.threshold):
        if value is not None:
            yield Number(_CLAIMED[claim.quantity], value, claim.text)


def _of_pair(pair: Matchup) -> list[Number]:
    problem = parse_problem(pair.problem)
    of = f"{pair.kernel} on {pair.problem}"
    return [
        Number("ratio", pair.interval.ratio, f"{of} against {pair.rival}"),
        Number("ns", pair.time_ns, of),
        Number("tflops", problem.flops() / pair.time_ns / 1e3, of),
        Number("gbps", problem.min_bytes() / pair.time_ns, of),
    ]
