"""Functions of a user's, measured on a CPU: what goes well, what goes on after one goes wrong, and what a user sees.

The faults themselves are in test_fault_corpus.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashmoe_science.judge.ending import code_of
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.function_run import FunctionRun, run_functions
from flashmoe_science.measure.oracle import Oracle
from flashmoe_science.measure.request import Request
from flashmoe_science.measure.session import Outcome, Session
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import CorrectnessRow, EndRow, NoteRow, PromiseRow, RefusalRow, TimingRow
from flashmoe_science.store import Run, RunWriter, read_run

TINY = "attn b1 h2 q24 d16 fp32 causal"

GOOD = """
from torch.nn.functional import scaled_dot_product_attention

def attention(q, k, v, causal=False, softmax_scale=None):
    print("called", flush=True)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)

def twice(q, k, v, causal=False, softmax_scale=None):
    attention(q, k, v, causal, softmax_scale)
    return attention(q, k, v, causal, softmax_scale)

twice.promises = {"speedup": 0.5, "deterministic": True}
"""
FATAL = """
import os

def aborts(q, k, v, causal=False, softmax_scale=None):
    print("the last thing that I say", flush=True)
    os.abort()
"""
HUNGRY = """
import torch

def attention(q, k, v, causal=False, softmax_scale=None):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
"""
OWN = f"{Path(__file__).parents[2] / 'examples' / 'row_softmax.py'}:row_softmax"
OWN_PROBLEM = "op row_softmax rows64 cols50 fp32 flops12800 bytes25600"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("good", GOOD), ("fatal", FATAL), ("hungry", HUNGRY), ("broken", "def attention(:\n")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FunctionRun, "_swept", lambda self: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that are started
    return tmp_path


def measured(
    *specs: str, problem: str = TINY, against: tuple[str, ...] = ("sdpa",), budget_s: float | None = None
) -> tuple[Outcome, Run]:
    told: list[tuple[int, int]] = []
    with RunWriter("run.jsonl") as writer:
        request = Request(targets=specs, against=against, quick=True, budget_s=budget_s, command=("flashmoe", "prove"))
        session = Session(Bench(torch.device("cpu"), None), writer, request, lambda text, *counts: told.append(counts))
        outcome = run_functions(session, (parse_problem(problem),))
    assert all(0 <= done <= total for done, total in told)
    return outcome, read_run("run.jsonl")


def refusals(run: Run, kernel: str) -> list[tuple[str, str]]:
    return [(row.stage, row.reason) for row in run.rows if isinstance(row, RefusalRow) and row.kernel == kernel]


@pytest.mark.slow
def test_one_candidate_goes_wrong_and_the_others_go_on_against_another_candidate() -> None:
    good, rival = "good.py:twice", "good.py:attention"
    outcome, run = measured("fatal.py:aborts", "broken.py:attention", good, against=("sdpa", rival))
    ((stage, reason),) = refusals(run, "fatal.py:aborts")
    assert (stage, reason.startswith("it crashed: SIGABRT (the last thing that I say)")) == ("correctness", True)
    ((stage, reason),) = refusals(run, "broken.py:attention")
    assert (stage, reason.startswith("it could not be loaded: SyntaxError")) == ("preflight", True)

    assert refusals(run, good) == []
    rows = [row for row in run.rows if isinstance(row, TimingRow)]
    assert {(row.kernel, row.rival, row.rival_origin) for row in rows} == {
        (good, good, "candidate"), (good, "sdpa", "peer"), (good, rival, "candidate"),
    }  # fmt: skip
    promised = {row.kernel: (row.speedup, row.deterministic) for row in run.rows if isinstance(row, PromiseRow)}
    assert promised[good] == (0.5, True)
    assert {row.kernel for row in run.rows if isinstance(row, CorrectnessRow) and row.passed} >= {good, "sdpa"}
    said = {verdict.kernel: verdict for verdict in JudgedRun(run).verdicts}
    assert said[good].time_ns is not None or said[good].verdict == "refused"  # a bad control
    assert "preflight" in str(said["broken.py:attention"].reason)
    assert (outcome.exit_code, len(outcome.wrong), "broken.py:attention" in str(outcome.stopped)) == (1, 1, True)
    assert isinstance(run.rows[-1], EndRow)


@pytest.mark.slow
@pytest.mark.redundant  # test_own_operation.py holds an operation of one's own too
def test_an_operation_of_ones_own_is_held_to_its_contract_and_timed_against_the_plain_maths() -> None:
    outcome, run = measured(OWN, problem=OWN_PROBLEM, against=())
    assert outcome.exit_code == 0, outcome
    rows = [row for row in run.rows if isinstance(row, TimingRow)]
    assert {row.problem for row in rows} == {OWN_PROBLEM}
    assert [row.rival for row in rows] == [OWN, "plain"]
    assert {row.op for row in rows} == {"row_softmax"}


def test_a_spent_budget_ends_a_run_with_what_there_is() -> None:
    outcome, run = measured("good.py:attention", "good.py:twice", budget_s=1e-9)
    assert outcome.problems_left == 2
    assert "the budget" in "".join(row.text for row in run.rows if isinstance(row, NoteRow))
    assert isinstance(run.rows[-1], EndRow)


@pytest.mark.parametrize(
    ("spec", "code", "stage", "words"),
    [
        ("good.py:attention", 3, "sanity", "not examined: the GPU has too little memory for the reference"),
        (
            "hungry.py:attention",
            1,
            "correctness",
            "it does not run: OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00",
        ),
    ],
)
def test_memory_that_the_harness_lacks_is_no_fault_of_a_function_and_what_it_lacks_itself_is(
    spec: str, code: int, stage: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_reference(self: Oracle, case: object, draw: int = 0) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")

    if code == 3:
        monkeypatch.setattr(Oracle, "_maths", no_reference)
    outcome, run = measured(spec)
    assert outcome.exit_code == code
    ((found, reason),) = refusals(run, spec)
    assert (found, reason[: len(words)]) == (stage, words)
    assert code_of(JudgedRun(run).verdicts) == code
    if code == 1:
        assert "raised by the kernel itself" in reason
