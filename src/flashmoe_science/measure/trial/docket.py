"""What is written down of one candidate's trial, in its name: notes, results, refusals, and that a problem is finished."""

from __future__ import annotations

from collections.abc import Sequence

from flashmoe_science.measure.ledger import Ledger
from flashmoe_science.measure.trial.battery import Examined
from flashmoe_science.problem import Problem
from flashmoe_science.records import CallPathRow, CorrectnessRow, DoneRow, NoteRow, Origin, RefusalRow, SeenLaunch, Stage


class Docket:
    """Rows of the candidate that is called ``spec``."""

    def __init__(self, ledger: Ledger, spec: str) -> None:
        self.ledger, self.spec = ledger, spec

    def note(self, text: str, problem: Problem | None = None, kernel: str | None = None) -> None:
        where = None if problem is None else str(problem)
        self.ledger.add(NoteRow(run=self.ledger.run, problem=where, kernel=kernel or self.spec, text=text))

    def correctness(self, problem: Problem, kernel: str, config: str, origin: Origin, found: Examined) -> None:
        """An oracle's result; none where what came back was no tensor of the right kind: there is no error to record."""
        if found.stats is None:
            return
        self.ledger.add(
            CorrectnessRow(
                run=self.ledger.run,
                problem=str(problem),
                kernel=kernel,
                origin=origin,
                config=config,
                passed=not found.reasons,
                out=found.stats,
            )
        )

    def callpath(
        self, problem: Problem, kernel: str, config: str, launches: Sequence[SeenLaunch], broken: Sequence[str]
    ) -> None:
        self.ledger.add(
            CallPathRow(
                run=self.ledger.run,
                problem=str(problem),
                kernel=kernel,
                config=config,
                launches=list(launches),
                broken_promises=list(broken),
            )
        )

    def refuse(self, stage: Stage, reason: str, problem: Problem, voids: bool = True) -> None:
        """Refuse the candidate on a problem. ``voids`` of False leaves what was measured of it: a number, and not the one that
        was promised."""
        self.ledger.take(
            RefusalRow(
                run=self.ledger.run,
                stage=stage,
                problem=str(problem),
                kernel=self.spec,
                config="",
                reason=reason,
                voids=voids,
            )
        )

    def refuse_rival(self, rival: str, config: str, reason: str, problem: Problem) -> None:
        self.ledger.add(
            RefusalRow(
                run=self.ledger.run, stage="correctness", problem=str(problem), kernel=rival, config=config, reason=reason
            )
        )

    def unusable(self, reason: str, problem: Problem | None) -> None:
        """Refuse a candidate that cannot be put on trial, which is nobody's wrong result."""
        where = None if problem is None else str(problem)
        self.ledger.add(
            RefusalRow(run=self.ledger.run, stage="preflight", problem=where, kernel=self.spec, config="", reason=reason)
        )

    def done(self, problem: Problem) -> None:
        """The candidate is through with a problem, whatever came of it."""
        self.ledger.add(DoneRow(run=self.ledger.run, problem=str(problem), kernel=self.spec))
