"""What a claim can ask of the records: kernels by name, problems by what they are, verdicts by count, times and rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from flashmoe_science.judge.gate.claim import Claim
from flashmoe_science.judge.gate.claims import ClaimResult, judge_claim
from flashmoe_science.judge.standing import JudgedRun, verdicts
from flashmoe_science.operations import parse_problem

FP16, BF16, CAUSAL, WIDE = (
    "attn b2 h8 q512 d64 fp16",
    "attn b2 h8 q512 d64 bf16",
    "attn b2 h8 q1024 d64 fp16 causal",
    "attn b2 h8 q512 k2048 d128 fp16",
)
MOE = "moe t4096 e64 k8 d1024 f2048 bf16"
Maker = Callable[..., Any]
Judged = Callable[..., ClaimResult]


def claim(**changes: Any) -> Claim:
    values = {"id": "c", "text": "", "gpu": "h200", "clock": "graph", "problems": 1, "statistic": "geomean", "at_least": 1.1}
    return Claim.model_validate({key: value for key, value in (values | changes).items() if value is not None})


@pytest.fixture
def judged(fabricate: Maker) -> Judged:
    """fwd_triton is 1.2 times as fast as fa3 everywhere, fwd_gluon_sm90 1.5 times, and 1.25 times as fast as fwd_triton."""
    run = fabricate()
    for problem in (FP16, BF16, CAUSAL, WIDE):
        run.control(problem=problem)
        run.timed("fwd_triton", 20_000, "fa3", 24_000, problem=problem)
        run.timed("fwd_gluon_sm90", 16_000, "fa3", 24_000, problem=problem)
        run.timed("fwd_gluon_sm90", 16_000, "fwd_triton", 20_000, problem=problem)
    done = run.done()
    rows = verdicts([done])
    return lambda **changes: judge_claim(claim(**changes), rows, [JudgedRun(done)])


def test_a_kernel_by_name_speaks_in_place_of_the_fastest_of_ours(judged: Judged) -> None:
    assert judged().measured == pytest.approx(1.5, rel=0.005)
    assert judged(kernel="fwd_triton").measured == pytest.approx(1.2, rel=0.005)
    against = {"kernel": "fa3", "at_least": None, "at_most": 0.7}
    assert judged(**against, rival="fwd_gluon_sm90").measured == pytest.approx(1 / 1.5, rel=0.005)
    assert judged(**against).why == (
        "none of its problems has a number: no peer that can be believed was timed beside fa3; rival names another kernel"
    )


def test_two_kernels_by_name_are_compared_where_they_were_sampled_side_by_side(judged: Judged) -> None:
    result = judged(kernel="fwd_gluon_sm90", rival="fwd_triton", problems=4)
    assert (result.outcome, result.problems, result.runs) == ("holds", 4, ("r1",))
    assert result.measured == pytest.approx(1.25, rel=0.005)
    missing = judged(kernel="fwd_triton", rival="sdpa")
    assert missing.outcome == "no record"
    assert missing.why == "no verdict of fwd_triton beside sdpa on its problems: any suite on h200, graph clock"


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, 4),
        ({"dtype": "bf16"}, 1),
        ({"mask": "full", "dtype": "fp16"}, 2),
        ({"head_dim": 128}, 1),
        ({"min_seqlen": 1024}, 2),
        ({"min_seqlen": 1024, "max_seqlen": 1024}, 1),
        ({"op": "moe"}, 0),
        ({"problem": "attn q512 b2 h8 fp16 d64"}, 1),
        ({"suite": "long"}, 0),
    ],
)
def test_problems_are_chosen_by_what_they_are(judged: Judged, changes: dict[str, Any], problems: int) -> None:
    result = judged(**changes)
    assert (result.problems, result.outcome) == (problems, "holds" if problems else "no record")


def test_a_size_that_an_operation_lacks_is_not_agreed_with() -> None:
    moe = parse_problem(MOE)
    assert claim(op="moe").is_about(moe)
    assert not any(claim(**{name: 1}).is_about(moe) for name in ("head_dim", "min_seqlen", "max_seqlen"))
    assert not claim(mask="full").is_about(moe)


def test_a_mixture_from_logits_is_another_than_one_from_ids() -> None:
    ids, logits = parse_problem(MOE), parse_problem(f"{MOE} logits")
    found = [claim(routing=word).is_about(one) for word in ("ids", "logits") for one in (ids, logits)]
    assert found == [True, False, False, True]
    assert not claim(routing="ids").is_about(parse_problem(FP16))


@pytest.mark.parametrize(("changes", "measured"), [({"quantity": "time_ns", "at_least": None, "at_most": 17_000.0}, 16_000)])
def test_times_and_rates_have_intervals_from_their_samples(judged: Judged, changes: dict[str, Any], measured: float) -> None:
    result = judged(problem=FP16, **changes)
    assert result.outcome == "holds"
    assert result.measured == pytest.approx(measured, rel=0.005)
    assert result.low is not None
    assert result.low < result.measured < result.high  # type: ignore[operator]
    assert judged(problem=FP16, **changes, kernel="fwd_triton").outcome == "fails"


def test_a_claim_on_the_worst_row_says_how_many_are_proven_to_miss_it(judged: Judged) -> None:
    result = judged(statistic="min", at_least=2.0, problems=4)
    assert result.refuted
    assert "4 of 4 rows are proven to miss it (Holm)" in str(result.why)
    near = judged(statistic="min", at_least=judged(statistic="min").measured)
    assert (near.outcome, near.refuted) == ("fails", False)
    assert "0 of 4 rows are proven" in str(near.why)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantity": "time_ns", "rival": "sdpa"}, "quantity is 'time_ns'"),
        ({"kernel": "sdpa", "rival": "sdpa"}, "both 'sdpa'"),
        ({"at_least": 0.0}, "must be more than 0"),
        ({"at_least": float("nan")}, "finite number"),
        ({"problem": "attn b2"}, "lacks h<n>"),
        ({"dtype": "fp8"}, "'fp16', 'bf16' or 'fp32'"),
        ({"min_seqlen": 512, "max_seqlen": 2}, "no length is both"),
    ],
)
def test_a_claim_that_makes_no_sense_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        claim(**changes)


MINE = "mine.py:fn"


def trial(fabricate: Maker, run: str = "trial", suite: str = "custom", **kwargs: Any) -> Any:
    """A user's kernel takes 10 us, fa3 12 us, and fwd_triton 5 us, which is slow beside no peer here."""
    made = fabricate(run, started="2026-03-01T00:00:00+00:00", suite=suite, **kwargs).control(MINE)
    return made.timed(MINE, 10_000, "fa3", 12_000).timed(MINE, 10_000, "fwd_triton", 5_000)


