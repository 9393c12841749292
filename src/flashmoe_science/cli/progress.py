"""The progress bar of long commands, on stderr: what is being done, how far, how long it will take. Off a terminal, lines."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from flashmoe_science.measure.session import Progress as Step

_LINE_EVERY_S = 10.0  # off a terminal


class Screen:
    """Shows a session's steps as they come."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._total: int | None = None
        self._done = 0
        self._printed = -_LINE_EVERY_S

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def watch(self, step: Step) -> None:
        """Show where a session stands. A new stage begins where the total changes or the count falls back."""
        if step.total != self._total or step.done < self._done:
            self._bar.reset(self._task, total=step.total)
            self._total = step.total
        self._done = step.done
        self._bar.update(self._task, completed=step.done, description=step.text)
        self._line(f"{step.done}/{step.total} {step.text}")

    def stage(self, text: str) -> None:
        self._bar.reset(self._task, total=None)
        self._total = None
        self._bar.update(self._task, description=text)
        self._line(text)

    def _line(self, text: str) -> None:
        if not self._console.is_terminal and time.monotonic() - self._printed >= _LINE_EVERY_S:
            self._printed = time.monotonic()
            self._console.print(text, markup=False, highlight=False)
