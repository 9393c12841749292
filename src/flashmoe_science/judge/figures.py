"""Figures of speed in a text, each asked which claim or run it comes from: "1.36 ms: no run gave this".

A paragraph cites a claim or a run by its id, in the words or in an HTML comment (``<!-- claim: documents-graph-mean -->``);
what stands between ``generated:`` marks cites all of them. A figure is backed where a source that it cites gives that number,
rounded as it is written; of a claim that does not hold, what was measured is such a number and what it asks is none.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.judge.comparison import Comparison
from flashmoe_science.judge.figures_in_text import Figure, Unit, blank, figures_in
from flashmoe_science.judge.gate.claim import Quantity
from flashmoe_science.judge.gate.claims import ClaimResult
from flashmoe_science.judge.summary import groups
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"<!-- generated:(\w+) -->\n.*?<!-- end generated:\1 -->", re.DOTALL)
_PARAGRAPH = re.compile(r"(?:^[^\n]*\S[^\n]*\n?)+", re.MULTILINE)
_FILLER = "\x00"  # in place of an empty line, where that ends no paragraph


@dataclass(frozen=True, slots=True)
class Number:
    """What a claim or a run gives, and of what."""

    unit: Unit
    value: float
    of: str

    def is_written(self, figure: Figure) -> bool:
        """Whether the number, rounded as the figure is written, is the figure."""
        unit, values = self.unit, [self.value]
        if unit == "ratio" and figure.unit == "percent":  # p% faster: (1 + p) times the speed, or 1 - p of the time
            unit, values = "percent", [100 * abs(self.value - 1), 100 * abs(1 - 1 / self.value)]
        elif unit == "ratio" and figure.unit == "share":
            unit, values = "share", [100 * self.value, 100 / self.value]
        return (
            unit == figure.unit
            and math.isfinite(figure.value)
            and any(abs(value - figure.value) <= figure.half * (1 + 1e-9) for value in values)
        )


@dataclass(frozen=True, slots=True)
class Read:
    """A figure, and what gives it: the claim or run that is cited and what its number is of; else ``why`` nothing does."""

    figure: Figure
    source: str | None = None
    of: str | None = None
    why: str | None = None


class Sources:
    """The numbers that claims and runs give, by the id that a text cites."""

    def __init__(self, claims: Sequence[ClaimResult], pairs: Iterable[Comparison], verdicts: Sequence[Verdict]) -> None:
        self.numbers: dict[str, list[Number]] = defaultdict(list)
        for result in claims:
            self.numbers[result.claim.id] = list(_of_claim(result))
        for pair in pairs:
            self.numbers[pair.run] += _of_pair(pair)
        for group in groups(verdicts):
            if group.mean is not None:
                for run in {row.run for row in group.front}:
                    mean = (group.mean.ratio, group.mean.low, group.mean.high)
                    self.numbers[run] += [Number("ratio", one, f"the mean of {group.title}") for one in mean]

    def giving(self, figure: Figure, cited: Iterable[str]) -> tuple[str, Number] | None:
        """The first of these sources that gives the figure, with what it is of."""
        found = ((name, number) for name in cited for number in self.numbers[name] if number.is_written(figure))
        return next(found, None)


def read(text: str, sources: Sources) -> list[Read]:
    """The figures of a Markdown text, in order, each with what gives it."""
    found = []
    for start, paragraph, generated in _paragraphs(text):
        cited = [name for name in sources.numbers if generated or _cites(paragraph, name)]
        for figure in figures_in(paragraph, start):
            given = sources.giving(figure, cited)
            if given is None:
                found.append(Read(figure, why=_why(figure, [] if generated else cited, sources)))
            else:
                found.append(Read(figure, given[0], given[1].of))
    return found


def unbacked(text: str, sources: Sources) -> list[Read]:
    """The figures of a Markdown text that no claim or run which they cite gives, in order."""
    return [one for one in read(text, sources) if one.why is not None]


def _cites(paragraph: str, name: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", paragraph) is not None


def _paragraphs(text: str) -> Iterator[tuple[int, str, bool]]:
    """(first line, text, whether it is generated) of each paragraph; a generated block is one, and so is one of code."""
    blocks = [(match.start(), match.end()) for match in _BLOCK.finditer(text)]
    for start, end in blocks:
        yield text.count("\n", 0, start) + 1, text[start:end], True
    rest = _FENCE.sub(lambda match: re.sub(r"(?<=\n)(?=\n)", _FILLER, match[0]), _BLOCK.sub(blank, text))
    for match in _PARAGRAPH.finditer(rest):
        yield rest.count("\n", 0, match.start()) + 1, match[0], False


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
    held = claim.threshold if result.outcome == "holds" else None  # what a claim asks and does not get is nobody's figure
    for value in (result.measured, result.low, result.high, held):
        if value is not None:
            yield Number(_CLAIMED[claim.quantity], value, claim.text)


def _of_pair(pair: Comparison) -> list[Number]:
    problem = parse_problem(pair.problem)
    queries = problem.queries()
    of = f"{pair.kernel} on {pair.problem}"
    return [
        Number("ratio", pair.interval.ratio, f"{of} against {pair.rival}"),
        Number("ns", pair.time_ns, of),
        Number("tflops", problem.flops() / pair.time_ns / 1e3, of),
        Number("gbps", problem.min_bytes() / pair.time_ns, of),
        *_of_peak(pair, problem, of),
        *([] if queries is None else [Number("queries", queries / pair.time_ns * 1e9, of)]),
    ]


def _of_peak(pair: Comparison, problem: Problem, of: str) -> Iterator[Number]:
    if (gpu := GPUS.get(pair.gpu)) is not None:
        yield Number("peak", problem.flops() / pair.time_ns * 1e11 / gpu.tensor_flops_16bit, f"{of}, of the specified FLOP/s")
        yield Number("peak", problem.min_bytes() / pair.time_ns * 1e11 / gpu.memory_bandwidth, f"{of}, of the specified B/s")
