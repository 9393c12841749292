"""Everything that a report is about, judged once: the page and its text forms show the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashmoe_science.judge.candidates import Candidate, candidates
from flashmoe_science.judge.cost import RunCost, TotalCost, run_cost, total_cost
from flashmoe_science.judge.crosscheck import Agreement, agreements
from flashmoe_science.judge.diagnosis import Diagnosis
from flashmoe_science.judge.gate.claims import ClaimResult
from flashmoe_science.judge.outcomes import Outcome, outcomes
from flashmoe_science.judge.plan import Plan, plan
from flashmoe_science.judge.standing import JudgedRun, standing
from flashmoe_science.judge.summary import Group, groups
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.judge.views import Refused, RunFacts, diagnoses, refused, run_facts
from flashmoe_science.store import Run


@dataclass(frozen=True, slots=True)
class Cost:
    runs: tuple[RunCost, ...]
    total: TotalCost


@dataclass(frozen=True, slots=True)
class Contents:
    """``judged`` are the verdicts that stand, ``superseded`` those that no longer do; ``runs`` begin with the latest."""

    records: tuple[Run, ...]
    judged: tuple[Verdict, ...]
    superseded: tuple[Verdict, ...]
    groups: tuple[Group, ...]
    candidates: tuple[Candidate, ...]
    claims: tuple[ClaimResult, ...]
    diagnoses: tuple[Diagnosis, ...]
    plans: tuple[Plan, ...]  # those that have a step
    outcomes: tuple[Outcome, ...]
    agreements: tuple[Agreement, ...]
    refusals: tuple[Refused, ...]
    cost: Cost
    runs: tuple[RunFacts, ...]


def contents_of(runs: Sequence[Run], claims: Sequence[ClaimResult] = ()) -> Contents:
    """Judge runs in every way that a report shows."""
    stand, history = standing([JudgedRun(run) for run in runs])
    found = groups(stand)
    costs = tuple(run_cost(run) for run in runs)
    diagnosed = diagnoses(runs, found, stand)
    return Contents(
        records=tuple(runs),
        judged=tuple(stand),
        superseded=tuple(history),
        groups=tuple(found),
        candidates=tuple(candidates(runs, stand)),
        claims=tuple(claims),
        diagnoses=tuple(diagnosed),
        plans=tuple(made for one in diagnosed if (made := plan(one)).steps),
        outcomes=tuple(outcomes(runs)),
        agreements=tuple(agreements(runs)),
        refusals=tuple(refused(runs, stand)),
        cost=Cost(costs, total_cost(costs)),
        runs=tuple(run_facts(runs, stand)),
    )
