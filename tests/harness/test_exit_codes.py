"""``flashmoe prove`` and ``flashmoe check`` end with each exit code that ``flashmoe --help`` lists, and say why first.

Those of ``claims`` and ``ratchet`` are in tests/unit/judge, of ``diagnose`` in tests/unit/judge/diagnose, of an interrupt in
test_kill_and_resume.py, of a reader that has had enough in tests/unit/cli/test_main.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from tests.harness.prove_command import PEERS, TINY

from flashmoe_science.cli.main import main
from flashmoe_science.exit_codes import MEANINGS, ExitCode
from flashmoe_science.measure.function_run import FunctionRun
from flashmoe_science.measure.session import BudgetSpent, Session
from flashmoe_science.measure.worker import clocks

UNSERVED = "attn b2 h4 hk2 q50 k83 d40 fp32 causal bshd"  # by sdpa_math
MINE = """
from flashmoe_science import flash_attention_science

def right(q, k, v, causal=False, softmax_scale=None):
    return flash_attention_science(q, k, v, causal=causal, softmax_scale=softmax_scale)

def wrong(q, k, v, causal=False, softmax_scale=None):
    return 1.5 * right(q, k, v, causal, softmax_scale)

def raises(q, k, v, causal=False, softmax_scale=None):
    raise NotImplementedError("not yet")
"""
Flashmoe = Callable[..., tuple[ExitCode, list[str]]]


@pytest.fixture
def flashmoe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Flashmoe:
    """Runs the command without a GPU in a folder of its own: its exit code, and the lines that it prints or complains."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("def attention(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "400")  # a line is a line
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(FunctionRun, "_swept", lambda self: None)  # check's

    def run(*words: str) -> tuple[ExitCode, list[str]]:
        monkeypatch.setattr(sys, "argv", ["flashmoe", *words])  # which a record keeps
        with pytest.raises(SystemExit) as stopped:
            main([*words])
        said = capsys.readouterr()
        lines = [line.rstrip() for line in (said.out or said.err).splitlines()]
        return ExitCode(int(stopped.value.code or 0)), lines

    return run


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """A clock in this process that a busy machine cannot disturb: nanoseconds a call, by slot, in the order of preparation."""
    times, ticks = dict[int, float](), count()
    real = clocks.Clocks.sample

    def sample(self: clocks.Clocks, slot: int, cut_at: float | None = None, path: str = "") -> dict[str, object]:
        if cut_at is not None:
            return real(self, slot, cut_at, path)
        return {"ns": times.get(slot, 100_000.0) * (1 + 0.001 * (next(ticks) % 3))}

    monkeypatch.setattr(clocks.Clocks, "sample", sample)
    return times


def test_good_is_right_and_timed(flashmoe: Flashmoe, stated: dict[int, float]) -> None:
    code, lines = flashmoe("prove", TINY, *PEERS, "--out", "proof")
    assert code == ExitCode.GOOD
    assert lines[0].startswith("1 equivalent: custom on cpu, eager clock, warm cache: 1.00x (")
    assert lines[-1] == "all good: 2 results held to the oracle, 1 comparison timed; records and report in proof"
    before = sorted(path.name for path in Path("proof").iterdir())
    again, lines = flashmoe("prove", "--resume", "proof")
    assert (again, sorted(path.name for path in Path("proof").iterdir())) == (ExitCode.GOOD, before)
    assert lines[-1] == "good: nothing was left to measure; records and report in proof"


def test_no_number_where_the_control_is_off(flashmoe: Flashmoe, stated: dict[int, float]) -> None:
    stated[2] = 90_000.0  # sdpa, sdpa_math, and sdpa prepared again for the control
    code, lines = flashmoe("prove", TINY, *PEERS, "--out", "proof")
    assert code == ExitCode.NO_NUMBER
    assert lines[0].startswith(
        "1 refused: custom on cpu, eager clock, warm cache; sdpa against itself came out slower: 0.900 ["
    )
    assert "measure again with less other work on this machine, and without --quick" in lines[0]
    assert lines[-1].startswith("no number: 2 results held to the oracle, 1 comparison timed;")
    assert flashmoe("prove", "--resume", "proof")[0] == ExitCode.NO_NUMBER


