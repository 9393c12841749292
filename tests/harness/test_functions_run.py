"""Functions of a user's, measured on a CPU: what goes well, what goes on after one goes wrong, and what a user sees.

The faults themselves are in test_fault_corpus.py.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from tests.harness.test_prove_command import assert_refused, prove

from flashmoe_science.judge.verdicts import verdicts_of
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.request import Request
from flashmoe_science.measure.run import FunctionsRun
from flashmoe_science.measure.session import Outcome, Session
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import CorrectnessRow, EndRow, NoteRow, PromiseRow, RefusalRow, TimingRow
from flashmoe_science.store import Run, RunWriter, read_run

TINY = "attn b1 h2 q24 d16 fp32 causal"

GOOD = """
import torch
from torch.nn.functional import scaled_dot_product_attention
from flashmoe_science import flash_attention_science

def attention(q, k, v, causal=False, softmax_scale=None):
    print("called", flush=True)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)

def twice(q, k, v, causal=False, softmax_scale=None):
    attention(q, k, v, causal, softmax_scale)
    return attention(q, k, v, causal, softmax_scale)

def right(q, k, v, causal=False, softmax_scale=None):
    return flash_attention_science(q, k, v, causal=causal, softmax_scale=softmax_scale)

twice.promises = {"speedup": 0.5, "deterministic": True}
"""
FATAL = """
import os, sys

def aborts(q, k, v, causal=False, softmax_scale=None):
    print("the last thing that I say", flush=True)
    os.abort()

def hangs(q, k, v, causal=False, softmax_scale=None):
    while True:
        pass

def raises(q, k, v, causal=False, softmax_scale=None):
    raise RuntimeError("no kernel image is available")
"""
SCALED = """
import torch
from flashmoe_science.contract import Contract, contract

class Scaled(Contract):
    name = "scaled"
    distributions = ("normal", "zeros")

    def default_problems(self):
        return [self.problem("fp32", rows=64, cols=50)]

    def inputs(self, problem, device, generator):
        return {"x": torch.randn(problem["rows"], problem["cols"], device=device, generator=generator)}

    def reference(self, problem, inputs):
        return inputs["x"] * 3, inputs["x"].sum(-1)

    def flops(self, problem):
        return 2 * problem["rows"] * problem["cols"]

    def min_bytes(self, problem):
        return 8 * problem["rows"] * problem["cols"]

