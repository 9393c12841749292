"""A claim holds only by the near end of its interval and with every problem that it is about on record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.judge.gate.claim import Claim, ClaimError, read_claims
from flashmoe_science.judge.gate.claims import ClaimResult, judge_claim
from flashmoe_science.judge.standing import verdicts
from flashmoe_science.operations import operation, parse_problem

COMMITTED = Path(__file__).parents[3] / "evidence" / "claims.toml"
SMALL, MIDDLE, LARGE = (f"attn b2 h8 q{size} d64 fp16" for size in (128, 512, 1024))
Maker = Callable[..., Any]


def claim(**changes: Any) -> Claim:
    values = {
        "id": "c", "text": "", "gpu": "h200", "suite": "documents", "clock": "graph", "problems": 2, "statistic": "geomean",
        "at_least": 1.5,
    }  # fmt: skip
    return Claim.model_validate({key: value for key, value in (values | changes).items() if value is not None})


@pytest.fixture
def judged(fabricate: Maker) -> Callable[..., ClaimResult]:
    """Ratios 1.25 at 128 and 2.0 at 512 against the best peer, 4.0 against sdpa on both; another shape is far worse."""
    run = fabricate()
    for problem, time in ((SMALL, 16_000), (MIDDLE, 10_000)):
        run.control(problem=problem).timed("fwd_triton", time, "fa3", 20_000, problem=problem)
        run.timed("fwd_triton", time, "sdpa", 4 * time, problem=problem)
        run.timed("fwd_gluon_sm90", 30_000, "fa3", 20_000, problem=problem)
    run.control(problem=LARGE).timed("fwd_triton", 40_000, "fa3", 20_000, problem=LARGE)
    rows = verdicts([run.done()])
    return lambda **changes: judge_claim(claim(**changes), rows)


def test_the_least_ratio_names_its_problem_and_the_miss(judged: Callable[..., ClaimResult]) -> None:
    result = judged(max_seqlen=512, statistic="min")
    assert (result.outcome, result.worst_problem) == ("fails", SMALL)
    assert result.measured == pytest.approx(1.25, rel=0.005)
    assert result.missed_by == pytest.approx(1.5 / 1.25 - 1, abs=0.02)
    assert f"misses 1.5 by a factor of {1 + (result.missed_by or 0):.3g}; worst is {SMALL}" in str(result.why)
    assert judged(max_seqlen=512, statistic="min", at_least=1.2).outcome == "holds"


def test_a_threshold_inside_the_interval_does_not_hold(judged: Callable[..., ClaimResult]) -> None:
    measured = judged(max_seqlen=512).measured
    result = judged(max_seqlen=512, at_least=measured)
    assert result.outcome == "fails"
    assert result.missed_by is not None
    assert 0 < result.missed_by < 0.01


def test_a_problem_without_the_named_rival_fails_the_claim(judged: Callable[..., ClaimResult]) -> None:
    result = judged(rival="sdpa")
    assert (result.outcome, result.problems) == ("fails", 2)
    assert result.why == f"1 of 3 problems have no number, such as {LARGE}"


def test_fewer_problems_than_it_is_about_fail_it(judged: Callable[..., ClaimResult]) -> None:
    result = judged(max_seqlen=512, problems=26)
    assert (result.outcome, result.missed_by) == ("fails", None)
    assert result.why == "2 problems are on record; it is about 26"


@pytest.mark.parametrize("changes", [{"gpu": "b200"}, {"suite": "long"}, {"clock": "eager"}, {"cache": "warm"}])
def test_other_conditions_are_no_record(judged: Callable[..., ClaimResult], changes: dict[str, str]) -> None:
    assert judged(**changes).outcome == "no record"


def test_memory_beyond_the_output_fails(fabricate: Maker) -> None:
    run = fabricate().control().timed("fwd_triton", 10_000, "fa3", 20_000)
    memory = {"quantity": "memory", "statistic": "max", "at_least": None, "at_most": 1.0, "problems": 1}
    assert judge_claim(claim(**memory), verdicts([run.done()])).outcome == "holds"
    run.rows = [
        row.model_copy(update={"peak_extra_bytes": 2 * row.output_bytes}) if row.kind == "correctness" else row
        for row in run.rows
    ]
    result = judge_claim(claim(**memory), verdicts([run.done()]))
    assert (result.outcome, result.measured, result.missed_by) == ("fails", 2.0, 1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = [", "is not TOML"),
        ("[other]\na = 1", "holds other; it must hold [[claim]] tables"),
        ("[[claim]]\nid = 'c'", "claim 'c': text: it is not given"),
        ("{whole}surprise = 1", "claim 'c': surprise: there is no such field; there may be id, text"),
        ("{whole}at_most = 1.0", "claim 'c': give one of at_least and at_most"),
        ("{whole}\n{whole}", "claim 'c' stands twice"),
    ],
)
def test_a_bad_file_is_said_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    whole = "[[claim]]\n" + "".join(
        f"{key} = {value!r}\n" for key, value in claim().model_dump(exclude_none=True).items()
    )  # fmt: skip
    whole = whole.replace("quantity = 'ratio'\n", "")
    path = tmp_path / "claims.toml"
    path.write_text(text.replace("{whole}", whole))
    with pytest.raises(ClaimError) as caught:
        read_claims(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_committed_claims_count_the_problems_of_their_suites() -> None:
    pytest.importorskip("torch")
    suites = operation("attention").contract().suites()
    committed = [one for one in read_claims(COMMITTED) if one.suite in suites]
    assert committed
    for one in committed:
        texts = [parse_problem(text) for text in suites[one.suite]]
        about = [p for p in texts if one.max_seqlen is None or max(p.seqlen_q, p.seqlen_k) <= one.max_seqlen]
        assert one.problems == len(about), one.id
