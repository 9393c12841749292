"""Archiving moves the runs that nothing rests on, byte for byte, and no verdict moves with them."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tests.unit.fabricated import Fabricate, verdicts

from flashmoe_science.store import RunWriter, read_runs


@pytest.fixture
def tool(tool_named: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(tmp_path)
    for day, time in (("r1", 20_000), ("r2", 21_000)):
        run = Fabricate(day, f"2026-01-0{day[1]}T00:00:00+00:00").control().timed("fwd_triton", time, "sdpa", 30_000).done()
        with RunWriter(Path("evidence/runs/h200") / f"{day}.jsonl") as writer:
            for row in (run.header, *run.rows):
                writer.append(row)
    Path("evidence/claims.toml").write_text("")
    return tool_named("archive_runs")


def test_a_superseded_run_is_moved_whole_and_the_verdicts_stay(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    runs = Path("evidence/runs/h200")
    before, stood = (runs / "r1.jsonl").read_bytes(), verdicts(read_runs("evidence"))
    assert tool.main(["--check"]) == 1
    assert (capsys.readouterr().out, (runs / "r1.jsonl").is_file()) == ("evidence/runs/h200/r1.jsonl\n", True)
    assert tool.main([]) == 0
    assert [path.name for path in runs.iterdir()] == ["r2.jsonl"]
    assert gzip.decompress(Path("evidence/archive/h200/r1.jsonl.gz").read_bytes()) == before
    assert verdicts(read_runs("evidence")) == stood
    assert tool.main(["--check"]) == 0


def test_a_copy_that_differs_takes_nothing_away(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gzip, "decompress", lambda packed: b"other bytes")
    with pytest.raises(ValueError, match=r"r1\.jsonl\.gz does not hold what evidence/runs/h200/r1\.jsonl does"):
        tool.main([])
    assert Path("evidence/runs/h200/r1.jsonl").is_file()
