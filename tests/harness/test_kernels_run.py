"""Faults planted on purpose: each must end in a recorded refusal that names it, never in a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
import torch

from flashmoe_science.kernel import Config, Kernel, Launch
from flashmoe_science.measure import round
from flashmoe_science.measure.bench import Bench, Candidate
from flashmoe_science.measure.inputs import InputSets
from flashmoe_science.measure.ledger import COULD_NOT_RUN, GOOD, UNTRUSTWORTHY, WRONG, Ledger
from flashmoe_science.measure.paths import Seen
from flashmoe_science.measure.session import Options, Outcome, Session
from flashmoe_science.measure.timing import CannotTime, Sampler
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.inputs import AttentionInputs, AttentionOutput
from flashmoe_science.ops.attention.oracle import attention_oracle
from flashmoe_science.ops.attention.peers import PEERS
from flashmoe_science.records import (
    CallPathRow,
    CorrectnessRow,
    EndRow,
    NoteRow,
    RefusalRow,
    Row,
    RunRow,
    SeenLaunch,
    TimingRow,
)

CPU = Bench(torch.device("cpu"), None)
PROBLEM = parse_problem("attn b1 h2 q24 d16 fp32")
SDPA = next(kernel for kernel in PEERS if kernel.name == "sdpa")
MATH = next(kernel for kernel in PEERS if kernel.name == "sdpa_math")
Run = Callable[[AttentionInputs, Config], AttentionOutput]


@dataclass
class Rows:
    rows: list[Row] = field(default_factory=list)

    def append(self, row: Row) -> None:
        self.rows.append(row)

    def of(self, kind: type[Row]) -> list[Row]:
        return [row for row in self.rows if isinstance(row, kind)]

    def refusals(self, kernel: str = "planted") -> list[tuple[str, str]]:
        return [(row.stage, row.reason) for row in self.rows if isinstance(row, RefusalRow) and row.kernel == kernel]


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a busy machine cannot disturb. The real one, beside other tests, finds a kernel twice as slow at times, and
    the sanity stage then refuses it, rightly. Calls are still made; what they take is played."""

    def played(bench: Bench, call: Callable[[AttentionInputs], object], inputs: InputSets) -> Sampler:
        ticks = count()

        def sample() -> float:
            call(inputs.first)
            return 100_000.0 + 100.0 * (next(ticks) % 3)

        return Sampler("eager", 1, sample)

    monkeypatch.setattr(round, "eager_sampler", played)


def planted(run: Run, **changes: object) -> Kernel:
    kernel = Kernel(
        name="planted",
        origin="ours",
        op="attention",
        about="a fault",
        supports=lambda problem, device: None,
        configs=lambda problem, device: (Config(block=1),),
        run=run,
        launches=lambda problem, config, gpu: (Launch("^planted$"),),
    )
    return replace(kernel, **changes)


