"""A verdict says what the records support, and no more: planted faults give a reason and no number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.unit.fabricated import PROBLEM, Fabricate, errors, verdicts

from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.records import CorrectnessRow, Stage, TimingRow
from flashmoe_science.store import Run


def of(rows: Sequence[Verdict], kernel: str, clock: str = "graph", problem: str = PROBLEM) -> Verdict:
    found = [row for row in rows if (row.kernel, row.clock, row.problem) == (kernel, clock, problem)]
    assert len(found) == 1, found
    return found[0]


def refused(row: Verdict, reason: str) -> None:
    """No number may be left in a refused verdict."""
    assert row.verdict == "refused"
    assert row.reason is not None
    assert reason in row.reason
    names = ("ratio", "low", "high", "tflops", "gbps", "time_ns", "rival_time_ns", "interval", "detectable", "spread")
    assert [getattr(row, name) for name in names] == [None] * len(names)


@pytest.fixture
def normal() -> Run:
    """Two kernels of ours, three peers; fa3 is the best peer."""
    run = Fabricate().control()
    run.timed("fwd_triton", 20_000, "fa3", 24_000).timed("fwd_triton", 20_000, "sdpa", 30_000)
    run.timed("fwd_triton", 20_000, "flex", 40_000).timed("fwd_gluon_sm90", 25_000, "fa3", 24_000)
    run.control(clock="eager").timed("fwd_triton", 22_000, "sdpa", 44_000, clock="eager")
    return run.done()


def test_each_kernel_of_ours_meets_the_best_peer_and_each_peer_our_best(normal: Run) -> None:
    rows = verdicts([normal])
    assert [(row.kernel, row.rival, row.clock) for row in rows] == [
        ("fwd_triton", "fa3", "graph"),
        ("fwd_gluon_sm90", "fa3", "graph"),
        ("fa3", "fwd_triton", "graph"),
        ("sdpa", "fwd_triton", "graph"),
        ("flex", "fwd_triton", "graph"),
        ("fwd_triton", "sdpa", "eager"),
        ("sdpa", "fwd_triton", "eager"),
    ]
    assert [row.verdict for row in rows] == ["faster", "slower", "slower", "slower", "slower", "faster", "slower"]
    assert [row.ratio for row in rows] == pytest.approx([1.2, 0.96, 1 / 1.2, 1 / 1.5, 1 / 2, 2, 1 / 2], rel=0.01)
    assert all(row.low < row.ratio < row.high for row in rows if row.low and row.ratio and row.high)


def test_a_config_that_is_wrong_is_left_aside() -> None:
    run = Fabricate().control(config="block_m=64")
    run.prove(PROBLEM, "fwd_triton", "block_m=48", passed=False)
    run.timed("fwd_triton", 10_000, "fa3", 24_000, config="block_m=48")
    run.timed("fwd_triton", 20_000, "fa3", 24_000, config="block_m=64")
    assert of(verdicts([run.done()]), "fwd_triton").config == "block_m=64"


def test_a_wrong_peer_is_no_rival() -> None:
    run = Fabricate().control()
    run.prove(PROBLEM, "fa4", passed=False)
    run.timed("fwd_triton", 20_000, "fa4", 15_000).timed("fwd_triton", 20_000, "sdpa", 30_000)
    rows = verdicts([run.done()])
    assert of(rows, "fwd_triton").rival == "sdpa"
    refused(of(rows, "fa4"), "wrong: its output is off by 1.51e+00 at [0, 1, 2, 3]; 1.00e-03 is allowed")


@pytest.mark.parametrize("ran", [True, False])
def test_a_peer_without_a_number_is_named(ran: bool) -> None:
    """Beside ours too, where it could run and had no time."""
    run = Fabricate().control().timed("fwd_triton", 20_000, "sdpa", 30_000).refused("timing", "no graph", "flex")
    if ran:
        run.prove(PROBLEM, "flex")
    rows = verdicts([run.done()])
    assert of(rows, "fwd_triton").reason == ("no number of flex to compare with" if ran else None)
    refused(of(rows, "flex"), "timing: no graph")


@pytest.mark.parametrize(("gpu", "name"), [("NVIDIA L4", "l4-132sm"), ("NVIDIA B200", "b200-132sm"), ("", "unnamed")])
def test_a_card_that_has_other_sms_than_its_name_is_none_of_that_name(gpu: str, name: str) -> None:
    run = Fabricate(gpu=gpu, sms=132).control().timed("fwd_triton", 20_000, "sdpa", 30_000)
    assert verdicts([run.done()])[0].gpu == name


def unproved(run: Any) -> None:
    run.timed("fwd_triton", 20_000, "sdpa", 30_000, proved=False).prove(PROBLEM, "sdpa")


def timed(time: float = 20_000, **how: Any) -> Callable[[Any], object]:
    return lambda run: run.timed("fwd_triton", time, "sdpa", 30_000, **how)


def proved(**how: Any) -> Callable[[Any], object]:
    return lambda run: run.prove(PROBLEM, "fwd_triton", **how)


def forged(run: Any) -> None:
    """Its errors are those of a failure."""
    proved(passed=False)(run)
    run.rows = [row.model_copy(update={"passed": True}) if isinstance(row, CorrectnessRow) else row for row in run.rows]


def passed_later(run: Any) -> None:
    for passed in (False, True):
        proved(passed=passed)(run)
        run._proved.clear()


def few_sets(run: Any) -> None:
    run.timed("fwd_triton", 20_000, "sdpa", 30_000)
    run.rows[-1] = run.rows[-1].model_copy(update={"input_sets": 2})


def copied(run: Any) -> None:
    first = run.timed("fwd_triton", 20_000, "sdpa", 30_000).rows[-1]
    run.timed("fwd_triton", 20_000, "fa3", 30_000)
    run.rows[-1] = run.rows[-1].model_copy(update={"a": first.a, "b": first.b})


def refusal(*words: Any, **where: Any) -> Callable[[Any], object]:
    return lambda run: run.refused(*words, **where)


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (proved(passed=False), "wrong: its output is off by"),
        (unproved, "it was not held against the oracle"),
        (proved(broken=["promised 384 threads a block, saw 128"]), "call path: promised 384 threads a block, saw 128"),
        (proved(seen=False), "call path: no kernel was seen"),
        (refusal("correctness", "it differs from run to run", "fwd_triton"), "correctness: it differs from run to run"),
        (refusal("sanity", "the quick and the full bench disagree"), "sanity: the quick and the full bench disagree"),
        (refusal("preflight", "the profiler sees no kernels", problem=None), "preflight: the profiler sees no kernels"),
        (timed(throttle=["thermal slowdown"]), "the GPU was throttled: thermal slowdown"),
        (timed(0), "a sample of 0 ns"),
        (timed(pairs=1), "the number of pairs of samples is 1"),
        (forged, "wrong:"),
        (passed_later, "wrong:"),
        (proved(passed=False, broken=["its_kernel was not launched"]), "call path: its_kernel was not launched"),
        (few_sets, "it says that the L2 was cold, but its 2 sets of tensors are 8 MiB, and the L2 holds 60"),
        (copied, "its samples are those of another row of its run"),
        (lambda run: timed(10_000)(timed()(run)), "its run sampled this pair 2 times"),
        (lambda run: run.timed("fwd_triton", 500, "fa3", 24_000), "is less than the"),  # beside every rival
        (timed(900), "ns that the chip's arithmetic and bandwidth allow"),
    ],
)
def test_a_planted_fault_is_refused_without_a_number(plant: Callable[[Any], None], reason: str) -> None:
    run = Fabricate().control("fwd_gluon_sm90")
    plant(run)
    if not any(getattr(row, "rival", None) == "sdpa" for row in run.rows):
        run.timed("fwd_triton", 20_000, "sdpa", 30_000)
    refused(of(verdicts([run.done()]), "fwd_triton"), reason)


def control(**how: Any) -> Callable[[Any], object]:
    return lambda run: run.timed("fwd_triton", 20_000, "fwd_triton", 20_000, **how)


@pytest.mark.parametrize(
    ("controlled", "reason"),
    [
        (lambda run: run, "no kernel was timed against itself"),
        (control(throttle=["hardware slowdown"]), "control is not believed: the GPU was throttled"),
        (control(pairs=5), "5 pairs of samples; 6 are the least that decide"),
        (lambda run: run.control(off=1.3).control(), "fwd_triton against itself came out"),
    ],
    ids=["none", "throttled", "few pairs", "a good one after a bad one"],
)
def test_without_a_sound_control_there_is_no_number(controlled: Callable[[Any], object], reason: str) -> None:
    run = Fabricate()
    controlled(run)
    refused(of(verdicts([run.timed("fwd_triton", 20_000, "sdpa", 30_000).done()]), "fwd_triton"), reason)


def best_was_elsewhere(run: Any) -> None:
    run.timed("fwd_gluon_sm90", 20_000, "fa3", 24_000).timed("fwd_triton", 20_000, "sdpa", 30_000)


def wrong_rival(run: Any) -> None:
    run.prove(PROBLEM, "sdpa", passed=False)
    run.timed("fwd_triton", 20_000, "sdpa", 30_000)


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (best_was_elsewhere, "fa3, the best of the rivals, was not timed beside it"),
        (wrong_rival, "no rival that can be believed was timed beside it"),
        (timed(pairs=5), "5 pairs of samples; 6 are the least that decide"),
    ],
)
def test_what_cannot_be_decided_says_why(plant: Callable[[Any], object], reason: str) -> None:
    run = Fabricate().control()
    plant(run)
    row = of(verdicts([run.done()]), "fwd_triton")
    assert (row.verdict, row.reason) == ("undecided", reason)


def test_more_than_the_chips_bandwidth_is_refused_where_the_cache_is_cold() -> None:
    narrow = "attn b64 h32 q1 k4096 d128 fp16"  # 4.3 GB of K and V, 0.9 ms at least
    run = Fabricate().control(problem=narrow)
    run.timed("fwd_triton", 500_000, "sdpa", 2_000_000, problem=narrow)
    refused(of(verdicts([run.done()]), "fwd_triton", problem=narrow), "ns that the chip's arithmetic and bandwidth allow")
    warm = Fabricate().control(problem=narrow, cache="warm")
    warm.timed("fwd_triton", 500_000, "sdpa", 2_000_000, problem=narrow, cache="warm")
    assert of(verdicts([warm.done()]), "fwd_triton", problem=narrow).verdict == "faster"


def test_a_control_that_is_off_refuses_the_problem_and_no_other() -> None:
    other = "attn b1 h1 q128 d64 fp16"
    run = Fabricate().control(off=1.1).control(problem=other)
    run.timed("fwd_triton", 20_000, "sdpa", 30_000).timed("fwd_triton", 20_000, "sdpa", 30_000, problem=other)
    rows = verdicts([run.done()])
    refused(of(rows, "fwd_triton"), "fwd_triton against itself came out faster: 1.1")
    assert of(rows, "fwd_triton", problem=other).verdict == "faster"


def test_a_control_that_proves_little_widens_every_interval_by_what_it_leaves_open() -> None:
    def run(noise: float) -> list[Verdict]:
        made = Fabricate().control(noise=noise).timed("fwd_triton", 20_000, "fa3", 20_900)
        return verdicts([made.timed("fwd_triton", 20_000, "sdpa", 60_000).done()])

    tight, loose = run(0.003), run(0.1)
    assert [(row.verdict, row.reason) for row in tight] == [("faster", None), ("slower", None), ("slower", None)]
    assert [row.verdict for row in loose] == ["undecided", "undecided", "slower"]
    bias = max(1 / loose[0].control_low, loose[0].control_high)  # type: ignore[operator,type-var]
    for sure, unsure in zip(tight, loose, strict=True):
        assert unsure.low == pytest.approx(sure.low / bias, rel=0.01)  # type: ignore[operator]
        assert unsure.high == pytest.approx(sure.high * bias, rel=0.01)  # type: ignore[operator]
        assert f"widened by {math.log(bias):.1%} (A/A control)" in str(unsure.reason)


def test_close_and_tight_is_equivalent_and_close_and_noisy_undecided() -> None:
    tight = Fabricate().control().timed("fwd_triton", 20_000, "sdpa", 20_050)
    assert of(verdicts([tight.done()]), "fwd_triton").verdict == "equivalent"
    noisy = Fabricate().control().timed("fwd_triton", 20_000, "sdpa", 20_050, noise=0.1)
    row = of(verdicts([noisy.done()]), "fwd_triton")
    assert row.verdict == "undecided"
    assert "the samples would show a difference of" in str(row.reason)


def test_a_coarse_event_clock_widens_the_interval() -> None:
    one, many = (
        of(verdicts([Fabricate().control().timed("fwd_triton", 20_000, "sdpa", 20_500, calls=calls).done()]), "fwd_triton")
        for calls in (1, 1000)
    )
    assert one.verdict == "undecided"  # a quarter of a microsecond of 20, twice, is 2.5%
    assert many.verdict == "faster"


def test_gpus_suites_and_layouts_do_not_mix() -> None:
    runs = []
    for index, (gpu, suite) in enumerate([("NVIDIA H200", "documents"), ("NVIDIA H200", "quick"), ("NVIDIA L4", "documents")]):
        run = Fabricate(f"r{index}", f"2026-01-0{index + 1}T00:00:00+00:00", gpu=gpu, suite=suite)
        runs.append(run.control().timed("fwd_triton", 400_000, "sdpa", 500_000).done())
    rows = [row for row in verdicts(runs) if row.origin == "ours"]
    assert [(row.gpu, row.suite) for row in rows] == [("h200", "documents"), ("h200", "quick"), ("l4", "documents")]


def edited(run: Any, kind: type, **changes: object) -> list[Verdict]:
    """Verdicts on a run whose rows of that kind, controls aside, somebody has edited."""
    run.rows = [
        row.model_copy(update=changes) if isinstance(row, kind) and getattr(row, "rival", "") != row.kernel else row
        for row in run.rows
    ]
    return verdicts([run.done()])


@pytest.mark.parametrize("output", ["out", "lse", "dsinks"])
@pytest.mark.parametrize(
    ("forged", "said"),
    [
        ({"max": None}, "the error of its {} is not on record"),
        ({"mean": None}, "the error of its {} is not on record"),
        ({"max": -1.0}, "contradict each other"),
        ({"rms": 9e-4}, "contradict each other"),
        ({"max": 1e-6}, "contradict each other"),
    ],
)
def test_errors_that_cannot_be_of_one_output_are_no_proof(output: str, forged: dict[str, float | None], said: str) -> None:
    run = Fabricate().control().timed("fwd_triton", 20_000, "sdpa", 30_000)
    outputs = {name: errors().model_copy(update=forged if name == output else {}) for name in ("out", "lse", "dsinks")}
    row = edited(run, CorrectnessRow, outputs=outputs)[0]
    assert (row.verdict, row.ratio) == ("refused", None)
    assert said.format({"out": "output", "lse": "log-sum-exp"}.get(output, output)) in (row.reason or "")


def test_a_gpus_clock_in_a_run_without_a_gpu_is_not_believed() -> None:
    run = Fabricate(gpu=None).control(clock="eager").timed("fwd_triton", 20_000, "sdpa", 30_000, clock="graph")
    assert {row.reason for row in verdicts([run.done()])} == {"it says that a GPU's clock timed it, in a run without a GPU"}


def test_a_kernel_that_its_run_calls_two_things_is_not_believed() -> None:
    run = Fabricate().control().timed("fwd_triton", 20_000, "sdpa", 30_000)
    rows = {row.kernel: row for row in edited(run, TimingRow, rival_origin="ours")}
    assert rows["sdpa"].reason == "its run calls it ours and peer; it can be only one of them"
    assert rows["fwd_triton"].verdict != "faster"


@pytest.mark.parametrize("gpu", [None, "NVIDIA Z9000"])
def test_a_time_that_no_chip_reaches_is_refused_where_the_chip_is_unknown(gpu: str | None) -> None:
    problem = "attn b4 h16 q8192 d128 fp16"  # 2.2 TFLOP: 240 us at four times the fastest chip's peak
    run = Fabricate(gpu=gpu).control(problem=problem, clock="eager", cache="warm")
    run.timed("fwd_triton", 20_000, "sdpa", 9e6, problem=problem, clock="eager", cache="warm")
    ours = next(row for row in verdicts([run.done()]) if row.kernel == "fwd_triton")
    assert ours.verdict == "refused"
    assert "that four times the fastest known chip's arithmetic and bandwidth allow" in (ours.reason or "")


V1 = "examples/v1_attention.py:attention"


def brought() -> Any:
    return Fabricate("brought", suite="custom").control(V1).timed(V1, 30_000, "sdpa", 20_000)


@pytest.mark.parametrize("stage", ["promise", "sanity"])
def test_a_broken_promise_stands_beside_the_measured_speed(stage: Stage) -> None:
    """Under the stage's old name too, as records of before have it."""
    words = "it promised 1.7 times the speed of its rival; measured against sdpa: 0.667 times"
    run = brought().refused(stage, words, V1)
    row = of(verdicts([run.done()]), V1)
    assert (row.verdict, row.promise, row.label) == ("slower", "broken", "slower, promise broken")
    assert row.ratio == pytest.approx(0.667, rel=0.01)
    assert row.remarks == ("promise broken: it promised 1.7 times the speed of its rival; measured against sdpa: 0.667 times",)
    assert row.as_dict()["promise"] == "broken"
    assert "promise" not in of(verdicts([run.done()]), "sdpa").as_dict()


