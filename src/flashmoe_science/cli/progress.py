"""The progress of a long command on stderr: a bar with the current step and the time taken. Off a terminal, a line every ten
seconds."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

_LINE_EVERY_S = 10.0  # off a terminal


class Screen(Progress):
    """Shows a run's steps as they come."""

    def __init__(self) -> None:
        text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
        columns = (SpinnerColumn("line"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), text)
        console = Console(stderr=True, emoji=False)
        super().__init__(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal)
        self._step = self.add_task("", total=None)
        self._printed = -_LINE_EVERY_S

    def watch(self, text: str, done: int = 0, total: int = 0) -> None:
        """Show the current step, and how many of how many are done where that is known."""
        self.update(self._step, total=total or None, completed=done, description=escape(text))
        if self.disable and time.monotonic() - self._printed >= _LINE_EVERY_S:
            self._printed = time.monotonic()
            line = f"({done}/{total}) {text}" if total else text
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
