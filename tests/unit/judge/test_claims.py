"""A claim holds only by the near end of its interval and with every problem that it is about on record."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.unit.fabricated import PROBLEM, Fabricate, verdicts

from flashmoe_science.judge.gate.claims import Claim, ClaimResult, judge_claim, read_claims
from flashmoe_science.judge.gate.entries import EntryError
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.operations import operation, parse_problem

COMMITTED = Path(__file__).parents[3] / "evidence" / "claims.toml"
SMALL, MIDDLE, LARGE = (f"attn b2 h8 q{size} d64 fp16" for size in (128, 512, 1024))
Judged = Callable[..., ClaimResult]
Call = Callable[..., tuple[int, str, str]]


def claim(**changes: Any) -> Claim:
    values = {
        "id": "c", "text": "", "gpu": "h200", "suite": "documents", "clock": "graph", "problems": 2, "statistic": "geomean",
        "at_least": 1.5,
    }  # fmt: skip
    return Claim.model_validate({key: value for key, value in (values | changes).items() if value is not None})


@pytest.fixture
def judged() -> Judged:
    """Ratios 1.25 at 128 and 2.0 at 512 against the best peer, 4.0 against sdpa on both; another shape is far worse."""
    run = Fabricate()
    for problem, time in ((SMALL, 16_000), (MIDDLE, 10_000)):
        run.control(problem=problem).timed("fwd_triton", time, "fa3", 20_000, problem=problem)
        run.timed("fwd_triton", time, "sdpa", 4 * time, problem=problem)
        run.timed("fwd_gluon_sm90", 30_000, "fa3", 20_000, problem=problem)
    run.control(problem=LARGE).timed("fwd_triton", 40_000, "fa3", 20_000, problem=LARGE)
    rows = verdicts([run.done()])
    return lambda **changes: judge_claim(claim(**changes), rows)


def test_the_least_ratio_names_its_problem_and_the_miss(judged: Judged) -> None:
    result = judged(max_seqlen=512, statistic="min")
    assert (result.outcome, result.worst_problem) == ("fails", SMALL)
    assert result.measured == pytest.approx(1.25, rel=0.005)
    assert result.missed_by == pytest.approx(1.5 / 1.25 - 1, abs=0.02)
    assert f"misses 1.5x by a factor of {1 + (result.missed_by or 0):.3g}; worst is {SMALL}" in str(result.why)
    assert judged(max_seqlen=512, statistic="min", at_least=1.2).outcome == "holds"


@pytest.mark.parametrize(
    ("changes", "outcome", "why"),
    [
        ({"rival": "sdpa"}, "fails", f"1 of 3 problems have no number, such as {LARGE}"),
        ({"max_seqlen": 512, "problems": 26}, "fails", "2 problems are on record; it is about 26"),
        ({"gpu": "b200"}, "no record", None),
        ({"suite": "long"}, "no record", None),
        ({"clock": "eager"}, "no record", None),
        ({"cache": "warm"}, "no record", None),
    ],
)
def test_what_is_not_on_record_does_not_hold(judged: Judged, changes: dict[str, Any], outcome: str, why: str | None) -> None:
    result = judged(**changes)
    assert (result.outcome, result.missed_by) == (outcome, None)
    assert why in (None, result.why)


def test_a_threshold_inside_the_interval_does_not_hold(judged: Judged) -> None:
    measured = judged(max_seqlen=512).measured
    result = judged(max_seqlen=512, at_least=measured)
    assert result.outcome == "fails"
    assert result.missed_by is not None
    assert 0 < result.missed_by < 0.01


def test_memory_beyond_the_output_fails() -> None:
    run = Fabricate().control().timed("fwd_triton", 10_000, "fa3", 20_000)
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
        ("[other]\na = 1", "holds other; it must hold claim and nothing else"),
        ("[claim]\nid = 'a'", "has a dict of claim; it must be a list"),
        ("[[claim]]\nid = 'c'", "claim 'c': text: it is not given"),
        ("{whole}surprise = 1", "claim 'c': surprise: there is no such field; there may be id, text"),
        ("{whole}at_most = 1.0", "claim 'c': give one of at_least and at_most"),
        ("{whole}\n{whole}", "claim 'c' is given twice"),
    ],
)
def test_a_bad_file_is_said_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    whole = "[[claim]]\n" + "".join(
        f"{key} = {value!r}\n" for key, value in claim().model_dump(exclude_none=True).items()
    )  # fmt: skip
    whole = whole.replace("quantity = 'ratio'\n", "")
    path = tmp_path / "claims.toml"
    path.write_text(text.replace("{whole}", whole))
    with pytest.raises(EntryError) as caught:
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


FP16, BF16, CAUSAL, WIDE = (
    PROBLEM,
    "attn b2 h8 q512 d64 bf16",
    "attn b2 h8 q1024 d64 fp16 causal",
    "attn b2 h8 q512 k2048 d128 fp16",
)
MOE = "moe t4096 e64 k8 d1024 f2048 bf16"


def asked(**changes: Any) -> Claim:
    """Of any suite, on one problem."""
    return claim(**({"suite": None, "problems": 1, "at_least": 1.1} | changes))


@pytest.fixture
def four() -> Judged:
    """fwd_triton is 1.2 times as fast as fa3 everywhere, fwd_gluon_sm90 1.5 times, and 1.25 times as fast as fwd_triton."""
    run = Fabricate()
    for problem in (FP16, BF16, CAUSAL, WIDE):
        run.control(problem=problem)
        run.timed("fwd_triton", 20_000, "fa3", 24_000, problem=problem)
        run.timed("fwd_gluon_sm90", 16_000, "fa3", 24_000, problem=problem)
        run.timed("fwd_gluon_sm90", 16_000, "fwd_triton", 20_000, problem=problem)
    done = run.done()
    rows = verdicts([done])
    return lambda **changes: judge_claim(asked(**changes), rows, [JudgedRun(done)])


def test_a_kernel_by_name_speaks_in_place_of_the_fastest_of_ours(four: Judged) -> None:
    assert four().measured == pytest.approx(1.5, rel=0.005)
    assert four(kernel="fwd_triton").measured == pytest.approx(1.2, rel=0.005)
    against = {"kernel": "fa3", "at_least": None, "at_most": 0.7}
    assert four(**against, rival="fwd_gluon_sm90").measured == pytest.approx(1 / 1.5, rel=0.005)
    assert four(**against).why == "none of its problems has a number"


def test_two_kernels_by_name_are_compared_where_they_were_sampled_side_by_side(four: Judged) -> None:
    result = four(kernel="fwd_gluon_sm90", rival="fwd_triton", problems=4)
    assert (result.outcome, result.problems, result.runs) == ("holds", 4, ("r1",))
    assert result.measured == pytest.approx(1.25, rel=0.005)
    missing = four(kernel="fwd_triton", rival="sdpa")
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
def test_problems_are_chosen_by_what_they_are(four: Judged, changes: dict[str, Any], problems: int) -> None:
    result = four(**changes)
    assert (result.problems, result.outcome) == (problems, "holds" if problems else "no record")


def test_times_and_rates_have_intervals_from_their_samples(four: Judged) -> None:
    changes = {"problem": FP16, "quantity": "time_ns", "at_least": None, "at_most": 17_000.0}
    result = four(**changes)
    assert (result.outcome, result.measured) == ("holds", pytest.approx(16_000, rel=0.005))
    assert result.low < result.measured < result.high  # type: ignore[operator]
    assert four(**changes, kernel="fwd_triton").outcome == "fails"


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"op": "moe"}, [MOE, f"{MOE} logits"]),
        ({"routing": "ids"}, [MOE]),
        ({"routing": "logits"}, [f"{MOE} logits"]),
        ({"head_dim": 1}, []),
        ({"min_seqlen": 1}, [FP16]),
        ({"mask": "full"}, [FP16]),
    ],
)
def test_what_an_operation_lacks_is_not_agreed_with(changes: dict[str, Any], about: list[str]) -> None:
    assert [text for text in (FP16, MOE, f"{MOE} logits") if asked(**changes).is_about(parse_problem(text))] == about


def test_a_claim_on_the_worst_row_says_how_many_are_proven_to_miss_it(four: Judged) -> None:
    result = four(statistic="min", at_least=2.0, problems=4)
    assert result.refuted
    assert "4 of 4 rows are proven to miss it (Holm)" in str(result.why)
    near = four(statistic="min", at_least=four(statistic="min").measured)
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
        asked(**changes)


MINE = "mine.py:fn"


def trial(run: str = "trial", suite: str = "custom", **kwargs: Any) -> Any:
    """A user's kernel takes 10 us, fa3 12 us, and fwd_triton 5 us, which is slow beside no peer here."""
    made = Fabricate(run, started="2026-03-01T00:00:00+00:00", suite=suite, **kwargs).control(MINE)
    return made.timed(MINE, 10_000, "fa3", 12_000).timed(MINE, 10_000, "fwd_triton", 5_000)