def honest(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    out, lse = attention_oracle(inputs)
    out = out.to(inputs.q.dtype)
    if inputs.out is not None:
        out = inputs.out.copy_(out)
    return AttentionOutput(out, lse.float() if inputs.return_lse else None)


def run(kernel: Kernel, rivals: tuple[Kernel, ...] = (SDPA,), **options: object) -> tuple[Outcome, Rows]:
    rows = Rows()
    asked = Options("custom", (PROBLEM,), (kernel,), rivals, ("flashmoe", "prove"), quick=True)
    return Session(CPU, rows, replace(asked, **options), lambda progress: None).run(), rows


def test_an_honest_kernel_is_timed_against_itself_and_its_rival() -> None:
    outcome, rows = run(planted(honest))
    assert outcome.exit_code == GOOD
    assert [(row.kernel, row.rival) for row in rows.of(TimingRow)] == [("planted", "planted"), ("planted", "sdpa")]
    assert isinstance(rows.rows[0], RunRow)
    assert isinstance(rows.rows[-1], EndRow)
    assert {row.run for row in rows.rows} == {outcome.run}
    assert rows.refusals() == []


def zeros(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    good = honest(inputs, config)
    good.out.zero_()
    return good


def one_wrong_element(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    good = honest(inputs, config)
    good.out[0, 1, 7, 3] += 0.01
    return good


def last_row_unwritten(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    good = honest(replace(inputs, out=None), config)
    if inputs.out is None:
        return good
    inputs.out[:, :, :-1] = good.out[:, :, :-1]
    return AttentionOutput(inputs.out, good.lse)


def wrong_lse(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    good = honest(inputs, config)
    return AttentionOutput(good.out, None if good.lse is None else good.lse * 1.4427)


def mutating(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    good = honest(inputs, config)
    inputs.v.mul_(1.0001)
    return good


def elsewhere(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    return honest(replace(inputs, out=None), config)


class Dithering:
    """Right to rounding, but not the same twice."""

    calls = 0

    def __call__(self, inputs: AttentionInputs, config: Config) -> AttentionOutput:
        self.calls += 1
        good = honest(inputs, config)
        good.out.mul_(1 + (self.calls % 2) * 2**-23)
        return good


class CachedAnswer:
    """Remembers the answer by the address of the inputs."""

    def __init__(self) -> None:
        self.kept: dict[int, AttentionOutput] = {}

    def __call__(self, inputs: AttentionInputs, config: Config) -> AttentionOutput:
        if inputs.q.data_ptr() not in self.kept:
            self.kept[inputs.q.data_ptr()] = honest(replace(inputs, out=None, return_lse=True), config)
        kept = self.kept[inputs.q.data_ptr()]
        return kept if inputs.out is None else AttentionOutput(inputs.out.copy_(kept.out), kept.lse)


class Lazy(torch.Tensor):
    """A tensor subclass, which could put off its work until somebody looks."""


def lazy(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    good = honest(inputs, config)
    return AttentionOutput(good.out.as_subclass(Lazy), good.lse)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (zeros, "error"),
        (one_wrong_element, "[0, 1, 7, 3]"),
        (last_row_unwritten, "NaN"),
        (wrong_lse, "lse"),
        (mutating, "it changed its inputs"),
        (elsewhere, "another tensor than the one it was given"),
        (Dithering(), "differs from run to run"),
        (CachedAnswer(), "does not answer anew"),
        (lazy, "not a plain tensor"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__) if callable(value) else "",
)
def test_a_wrong_kernel_is_refused_by_name_and_never_timed(fault: Run, words: str) -> None:
    outcome, rows = run(planted(fault))
    ((stage, reason),) = rows.refusals()
    assert stage == "correctness"
    assert words in reason
    assert rows.of(TimingRow) == []
    assert [row.passed for row in rows.of(CorrectnessRow) if row.kernel == "planted"] == [False]
    assert outcome.exit_code == WRONG
    assert words in outcome.wrong[0]


def test_a_kernel_that_dies_on_the_problem_is_refused_with_its_last_words() -> None:
    def dies(inputs: AttentionInputs, config: Config) -> AttentionOutput:
        if inputs.problem == PROBLEM:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        return honest(inputs, config)

    outcome, rows = run(planted(dies))
    assert rows.refusals() == [
        ("callpath", "it does not run: RuntimeError: CUDA error: an illegal memory access was encountered")
    ]
    assert outcome.exit_code == WRONG


def test_a_kernel_that_does_not_survive_preflight_stops_the_run() -> None:
    def dies(inputs: AttentionInputs, config: Config) -> AttentionOutput:
        raise ImportError("undefined symbol: _ZN3foo")

    outcome, rows = run(planted(dies))
    assert outcome.exit_code == COULD_NOT_RUN
    assert outcome.stopped is not None
    assert "undefined symbol: _ZN3foo" in outcome.stopped
    assert rows.of(CorrectnessRow) == []
    assert rows.rows[-1].exit_code == COULD_NOT_RUN


def test_a_wrong_rival_is_left_out_and_does_not_make_ours_wrong() -> None:
    bad = planted(zeros, name="bad_peer", origin="peer")
    outcome, rows = run(planted(honest), rivals=(bad, SDPA))
    assert outcome.exit_code == GOOD
    assert [row.rival for row in rows.of(TimingRow)] == ["planted", "sdpa"]
    assert rows.refusals("bad_peer")[0][0] == "correctness"


def forge_clock(monkeypatch: pytest.MonkeyPatch, times: dict[str, list[float]]) -> None:
    """Give every sampler of a kernel the next of its times, the last one for ever."""
    left = {name: list(values) for name, values in times.items()}

    def sampler(self: round.Round, entrant: round.Entrant, clock: str, inputs: object) -> Sampler:
        values = left.get(entrant.candidate.name, [1e6])
        return Sampler("eager", 1, lambda: values.pop(0) if len(values) > 1 else values[0])

    monkeypatch.setattr(round.Round, "_sampler", sampler)


def test_zero_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forge_clock(monkeypatch, {"planted": [0.0]})
    outcome, rows = run(planted(honest))
    assert rows.of(TimingRow) == []
    assert {(stage, reason.split(" (")[0]) for stage, reason in rows.refusals()} == {("sanity", "a sample took no time at all")}
    assert outcome.exit_code == UNTRUSTWORTHY


def test_a_time_far_from_the_quick_benchs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forge_clock(monkeypatch, {"planted": [*[1e6] * 10, 1e5]})  # honest while it is looked at
    outcome, rows = run(planted(honest))
    assert rows.of(TimingRow) == []
    assert "where the quick bench found 1000000 ns" in rows.refusals()[0][1]
    assert outcome.exit_code == UNTRUSTWORTHY


def test_a_kernel_that_cannot_be_captured_gets_a_refusal_and_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampler(self: round.Round, entrant: round.Entrant, clock: str, inputs: object) -> Sampler:
        if entrant.candidate.name == "planted":
            raise CannotTime("its CUDA graph could not be captured: operation not permitted when stream is capturing")
        return Sampler("eager", 1, lambda: 1e6)

    monkeypatch.setattr(round.Round, "_sampler", sampler)
    outcome, rows = run(planted(honest))
    assert rows.refusals() == [
        ("timing", "its CUDA graph could not be captured: operation not permitted when stream is capturing")
    ]
    assert rows.of(TimingRow) == []
    assert outcome.exit_code == UNTRUSTWORTHY


def test_a_kernel_that_ran_another_is_refused_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documents' second failure: the bindings called the old 128-thread kernel."""
    from flashmoe_science.hardware.gpus import gpu_named

    old = SeenLaunch(name="old_kernel", grid=(1, 1, 1), block=(128, 1, 1), shared_bytes=0)
    seen = Seen(problem=str(PROBLEM), kernel="planted", config="block=1", planned=[old], by_user=[old])
    rows = Rows()
    plan = round.Plan((planted(honest),), (), 1, round.Sampling(1, 1, 1.0), True, 0, None)
    one = round.Round(
        Bench(torch.device("cpu"), gpu_named("h200")),
        PROBLEM,
        plan,
        {(str(PROBLEM), "planted", "block=1"): seen},
        Ledger("r", rows),
        lambda text: None,
    )
    monkeypatch.setattr(Bench, "synchronize", lambda self: None)
    one.go()
    (path,) = rows.of(CallPathRow)
    said = ["promised a kernel named '^planted$'; saw 'old_kernel'", "launched 'old_kernel', which it did not promise"]
    assert path.broken_promises == [*said, *(f"called by a user: {reason}" for reason in said)]
    assert rows.refusals()[0][0] == "callpath"
    assert rows.of(CorrectnessRow) == rows.of(TimingRow) == []


def test_what_cannot_serve_a_problem_is_noted_not_skipped() -> None:
    unable = planted(honest, name="unable", supports=lambda problem, device: "it needs a moon")
    _, rows = run(planted(honest), rivals=(unable, SDPA))
    assert ("unable", "it needs a moon") in [(row.kernel, row.text) for row in rows.of(NoteRow)]


def test_an_absent_peer_is_noted() -> None:
    absent = planted(honest, name="absent", origin="peer", absent=lambda: "absent-wheel is not installed")
    _, rows = run(planted(honest), rivals=(absent, SDPA))
    assert ("absent", "absent-wheel is not installed") in [(row.kernel, row.text) for row in rows.of(NoteRow)]
    assert "absent" not in {row.kernel for row in rows.of(CorrectnessRow)}


def test_a_spent_budget_ends_cleanly_with_what_there_is() -> None:
    outcome, rows = run(planted(honest), budget_s=1e-9)
    assert (outcome.problems_done, outcome.problems_left) == (0, 1)
    assert any("the budget of 1e-09 s is spent: 1 problems" in row.text for row in rows.of(NoteRow))
    assert isinstance(rows.rows[-1], EndRow)


def test_every_config_is_tried_and_the_fastest_competes(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = tuple(Config(block=size) for size in (16, 32, 64))
    times = {"block=16": 3e6, "block=32": 1e6, "block=64": 2e6}

    def sampler(self: round.Round, entrant: round.Entrant, clock: str, inputs: object) -> Sampler:
        return Sampler("eager", 1, lambda: times.get(str(entrant.candidate.config), 1e6))

    monkeypatch.setattr(round.Round, "_sampler", sampler)
    _, rows = run(planted(honest, configs=lambda problem, device: configs), configs=3)
    assert {row.config for row in rows.of(TimingRow)} == {"block=32"}
    assert {row.config for row in rows.of(CorrectnessRow) if row.kernel == "planted"} == set(times)


def test_a_candidate_prints_with_its_config() -> None:
    assert str(Candidate(planted(honest), Config(block=1))) == "planted (block=1)"
    assert str(Candidate(MATH, Config())) == "sdpa_math"
