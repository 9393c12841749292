"""How far a long command is, on stderr: a bar with what is being done and how long it will take, and below it the pairs as they
are sampled. Off a terminal, a line now and then.
"""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from flashmoe_science.measure.run import Estimate, Progress

_LINE_EVERY_S = 10.0  # off a terminal
_ESTIMATES = 8  # how many are shown, the latest last
_LEAST_S, _LEAST_SHARE = 5.0, 0.02  # before so much is over, no time left is told


class Screen:
    """Shows a session's steps as they come."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, emoji=False)
        self._estimates: deque[Estimate] = deque(maxlen=_ESTIMATES)
        self._began = time.monotonic()
        self._step: Progress | None = None
        self._text = ""
        self._printed = -_LINE_EVERY_S
        self._live = Live(console=self._console, transient=True, get_renderable=self._shown, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def watch(self, step: Progress) -> None:
        """Show where a session stands."""
        if self._step is None or begins_anew(self._step, step):
            self._began = time.monotonic()
        self._step, self._text = step, step.text
        if step.estimate is not None:
            self._estimates.append(step.estimate)
        words = (f"{share_of(step):.0%}", f"({step.done}/{step.total})", step.text, self._left())
        self._line(" ".join(word for word in words if word))

    def stage(self, text: str) -> None:
        """Show what is being done where nothing can be counted."""
        self._step, self._text = None, text
        self._line(text)

    def _left(self) -> str:
        return "" if self._step is None else time_left(time.monotonic() - self._began, share_of(self._step))

    def _line(self, text: str) -> None:
        if not self._console.is_terminal and time.monotonic() - self._printed >= _LINE_EVERY_S:
            self._printed = time.monotonic()
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _shown(self) -> RenderableType:
        above = Table.grid(padding=(0, 1))
        if self._step is None:
            above.add_row(Spinner("line"), Text(self._text, no_wrap=True, overflow="ellipsis"))
            return above
        share = share_of(self._step)
        above.add_row(
            ProgressBar(total=1.0, completed=share, width=24),
            f"{share:.0%}",
            f"{self._step.done}/{self._step.total}",
            Text(self._left(), style="bold", no_wrap=True),
        )
        text = Text(self._text, no_wrap=True, overflow="ellipsis")
        return Group(above, text, *([_table(self._estimates)] if self._estimates else []))


def share_of(step: Progress) -> float:
    """How much of the time is over, from 0 to 1: as the session expects, or by what is done."""
    if step.share is not None:
        return min(1.0, step.share)
    return step.done / step.total if step.total else 0.0


def begins_anew(before: Progress, now: Progress) -> bool:
    """Whether another session, or another stage of one, has begun: time is then counted afresh."""
    other_kind = (before.share is None) != (now.share is None)
    other_stage = now.share is None and now.total != before.total
    return other_kind or other_stage or share_of(now) < share_of(before)


def time_left(elapsed: float, share: float) -> str:
    """How long it will go on at the pace so far, in words; nothing while too little is over to tell, or when all is."""
    if elapsed < _LEAST_S or not _LEAST_SHARE <= share < 1.0:
        return ""
    seconds = elapsed * (1.0 - share) / share
    if seconds < 55:
        return f"about {max(5, round(seconds / 5) * 5)} s left"
    minutes = round(seconds / 60)
    return f"about {minutes} min left" if minutes < 90 else f"about {seconds / 3600:.1f} h left"


def _table(estimates: deque[Estimate]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", title="latest pairs: quick estimates, not yet judged",
                  title_justify="left", title_style="dim italic")  # fmt: skip
    for heading in ("problem", "kernel", "against", "conditions"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    table.add_column("ratio", justify="right")
    for one in estimates:
        cells = (one.problem, one.kernel, one.rival, one.conditions, f"~{one.ratio:.2f}")
        table.add_row(*map(Text, cells))
    return table