def held(*runs: Any, **changes: Any) -> ClaimResult:
    done = [run.done() for run in runs]
    return judge_claim(asked(**changes), verdicts(done), [JudgedRun(one) for one in done])


def test_the_best_peer_of_a_named_kernel_is_a_peer() -> None:
    """A verdict on a kernel on trial is on the best of all others, ours too; and one on ours may be on a user's."""
    mine = held(trial(), kernel=MINE)
    assert (mine.outcome, mine.measured) == ("holds", pytest.approx(1.2, rel=0.005))
    ours = held(trial(), kernel="fwd_triton")
    assert (ours.outcome, ours.measured) == ("fails", None)
    assert held(trial()).measured is None


def test_no_run_is_chosen_for_being_kind_to_the_claim() -> None:
    slow = Fabricate("slow", suite="documents").control().timed("fwd_triton", 24_000, "fa3", 24_000)
    fast = (
        Fabricate("fast", suite="long", started="2026-02-01T00:00:00+00:00")
        .control()
        .timed("fwd_triton", 12_000, "fa3", 24_000)
    )
    assert (held(slow, fast).outcome, held(slow, fast).runs) == ("fails", ("slow",))
    assert held(slow, fast, at_least=None, at_most=1.1).runs == ("fast",)
    times = {"quantity": "time_ns", "at_least": None, "at_most": 20_000}
    assert (held(slow, fast, **times).outcome, held(slow, fast, **times).runs) == ("fails", ("slow",))
    named = {"kernel": "fwd_triton", "rival": "fa3"}
    assert (held(slow, fast, **named).outcome, held(slow, fast, **named).runs) == ("fails", ("slow",))