def test_no_number_where_the_budget_ends_before_anything_is_timed(flashmoe: Flashmoe) -> None:
    for words in ((TINY, *PEERS), ("mine.py:right", TINY)):
        code, lines = flashmoe("prove", *words, "--budget", "0.001", "--out", f"proof{len(words)}")
        assert code == ExitCode.NO_NUMBER
        to_go_on = f"to go on: flashmoe prove --resume proof{len(words)}"
        assert lines[0] == f"no number: 1 problem not measured, the budget is spent; {to_go_on}"
        assert not any("good" in line for line in lines)


def test_a_budget_that_ends_after_something_was_timed_is_good_as_far_as_it_went(
    flashmoe: Flashmoe, stated: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    second, step = TINY.replace("q16", "q17"), Session.step

    def spent(self: Session, text: str, of: str = "") -> None:
        if of == second:
            raise BudgetSpent
        step(self, text, of)

    monkeypatch.setattr(Session, "step", spent)
    code, lines = flashmoe("prove", TINY, second, *PEERS, "--budget", "60", "--out", "proof")
    assert code == ExitCode.GOOD
    assert lines[-2] == "1 problem not measured, the budget is spent; to go on: flashmoe prove --resume proof"
    assert lines[-1].startswith("good as far as it went: 2 results held to the oracle, 1 comparison timed;")


def test_no_number_where_there_is_nothing_to_compare_with(flashmoe: Flashmoe, stated: dict[int, float]) -> None:
    code, lines = flashmoe("prove", UNSERVED, *PEERS, "--out", "proof")
    assert code == ExitCode.NO_NUMBER
    assert lines[0].startswith(f"no number: sdpa_math on {UNSERVED}: PyTorch's math backend would be given a dense")
    assert lines[0].endswith("; nothing was compared; name another rival with --against")


def test_wrong_is_named_first_also_when_nothing_is_left_to_measure(flashmoe: Flashmoe) -> None:
    code, lines = flashmoe("prove", "mine.py:wrong", TINY, "--quick", "--out", "proof")
    assert code == ExitCode.WRONG
    assert lines[0].startswith("wrong: out: maximum error ")
    assert lines[-1].startswith("wrong: 1 result held to the oracle, 0 comparisons timed;")
    assert flashmoe("prove", "--resume", "proof")[0] == ExitCode.WRONG


def test_could_not_run_is_said_in_the_first_line(flashmoe: Flashmoe) -> None:
    code, lines = flashmoe("prove", "broken.py:attention", TINY, "--quick", "--out", "proof")
    assert code == ExitCode.COULD_NOT_RUN
    assert lines[0].startswith("could not run: it could not be loaded: SyntaxError")
    code, lines = flashmoe("prove", TINY, "--budget", "2usd")
    assert (code, len(lines)) == (ExitCode.COULD_NOT_RUN, 1)


@pytest.mark.usefixtures("short_sweep")
@pytest.mark.parametrize(("name", "code"), [("wrong", ExitCode.WRONG), ("raises", ExitCode.COULD_NOT_RUN)])
def test_check_ends_as_prove_does(name: str, code: ExitCode, flashmoe: Flashmoe) -> None:
    assert flashmoe("check", f"mine.py:{name}")[0] == code


def test_help_lists_every_code(flashmoe: Flashmoe) -> None:
    _, lines = flashmoe("--help")
    table = lines[lines.index("Exit codes:") + 1 :]
    text = " ".join(" ".join(table).split())
    assert set(MEANINGS) == set(ExitCode)
    for code, meaning in MEANINGS.items():
        assert f"{code} {code.word}: {meaning}" in text
