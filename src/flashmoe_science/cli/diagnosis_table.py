"""A diagnosis in the terminal: the time under the ceilings, every hypothesis with its evidence, the plan, the predictions."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from typing import TYPE_CHECKING

from flashmoe_science.cli.sheet import Column, Line, print_sheet, put_wrapped
from flashmoe_science.judge.formats import within
from flashmoe_science.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from flashmoe_science.judge.diagnose.diagnosis import Diagnosis
    from flashmoe_science.judge.diagnose.plan import Plan, Step
    from flashmoe_science.judge.diagnose.predictions import Outcome

_STATUSES = {"supported": "yellow", "untested": "cyan", "ruled out": "dim"}  # in the order in which they are shown
_OUTCOMES = {"hit": "green", "missed": "red", "exceeded": "magenta", "not measured yet": "cyan"}


def print_diagnosis(screen: Console, diagnosis: Diagnosis) -> None:
    """What is known of the kernel, its share of each ceiling, and the hypotheses, the supported first."""
    from rich.table import Table
    from rich.text import Text

    facts = diagnosis.facts
    config = f" ({facts.config})" if facts.config else ""
    put_wrapped(screen, f"{diagnosis.kernel}{config} on {diagnosis.problem}, {facts.machine}")
    known = [f"{time.time_ns / 1e3:.4g} us on the {clock} clock" for clock, time in facts.times.items()]
    launch = facts.launch
    if launch is not None:
        registers = "" if launch.registers is None else f", {launch.registers} registers a thread"
        known.append(f"{facts.blocks} blocks of {facts.threads} threads{registers}, {launch.shared_bytes} B of shared memory")
    put_wrapped(screen, "; ".join(known) or "no time on record")
    for refusal in facts.refusals:
        put_wrapped(screen, f"refused: {refusal}")
    if diagnosis.counters_absent:
        put_wrapped(screen, f"no counters: {diagnosis.counters_absent}")
    for need in diagnosis.point.needs if diagnosis.point else ():
        put_wrapped(screen, f"{need.level:8} {need.share:6.1%} of {need.ceiling}", 2)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for status, style in _STATUSES.items():
        for one in diagnosis.hypotheses:
            if one.status == status:
                evidence = Text.assemble((one.title, "bold"), f". {printable(one.evidence)}")
                table.add_row(Text(status, style=style), evidence)
    screen.print(table)
    put_wrapped(screen, f"cause: {diagnosis.cause}")


def print_plan(screen: Console, plan: Plan) -> None:
    """The changes in the order of what each can give at the most, and what they give together."""
    if plan.time_ns and plan.least_ns:
        least = f"{plan.least_ns / 1e3:.4g} us is the least that the binding ceiling lets it take ({plan.limit})"
        put_wrapped(screen, f"{plan.time_ns / 1e3:.4g} us; {least}")
    if not plan.steps:
        put_wrapped(screen, "no change is called for by what is on record")
        return
    columns = (
        Column("key"), Column("clock"), Column("part", right=True, spare=1), Column("of it", right=True, spare=2),
        Column("at most", right=True), Column("together", right=True),
    )  # fmt: skip
    print_sheet(screen, "plan", "change", columns, [_step(step) for step in plan.steps])


def _step(step: Step) -> Line:
    faster = "removed" if isinf(step.speedup) else f"{step.speedup:.3g}x"
    together = f"{step.cumulated:.2f}x{' (the ceiling)' if step.capped else ''}"
    cells = (step.hypothesis, step.clock, f"{step.part:.0%}", faster, f"{step.most_gain:.2f}x", together)
    return Line(step.change, cells, below=step.how)


def print_predictions(screen: Console, found: Sequence[Outcome]) -> None:
    """Recorded predictions beside what was measured after them."""
    columns = (
        Column("made", spare=1), Column("key"), Column("predicted", right=True), Column("measured", right=True),
        Column("95% interval", spare=2), Column("outcome"),
    )  # fmt: skip
    print_sheet(screen, "predictions", "kernel and problem", columns, [_outcome(one) for one in found])


def _outcome(one: Outcome) -> Line:
    row = one.prediction
    return Line(
        f"{row.kernel} -> {row.made_in}: {row.problem}" if row.made_in else f"{row.kernel}: {row.problem}",
        (
            row.made,
            row.hypothesis,
            f"{row.most_gain:.2f}x",
            "" if one.gain is None else f"{one.gain:.2f}x",
            within(one.low, one.high),
            one.said,
        ),
        ("", "", "", "", "", _OUTCOMES[one.said]),
        below=row.change if one.off_by is None else f"{row.change}: {_miss(one)}",
    )


def _miss(one: Outcome) -> str:
    """How far the measured gain is from the predicted one."""
    assert one.off_by is not None  # it was measured
    factor = one.off_by if one.off_by >= 1 else 1 / one.off_by
    by = "" if one.said == "hit" else f" by {factor:.2f}x"
    part = "" if one.part is None else f": it sped up {one.part:.0%} of the time, not {one.prediction.part or 0:.0%}"
    return f"{one.said}{by}{part} (run {one.run}, {one.how})"
