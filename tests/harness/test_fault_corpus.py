"""Every fault of docs/faults.md, planted and put on trial as a user would: each must be refused in words that name it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from flashmoe_science.measure.ledger import GOOD
from flashmoe_science.measure.session import Outcome
from flashmoe_science.measure.trial import contest
from flashmoe_science.measure.trial.trials import Options, Trials

from flashmoe_science.judge.verdicts import verdicts_of
from flashmoe_science.measure import sanity
from flashmoe_science.measure.bench import Bench, bench_here
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.records import CorrectnessRow, RefusalRow, Row, RunRow, TimingRow
from flashmoe_science.store import Run

FAULTS = Path(__file__).parent / "faults"
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"

ATTENTION = "attn b1 h2 q70 d16 fp32 causal"  # 70: no tile divides it
UNEQUAL = "attn b1 h2 q24 k40 d16 fp32 causal"
GROUPED = "attn b1 h4 hk2 q70 d16 fp32 causal"
EXPERTS = "moe t50 e6 k2 d32 f24 fp32"
ON_GPU = "attn b1 h2 q100 d64 fp16"
ONE_HEAD = "attn b1 h1 q100 d64 fp16"
WATCHDOG_S = 30.0


@dataclass(frozen=True)
class Fault:
    """A fault's file and what its refusal must say: every one of ``words``, each of which may be alternatives."""

    name: str
    stage: str
    words: tuple[str, ...]
    problem: str | None = ATTENTION
    function: str = "attention"
    has_a_number: bool = False  # a true one, and not the one that it promised

    @property
    def spec(self) -> str:
        return f"{FAULTS / self.name}.py:{self.function}"


def fault(name: str, stage: str, *words: str, **more: object) -> Fault:
    return Fault(name, stage, words, **more)  # type: ignore[arg-type]


