"""What a report is about, judged once: its forms show the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from flashmoe_science.judge.candidates import candidates
from flashmoe_science.judge.diagnose.diagnosis import Diagnosis, diagnose
from flashmoe_science.judge.diagnose.facts import NothingKnown
from flashmoe_science.judge.diagnose.predictions import outcomes
from flashmoe_science.judge.gate.claim import Claim
from flashmoe_science.judge.gate.claims import judge_claim
from flashmoe_science.judge.standing import JudgedRun, standing
from flashmoe_science.judge.summary import Group, groups
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.store import Run

_LAST = "custom"  # the suite of problems named one by one, after those that are a sample of use
_MOST_DIAGNOSED = 6  # problems of one candidate, and of ours under one set of conditions


class Contents:
    """Runs judged in every way that a report shows; what is judged already is not judged again."""

    def __init__(self, given: Sequence[Run | JudgedRun], claims: Sequence[Claim] = ()) -> None:
        judged = [one if isinstance(one, JudgedRun) else JudgedRun(one) for one in given]
        self.judged = {one.run.header.run: one for one in judged}
        self.runs = sorted((one.run for one in judged), key=lambda run: run.header.started, reverse=True)  # the latest first
        self.verdicts = standing(judged)
        found = groups(self.verdicts)
        self.own = sorted((group for group in found if not group.tried), key=lambda group: group.suite == _LAST)
        self.tried = [group for group in found if group.tried]
        self.candidates = candidates(self.runs, self.verdicts)
        self.claims = [judge_claim(claim, self.verdicts, judged) for claim in claims]
        self.diagnoses = _diagnoses(self.runs, found, self.verdicts)
        self.predictions = outcomes(self.runs)

    @property
    def groups(self) -> list[Group]:
        """What the page is about first: the project's own kernels, or where it has none, the kernels that a user brought."""
        return [*self.own, *self.tried]

    @property
    def of_candidates(self) -> bool:
        """Whether the report is about users' kernels alone, beside which ours are peers."""
        return bool(self.candidates) and not self.own


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
