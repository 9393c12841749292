"""What a run comes to: the exit code, and the first line with a number, or with the reason and what to do."""

from __future__ import annotations

import pytest
from tests.unit.fabricated import LONGER, PROBLEM, Fabricate, verdicts

from flashmoe_science.exit_codes import ExitCode, worst
from flashmoe_science.judge.ending import code_of, first_lines, left_out

MINE = "mine.py:attention"


def on_cpu(quick: bool = True) -> Fabricate:
    return Fabricate(gpu=None, suite="custom", quick=quick)


def beside(run: Fabricate, rival: str = "sdpa", problem: str = PROBLEM, off: float = 1.0, time: float = 40_000) -> Fabricate:
    """The function at half the rival's speed, the control off by so much."""
    run.control(MINE, problem=problem, clock="eager", cache="warm", off=off)
    return run.timed(MINE, time, rival, 20_000, problem=problem, clock="eager", cache="warm")


def ended(run: Fabricate) -> tuple[ExitCode, list[str]]:
    whole = [run.done()]
    rows = verdicts(whole)
    return code_of(rows), first_lines(whole, rows)


def test_a_slower_function_is_good_and_its_number_is_in_the_first_line() -> None:
    code, (line,) = ended(beside(on_cpu()))
    assert code == ExitCode.GOOD
    assert line.startswith(f"slower: {MINE}: 40.")
    assert " us a call, 0.50x (" in line
    assert line.endswith(f"against sdpa, on {PROBLEM}")


@pytest.mark.parametrize(("quick", "do"), [(True, ", and without --quick, which takes few samples"), (False, "")])
def test_a_control_that_is_off_is_told_with_what_to_do(quick: bool, do: str) -> None:
    code, (line,) = ended(beside(on_cpu(quick), off=0.9))
    assert code == ExitCode.NO_NUMBER
    assert line.startswith(f"no number: {MINE} against itself came out slower: 0.9")
    assert line.endswith(f"]; measure again with less other work on this machine{do} ({MINE} on {PROBLEM})")


def test_one_refused_number_of_two_is_no_success_on_a_cpu_either() -> None:
    code, (line,) = ended(beside(beside(on_cpu()), problem=LONGER, off=0.9))
    assert code == ExitCode.NO_NUMBER
    assert line.startswith("no number: ")
    assert f"({MINE} on {LONGER}); otherwise slower: " in line
    assert line.endswith(f"0.50x (0.50x to 0.50x) against sdpa, on {PROBLEM}")


def test_a_wrong_result_is_told_before_the_numbers_that_there_are() -> None:
    run = beside(on_cpu()).refused("correctness", "out: maximum error 2 is above 1", MINE, LONGER)
    code, (line,) = ended(run)
    assert code == ExitCode.WRONG
    assert line.startswith(f"wrong: out: maximum error 2 is above 1 ({MINE} on {LONGER}); otherwise slower: ")
    assert "measure again" not in line


def test_what_could_not_be_loaded_could_not_run() -> None:
    code, (line,) = ended(on_cpu().refused("preflight", "it could not be loaded: SyntaxError", MINE))
    assert code == ExitCode.COULD_NOT_RUN
    assert line == f"could not run: it could not be loaded: SyntaxError ({MINE} on {PROBLEM})"


def test_what_was_caught_is_not_measured_again() -> None:
    code, (line,) = ended(on_cpu().refused("sanity", "a sample took no time at all", MINE))
    assert code == ExitCode.NO_NUMBER
    assert line == f"no number: a sample took no time at all ({MINE} on {PROBLEM})"


def test_a_rivals_refused_number_is_no_failure_of_the_function() -> None:
    run = beside(on_cpu()).refused("correctness", "out: maximum error 2 is above 1", "sdpa_math")
    assert ended(run)[0] == ExitCode.GOOD


def test_a_broken_promise_and_no_ratio_at_all_are_no_success() -> None:
    assert ended(beside(on_cpu()).refused("promise", "it promised twice", MINE))[0] == ExitCode.NO_NUMBER
    run = on_cpu().control(MINE, clock="eager", cache="warm").timed(MINE, 40_000, "sdpa", 20_000, clock="eager", cache="warm")
    assert ended(run.refused("correctness", "out: maximum error 2 is above 1", "sdpa"))[0] == ExitCode.NO_NUMBER


def test_nothing_to_compare_with_says_who_took_no_part() -> None:
    run = on_cpu().control(MINE, clock="eager", cache="warm").noted("it takes no odd lengths", "sdpa_math", PROBLEM)
    run.noted("it opens a file for writing", MINE, PROBLEM)
    assert ended(run) == (ExitCode.GOOD, [])  # no verdict: whoever measured knows that something was to be timed
    assert left_out([run.done()]) == {"sdpa_math": [f"sdpa_math on {PROBLEM}: it takes no odd lengths"]}


def test_kernels_of_the_package_are_counted_by_suite_and_clock() -> None:
    run = Fabricate().control().timed("fwd_triton", 20_000, "fa3", 24_000)
    run.control(problem=LONGER, off=0.9).timed("fwd_triton", 20_000, "fa3", 24_000, problem=LONGER)
    code, (line,) = ended(run)
    assert code == ExitCode.NO_NUMBER
    assert line.startswith("1 faster, 1 refused: documents on h200, graph clock, cold cache: 1.20x (")
    assert line.endswith(f"; measure again with less other work on this machine (fwd_triton on {LONGER})")


def test_the_worst_of_several_is_wrong_then_could_not_run_then_no_number() -> None:
    codes = [ExitCode.GOOD, ExitCode.NO_NUMBER, ExitCode.COULD_NOT_RUN, ExitCode.WRONG]
    assert [worst(codes[:end]) for end in range(5)] == [ExitCode.GOOD, *codes]