# Faults that are found by calls alone.
WRONG = (
    fault("wrong_in_one_element", "correctness", r"\(at \[0, 1, 7, 3\]\)", "1 of 2240 elements is wrong"),
    fault("tile_of_48", "correctness", r"maximum error [23]\.\d+ is above"),
    fault("ignores_the_mask", "correctness", "maximum error"),
    fault("another_mask", "correctness", "maximum error", problem=UNEQUAL),
    fault("ignores_the_scale", "correctness", "softmax scale"),
    fault("no_maximum", "correctness", "on inputs that are large", "NaN or infinite"),
    fault("constant_output", "correctness", "its output is constant"),
    fault("maximum_from_zero", "correctness", "every score far below zero"),
    fault("mask_of_minus_100", "correctness", "every score far below zero"),
    fault("right_on_zeros_only", "correctness", "maximum error", "all zero it is right"),
    fault("right_on_one_seed", "correctness", "right for one seed, wrong for another"),
    fault("bf16_inside", "correctness", "lower precision inside"),
    fault("fp8_inside", "correctness", "lower precision inside"),
    fault("row_sum_in_halves", "correctness", "lower precision inside", problem=None, function="row_sum"),
    fault("output_not_written", "correctness", "unwritten"),
    fault("writes_past_the_end", "correctness", r"wrote past the end of an input \(v\)"),
    fault("writes_past_its_output", "correctness", "wrote past the end of a tensor that it allocated"),
    fault("reads_beyond_its_tensors", "correctness", "reads beyond its tensors", "NaN"),
    fault("changes_its_input", "correctness", r"changed its inputs \(v\)"),
    fault("returns_its_input", "correctness", "memory of an input"),
    fault("cached_by_pointer", "correctness", "output of an earlier call", "the same memory, new values"),
    fault("cached_by_shape", "correctness", "output of an earlier call", "other memory"),
    fault("reuses_its_output", "correctness", "memory of its earlier output"),
    fault("rings_of_outputs", "correctness", "memory of its earlier output"),
    fault("changes_earlier_answers", "correctness", "still holds is changed by a later call"),
    fault("wrong_now_and_then", "correctness", "wrong now and then", "index 69 of dimension 2|maximum error"),
    fault("fails_now_and_then", "correctness", "it failed in one call|does not run", "no buffer is free"),
    fault("returns_nothing_at_times", "correctness", "left to its default", "NoneType, not a plain tensor"),
    fault("works_on_a_thread", "correctness", "another stream or thread"),
    fault("burns_the_other_cores", "correctness", "threads of its own go on", "_burn"),
    fault("changes_the_settings", "correctness", "settings changed", "num_threads", "float32_matmul_precision"),
    fault("lazy_output", "correctness", "_Lazy, not a plain tensor"),
    fault("not_the_same_twice", "correctness", "promised the same bits"),
    fault("wrong_shape", "correctness", r"shape \[1, 70, 2, 16\]"),
    fault("wrong_dtype", "correctness", "float64; it must be float32"),
    fault("crashes", "correctness", "crashed: SIGSEGV", "illegal memory access"),
    fault("exits", "correctness", "ended the process with code 0"),
    fault("ends_the_interpreter", "correctness", r"sys.exit\(0\)"),
    fault("forges_an_answer", "correctness", "harness's own pipe"),
    fault("moe_drops_tokens", "correctness", "maximum error", problem=EXPERTS, function="experts"),
    fault("moe_swaps_gate_and_up", "correctness", "maximum error", problem=EXPERTS, function="experts"),
    fault("moe_room_for_few", "correctness", "all tokens for the same experts", problem=EXPERTS, function="experts"),
    fault("does_not_import", "preflight", "undefined symbol: _ZN2at4_ops"),
    fault("works_ahead", "sanity", "replaced torch._foreach_mul_"),
    fault("replaces_an_operator", "sanity", "replaced the operator aten::clone"),
    fault("leaves_a_mode", "correctness", "settings changed", "torch function modes"),
    fault("patches_the_timer", "sanity", "replaced time.perf_counter", "clocks"),
    fault("heads_interleaved", "correctness", r"reads key/value head h % heads_kv", problem=GROUPED),
    fault("requires_grad", "correctness", "its output requires gradients"),
    fault("sums_its_input", "correctness", "output of an earlier call", "one element of an input changed"),
    fault("sets_backend_flags", "correctness", "settings changed", "cudnn.benchmark True", "denormal", "garbage collection"),
    fault("drifts", "correctness", "wrong now and then", "error grows from call to call"),
)
# Faults that only a clock meets.
TIMED = (
    fault("skips_after_many_calls", "correctness", "skips work when it is timed"),
    fault("skips_when_timed", "correctness", "skips work when it is timed"),
    fault(
        "works_on_more_threads",
        "timing",
        "on other threads than the one that it and its rivals are timed on",
        problem="attn b1 h8 q512 d64 fp32",
    ),
    fault("starts_a_burner", "timing", "processes that it started work while it is timed|rival was slowed"),
    fault("knows_a_cut_sample", "correctness", "skips work when it is timed"),
    fault("puts_work_off", "timing", "puts work off until somebody looks"),
    fault("slows_its_rival", "timing", "rival was slowed"),
    fault(
        "claims_more_than_it_gives",
        "sanity",
        r"promised 1\.7 times",
        r"measured against sdpa: 0\.\d+ times",
        has_a_number=True,
    ),
)
FORGED = fault("forges_samples", "timing", "clock disagrees with the harness's")
SLOW = (fault("hangs", "correctness", "hung: no answer within 15 s"),)
GPU = (
    # One head: what is past its rows is past the tensor.
    fault("gpu/writes_past_the_end", "correctness", "wrote past the end of a tensor that it allocated", problem=ONE_HEAD),
    fault("gpu/reads_beyond_its_tensors", "correctness", "reads beyond its tensors", problem=ONE_HEAD),
    fault("gpu/wrong_kernel", "callpath", "threads a block 384, saw 128", problem=ON_GPU),
    fault("gpu/another_kernel", "callpath", "promised a kernel named 'warp_specialised_attention'; saw", problem=ON_GPU),
    fault("gpu/tile_too_large", "correctness", "shared memory", problem=ON_GPU),
    fault("gpu/side_stream", "callpath|correctness", "stream", problem=ON_GPU),
    fault("gpu/skips_when_captured", "timing|correctness", "skips work when it is timed", problem=ON_GPU),
    fault("gpu/patches_the_events", "sanity", "replaced", "elapsed_time|synchronize", problem=ON_GPU),
    fault("gpu/keeps_the_l2", "correctness|sanity", "L2", problem=ON_GPU),
    # In 16 bits, most of what the order of a sum changes is rounded off.
    fault("gpu/races", "correctness", "promised the same bits", problem="attn b1 h2 q100 d64 fp32"),
)


HARMLESS = {"floods_its_output", "leaves_an_idle_thread"}


class Rows:
    def __init__(self) -> None:
        self.rows: list[Row] = []

    def append(self, row: Row) -> None:
        self.rows.append(row)

    def refusals(self, spec: str) -> list[RefusalRow]:
        return [row for row in self.rows if isinstance(row, RefusalRow) and row.kernel == spec]


