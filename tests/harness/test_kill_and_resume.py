"""A run that is killed loses at most the row in hand; ``--resume`` measures what it left into a second file."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from tests.harness.prove_command import prove, start, wait_for

from flashmoe_science.records import DoneRow, RefusalRow, Row, TimingRow
from flashmoe_science.store import Run, read_run

PROBLEMS = [f"attn b1 h2 q{rows} d16 fp32" for rows in (16, 29, 32)]
KERNELS = [*PROBLEMS, "--kernel", "sdpa", "--against", "sdpa_math"]
# An operation of its own: attention would be put to a sweep of 116 problems, before the kill and after.
FUNCTION = """
import torch
from flashmoe_science.contract import Contract, contract

class RowSum(Contract):
    name = "row_sum"

    def default_problems(self):
        return [self.problem("fp32", rows=rows, cols=40) for rows in (16, 29)]

    def inputs(self, problem, device, generator):
        return {"x": torch.rand(problem["rows"], problem["cols"], device=device, generator=generator)}

    def reference(self, problem, inputs):
        return inputs["x"].sum(-1)

    def flops(self, problem):
        return problem["rows"] * problem["cols"]

    def min_bytes(self, problem):
        return 4 * problem["rows"] * (problem["cols"] + 1)

@contract(RowSum())
def wrong_at_29(x):
    return x.sum(-1) * (1.5 if x.shape[0] == 29 else 1.0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "evidence" / "runs").mkdir(parents=True)  # none that would have to be judged again
    (tmp_path / "mine.py").write_text(FUNCTION)
    return tmp_path


def killed(folder: Path, name: str, words: list[str], kind: type[Row], count: int) -> Run:
    """Run the command and kill it with SIGKILL once the record holds so many rows of that kind; returns what is left of it."""
    path = folder / "proof" / name
    with start(folder, *words, "--quick", "--out", "proof") as process:
        wait_for(process, path, f'"kind":"{kind.model_fields["kind"].default}"'.encode(), count)
        process.kill()
    return read_run(path)


def resumed(folder: Path, name: str) -> tuple[Run, dict[str, object]]:
    done = prove(folder, "--resume", "proof", "--json")
    assert done.returncode in (0, 1, 3), done.stderr
    return read_run(folder / "proof" / name), json.loads(done.stdout)


def done(run: Run) -> list[str]:
    return [row.problem for row in run.rows if isinstance(row, DoneRow)]


@pytest.mark.slow
@pytest.mark.redundant  # the next test resumes too
def test_a_run_of_kernels_goes_on_in_a_second_file(folder: Path) -> None:
    cut = killed(folder, "run-custom.jsonl", KERNELS, DoneRow, 1)
    assert not cut.complete
    assert PROBLEMS[0] in done(cut)
    before = (folder / "proof" / "run-custom.jsonl").read_bytes()
    second, said = resumed(folder, "run-custom-2.jsonl")
    assert (folder / "proof" / "run-custom.jsonl").read_bytes() == before
    assert second.complete
    assert done(second) == PROBLEMS[len(done(cut)) :]
    assert {row.problem for row in second.rows if isinstance(row, TimingRow)} <= set(done(second))
    assert {one["problem"] for one in said["verdicts"]} == set(PROBLEMS)  # type: ignore[union-attr]
    assert (folder / "proof" / "report.html").is_file()


@pytest.mark.slow
def test_a_function_goes_on_and_a_refusal_from_before_the_cut_stands(folder: Path) -> None:
    problems = [f"op row_sum rows{rows} cols40 fp32 flops{40 * rows} bytes{164 * rows}" for rows in (16, 29)]
    words = ["mine.py:wrong_at_29", *problems]
    cut = killed(folder, "run-functions.jsonl", words, RefusalRow, 1)
    if done(cut) == problems:  # it was quicker than the kill: without its last row, the second problem is not done
        path = folder / "proof" / "run-functions.jsonl"
        whole = path.read_bytes().splitlines(keepends=True)
        last = max(index for index, line in enumerate(whole) if b'"kind":"done"' in line)
        path.write_bytes(b"".join(whole[:last]) + whole[last][:37])
        cut = read_run(path)
    assert done(cut) == problems[:1]

    second, said = resumed(folder, "run-functions-2.jsonl")
    assert second.complete
    assert done(second) == problems[1:]
    reasons = {row.reason for row in second.rows if isinstance(row, RefusalRow) and row.problem == problems[1]}
    assert {row.reason for row in cut.rows if isinstance(row, RefusalRow)} <= reasons
    assert said["exit_code"] == 1
    at_29 = {one["verdict"] for one in said["verdicts"] if (one["problem"], one["kernel"]) == (problems[1], words[0])}
    assert at_29 == {"refused"}


@pytest.mark.slow
def test_an_interrupt_says_how_to_go_on(folder: Path) -> None:
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores it
    with start(folder, *KERNELS, "--out", "proof", process_group=0, preexec_fn=heard) as process:
        wait_for(process, folder / "proof" / "run-custom.jsonl")
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "to go on: flashmoe prove --resume proof" in said
    assert "Traceback" not in said
