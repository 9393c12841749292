"""How far a long command is, on stderr: a bar with what is being done and how long it has taken. Off a terminal, a line now and
then."""

from __future__ import annotations

import time
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

    from flashmoe_science.measure.session import Progress

_LINE_EVERY_S = 10.0  # off a terminal


class Screen:
    """Shows a run's steps as they come."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, emoji=False)
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
        """Show where a run stands."""
        self._step, self._text = step, step.text
        self._line(f"({step.done}/{step.total}) {step.text}")

    def stage(self, text: str) -> None:
        """Show what is being done where nothing can be counted."""
        self._step, self._text = None, text
        self._line(text)

    def _line(self, text: str) -> None:
        if not self._console.is_terminal and time.monotonic() - self._printed >= _LINE_EVERY_S:
            self._printed = time.monotonic()
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _shown(self) -> RenderableType:
        above = Table.grid(padding=(0, 1))
        if self._step is None:
            above.add_row(Spinner("line"), Text(self._text, no_wrap=True, overflow="ellipsis"))
            return above
        minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
        above.add_row(
            Spinner("line"),
            ProgressBar(total=max(1, self._step.total), completed=self._step.done, width=24),
            f"{self._step.done}/{self._step.total}",
            f"{minutes}:{seconds:02}",
        )
        return Group(above, Text(self._text, no_wrap=True, overflow="ellipsis"))
