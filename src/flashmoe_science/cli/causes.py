"""A diagnosis in the terminal: where the time stands under the ceilings, then every hypothesis with its evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from flashmoe_science.judge.diagnosis import Diagnosis

_STATUSES = {"supported": "yellow", "untested": "cyan", "ruled out": "dim"}  # in the order in which they are shown
_PIPED_WIDTH = 200  # a table that does not go to a terminal is not folded to one's width


def console() -> Console:
    from rich.console import Console

    made = Console(highlight=False, emoji=False)
    if not made.is_terminal:
        made.width = _PIPED_WIDTH
    return made


def print_diagnosis(screen: Console, diagnosis: Diagnosis) -> None:
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    facts = diagnosis.facts
    config = f" ({facts.config})" if facts.config else ""
    screen.print(f"[bold]{escape(diagnosis.kernel + config)}[/] on {escape(diagnosis.problem)}, {escape(facts.machine)}")
    times = [f"{time.time_ns / 1e3:.4g} us on the {clock} clock" for clock, time in facts.times.items()]
    launch = facts.launch
    if launch is not None:
        registers = "" if launch.registers is None else f", {launch.registers} registers a thread"
        times.append(f"{facts.blocks} blocks of {facts.threads} threads{registers}, {launch.shared_bytes} B of shared memory")
    screen.print(escape("; ".join(times) or "no time on record"))
    for refusal in facts.refusals:
        screen.print(escape(f"refused: {refusal}"), style="red")
    if diagnosis.counters_absent:
        screen.print(escape(f"no counters: {diagnosis.counters_absent}"))
    for need in diagnosis.point.needs if diagnosis.point else ():
        screen.print(escape(f"  {need.level:8} {need.share:6.1%} of {need.ceiling}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "hypothesis", "evidence"):
        table.add_column(heading)
    for status, style in _STATUSES.items():
        for one in diagnosis.hypotheses:
            if one.status == status:
                table.add_row(Text(status, style=style), Text(one.title), Text(one.evidence))
    screen.print(table)
    screen.print(escape(f"cause: {diagnosis.cause}"), style="bold")
    screen.print()