@pytest.mark.parametrize(
    ("stages", "first"),
    [
        (("timing", "correctness"), "correctness"),
        (("sanity", "timing", "callpath"), "callpath"),
        (("correctness", "callpath", "preflight"), "preflight"),
    ],
)
@pytest.mark.parametrize("timed", [True, False])
def test_the_first_reason_is_that_of_the_earliest_stage(stages: tuple[Stage, ...], first: Stage, timed: bool) -> None:
    """What came after a failure may follow from it."""
    run = Fabricate("brought", suite="custom").control("sdpa")
    if timed:
        run.control(V1).timed(V1, 30_000, "sdpa", 20_000)
    for stage in stages:
        run.refused(stage, f"no good at {stage}", V1)
    refused(of(verdicts([run.done()]), V1), f"{first}: no good at {first}")


def test_a_time_that_depends_on_the_rival_is_remarked_on() -> None:
    """As one on record did: 6970 us beside one rival and 11362 us beside another."""
    run = brought().timed(V1, 48_900, "fwd_triton", 20_000)
    row = of(verdicts([run.done()]), V1)
    assert row.verdict == "slower"
    assert row.time_range_ns == pytest.approx((30_000, 48_900), rel=0.01)
    low, high = (f"{time / 1e3:.2f}" for time in row.time_range_ns or ())
    assert row.remarks == (f"its own time ranged from {low} to {high} us beside different rivals",)
    assert of(verdicts([run.done()]), "sdpa").remarks == ()


@pytest.mark.parametrize(("time", "noise"), [(36_000, 0.003), (48_900, 1.5)])
def test_a_small_or_an_uncertain_difference_of_its_own_times_is_not(time: int, noise: float) -> None:
    run = brought().timed(V1, time, "fwd_triton", 20_000, noise=noise)
    assert of(verdicts([run.done()]), V1).time_range_ns is None
