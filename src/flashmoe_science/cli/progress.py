"""How far a long command is, on stderr: a bar with what is being done and how long it has taken. Off a terminal, a line now and
then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column

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

    def watch(self, text: str, done: int = 0, total: int = 0) -> None:
        """Show what is being done, and where that can be counted how much of it is."""
        self._bar.update(self._task, total=total or None, completed=done, description=escape(text))
        if not self._console.is_terminal and time.monotonic() - self._printed >= _LINE_EVERY_S:
            self._printed = time.monotonic()
            line = f"({done}/{total}) {text}" if total else text
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
