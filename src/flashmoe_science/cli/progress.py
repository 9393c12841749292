"""How far a long command is, on stderr: a bar with what is being done and how long it has taken. Off a terminal, a line now and
then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column

if TYPE_CHECKING:
    from flashmoe_science.measure.session import Progress

_LINE_EVERY_S = 10.0  # off a terminal


class Screen:
    """Shows a run's steps as they come."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, emoji=False)
        text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
        counted = (SpinnerColumn("line"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*counted, text, console=self._console, transient=True, expand=True)
        self._bar.disable = not self._console.is_terminal
        self._task = self._bar.add_task("", total=None)
        self._printed = -_LINE_EVERY_S

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def watch(self, step: Progress) -> None:
        """Show where a run stands."""
        self._bar.update(self._task, total=step.total, completed=step.done, description=escape(step.text))
        self._line(f"({step.done}/{step.total}) {step.text}")

    def stage(self, text: str) -> None:
        """Show what is being done where nothing can be counted."""
        self._bar.update(self._task, total=None, completed=0, description=escape(text))
        self._line(text)

    def _line(self, text: str) -> None:
        if not self._console.is_terminal and time.monotonic() - self._printed >= _LINE_EVERY_S:
            self._printed = time.monotonic()
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
