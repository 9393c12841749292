"""The last stages of ``flashmoe prove``: verdicts on the run's records, verdicts and claims on the committed ones, a report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmoe_science.cli.evidence import DEFAULT

if TYPE_CHECKING:
    from flashmoe_science.judge.gate.claims import ClaimResult
    from flashmoe_science.judge.verdicts import Verdict

_GOOD, _WRONG, _UNTRUSTWORTHY = 0, 1, 3
_CHECKOUT = Path(__file__).parents[3]  # where the package lies in a clone; an installed one has no evidence beside it


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the records say: ``here`` of this run; ``standing`` and ``claims`` of the committed ones."""

    here: tuple[Verdict, ...]
    standing: tuple[Verdict, ...]
    claims: tuple[ClaimResult, ...]

    @property
    def exit_code(self) -> int:
        """1 where a claim fails; 3 where a GPU's number, or every number of a CPU, was refused as untrustworthy.

        A CPU that does other work gives an untrustworthy pair now and then; that is shown, and only nothing else is a failure.
        """
        if any(claim.outcome == "fails" for claim in self.claims):
            return _WRONG
        refused = [verdict for verdict in self.here if verdict.verdict == "refused"]
        on_gpu = any(verdict.gpu != "cpu" and verdict.origin in ("ours", "candidate") for verdict in refused)
        return _UNTRUSTWORTHY if on_gpu or (refused and len(refused) == len(self.here)) else _GOOD

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdicts": [verdict.as_dict() for verdict in self.here],
            "committed": dict(Counter(verdict.verdict for verdict in self.standing)),
            "claims": [
                {"id": one.claim.id, "text": one.claim.text, "outcome": one.outcome, "measured": one.measured, "why": one.why}
                for one in self.claims
            ],
        }

    def print(self) -> None:
        """A table of this run's verdicts, then what the committed records and the claims come to."""
        from flashmoe_science.cli.sheet import console, put_wrapped
        from flashmoe_science.cli.verdicts import print_verdicts
        from flashmoe_science.judge.formats import ratio

        out = console()
        print_verdicts(out, self.here)
        if self.standing:
            counts = Counter(verdict.verdict for verdict in self.standing)
            put_wrapped(out, f"committed records, judged again: {', '.join(f'{n} {said}' for said, n in counts.items())}")
        for one in self.claims:
            measured = "" if one.measured is None else f" ({ratio(one.measured)})"
            why = f": {one.why}" if one.why else ""
            put_wrapped(out, f"claim {one.outcome}{measured}: {one.claim.text}{why}")


def judge_and_report(folder: Path) -> Judgement:
    """Judge the runs in ``folder`` and the committed ones, and write a report on both into ``folder``.

    Raises:
        StoreError, ClaimError: a record or the claims cannot be read.
    """
    from flashmoe_science.cli.evidence import claims_under, runs_under
    from flashmoe_science.judge.report import write_report
    from flashmoe_science.judge.standing import verdicts

    here, evidence = runs_under(folder), _evidence()
    committed = [] if evidence is None else runs_under(evidence)
    standing = verdicts(committed)
    claims = [] if evidence is None else claims_under(evidence, standing, committed)
    write_report([*committed, *here], folder, claims=claims)
    return Judgement(tuple(verdicts(here)), tuple(standing), tuple(claims))


def _evidence() -> Path | None:
    """The committed evidence: of the checkout that we stand in, or of the one that this package lies in."""
    for root in (Path.cwd(), _CHECKOUT):
        if (root / DEFAULT / "runs").is_dir():
            return root / DEFAULT
    return None