def held(*runs: Any, **changes: Any) -> ClaimResult:
    done = [run.done() for run in runs]
    return judge_claim(claim(**changes), verdicts(done), [JudgedRun(one) for one in done])


def test_the_best_peer_of_a_named_kernel_is_a_peer(fabricate: Maker) -> None:
    """A verdict on a kernel on trial is on the best of all others, ours too; and one on ours may be on a user's."""
    mine = held(trial(fabricate), kernel=MINE)
    assert (mine.outcome, mine.measured) == ("holds", pytest.approx(1.2, rel=0.005))
    ours = held(trial(fabricate), kernel="fwd_triton")
    assert (ours.outcome, ours.measured) == ("fails", None)
    assert held(trial(fabricate)).measured is None


def test_no_run_is_chosen_for_being_kind_to_the_claim(fabricate: Maker) -> None:
    slow = fabricate("slow", suite="documents").control().timed("fwd_triton", 24_000, "fa3", 24_000)
    fast = (
        fabricate("fast", suite="long", started="2026-02-01T00:00:00+00:00")
        .control()
        .timed("fwd_triton", 12_000, "fa3", 24_000)
    )
    assert (held(slow, fast).outcome, held(slow, fast).runs) == ("fails", ("slow",))
    assert held(slow, fast, at_least=None, at_most=1.1).runs == ("fast",)
    times = {"quantity": "time_ns", "at_least": None, "at_most": 20_000}
    assert (held(slow, fast, **times).outcome, held(slow, fast, **times).runs) == ("fails", ("slow",))
    named = {"kernel": "fwd_triton", "rival": "fa3"}
    assert (held(slow, fast, **named).outcome, held(slow, fast, **named).runs) == ("fails", ("slow",))


def test_a_warm_row_or_a_trial_beside_a_run_of_ours_speaks_for_nothing(fabricate: Maker) -> None:
    both = fabricate("both").control().timed("fwd_triton", 24_000, "fa3", 24_000)
    both.control(cache="warm").timed("fwd_triton", 10_000, "fa3", 24_000, cache="warm")
    assert held(both, cache="any").measured == pytest.approx(1.0, rel=0.005)
    assert held(both, cache="warm").outcome == "holds"
    beside = trial(fabricate, suite="documents").timed("fwd_triton", 5_000, "fa3", 12_000)
    assert held(both, beside).runs == ("both",)


def test_what_a_quick_run_shows_is_said_to_be_quick(fabricate: Maker) -> None:
    quick = fabricate("quick", quick=True).control().timed("fwd_triton", 12_000, "fa3", 24_000)
    assert (held(quick).outcome, held(quick).quick) == ("holds", True)
    full = fabricate("full", suite="long").control().timed("fwd_triton", 24_000, "fa3", 24_000)
    assert (held(quick, full).runs, held(quick, full).quick) == (("full",), False)


def test_a_best_peer_that_has_no_number_may_have_been_the_best(fabricate: Maker) -> None:
    run = fabricate("hidden").control().timed("fwd_triton", 12_000, "sdpa", 24_000)
    run.prove(FP16, "fa3")
    run.refused("timing", "its samples drift", "fa3")
    assert held(run).why == f"the best peer is not known: no number of fa3 on {FP16}"
    assert held(run, at_least=None, at_most=2.1).outcome == "holds"  # a better peer would only make it truer
    assert held(run, rival="sdpa").outcome == "holds"
