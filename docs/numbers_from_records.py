"""The numbers of README.md, its picture and the results page, computed from the committed records (see generate.py)."""

from __future__ import annotations

import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from flashmoe_science.dispatch.select import select
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.judge.formats import count, microseconds, significant
from flashmoe_science.judge.gate.claims import ClaimResult, judge_claim, read_claims
from flashmoe_science.judge.standing import JudgedRun, is_drawn, latest, standing
from flashmoe_science.judge.stats import Interval, geometric_mean
from flashmoe_science.judge.summary import JUDGEMENTS, NAMED, of_suites
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import is_operation, operation, parse_problem
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.proof.suites import SUITES
from flashmoe_science.store import Run, read_runs, refuse_torn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from figures_in_text import Sources, unbacked  # which tools/ holds

NO_RECORDS = "No records are committed yet."
ABOVE = "../../"  # from the results page to the checkout
RESULTS_INTRODUCTION = """# Results

[What we claim](#claims), [where we lose](#where-we-lose), [what it was measured on](#measured-on), and every row: the median
times of our fastest kernel and of the best peer, and the ratio of the peer's time to ours (above 1 we are faster) with its 95%
interval. `flashmoe verdicts` prints the peers' rows too.
"""
EXPERTS_INTRODUCTION = """One layer of each model's experts from router logits (top-k, both products, combination): device time,
and the ratio to the fastest of PyTorch's grouped products and batched matrix products, for Qwen3 also SonicMoE. In an empty
cell the baseline ran out of memory, or the result was rejected as unreliable.
"""
SHORT, LONG, LONG_DRAWN = "documents", "long", "long-draw"
CASES = {  # by title, in the order in which they are shown: the suites whose problems they are
    "short prompts, up to 512 tokens": (SHORT,),
    "long prompts, 512 to 16k tokens": (LONG,),
    "long prompts drawn at random": (LONG_DRAWN,),
    "fp32 prompts, 512 to 4096 tokens": ("fp32",),
    "windows, soft caps, sinks, masks, biases": ("serving",),
    "chunked prefill, 16 to 512 queries": ("chunked",),
    "decoding, 1k to 128k keys": ("decode",),
    "decoding from pages of 16 and 64 keys": ("decode-paged",),
    "decoding drawn at random": ("decode-draw", "decode-paged-draw"),
    "attention's backward": ("train",),
    "attention's backward, up to 512 tokens": ("train-short",),
    "backwards drawn at random": ("train-draw",),
    "experts of Qwen3-30B-A3B": ("moe-qwen3",),
    "experts of Mixtral-8x7B": ("moe-mixtral",),
    "experts of DeepSeek-V3": ("moe-deepseek-v3",),
    "experts of gpt-oss-20b": ("moe-gpt-oss",),
    "experts in mxfp4, fp8 and int4": ("moe-formats",),
    "experts drawn at random": ("moe-qwen3-draw", "moe-gpt-oss-draw"),
    "experts, a step of training": ("moe-train",),
    "experts' steps drawn at random": ("moe-train-draw",),
}
ROUTED = "logits"  # the word of problems that begin with the router's choice
MOST_SHORT = 512
Key = tuple[str, str, str, str]  # gpu, suite, clock, cache


class Case(NamedTuple):
    """Problems of one kind on one GPU, each with a ratio, and the geometric mean of those."""

    gpu: str
    title: str
    rows: list[Verdict]
    mean: Interval


