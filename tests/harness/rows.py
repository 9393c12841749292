"""A run's sink that keeps what it is given, and finds in it."""

from __future__ import annotations

from typing import TypeVar

from flashmoe_science.records import RefusalRow, Row

Kind = TypeVar("Kind", bound=Row)


class Rows(list[Row]):
    def of(self, kind: type[Kind]) -> list[Kind]:
        return [row for row in self if isinstance(row, kind)]

    def refusals(self, kernel: str = "planted") -> list[tuple[str, str]]:
        """The stage and the reason of each refusal of a kernel, or of a function by its spec."""
        return [(row.stage, row.reason) for row in self.of(RefusalRow) if row.kernel == kernel]