@contract(Scaled())
def scaled(x):
    return x * 3, x.sum(-1)
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (
        ("good", GOOD),
        ("fatal", FATAL),
        ("own", SCALED),
        ("late", "globals()['there'] = 1\n"),
        ("broken", "def attention(:\n"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that are started
    return tmp_path


def measured(
    *specs: str, problem: str | None = TINY, against: tuple[str, ...] = ("sdpa",), **more: object
) -> tuple[Outcome, Run]:
    asked: dict[str, object] = {
        "targets": specs,
        "against": against,
        "quick": True,
        "sweep": False,
        "command": ("flashmoe", "prove"),
    }
    told: list[tuple[int, int]] = []
    problems = None if problem is None else tuple(map(parse_problem, problem.split(" + ")))
    with RunWriter("run.jsonl") as writer:
        request = Request(**{**asked, **more})  # type: ignore[arg-type]
        session = Session(Bench(torch.device("cpu"), None), writer, request, lambda text, *counts: told.append(counts))
        outcome = FunctionsRun(session, problems).run()
    assert all(0 <= done <= total for done, total in told)
    return outcome, read_run("run.jsonl")


def refusals(run: Run, kernel: str) -> list[tuple[str, str]]:
    return [(row.stage, row.reason) for row in run.rows if isinstance(row, RefusalRow) and row.kernel == kernel]


def test_one_candidate_goes_wrong_and_the_others_go_on() -> None:
    outcome, run = measured("fatal.py:aborts", "broken.py:attention", "good.py:attention", "fatal.py:raises", "late.py:missing")
    ((stage, reason),) = refusals(run, "fatal.py:aborts")
    assert stage == "correctness"
    assert reason.startswith("it crashed: SIGABRT (the last thing that I say)")
    ((stage, reason),) = refusals(run, "broken.py:attention")
    assert stage == "preflight"
    assert reason.startswith("it could not be loaded: SyntaxError")
    ((_, reason),) = refusals(run, "fatal.py:raises")
    assert "RuntimeError: no kernel image is available" in reason
    assert "AttributeError" in refusals(run, "late.py:missing")[0][1]

    assert refusals(run, "good.py:attention") == []
    rows = [row for row in run.rows if isinstance(row, TimingRow)]
    assert [(row.kernel, row.rival) for row in rows] == [("good.py:attention", one) for one in ("good.py:attention", "sdpa")]
    assert {row.origin for row in rows} == {"candidate"}
    passed = {row.kernel: row.passed for row in run.rows if isinstance(row, CorrectnessRow)}
    assert passed == {"good.py:attention": True, "sdpa": True}
    said = {verdict.kernel: verdict for verdict in verdicts_of(run)}
    assert said["good.py:attention"].time_ns is not None or said["good.py:attention"].verdict == "refused"  # a bad control
    assert {kernel for kernel, verdict in said.items() if verdict.reason and "preflight" in verdict.reason} == {
        "broken.py:attention",
        "late.py:missing",
    }
    assert outcome.exit_code == 1
    assert len(outcome.wrong) == 2
    assert outcome.stopped is not None
    assert "broken.py:attention" in outcome.stopped
    assert isinstance(run.rows[-1], EndRow)


def test_an_operation_of_ones_own_is_held_to_its_contract_and_timed_against_the_plain_maths() -> None:
    outcome, run = measured("own.py:scaled", problem=None, against=())
    assert outcome.exit_code == 0, outcome
    rows = [row for row in run.rows if isinstance(row, TimingRow)]
    assert {row.problem for row in rows} == {"op scaled rows64 cols50 fp32 flops6400 bytes25600"}
    assert [row.rival for row in rows] == ["own.py:scaled", "plain"]
    assert {row.op for row in rows} == {"scaled"}


def test_another_candidate_as_rival_and_what_was_promised() -> None:
    outcome, run = measured("good.py:twice", against=("good.py:attention",))
    assert refusals(run, "good.py:twice") == [], outcome
    (promised,) = [row for row in run.rows if isinstance(row, PromiseRow)]
    assert (promised.speedup, promised.deterministic) == (0.5, True)
    rivals = {row.rival: row.rival_origin for row in run.rows if isinstance(row, TimingRow)}
    assert rivals == {"good.py:twice": "candidate", "good.py:attention": "candidate"}


def test_a_cost_that_its_contract_does_not_count_is_refused() -> None:
    outcome, run = measured("own.py:scaled", problem="op scaled rows64 cols50 fp32 flops1 bytes25600", against=())
    assert outcome.exit_code == 2
    assert any("it says flops1, and its contract counts 6400" in row.text for row in run.rows if isinstance(row, NoteRow))


def test_a_spent_budget_ends_a_run_with_what_there_is() -> None:
    outcome, run = measured("good.py:attention", "good.py:twice", budget_s=1e-9)
    assert outcome.problems_left == 2
    assert "the budget" in "".join(row.text for row in run.rows if isinstance(row, NoteRow))
    assert isinstance(run.rows[-1], EndRow)


def test_a_function_that_hangs_on_one_problem_is_not_asked_the_next_ones() -> None:
    began = time.monotonic()
    spec = "fatal.py:hangs"
    _, run = measured(spec, problem=f"{TINY} + attn b1 h2 q8 d16 fp32 + attn b1 h2 q9 d16 fp32", watchdog_s=5.0)
    first, *others = [reason for _, reason in refusals(run, spec)]
    assert first.startswith("it hung: no answer within 5 s")
    assert others == [f"not asked: it hung on '{TINY}'"] * 2
    assert len(run.done_by(spec)) == 3
    assert time.monotonic() - began < 60


def test_a_function_that_is_its_own_only_rival_is_refused() -> None:
    outcome, run = measured("good.py:attention", against=("good.py:attention",))
    assert outcome.exit_code == 2
    assert "--against leaves no rival for good.py:attention" in str(outcome.stopped)
    assert not any(isinstance(row, TimingRow) for row in run.rows)


def test_from_the_command_line_to_json(files: Path) -> None:
    (files / "evidence" / "runs").mkdir(parents=True)  # none that would have to be judged again
    done = prove("good.py:right", TINY, "--against", "sdpa", "--quick", "--json", "--out", "proof", cwd=files)
    assert done.returncode in (0, 3), done.stderr  # 3: this machine's other work spoilt the only control there is
    said = json.loads(done.stdout)
    assert said["checked"] == 2
    assert said["wrong"] == []
    assert {verdict["kernel"] for verdict in said["verdicts"]} == {"good.py:right", "sdpa"}
    assert {"run-functions.jsonl", "report.html"} <= {path.name for path in (files / "proof").iterdir()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py:fn"], "candidate 'nowhere.py:fn': there is no file 'nowhere.py'"),
        (["good.py:"], "candidate is 'good.py:'; it must be my_module:function or path/to/file.py:function"),
        (["good.py:attention", "dokuments"], "'dokuments' is neither a problem"),
        (["good.py:attention", "--against", "nowhere.py:fn"], "there is no file 'nowhere.py'"),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(arguments, message, files, monkeypatch, capsys)
    assert not (files / "reports").exists()
