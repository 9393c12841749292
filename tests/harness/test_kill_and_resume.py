"""Nothing is lost: a run killed at any moment loses at most the row in hand, and goes on to the same end."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from flashmoe_science.judge.verdicts import verdicts_of
from flashmoe_science.records import CorrectnessRow, DoneRow, EndRow, ResumeRow, TimingRow
from flashmoe_science.store import Run, read_run

TINY = ("attn b1 h2 q16 d16 fp32", "attn b1 h2 q24 d16 fp32", "attn b1 h2 q32 d16 fp32")
NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


def coverage(run: Run) -> list[tuple[str, str, str, str | None, str]]:
    """What verdicts the run gives, of which there must be no fewer and no others for a cut."""
    return [(one.problem, one.kernel, one.clock, one.rival, one.verdict) for one in verdicts_of(run)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("killed")
    program = Path(__file__).with_name("killed_runs.py")
    done = subprocess.run([sys.executable, str(program), str(folder)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return {path.stem: read_run(path) for path in folder.glob("*.jsonl")}


def test_a_run_killed_at_any_row_comes_to_the_same_verdicts(runs: dict[str, Run]) -> None:
    whole = coverage(runs["uncut"])
    assert len(whole) == 4
    assert len(runs) == 1 + 1 + 2 * (len(runs["uncut"].rows) + 1) + 8
    assert {name: coverage(run) for name, run in runs.items()} == dict.fromkeys(runs, whole)
    assert all(run.complete for run in runs.values())


def test_a_finished_problem_is_not_measured_again(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        assert set(Counter(row.problem for row in run.rows if isinstance(row, DoneRow)).values()) == {1}, name
        assert Counter((row.problem, row.rival) for row in run.rows if isinstance(row, TimingRow)) == Counter(
            (row.problem, row.rival) for row in runs["uncut"].rows if isinstance(row, TimingRow)
        ), name


def test_no_row_before_the_one_in_hand_is_lost(runs: dict[str, Run]) -> None:
    rows = runs["uncut"].rows
    place = next(index for index, row in enumerate(rows) if isinstance(row, TimingRow))
    cut = runs[f"{place + 1}inside"]  # the header is row 0
    resumed = next(index for index, row in enumerate(cut.rows) if isinstance(row, ResumeRow))
    assert [row.kind for row in cut.rows[:resumed]] == [row.kind for row in rows[:place]]
    assert cut.rows[resumed].again == [rows[place].problem]
    after = runs[f"{place + 1}after"]
    assert [type(row) for row in after.voided] == [TimingRow]  # it was whole, and is measured again with its problem
    assert sum(isinstance(row, CorrectnessRow) for row in after.rows) == 6


def test_seconds_and_device_time_add_up_over_the_cut(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        end = run.rows[-1]
        assert isinstance(end, EndRow)
        spent = sum(row.device_seconds for row in (*run.rows, *run.voided) if isinstance(row, TimingRow))
        assert end.device_seconds == pytest.approx(spent, abs=1e-3), name
        before = [row.seconds_before for row in run.rows if isinstance(row, ResumeRow)]
        assert before == sorted(before)
        assert end.wall_seconds >= max(before, default=0.0)


@pytest.mark.slow
def test_the_command_goes_on_after_kills_at_random_moments(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flashmoe_science", "prove"]
    first = [*command, *TINY, "--kernel", "sdpa", "--against", "sdpa_math", "--quick", "--out", "proof"]
    chance = random.Random(11)
    path = tmp_path / "proof" / "run-custom.jsonl"
    for attempt in range(4):
        words = first if not path.exists() else [*command, "--resume", "proof"]
        process = subprocess.Popen(
            words, cwd=tmp_path, env=NO_GPU, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        with process:
            size = path.stat().st_size if path.exists() else 0
            while process.poll() is None and not (path.exists() and path.stat().st_size > size):
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.15))
            process.kill()
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read(), attempt
    done = subprocess.run(
        [*command, "--resume", str(path), "--json"], cwd=tmp_path, env=NO_GPU, capture_output=True, text=True, timeout=600
    )
    assert done.returncode in (0, 3), done.stderr  # 3: this machine's other work disturbed every pair
    run = read_run(path)
    assert run.complete
    assert run.done == set(TINY)
    # Not every kernel: a busy machine may have one of a pair refused, and then the other has no rival.
    assert {one["problem"] for one in json.loads(done.stdout)["verdicts"]} == set(TINY)
    assert (tmp_path / "proof" / "report.html").is_file()
