"""Kernels of ours, good and bad, through a whole run in process: each fault ends in a recorded refusal, never in a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
import torch
from tests.harness.planted_kernels import honest, kernel
from tests.harness.rows import Rows

from flashmoe_science.exit_codes import ExitCode
from flashmoe_science.kernel import Config, Kernel
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.clocks import CannotTime, Sampler
from flashmoe_science.measure.kernels_run import KernelsRun
from flashmoe_science.measure.oracle import Oracle
from flashmoe_science.measure.request import Group, Request
from flashmoe_science.measure.session import Outcome, Session
from flashmoe_science.measure.worker import clocks
from flashmoe_science.measure.worker.calls import Calls
from flashmoe_science.operations import kernel_named, parse_problem
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionOutput
from flashmoe_science.ops.attention.front import kernels
from flashmoe_science.problem import Problem
from flashmoe_science.records import CorrectnessRow, EndRow, NoteRow, RefusalRow, RunRow, TimingRow

CPU = Bench(torch.device("cpu"), None)
PROBLEM = parse_problem("attn b1 h2 q24 d16 fp32")
SDPA = kernel_named("sdpa")


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """A clock that a busy machine cannot disturb. Calls are still made; what they take is stated: the next time of the kernel's
    ("name (config)", or its name), the last one for ever."""
    stated: dict[str, list[float]] = {}
    named: dict[object, tuple[str, str]] = {}  # by slot
    ticks = count()

    def prepare(self: clocks.Clocks, who: str, config: str, **how: object) -> dict[str, object]:
        answer = real(self, who, config, **how)
        if "slot" in answer:
            named[answer["slot"]] = (who, config)
        return answer

    def sample(self: clocks.Clocks, slot: int, cut_at: float | None = None, path: str = "") -> dict[str, object]:
        if cut_at is not None:
            return real_sample(self, slot, cut_at, path)
        self._slots[slot].bound[0]()
        who, config = named[slot]
        values = stated.get(f"{who} ({config})", stated.get(who))
        if values is None:
            return {"ns": 100_000.0 + 100.0 * (next(ticks) % 3)}
        return {"ns": values.pop(0) if len(values) > 1 else values[0]}

    real, real_sample = clocks.Clocks.prepare, clocks.Clocks.sample
    monkeypatch.setattr(clocks.Clocks, "prepare", prepare)
    monkeypatch.setattr(clocks.Clocks, "sample", sample)
    monkeypatch.setattr(clocks, "eager_sampler", lambda bench, call, inputs, **how: Sampler("eager", 1, lambda: 1.0))
    return stated


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Outcome, Rows]]:
    """Measure a kernel of ours against peers, as the operation's only ones."""

    def go(
        subject: Kernel, rivals: tuple[Kernel, ...] = (SDPA,), problems: tuple[Problem, ...] = (PROBLEM,), **asked: object
    ) -> tuple[Outcome, Rows]:
        monkeypatch.setattr(kernels, "ours", lambda: (subject,))
        monkeypatch.setattr(kernels, "PEERS", rivals)
        request = Request(kernel=(subject.name,), against=("all",), quick=True, command=("flashmoe", "prove"))
        request, rows = replace(request, **asked), Rows()
        group = Group("custom", "attention", problems)
        return KernelsRun(Session(CPU, rows, request, lambda *step: None), group).run(), rows

    return go


def test_an_honest_kernel_is_timed_against_itself_and_its_rival(run) -> None:
    outcome, rows = run(kernel())
    assert outcome.exit_code == ExitCode.GOOD
    assert [(row.kernel, row.rival) for row in rows.of(TimingRow)] == [("planted", "planted"), ("planted", "sdpa")]
    assert isinstance(rows[0], RunRow)
    assert isinstance(rows[-1], EndRow)
    assert {row.run for row in rows} == {outcome.run}
    assert rows.refusals() == []


