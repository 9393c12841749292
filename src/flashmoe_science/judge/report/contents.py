"""What a report is about, judged once: its four forms show the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashmoe_science.judge.candidates import Candidate, candidates
from flashmoe_science.judge.diagnose.diagnosis import Diagnosis, NothingKnown, diagnose
from flashmoe_science.judge.diagnose.plan import Plan, plan
from flashmoe_science.judge.diagnose.predictions import Outcome, outcomes
from flashmoe_science.judge.gate.claim import Claim
from flashmoe_science.judge.gate.claims import ClaimResult, judge_claim
from flashmoe_science.judge.report.cost import RunCost, run_cost
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.judge.standing import standing as standing_of
from flashmoe_science.judge.summary import Group, groups
from flashmoe_science.judge.trust import gpu_name, is_promise
from flashmoe_science.judge.verdicts import Verdict, is_brought
from flashmoe_science.records import RefusalRow, RunRow
from flashmoe_science.store import Run

_LAST = "custom"  # the suite of problems named one by one, after those that are a sample of use
_MOST_DIAGNOSED = 6  # problems of one candidate, and of ours under one set of conditions


@dataclass(frozen=True, slots=True)
class Refused:
    """One reason for which a kernel got no number, and the problems where it stands. ``kernel`` of None is a whole problem."""

    kernel: str | None
    candidate: bool
    stage: str
    reason: str
    problems: tuple[str, ...]
    gpu: str
    config: str


@dataclass(frozen=True, slots=True)
class Contents:
    """``verdicts`` are those that stand, ``superseded`` those that later runs replaced. ``runs`` begin with the latest.

    ``own`` are the groups of the project's kernels, ``tried`` those of users' kernels, ``candidates`` these kernels.
    """

    runs: tuple[Run, ...]
    verdicts: tuple[Verdict, ...]
    superseded: tuple[Verdict, ...]
    own: tuple[Group, ...]
    tried: tuple[Group, ...]
    candidates: tuple[Candidate, ...]
    claims: tuple[ClaimResult, ...]
    diagnoses: tuple[Diagnosis, ...]
    plans: tuple[Plan, ...]  # one a diagnosis
    predictions: tuple[Outcome, ...]
    refusals: tuple[Refused, ...]
    costs: tuple[RunCost, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """What the page is about first: the project's own kernels, or where it has none, the kernels that a user brought."""
        return (*self.own, *self.tried)

    @property
    def of_candidates(self) -> bool:
        """Whether the report is about users' kernels alone, beside which ours are peers."""
        return bool(self.candidates) and not self.own


def contents_of(
    given: Sequence[Run | JudgedRun], claims: Sequence[Claim] = (), price_per_hour: float | None = None
) -> Contents:
    """Judge runs in every way that a report shows; what is judged already is not judged again.

    ``price_per_hour`` (USD) is of runs whose record holds none.
    """
    judged = [one if isinstance(one, JudgedRun) else JudgedRun(one) for one in given]
    runs = [one.run for one in judged]
    standing, superseded = standing_of(judged)
    found = groups(standing)
    latest_first = tuple(sorted(runs, key=lambda run: run.header.started, reverse=True))
    diagnosed = tuple(_diagnoses(runs, found, standing))
    return Contents(
        runs=latest_first,
        verdicts=tuple(standing),
        superseded=tuple(superseded),
        own=tuple(sorted((group for group in found if not group.tried), key=lambda group: group.suite == _LAST)),
        tried=tuple(group for group in found if group.tried),
        candidates=tuple(candidates(runs, standing)),
        claims=tuple(judge_claim(claim, standing, judged) for claim in claims),
        diagnoses=diagnosed,
        plans=tuple(map(plan, diagnosed)),
        predictions=tuple(outcomes(runs)),
        refusals=tuple(_refused(latest_first, standing)),
        costs=tuple(run_cost(run, price_per_hour) for run in latest_first),
    )


def _refused(runs: Sequence[Run], judged: Sequence[Verdict]) -> list[Refused]:
    """Every refusal of a standing run, and those that stand only in verdicts; equal ones are one."""
    standing = {row.run for row in judged}
    merged: dict[tuple[str | None, bool, str, str, str, str], list[str]] = defaultdict(list)
    recorded: set[tuple[str, str, str | None]] = set()
    for run, row in _refusal_rows(runs):
        gpu = gpu_name(run.environment)
        if run.run not in standing and any(verdict.gpu == gpu for verdict in judged):
            continue  # an older run, which another replaced
        candidate = row.kernel is not None and is_brought(row.kernel, None)
        merged[row.kernel, candidate, row.stage, row.reason, gpu, row.config or ""].append(row.problem or "every problem")
        recorded.add((run.run, row.problem or "", row.kernel))
    for verdict in judged:
        if verdict.verdict == "refused" and (verdict.run, verdict.problem, verdict.kernel) not in recorded:
            key = (verdict.kernel, verdict.brought, "judged", verdict.reason or "", verdict.gpu, verdict.config)
            merged[key].append(verdict.problem)
    return [
        Refused(kernel, candidate, stage, reason, tuple(dict.fromkeys(problems)), gpu, config)
        for (kernel, candidate, stage, reason, gpu, config), problems in merged.items()
    ]


def _refusal_rows(runs: Sequence[Run]) -> Iterator[tuple[RunRow, RefusalRow]]:
    for run in runs:
        for row in run.rows:
            if isinstance(row, RefusalRow) and not is_promise(row):
                yield run.header, row


def _diagnoses(runs: Sequence[Run], found: Sequence[Group], judged: Sequence[Verdict]) -> list[Diagnosis]:
    """Why a candidate is as slow as it is, and ours where it loses, the worst first, or where it never does, wins least."""
    wanted: dict[tuple[str, str, str], None] = {}
    for group in found:
        if group.clock == "graph" or group.gpu == "cpu":
            ours = [row for row in group.front if row.origin == "ours"]
            losing = [row for row in ours if row.verdict in ("slower", "refused")]
            chosen = _worst(losing) or _worst([row for row in ours if row.ratio is not None])[:1]
            wanted |= dict.fromkeys((row.problem, row.kernel, row.gpu) for row in chosen)
    brought: dict[str, list[Verdict]] = defaultdict(list)
    for row in judged:
        if row.brought:
            brought[row.kernel].append(row)
    for rows in brought.values():
        wanted |= dict.fromkeys((row.problem, row.kernel, row.gpu) for row in _worst(rows))
    made = []
    for problem, kernel, gpu in wanted:
        try:
            made.append(diagnose(runs, problem, kernel, gpu=gpu))
        except NothingKnown:
            continue  # it was refused before anything of it was seen; the refusal says why
    return [one for one in made if any(cause.status != "untested" for cause in one.hypotheses)]


def _worst(rows: Sequence[Verdict]) -> list[Verdict]:
    return sorted(rows, key=lambda row: 0.0 if row.ratio is None else row.ratio)[:_MOST_DIAGNOSED]