@dataclass(frozen=True)
class Numbers:
    """What the records say. ``runs`` are all that are committed, ``judged`` the same, ``verdicts`` those that stand."""

    runs: Sequence[Run]
    verdicts: Sequence[Verdict]
    claimed: Sequence[ClaimResult]
    root: Path
    judged: Sequence[JudgedRun] = ()

    @classmethod
    def read(cls, root: Path) -> Numbers:
        """The numbers of a checkout. Raises StoreError or ClaimError, in one line, where a file is torn or wrong."""
        folder = root / "evidence"
        return cls.of([JudgedRun(run) for run in (refuse_torn(read_runs(folder)) if folder.is_dir() else [])], root)

    @classmethod
    def of(cls, judged: Sequence[JudgedRun], root: Path) -> Numbers:
        """The numbers of a checkout whose runs were read. Raises ClaimError."""
        claims = root / "evidence" / "claims.toml"
        stand = standing(judged)
        results = [judge_claim(one, stand, judged) for one in read_claims(claims)] if claims.is_file() else []
        return cls([one.run for one in judged], stand, results, root, judged)

    @cached_property
    def groups(self) -> dict[Key, list[Verdict]]:
        """Our verdicts on one GPU that count (docs/design/0010), one a problem: that of the fastest of our kernels, which is
        what dispatch runs once it is promoted."""
        best: dict[tuple[Key, str], Verdict] = {}
        ours = [row for row in self.verdicts if row.of_ours and is_operation(row.op) and self._speaks_of_today(row)]
        counting = latest(ours, _work)
        for row in ours:
            if row.suite == NAMED and counting[_work(row)].suite != NAMED:
                continue
            key: tuple[Key, str] = ((row.gpu, row.suite, row.clock, row.cache), row.problem)
            if key not in best or _time(row) < _time(best[key]):
                best[key] = row
        groups: dict[Key, list[Verdict]] = defaultdict(list)
        for (group, _), row in best.items():
            groups[group].append(row)
        return dict(sorted(groups.items(), key=lambda group: (group[0][:2], group[0][2] != "graph", group[0][3])))

    @cached_property
    def _runs(self) -> dict[str, JudgedRun]:
        return {one.run.header.run: one for one in self.judged}

    def _speaks_of_today(self, row: Verdict) -> bool:
        """Whether the row's run measured the kernel that serves the problem now, which may be newer than the run."""
        if row.run not in self._runs or row.gpu not in GPUS:
            return True
        problem = parse_problem(row.problem)
        op = operation(problem.op)
        return select(problem, GPUS[row.gpu], committed_table(), op.ours(), op.fallback()).kernel in self._runs[row.run].kernels

    def evidence(self) -> str:
        """Where, when and with what the standing records were taken: a line each machine, day and set of versions."""
        standing = {row.run for row in self.verdicts}
        places: dict[str, list[str]] = defaultdict(list)
        for run in self.runs:
            if run.header.run not in standing:
                continue
            where = run.header.environment
            versions = [
                f"torch {where.torch}",
                f"Triton {where.triton}",
                *(f"{k} {v}" for k, v in sorted(where.packages.items())),
            ]
            what = f"{where.gpu or where.cpu}, driver {where.driver}" if where.gpu else where.cpu
            path = run.path.relative_to(self.root) if run.path else Path(run.header.run)
            name = path.stem.split("-", 1)[-1]
            places[f"{what}, {run.header.started[:10]}: {', '.join(versions)}"].append(f"[{name}]({ABOVE}{path})")
        return "\n".join(f"- {place}. Records: {', '.join(runs)}." for place, runs in places.items())

    @cached_property
    def cases(self) -> list[Case]:
        """What a reader asks first, by device time and by GPU; a case without a record is left out."""
        found = []
        for gpu in sorted({key[0] for key in self.groups}, reverse=True):
            for title, suites in CASES.items():
                keys = [key for key in self.groups if key[0] == gpu and key[1] in suites and key[2] == "graph"]
                rows = [row for key in keys for row in self.groups[key] if row.interval is not None and _is_asked(row)]
                if rows:
                    found.append(Case(gpu, title, rows, geometric_mean(_intervals(rows))))
        return found

    def summary(self) -> str:
        """A row for each case, by device time; then eager calls and memory."""
        rows = [
            *(_summarised(f"{case.title} ({case.gpu})", "best peer", _intervals(case.rows)) for case in self.cases),
            *self._eager_latency(),
            _memory([row for case in self.cases for row in case.rows if row.suite in (SHORT, LONG, LONG_DRAWN)]),
        ]
        head = "| | problems | against | ratio, geometric mean | min |\n|---|---|---|---|---|"
        return "\n".join([head, *filter(None, rows)])

    def experts(self) -> str:
        """A mixture's layer from router logits, device time: a row a model, a column a number of tokens."""
        found: dict[str, dict[int, Verdict]] = defaultdict(dict)
        for (gpu, suite, clock, _), rows in self.groups.items():
            for row in rows if clock == "graph" and not is_drawn(suite) else ():
                problem = parse_problem(row.problem)
                if isinstance(problem, MoEProblem) and _is_layer(row) and row.time_ns is not None:
                    found[f"{suite}, {gpu}"][problem.tokens] = row
        if not found:
            return NO_RECORDS
        tokens = sorted({one for model in found.values() for one in model})
        lines = [f"| tokens | {' | '.join(map(str, tokens))} |", "|---" * (len(tokens) + 1) + "|"]
        for model, of in found.items():
            cells = [f"{_microseconds(of[one].time_ns)} us, {_ratio(of[one])}" if one in of else "-" for one in tokens]
            lines.append(f"| {model} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def _eager_latency(self) -> Iterable[str]:
        """Eager calls of the fastest of our kernels against the framework's own, on each operation that has one."""
        found: dict[tuple[str, str], list[Interval]] = defaultdict(list)
        for (_, suite, clock, _), rows in self.groups.items():
            for row in rows if clock == "eager" and suite in (SHORT, LONG) else ():
                if not _is_asked(row):
                    continue
                fallback = operation(row.op).fallback()
                beside = self._runs[row.run].comparisons_of(row) if row.run in self._runs else []
                found[suite, fallback] += [pair.interval for pair in beside if pair.rival == fallback]
        for (suite, fallback), intervals in found.items():
            yield _summarised(
                f"{'short' if suite == SHORT else 'long'} prompts, end-to-end latency of eager calls", fallback, intervals
            )

    def results(self) -> str:
        """One line a GPU, suite and clock."""
        lines = [
            "| GPU | suite | clock | problems | ratio, geometric mean | min | max | " + " | ".join(JUDGEMENTS) + " |",
            "|---|---|---|---|---|---|---|" + "---|" * len(JUDGEMENTS),
        ]
        for (gpu, suite, clock, cache), rows in self.groups.items():
            intervals = [row.interval for row in rows if row.interval is not None]
            counts = Counter[str](row.verdict for row in rows)
            if intervals:
                mean = geometric_mean(intervals)
                least, most = min(i.ratio for i in intervals), max(i.ratio for i in intervals)
                ratios = f"{_short(mean.ratio)} [{_short(mean.low)}, {_short(mean.high)}] | {_short(least)} | {_short(most)}"
            else:
                ratios = "- | - | -"
            said = " | ".join(str(counts[word]) for word in JUDGEMENTS)
            lines.append(f"| {gpu} | {suite} | {clock}, {cache} | {len(rows)} | {ratios} | {said} |")
        return "\n".join(lines)

    def _measured(self, clock: str) -> list[Verdict]:
        """Our rows with a ratio that count when losses are counted, the worst first: those of the suites."""
        rows = [row for key, rows in self.groups.items() if key[2] == clock for row in rows if row.ratio is not None]
        return sorted(of_suites(rows), key=lambda row: row.ratio or 0.0)

    def losses(self) -> str:
        """How many of our rows a peer is faster on, by suite, and the worst."""
        rows = self._measured("graph")
        slower = [row for row in rows if row.verdict == "slower"]
        if not slower:
            return f"No peer is faster by device time on any of {count(len(rows), 'problem')}."
        lines = [
            f"By device time a peer is faster on {len(slower)} of {len(rows)} problems:\n",
            "| | slower | our mean speed there over the peer's | worst |\n|---|---|---|---|",
        ]
        for suite, all_there in Counter(row.suite for row in rows).most_common():
            if lost := [row for row in slower if row.suite == suite]:
                title = next((title for title, suites in CASES.items() if suite in suites), suite)
                mean, least = geometric_mean(_intervals(lost)).ratio, lost[0].ratio or 0.0
                worst = f"{_short(least)}x of {lost[0].rival}: `{lost[0].problem}` ({lost[0].gpu})"
                lines.append(f"| {title} | {len(lost)} of {all_there} | {_short(mean)}x | {worst} |")
        return "\n".join(lines)

    def worst(self) -> str:
        """The rows where a peer is faster, worst first, by clock; and what was refused."""
        lines = []
        for clock in ("graph", "eager"):
            rows = self._measured(clock)
            if slower := [row for row in rows if row.verdict == "slower"]:
                lines.append(
                    f"On the {clock} clock {len(slower)} of our {len(rows)} rows are slower than the best peer; the worst:\n"
                )
                lines.extend(
                    f"- {_short(row.ratio or 0.0)} of {row.rival}: `{row.problem}` ({row.gpu}, {row.suite})"
                    for row in slower[:5]
                )
                lines.append("")
        refused = sum(row.verdict == "refused" for row in self.verdicts if row.of_ours)
        lines.append(f"{refused or 'No'} row{'s' * (refused > 1)} of ours {'were' if refused > 1 else 'was'} refused.")
        return "\n".join(lines)

    def claims(self) -> str:
        if not self.claimed:
            return "There are no claims yet."
        return "\n".join(["| claim | asks | measured | |", "|---|---|---|---|", *map(_claim, self.claimed)])

    def unbacked(self, text: str) -> list[str]:
        """The figures of speed in a text that no claim and no run which it cites gives, a line each."""
        return unbacked(text, self._sources)

    @cached_property
    def _sources(self) -> Sources:
        return Sources(self.claimed, [pair for run in self.judged for pair in run.believed], self.verdicts)

    def results_page(self) -> str:
        """Every row of ours beside its best peer."""
        parts = [RESULTS_INTRODUCTION]
        if not self.runs:
            return "\n".join([*parts, NO_RECORDS + "\n"])
        about = (
            f"Each is a sentence with a threshold in [claims.toml]({ABOVE}evidence/claims.toml), computed anew by `make prove`."
        )
        parts += ["## In short\n", self.summary(), "\n## Experts\n", EXPERTS_INTRODUCTION, self.experts()]
        parts += ["\n## Where we lose\n", self.worst(), "\n## By suite\n", self.results()]
        parts += ["\n## Claims\n", about + "\n", self.claims(), "\n## Measured on\n", self.evidence(), ""]
        for (gpu, suite, clock, cache), rows in self.groups.items():
            parts.append(f"## {gpu}, `{suite}`, {clock} clock, {cache} cache\n")
            parts.append(
                "| problem | kernel | us | TFLOP/s | best peer | us | ratio | verdict |\n|---|---|---|---|---|---|---|---|"
            )
            parts.extend(_result(row) for row in rows)
            parts.append("")
        return "\n".join(parts)


def _microseconds(nanoseconds: float | None) -> str:
    return "-" if nanoseconds is None else f"{nanoseconds / 1e3:.2f}"


def _ratio(row: Verdict) -> str:
    return "-" if row.ratio is None else f"{_short(row.ratio)}x"


def _result(row: Verdict) -> str:
    speed = "-" if row.tflops is None else f"{row.tflops:.3g}"
    told = row.verdict if row.reason is None else f"{row.verdict}: {row.reason}"
    cells = (
        f"`{row.problem}`",
        row.kernel,
        _microseconds(row.time_ns),
        speed,
        row.rival or "-",
        _microseconds(row.rival_time_ns),
    )
    return f"| {' | '.join(cells)} | {_interval(row)} | {told.replace('|', '/')} |"


def _intervals(rows: Iterable[Verdict]) -> list[Interval]:
    return [row.interval for row in rows if row.interval is not None]


def _summarised(what: str, against: str, intervals: Sequence[Interval]) -> str:
    """A row of the summary, empty where there are no ratios."""
    if not intervals:
        return ""
    mean = geometric_mean(intervals)
    ratios = f"{_short(mean.ratio)}x [{_short(mean.low)}, {_short(mean.high)}]"
    return f"| {what} | {len(intervals)} | {against} | {ratios} | {_short(min(one.ratio for one in intervals))}x |"


def _is_asked(row: Verdict) -> bool:
    """Whether the row is of a case as its title has it: of few tokens, or of experts as the suite has them now."""
    series = parse_problem(row.problem).series()
    short = row.suite != SHORT or (series is not None and series.length <= MOST_SHORT)
    return short and (row.op != "moe" or _is_layer(row))


def _is_layer(row: Verdict) -> bool:
    """Whether the row is of experts as the suite has them now, from router logits. Its older rows may be of others."""
    problem = parse_problem(row.problem)
    if not isinstance(problem, MoEProblem) or problem.routing != ROUTED:
        return False
    near = [parse_problem(text) for text in SUITES.get(row.suite.removesuffix("-draw"), ())]
    return problem.words() in [one.words() for one in near if isinstance(one, MoEProblem)]


def _work(row: Verdict) -> tuple[str, ...]:
    """Equal for rows of the same work, whatever suite asked for it."""
    return row.gpu, str(parse_problem(row.problem).without_layout()), row.clock, row.cache


def _memory(rows: Iterable[Verdict]) -> str:
    """What a call allocates at the most, over its results."""
    shares = [row.peak_extra_bytes / row.output_bytes for row in rows if row.peak_extra_bytes and row.output_bytes]
    if not shares:
        return ""
    middle, most = statistics.median(shares), max(shares)
    return f"| memory of a call | {len(shares)} | its results | {_short(middle)} (median) | {_short(most)} (the most) |"


def _interval(row: Verdict) -> str:
    if row.ratio is None or row.low is None or row.high is None:
        return "-"
    return f"{_short(row.ratio)} [{_short(row.low)}, {_short(row.high)}]"


def _short(value: float) -> str:
    """Two decimals, or where those would show little, three digits that count."""
    return f"{value:.2f}" if value >= 0.1 else significant(value)


def _time(row: Verdict) -> float:
    return float("inf") if row.time_ns is None else row.time_ns


def _claim(result: ClaimResult) -> str:
    claim = result.claim
    show = microseconds if claim.quantity == "time_ns" else _short  # in the unit of what it asks
    measured = "-" if result.measured is None else show(result.measured)
    if result.low is not None and result.high is not None and result.low != result.high:
        measured += f" [{show(result.low)}, {show(result.high)}]"
    told = result.outcome if result.why is None else f"{result.outcome}: {result.why}"
    cells = (
        f"{claim.text} ({claim.gpu}, {claim.suite})",
        f"{claim.statistic} {claim.demand}",
        measured,
        told.replace("|", "/"),
    )
    return f"| {' | '.join(cells)} |"
