"""The numbers that README.md and the results page show, computed from the committed records (see generate.py).

README.md holds them between ``<!-- generated:NAME -->`` and ``<!-- end generated:NAME -->``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flashmoe_science.judge.figures import Sources, unbacked
from flashmoe_science.judge.formats import significant
from flashmoe_science.judge.gate.claim import read_claims
from flashmoe_science.judge.gate.claims import ClaimResult, judge_claim
from flashmoe_science.judge.standing import JudgedRun, verdicts
from flashmoe_science.judge.stats import geometric_mean
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.store import Run, read_runs, refuse_torn

NO_RECORDS = "No records are committed yet."
RESULTS_INTRODUCTION = """# Results, row by row

Median time of the fastest of our kernels and of the best peer, and the ratio of the peer's time to ours (above 1 we are
faster) with its 95% interval. `flashmoe verdicts` prints the peers' own rows too.
"""
BLOCK = re.compile(r"<!-- generated:(?P<name>\w+) -->\n.*?<!-- end generated:(?P=name) -->", re.DOTALL)
SAID = ("faster", "equivalent", "slower", "undecided", "refused")
Key = tuple[str, str, str, str]  # gpu, suite, clock, cache


@dataclass(frozen=True)
class Numbers:
    """What the records say. ``runs`` are all that are committed, ``verdicts`` those that stand."""

    runs: Sequence[Run]
    verdicts: Sequence[Verdict]
    claimed: Sequence[ClaimResult]
    root: Path

    @classmethod
    def read(cls, root: Path) -> Numbers:
        """The numbers of a checkout. Raises StoreError or ClaimError, in one line, where a file is torn or wrong."""
        folder, claims = root / "evidence" / "runs", root / "evidence" / "claims.toml"
        runs = refuse_torn(read_runs(folder)) if folder.is_dir() else []
        standing = verdicts(runs)
        judged = [JudgedRun(run) for run in runs]
        results = [judge_claim(one, standing, judged) for one in read_claims(claims)] if claims.is_file() else []
        return cls(runs, standing, results, root)

    @cached_property
    def groups(self) -> dict[Key, list[Verdict]]:
        """Our verdicts, one a problem: that of the fastest of our kernels, which is what dispatch runs once it is promoted."""
        best: dict[tuple[Key, str], Verdict] = {}
        for row in self.verdicts:
            if not row.of_ours:
                continue
            key: tuple[Key, str] = ((row.gpu, row.suite, row.clock, row.cache), row.problem)
            if key not in best or _time(row) < _time(best[key]):
                best[key] = row
        groups: dict[Key, list[Verdict]] = defaultdict(list)
        for (group, _), row in best.items():
            groups[group].append(row)
        return dict(sorted(groups.items(), key=lambda group: (group[0][:2], group[0][2] != "graph", group[0][3])))

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
            places[f"{what}, {run.header.started[:10]}: {', '.join(versions)}"].append(f"[{name}]({path})")
        return "\n".join(f"- {place}. Records: {', '.join(runs)}." for place, runs in places.items())

    def trials(self) -> str:
        """What came of kernels on trial, each beside the best of its rivals, by the device's time and by the caller's."""
        found: dict[tuple[str, str, str], dict[str, Verdict]] = defaultdict(dict)
        for row in self.verdicts:
            if row.brought:
                found[row.gpu, row.kernel, row.problem][row.clock] = row
        lines = ["| kernel | problem | device time | as a caller waits |", "|---|---|---|---|"]
        for (gpu, kernel, problem), by_clock in sorted(found.items()):
            told = [_told(by_clock[clock]) if clock in by_clock else "-" for clock in ("graph", "eager")]
            lines.append(f"| `{kernel}` | `{problem}`, {gpu} | {told[0]} | {told[1]} |")
        return "\n".join(lines)

    def results(self) -> str:
        """One line a GPU, suite and clock."""
        lines = [
            "| GPU | suite | clock | problems | ratio, geometric mean | least | most | " + " | ".join(SAID) + " |",
            "|---|---|---|---|---|---|---|" + "---|" * len(SAID),
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
            said = " | ".join(str(counts[word]) for word in SAID)
            lines.append(f"| {gpu} | {suite} | {clock}, {cache} | {len(rows)} | {ratios} | {said} |")
        return "\n".join(lines) + "\n\nRow by row: [docs/reference/results.md](docs/reference/results.md)."

    def losses(self) -> str:
        """The rows where a peer is faster, worst first, by clock; and what was refused."""
        slower = [row for rows in self.groups.values() for row in rows if row.verdict == "slower" and row.ratio is not None]
        lines = []
        for clock in ("graph", "eager"):
            here = sorted((row for row in slower if row.clock == clock), key=lambda row: row.ratio or 0.0)
            if here:
                lines.append(f"On the {clock} clock {len(here)} of our rows are slower than the best peer; the worst:\n")
                lines.extend(
                    f"- {_short(row.ratio or 0.0)} of {row.rival}: `{row.problem}` ({row.gpu}, {row.suite})" for row in here[:5]
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
        sources = Sources(self.claimed, (one for run in self.runs for one in JudgedRun(run).believed), self.verdicts)
        return [f"{one.figure.line}: {one.figure.text}: {one.why}" for one in unbacked(text, sources)]

    def results_page(self) -> str:
        """Every row of ours beside its best peer."""
        parts = [RESULTS_INTRODUCTION]
        if not self.runs:
            return "\n".join([*parts, NO_RECORDS + "\n"])
        for (gpu, suite, clock, cache), rows in self.groups.items():
            parts.append(f"## {gpu}, `{suite}`, {clock} clock, {cache} cache\n")
            parts.append(
                "| problem | kernel | us | TFLOP/s | best peer | us | ratio | verdict |\n|---|---|---|---|---|---|---|---|"
            )
            parts.extend(_result(row) for row in rows)
            parts.append("")
        return "\n".join(parts)


def fill(text: str, numbers: Numbers) -> str:
    """``text`` with each marked block written anew; raises ValueError where a mark has no end or names nothing known."""
    writers: dict[str, Callable[[], str]] = {
        "evidence": numbers.evidence,
        "results": numbers.results,
        "losses": numbers.losses,
        "claims": numbers.claims,
        "trials": numbers.trials,
    }

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in writers:
            raise ValueError(f"README.md marks the block {name!r}; it must be one of {', '.join(writers)}")
        content = writers[name]() if numbers.runs or name == "claims" else NO_RECORDS
        return f"<!-- generated:{name} -->\n{content}\n<!-- end generated:{name} -->"

    filled, found = re.subn(
        r"<!-- generated:(?P<name>\w+) -->\n.*?<!-- end generated:(?P=name) -->", block, text, flags=re.DOTALL
    )
    if found != len(re.findall(r"<!-- (?:end )?generated:", text)) / 2:
        raise ValueError("README.md has a generated block without its end, or an end without its block")
    return filled


def _result(row: Verdict) -> str:
    def microseconds(nanoseconds: float | None) -> str:
        return "-" if nanoseconds is None else f"{nanoseconds / 1e3:.2f}"

    speed = "-" if row.tflops is None else f"{row.tflops:.3g}"
    told = row.verdict if row.reason is None else f"{row.verdict}: {row.reason}"
    cells = (
        f"`{row.problem}`",
        row.kernel,
        microseconds(row.time_ns),
        speed,
        row.rival or "-",
        microseconds(row.rival_time_ns),
    )
    return f"| {' | '.join(cells)} | {_interval(row)} | {told.replace('|', '/')} |"


def _told(row: Verdict) -> str:
    return f"{row.verdict}: {_interval(row)} of {row.rival}" if row.ratio is not None else row.verdict


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
    measured = "-" if result.measured is None else _short(result.measured)
    if result.low is not None and result.high is not None and result.low != result.high:
        measured += f" [{_short(result.low)}, {_short(result.high)}]"
    told = result.outcome if result.why is None else f"{result.outcome}: {result.why}"
    claim = result.claim
    cells = (
        f"{claim.text} ({claim.gpu}, {claim.suite})",
        f"{claim.statistic} {claim.demand}",
        measured,
        told.replace("|", "/"),
    )
    return f"| {' | '.join(cells)} |"
