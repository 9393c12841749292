"""``flashmoe check``: what a user reads, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flashmoe_science.cli.check import print_result
from flashmoe_science.measure.check import EXAM, Checked, CheckResult
from flashmoe_science.operations import parse_problem

FAULTS = Path(__file__).parents[2] / "harness" / "faults"
EXAMPLES = Path(__file__).parents[3] / "examples"


def checked(text: str, answer: str, *reasons: str, inputs: str = "", codes: tuple[str, ...] = ()) -> Checked:
    return Checked(parse_problem(text), inputs, answer, reasons, codes)  # type: ignore[arg-type]


RESULT = CheckResult(
    "mine.py:attention",
    "attention",
    (
        checked("attn b1 h2 q9 d64 fp16", "right"),
        checked(
            "attn b1 h2 q9 d64 fp16 causal", "wrong", "maximum error 2", "it is right for no mask", codes=("mask-missing",)
        ),
        checked(
            "attn b2 h2 q9 d64 fp16 causal", "wrong", "maximum error 3", "it is right for no mask", codes=("mask-missing",)
        ),
        checked("attn b1 h2 q9 d100 bf16", "not served", "ValueError: head_dim is 100"),
        checked("attn b1 h2 q9 d96 bf16", "not served", "ValueError: head_dim is 96"),
        checked("attn b1 h2 q9 d64 fp16", "right", inputs=EXAM),
        checked("attn b1 h2 q9 d64 fp16", "right", inputs="all zero"),
    ),
    3.21,
)


def test_the_matrix_says_what_was_covered_and_what_was_not(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(RESULT)
    printed = capsys.readouterr().out
    for line in (
        "right: 64 (",
        "not served: 96, 100",
        "wrong: causal",
        "right: the whole exam, all zero",
        "not covered: dtype fp32, layout bshd, mask causal-topleft",
        "wrong: 'attn b1 h2 q9 d64 fp16 causal' and 1 more: maximum error 2; it is right for no mask",
        "not served: 'attn b1 h2 q9 d100 bf16' and 1 more: ValueError: head_dim is 100",
        "wrong: 3 right, 2 wrong, 2 not served, in 3.2 s",
    )[1:]:
        assert line in printed


def test_values_are_in_the_order_of_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a word follows: "2 (all)" query heads share the one key head."""
    heads = ("h12 hk1", "h2", "h2 hk1", "h8 hk4", "h10 hk1")
    print_result(CheckResult("mine.py:fn", "attention", tuple(checked(f"attn b1 {one} q9 d64", "right") for one in heads), 1.0))
    assert "query heads a key head  right: 1, 2 (all), 2, 10 (all), 12 (all)\n" in capsys.readouterr().out


@pytest.mark.usefixtures("short_sweep")
def test_a_wrong_function_is_exit_1_with_codes_for_machines(
    flashmoe: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    problem = "attn b1 h1 q3 k7 d4 fp32 causal"
    code, out, _ = flashmoe("check", f"{FAULTS / 'moves_the_random_state.py'}:attention", "--json", "--problem", problem)
    told = json.loads(out)
    assert code == 1
    assert "mask-top-left" in told["codes"]
    assert told["counts"]["right"] > 5
    assert told["counts"]["not served"] > 0
    assert told["stopped"] is None
    assert {one["answer"] for one in told["checked"] if one["problem"] == problem} == {"wrong"}
    assert any("random state of torch" in note for one in told["checked"] for note in one["notes"])


@pytest.mark.parametrize(
    ("function", "problem", "said"),
    [
        ("cpu_attention.py:attention", "moe t16 e8 k2 d64 f64 bf16", "it is held to the contract of attention, not of moe"),
        (
            "row_softmax.py:row_softmax",
            "attn b1 h2 q16 d16 fp32",
            "it is held to the contract of row_softmax, not of attention",
        ),
        ("cpu_attention.py:attention", "attn b8 h32 q8192 d128 bf16", "too much for a CPU, and there is no GPU here"),
    ],
)
def test_a_problem_that_the_function_cannot_be_asked_for_is_refused(
    function: str, problem: str, said: str, flashmoe: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    spec = f"{EXAMPLES / function}"
    code, out, err = flashmoe("check", spec, "--problem", problem)
    assert (code, out) == (2, "")
    assert err == f"flashmoe: problem '{problem}' cannot be asked of {spec}: {said}\n"