def test_a_warm_row_or_a_trial_beside_a_run_of_ours_speaks_for_nothing() -> None:
    both = Fabricate("both").control().timed("fwd_triton", 24_000, "fa3", 24_000)
    both.control(cache="warm").timed("fwd_triton", 10_000, "fa3", 24_000, cache="warm")
    assert held(both, cache="any").measured == pytest.approx(1.0, rel=0.005)
    assert held(both, cache="warm").outcome == "holds"
    beside = trial(suite="documents").timed("fwd_triton", 5_000, "fa3", 12_000)
    assert held(both, beside).runs == ("both",)


def test_what_a_quick_run_shows_is_said_to_be_quick() -> None:
    quick = Fabricate("quick", quick=True).control().timed("fwd_triton", 12_000, "fa3", 24_000)
    assert (held(quick).outcome, held(quick).quick) == ("holds", True)
    full = Fabricate("full", suite="long").control().timed("fwd_triton", 24_000, "fa3", 24_000)
    assert (held(quick, full).runs, held(quick, full).quick) == (("full",), False)


def test_a_best_peer_that_has_no_number_may_have_been_the_best() -> None:
    run = Fabricate("hidden").control().timed("fwd_triton", 12_000, "sdpa", 24_000)
    run.prove(FP16, "fa3")
    run.refused("timing", "its samples drift", "fa3")
    assert held(run).why == f"the best peer is not known: no number of fa3 on {FP16}"
    assert held(run, at_least=None, at_most=2.1).outcome == "holds"  # a better peer would only make it truer
    assert held(run, rival="sdpa").outcome == "holds"


