"""A diagnosis with its plan, and recorded predictions, as blocks that a page and the terminal show alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flashmoe_science.judge.diagnose.diagnosis import Diagnosis
from flashmoe_science.judge.diagnose.plan import Plan, Step, plan
from flashmoe_science.judge.diagnose.predictions import Outcome
from flashmoe_science.judge.formats import times, within
from flashmoe_science.judge.report.blocks import Block, Cell, Definitions, Heading, Paragraph, Row, Table, columns

_PLAN = columns("words:change", "key", "clock", "n:part", "n:of it", "n:at most", "n:together")
_PREDICTIONS = columns("words:kernel and problem", "made", "key", "n:predicted", "n:measured", "nw:95% interval", "outcome")


def diagnosis_blocks(one: Diagnosis) -> Iterator[Block]:
    """What is known of a kernel, its share of each ceiling, every cause with its evidence, and what would change it."""
    facts, launch = one.facts, one.facts.launch
    yield Heading(one.kernel, f"{f'({facts.config}) ' if facts.config else ''}on {one.problem}, {facts.machine}")
    known = [f"{time.time_ns / 1e3:.4g} us on the {clock} clock" for clock, time in facts.times.items()]
    if launch is not None:
        registers = "" if launch.registers is None else f", {launch.registers} registers a thread"
        known.append(f"{facts.blocks} blocks of {facts.threads} threads{registers}, {launch.shared_bytes} B of shared memory")
    yield Paragraph("; ".join(known) or "no time on record")
    yield from (Paragraph(refusal, lead="refused:", state="refused") for refusal in facts.refusals)
    if facts.counters_absent:
        yield Paragraph(f"no counters: {facts.counters_absent}", "dim")
    if one.point is not None and one.point.needs:
        shares = tuple((need.level, f"{need.share:.1%} of {need.ceiling}", "") for need in one.point.needs)
        yield Definitions(shares, f"Shares of ceilings: {len(shares)}")
    for status in ("supported", "untested", "ruled out"):
        causes = [cause for cause in one.hypotheses if cause.status == status]
        if causes:
            items = tuple((cause.title, cause.evidence, status.split()[0]) for cause in causes)
            folded = status != "supported"
            yield Definitions(items, f"{status.capitalize()}: {len(causes)}" if folded else None, page_only=folded)
    yield Paragraph(one.cause, lead="cause:")
    yield from _plan(one, plan(one))


def _plan(one: Diagnosis, made: Plan) -> Iterator[Block]:
    """The changes in the order of what each can give at the most, and what they give together."""
    if made.time_ns and made.least_ns:
        least = f"{made.least_ns / 1e3:.4g} us is the least that the binding ceiling lets it take ({made.limit})"
        yield Paragraph(f"{made.time_ns / 1e3:.4g} us; {least}", "dim")
    if made.steps:
        yield Table("plans", f"Plan for {one.kernel} on {one.problem}", _PLAN, [_step(step) for step in made.steps])
    else:
        yield Paragraph("no change is called for by what is on record", "dim")


def _step(step: Step) -> Row:
    faster = "removed" if math.isinf(step.speedup) else f"{step.speedup:.3g}x"
    together = f"{times(step.cumulated)}{' (the ceiling)' if step.capped else ''}"
    cells = (step.hypothesis, step.clock, f"{step.part:.0%}", faster, times(step.most_gain), together)
    return Row((Cell(step.change, step.how), *map(Cell, cells)))


def prediction_table(found: Sequence[Outcome]) -> Table:
    """Recorded predictions beside what was measured after them."""
    rows = []
    for one in found:
        row = one.prediction
        kernels = f"{row.kernel} -> {row.made_in}" if row.made_in else row.kernel
        note = row.change if one.off_by is None else f"{row.change}: {_miss(one, one.off_by)}"
        numbers = (times(row.most_gain), times(one.gain), within(one.low, one.high))
        cells = (Cell(row.made[:10]), Cell(row.hypothesis), *map(Cell, numbers), Cell(one.said, state=one.said.split()[0]))
        rows.append(Row((Cell(f"{kernels}: {row.problem}", note), *cells)))
    return Table("predictions", "Predictions", _PREDICTIONS, rows)


def _miss(one: Outcome, off_by: float) -> str:
    """How far the measured gain is from the predicted one."""
    by = "" if one.said == "hit" else f" by {max(off_by, 1 / off_by):.2f}x"
    part = "" if one.part is None else f": it sped up {one.part:.0%} of the time, not {one.prediction.part or 0:.0%}"
    return f"{one.said}{by}{part} (run {one.run}, {one.how})"