def wrong_lse(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    good = honest(inputs, config)
    return AttentionOutput(good.out, None if good.lse is None else good.lse * 1.4427)


def test_a_wrong_log_sum_exp_is_refused_by_name_and_never_timed(run) -> None:
    """The other faults, planted in a kernel of ours, are in test_fault_corpus.py."""
    only = kernel(run=wrong_lse, supports=lambda problem, device: None if problem == PROBLEM else "not in preflight")
    outcome, rows = run(only)
    ((stage, reason),) = rows.refusals()
    assert stage == "correctness"
    assert "lse" in reason
    assert rows.of(TimingRow) == []
    assert not any(row.passed for row in rows.of(CorrectnessRow) if row.kernel == "planted")
    assert outcome.exit_code == ExitCode.WRONG
    assert "lse" in outcome.wrong[0]


def test_a_kernel_that_dies_on_the_problem_is_refused_with_its_last_words(run) -> None:
    def dies(inputs: AttentionInputs, config: Config) -> AttentionOutput:
        if inputs.problem == PROBLEM:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        return honest(inputs, config)

    outcome, rows = run(kernel(run=dies))
    assert rows.refusals() == [
        ("callpath", "it does not run: RuntimeError: CUDA error: an illegal memory access was encountered")
    ]
    assert outcome.exit_code == ExitCode.WRONG


def test_a_kernel_that_does_not_survive_preflight_stops_the_run(run) -> None:
    def dies(inputs: AttentionInputs, config: Config) -> AttentionOutput:
        raise ImportError("undefined symbol: _ZN3foo")

    outcome, rows = run(kernel(run=dies))
    assert outcome.exit_code == ExitCode.COULD_NOT_RUN
    assert outcome.stopped is not None
    assert "undefined symbol: _ZN3foo" in outcome.stopped
    assert rows.of(CorrectnessRow) == []
    assert rows[-1].exit_code == ExitCode.COULD_NOT_RUN


def out_of_memory(*given: object, **named: object) -> object:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14.00 GiB.")


NOT_EXAMINED = "not examined: the GPU has too little memory for the reference and the copies beside it (14 GiB needed"


@pytest.mark.parametrize("where", ["problem", "check", "_maths"])
def test_a_reference_that_memory_does_not_hold_is_no_fault_and_stops_no_other_problem(
    where: str, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, real = parse_problem("attn b1 h2 q48 d16 fp32"), getattr(Oracle, where)

    def only_small(self: Oracle, *given: object, **named: object) -> object:
        asked = named.get("text") or str(self._problem)
        return (out_of_memory if asked == str(large) else real)(self, *given, **named)

    monkeypatch.setattr(Oracle, where, only_small)
    outcome, rows = run(kernel(), problems=(large, PROBLEM))
    assert outcome.exit_code == ExitCode.NO_NUMBER
    assert outcome.wrong == []
    ((stage, reason),) = rows.refusals()
    assert (stage, reason[: len(NOT_EXAMINED)]) == ("sanity", NOT_EXAMINED)
    assert {row.problem for row in rows.of(TimingRow)} == {str(PROBLEM)}
    alone, _ = run(kernel(), problems=(large,))
    assert (alone.exit_code, alone.stopped) == (ExitCode.NO_NUMBER, None)


def test_a_kernel_that_runs_out_of_memory_itself_does_not_run(run) -> None:
    def hungry(inputs: AttentionInputs, config: Config) -> AttentionOutput:
        return honest(inputs, config) if inputs.problem != PROBLEM else out_of_memory()

    outcome, rows = run(kernel(run=hungry))
    assert outcome.exit_code == ExitCode.WRONG
    ((stage, reason),) = rows.refusals()
    assert stage == "callpath"
    assert "does not run: OutOfMemoryError: CUDA out of memory. Tried to allocate 14.00 GiB.; raised by the kernel" in reason


@pytest.mark.parametrize(("first", "refused"), [(0, "planted"), (1, "sdpa")])
def test_inputs_that_no_clock_finds_memory_for_are_no_fault(
    run, monkeypatch: pytest.MonkeyPatch, first: int, refused: str
) -> None:
    def sampler(bench: Bench, call: object, inputs: object, **how: object) -> Sampler:
        return out_of_memory() if next(prepared) == first else Sampler("eager", 1, lambda: 1.0)

    prepared = count()
    monkeypatch.setattr(clocks, "eager_sampler", sampler)
    outcome, rows = run(kernel())
    assert {(row.kernel, row.stage) for row in rows.of(RefusalRow)} == {(refused, "timing")}
    assert outcome.exit_code == ExitCode.NO_NUMBER


def test_of_a_wrong_kernel_no_clock_is_asked_nor_a_rival(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(inputs: AttentionInputs, config: Config) -> AttentionOutput:
        return (honest if inputs.problem != PROBLEM else wrong_lse)(inputs, config)

    monkeypatch.setattr(clocks, "eager_sampler", None)
    _, rows = run(kernel(run=wrong))
    assert "sdpa" not in {row.kernel for row in rows.of(CorrectnessRow)}
    assert {stage for stage, _ in rows.refusals()} == {"correctness"}


def test_a_wrong_rival_is_left_out_and_does_not_make_ours_wrong(run) -> None:
    bad = kernel("bad_peer", "peer", run=wrong_lse)
    outcome, rows = run(kernel(), rivals=(bad, SDPA))
    assert outcome.exit_code == ExitCode.GOOD
    assert [row.rival for row in rows.of(TimingRow)] == ["planted", "sdpa"]
    assert rows.refusals("bad_peer")[0][0] == "correctness"


def test_a_kernel_that_no_clock_can_time_gets_a_refusal_and_no_number(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def sampler(bench: Bench, call: object, inputs: object, **how: object) -> Sampler:
        if next(prepared) == 0:  # the subject is the first
            raise CannotTime("its CUDA graph could not be captured: operation not permitted")
        return Sampler("eager", 1, lambda: 1.0)

    prepared = count()
    monkeypatch.setattr(clocks, "eager_sampler", sampler)
    outcome, rows = run(kernel())
    assert rows.refusals() == [("timing", "its CUDA graph could not be captured: operation not permitted")]
    assert rows.of(TimingRow) == []
    assert outcome.exit_code == ExitCode.NO_NUMBER


def test_a_kernel_that_takes_more_memory_than_it_promises_is_refused(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(self: Calls, who: str, config: str, case: dict[str, object]) -> dict[str, int]:
        return {"peak": 5000 if who == "planted" else 10**9, "results": 4000}

    monkeypatch.setattr(Calls, "memory", memory)
    outcome, rows = run(kernel())
    assert rows.refusals() == [("correctness", "one call takes 5000 bytes of device memory; its results are 4000")]
    assert outcome.exit_code == ExitCode.WRONG
    promised = kernel(workspace=lambda problem, config: 1000)
    assert run(promised)[0].exit_code == ExitCode.GOOD
    less = kernel(workspace=lambda problem, config: 999)
    words = "one call takes 5000 bytes of device memory; its results are 4000 and the workspace that it promises 999"
    assert run(less)[1].refusals() == [("correctness", words)]


def test_what_cannot_serve_a_problem_is_noted_not_skipped(run) -> None:
    unable = kernel("unable", "peer", supports=lambda problem, device: "it needs a moon")
    absent = kernel("absent", "peer", absent=lambda: "absent-wheel is not installed")
    _, rows = run(kernel(), rivals=(unable, absent, SDPA))
    notes = {(row.kernel, row.text) for row in rows.of(NoteRow)}
    assert {("unable", "it needs a moon"), ("absent", "absent-wheel is not installed")} <= notes
    assert not {"unable", "absent"} & {row.kernel for row in rows.of(CorrectnessRow)}


def test_every_config_is_tried_and_the_fastest_is_examined_and_timed(run, times: dict[str, list[float]]) -> None:
    configs = tuple(Config(block=size) for size in (16, 32, 64))
    times.update({"planted (block=16)": [3e6], "planted (block=32)": [1e6], "planted (block=64)": [2e6], "sdpa": [1e6]})
    _, rows = run(kernel(configs=lambda problem, device: configs), quick=False)
    assert {row.config for row in rows.of(TimingRow)} == {"block=32"}
    assert [row.config for row in rows.of(CorrectnessRow) if row.kernel == "planted"] == ["block=32"]
    (note,) = [row.text for row in rows.of(NoteRow) if "planted (block=64): 2000000 ns" in row.text]
    assert note.startswith("quick bench (eager): planted (block=32): 1000000 ns")
