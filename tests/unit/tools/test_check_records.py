"""The check of what rests on the records fails where the table is stale or a record is a regression, and reads them once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.unit.fabricated import Fabricate

from flashmoe_science.judge.gate.ratchet import check, raised, write_ratchet
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.store import RunWriter

HOLDS = "the ratchet holds"


def day(number: int, time: int) -> JudgedRun:
    run = Fabricate(f"day{number}", f"2026-01-0{number}T00:00:00+00:00").control()
    return JudgedRun(run.timed("fwd_triton", time, "sdpa", 30_000).done())


@pytest.mark.parametrize(
    ("time", "stale", "told"),
    [
        (20_000, 0, HOLDS),
        (20_000, 1, ""),
        (25_000, 0, "ratchet: regressed: attn"),
        (None, 0, "no kept ratio"),
    ],
)
def test_it_fails_where_one_of_the_three_does(
    tool_named: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    time: int | None,
    stale: int,
    told: str,
) -> None:
    tool, given = tool_named("check_records"), []
    runs = [day(1, 20_000), *([] if time is None else [day(2, time)])]
    for judged in runs:
        with RunWriter(tmp_path / "runs" / f"{judged.run.header.run}.jsonl") as writer:
            for row in (judged.run.header, *judged.run.rows):
                writer.append(row)
    write_ratchet(tmp_path / "ratchet.json", [] if time is None else raised([], check([], runs[:1], [])))

    def main(_: list[str], judged: Any) -> int:
        given.append(judged)
        return stale

    monkeypatch.setattr(tool, "EVIDENCE", tmp_path)
    monkeypatch.setattr(tool, "dispatch_table", SimpleNamespace(main=main))
    monkeypatch.setitem(sys.modules, "generate", SimpleNamespace(main=main))  # type: ignore[misc]
    try:
        tool.main()
        ended: Any = 0
    except SystemExit as stopped:
        ended = stopped.code
    assert bool(ended) == (told != HOLDS)
    assert told in f"{capsys.readouterr().out}{ended}"
    assert all(one is given[0] for one in given)
