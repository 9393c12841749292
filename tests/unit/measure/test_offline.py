"""What is interpreted where there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from flashmoe_science.measure.offline import OfflineRun
from flashmoe_science.operations import kernel_named, parse_problem


def test_what_takes_the_interpreter_minutes_is_left_out() -> None:
    """It has 2^18 exponentials, as many as may be, and 8192 programs of 10 ms."""
    session: Any = SimpleNamespace(request=SimpleNamespace(quick=False))
    short, long = (parse_problem(f"attnmerge p2 t{tokens} h32 d128 bf16") for tokens in (64, 4096))
    run = OfflineRun(session, [kernel := kernel_named("merge_parts_triton")], [short, long])
    assert {problem for _, problem in run._small(kernel)} == {short}