CLAIM = """
[[claim]]
id = "{id}"
text = "quick enough"
gpu = "{gpu}"
clock = "graph"
problems = 1
statistic = "min"
at_least = {at_least}
"""


@pytest.fixture
def evidence(recorded: Callable[..., Path]) -> Path:
    """fwd_triton is 1.5 times as fast as fa3."""
    return recorded(Fabricate().control().timed("fwd_triton", 20_000, "fa3", 30_000))


def claims_file(path: Path, *entries: Sequence[object]) -> Path:
    text = "".join(CLAIM.format(id=name, gpu=gpu, at_least=at_least) for name, gpu, at_least in entries)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("entries", "code", "outcomes"),
    [
        ([("a", "h200", 1.4)], 0, ["holds"]),
        ([("a", "h200", 1.4), ("b", "h200", 1.7)], 1, ["holds", "fails"]),
        ([("a", "h200", 1.4), ("b", "b200", 1.4)], 3, ["holds", "no record"]),
        ([("a", "b200", 1.4), ("b", "h200", 1.7)], 1, ["no record", "fails"]),
    ],
)
def test_the_exit_code_says_whether_all_hold(
    flashmoe: Call, evidence: Path, entries: list[tuple[str, str, float]], code: int, outcomes: list[str]
) -> None:
    claims_file(evidence / "claims.toml", *entries)
    got, out, _ = flashmoe("claims", "--evidence", evidence, "--json")
    assert got == code
    assert [one["outcome"] for one in json.loads(out)["claims"]] == outcomes


def test_claims_on_a_folder_without_records_cannot_be_looked_at(flashmoe: Call, tmp_path: Path) -> None:
    path = claims_file(tmp_path / "mine.toml", ("a", "h200", 1.4))
    code, out, err = flashmoe("claims", path, "--evidence", tmp_path)
    assert (code, out) == (2, "")
    assert err == f"flashmoe: --evidence is '{tmp_path}', which holds no records (*.jsonl); run flashmoe prove to make some\n"


def test_a_failed_claim_says_by_how_much_with_interval_worst_problem_and_runs(flashmoe: Call, evidence: Path) -> None:
    path = claims_file(evidence / "mine.toml", ("too-much", "h200", 1.7))
    code, out, _ = flashmoe("claims", path, "--evidence", evidence)
    assert code == 1
    said = " ".join(out.split())
    assert "too-much: quick enough min >= 1.7x" in said
    assert "fastest of ours against best peer; every suite on h200, graph clock, cold cache, 1 problem" in said
    assert "worst is attn b2 h8 q512 d64 fp16; runs r1" in said
    assert "the near end of its interval, misses 1.7x by a factor of 1." in said
    assert "(the records show the contrary)" in said
    assert "1 claim: 0 hold, 1 fail, 0 have no record" in out


@pytest.mark.parametrize("start", ["\ufeff", ""])
def test_a_file_from_another_editor_is_read(flashmoe: Call, evidence: Path, start: str) -> None:
    path = claims_file(evidence / "mine.toml", ("a", "h200", 1.4))
    path.write_text(start + path.read_text().replace("\n", "\r\n"), newline="", encoding="utf-8")
    assert flashmoe("claims", path, "--evidence", evidence)[0] == 0


def test_a_claims_text_can_neither_command_the_terminal_nor_pass_for_another_line(flashmoe: Call, evidence: Path) -> None:
    path = claims_file(evidence / "mine.toml", ("a", "h200", 1.4))
    path.write_text(path.read_text().replace("quick enough", "quick\\u001b[2J\\nholds  b: forged"))
    _, out, _ = flashmoe("claims", path, "--evidence", evidence)
    assert "\x1b" not in out
    assert "a: quick\\x1b[2J holds b: forged" in out