def put_on_trial(bench: Bench, one: Fault, watchdog_s: float = WATCHDOG_S) -> tuple[Outcome, Rows]:
    problems: tuple[Problem, ...] | None = None if one.problem is None else (parse_problem(one.problem),)
    rows = Rows()
    options = Options(
        suite="custom",
        specs=(one.spec,),
        problems=problems,
        against=("sdpa",) if one.function == "attention" else (),
        every=False,
        command=("flashmoe", "prove"),
        quick=True,
        seed=42,
        repeats=3,
        watchdog_s=watchdog_s,
        budget_s=None,
    )
    return Trials(bench, rows, options, lambda progress: None).run(), rows


def assert_named(one: Fault, outcome: Outcome, rows: Rows) -> None:
    """Refused, in its words, at its stage; and no number of it against a rival."""
    said = rows.refusals(one.spec)
    assert said, f"{one.name} was not refused"
    reasons = "; ".join(row.reason for row in said)
    for words in one.words:
        assert re.search(words, reasons), f"{words!r} is not in: {reasons}"
    assert any(re.fullmatch(one.stage, row.stage) for row in said)
    header, *rest = rows.rows
    assert isinstance(header, RunRow)
    found = {verdict.verdict for verdict in verdicts_of(Run(header, tuple(rest))) if verdict.kernel == one.spec}
    assert one.has_a_number or found == {"refused"}
    assert outcome.exit_code != GOOD


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that are started
    return Bench(torch.device("cpu"), None)


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine's other work does to a time is no fault of a kernel's: the checks that find it are left out."""

    def impossible(samples: Sequence[int], floor: float, expected: float | None) -> str | None:
        return sanity.impossible(samples, floor, None)

    monkeypatch.setattr(contest, "impossible", impossible)
    monkeypatch.setattr(contest, "disagreement", lambda remote, ping: None)


@pytest.mark.parametrize("one", WRONG, ids=lambda one: one.name)
def test_a_wrong_kernel_is_caught_by_name(cpu: Bench, one: Fault) -> None:
    outcome, rows = put_on_trial(cpu, one)
    assert_named(one, outcome, rows)
    assert [row for row in rows.rows if isinstance(row, TimingRow)] == []


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("one", TIMED, ids=lambda one: one.name)
def test_a_kernel_that_cheats_the_clock_is_caught_by_name(cpu: Bench, one: Fault) -> None:
    assert_named(one, *put_on_trial(cpu, one))


def test_a_kernel_that_forges_its_samples_is_caught_by_another_clock(cpu: Bench) -> None:
    assert_named(FORGED, *put_on_trial(cpu, FORGED))


@pytest.mark.slow
@pytest.mark.parametrize("one", SLOW, ids=lambda one: one.name)
def test_a_kernel_that_takes_its_time_is_caught_by_name(cpu: Bench, one: Fault) -> None:
    assert_named(one, *put_on_trial(cpu, one, watchdog_s=15.0))


@pytest.mark.gpu
@pytest.mark.parametrize("one", GPU, ids=lambda one: one.name)
def test_a_fault_on_a_gpu_is_caught_by_name(one: Fault) -> None:
    assert_named(one, *put_on_trial(bench_here(), one))


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_a_kernel_that_prints_much_or_leaves_a_thread_waiting_is_no_worse_for_it(cpu: Bench, name: str) -> None:
    one = fault(name, "")
    outcome, rows = put_on_trial(cpu, one)
    assert rows.refusals(one.spec) == []
    assert [row.passed for row in rows.rows if isinstance(row, CorrectnessRow) and row.kernel == one.spec] == [True]
    assert outcome.exit_code == GOOD


@pytest.mark.usefixtures("undisturbed")
def test_a_kernel_that_remembers_what_it_was_asked_is_caught_or_gains_nothing(cpu: Bench) -> None:
    """It computes what its rival does, and looks at its inputs besides: anything but slower would be an answer that it kept.
    Where no timed sample meets the same values twice, there is nothing to be caught at."""
    one = fault("remembers_contents", "timing", "remembers answers")
    outcome, rows = put_on_trial(cpu, one)
    beside = [row for row in rows.rows if isinstance(row, TimingRow) and row.rival == "sdpa"]
    if not beside:
        assert_named(one, outcome, rows)
    for row in beside:
        assert statistics.median(theirs / own for own, theirs in zip(row.a, row.b, strict=True)) < 1.1


def test_every_fault_is_on_the_page_and_on_trial() -> None:
    files = {str(path.relative_to(FAULTS).with_suffix("")) for path in FAULTS.rglob("*.py")} - {"gpu/base"}
    tried = {one.name for one in (*WRONG, *TIMED, FORGED, *SLOW, *GPU)} | HARMLESS | {"remembers_contents"}
    assert tried == files
    kernels = PAGE.read_text(encoding="utf-8").split("## Of a measurement")[0]
    assert set(re.findall(r"`([a-z0-9_/]+)`", kernels)) >= files


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 10
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {name}"
