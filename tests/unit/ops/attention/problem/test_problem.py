"""Problems: their text form, their cost against brute force, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.problem import MAX_HEAD_DIM, AttentionProblem, head_parts, padded_head_dim
from flashmoe_science.problem import ProblemError

SIZES = st.integers(1, 12)


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    heads_kv = draw(SIZES)
    return AttentionProblem(
        batch=draw(SIZES),
        heads=heads_kv * draw(SIZES),
        heads_kv=heads_kv,
        seqlen_q=draw(SIZES),
        seqlen_k=draw(SIZES),
        head_dim=draw(st.integers(1, 256)),
        head_dim_v=draw(st.integers(1, 256)),
        dtype=draw(st.sampled_from(["fp16", "bf16", "fp32"])),
        mask=draw(st.sampled_from(["full", "causal", "causal-topleft"])),
        layout=draw(st.sampled_from(["bhsd", "bshd"])),
    )


@given(problems())
def test_the_text_form_reads_back(problem: AttentionProblem) -> None:
    assert parse_problem(str(problem)) == problem


@given(problems())
def test_scores_and_flops_agree_with_counting_the_mask(problem: AttentionProblem) -> None:
    pairs = sum(
        not problem.causal or key <= query + problem.causal_offset
        for query in range(problem.seqlen_q)
        for key in range(problem.seqlen_k)
    )
    assert problem.scores() == problem.batch * problem.heads * pairs
    assert problem.flops() == 2 * problem.scores() * (problem.head_dim + problem.head_dim_v)


def test_the_two_causal_alignments_are_one_where_the_lengths_agree() -> None:
    assert parse_problem("attn b1 h1 q8 d64 causal-topleft") == parse_problem("attn b1 h1 q8 d64 causal")
    assert parse_problem("attn b1 h1 q8 k9 d64 causal-topleft") != parse_problem("attn b1 h1 q8 k9 d64 causal")


def test_min_bytes_counts_each_tensor_once() -> None:
    problem = parse_problem("attn b2 h4 hk2 q3 k5 d8 dv16 fp32")
    elements = 2 * 4 * 3 * 8 + 2 * 2 * 5 * 8 + 2 * 2 * 5 * 16 + 2 * 4 * 3 * 16
    assert problem.min_bytes() == 4 * elements


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "does not begin with 'attn', 'attnbwd', 'attnmerge', 'moe', 'moebwd', 'op'"),
        ("conv b1", "does not begin with 'attn', 'attnbwd', 'attnmerge', 'moe', 'moebwd', 'op'"),
        ("attn b1 h16 d128", "lacks q<n>"),
        ("attn b1 h16 q128 d128 d64", "gives 'd' twice"),
        ("attn b1 h16 q128 d128 bf16 fp16", "gives the dtype twice"),
        ("attn b1 h16 q128 d128 fp8", "unknown word 'fp8'"),
        ("attn b1 h16 q-1 d128", "unknown word 'q-1'"),
        ("attn b0 h16 q128 d128", "batch is 0"),
        ("attn b1 h16 q128 d0", "head_dim is 0; it must be an integer from 1 to 256"),
        (f"attn b{'9' * 5000} h16 q128 d64", "b is a number of 5000 digits"),
        ("attn b1 h16 q128 d257", "head_dim is 257; it must be an integer from 1 to 256"),
        ("attn b1 h16 q128 d128 dv300", "head_dim_v is 300"),
        ("attn b1 h16 hk3 q128 d128", "heads_kv must divide heads"),
        ("attn b1 h16 q4294967296 d128", "seqlen_q is 4294967296"),
    ],
)
def test_a_wrong_text_is_refused_in_one_line(text: str, what: str) -> None:
    with pytest.raises(ProblemError) as refusal:
        parse_problem(text)
    assert what in str(refusal.value)
    assert "\n" not in str(refusal.value)


@dataclass(frozen=True, slots=True)
class Windowed(AttentionProblem):
    """A problem with a feature that attention does not have yet."""

    window: int = -1


SIZED = {"batch": 1, "heads": 8, "heads_kv": 8, "seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 64, "head_dim_v": 64}


def test_a_new_field_is_a_feature_that_nothing_is_near_in() -> None:
    """A windowed problem must never get the config of a full one, however near its sizes are."""
    full, near, windowed = Windowed(**SIZED), Windowed(**SIZED | {"batch": 2}), Windowed(**SIZED, window=128)
    assert full.distance(near) == 1.0
    assert full.distance(full) == windowed.distance(windowed) == 0.0
    for one, other in ((full, windowed), (windowed, full), (near, windowed), (windowed, replace(windowed, window=64))):
        assert one.distance(other) == math.inf
    assert windowed.representative().window == 128


def test_distance_is_the_largest_factor_between_the_sizes_that_shape_a_kernel() -> None:
    problem = parse_problem("attn b2 h8 q1024 d64 bf16 causal")
    for text, distance in (
        ("attn b2 h8 q1024 d64 bf16 causal", 0.0),
        ("attn b4 h4 q1024 d64 bf16 causal", 0.0),  # as much parallel work
        ("attn b2 h8 q256 k1024 d64 bf16 causal", 2.0),
        ("attn b1 h8 q1024 k512 d64 fp16 causal-topleft", 1.0),
        ("attn b2 h8 q1024 d64 bf16", math.inf),
        ("attn b2 h8 q1024 d64 fp32 causal", math.inf),
        ("moe t8 e4 k2 d16 f16 bf16", math.inf),
    ):
        assert problem.distance(parse_problem(text)) == distance, text


@given(problems(), st.integers(0, 3))
def test_a_representative_is_little_longer_and_represents_itself(problem: AttentionProblem, power: int) -> None:
    grown = replace(problem, batch=problem.batch * 9**power, seqlen_q=problem.seqlen_q * 10**power, seqlen_k=12 * 3**power)
    shown = grown.representative()
    assert shown.representative() == shown
    assert (shown.causal_offset == 0) == (grown.causal_offset == 0)
    for field in ("batch", "seqlen_q", "seqlen_k"):
        exact, rounded = getattr(grown, field), getattr(shown, field)
        assert exact <= rounded < max(17, 1.25 * exact)
        assert rounded.bit_length() == exact.bit_length() or rounded <= 16 or rounded & (rounded - 1) == 0
    assert replace(shown, batch=1, seqlen_q=1, seqlen_k=1) == replace(grown, batch=1, seqlen_q=1, seqlen_k=1) or (
        shown.mask != grown.mask and shown.seqlen_q == shown.seqlen_k
    )


def test_a_head_is_held_in_one_or_two_powers_of_two_with_the_least_padding() -> None:
    powers = (16, 32, 64, 128, 256)
    pairs = [(first, rest) for first in powers for rest in powers if rest < first]
    for dim in range(1, MAX_HEAD_DIM + 1):
        parts = head_parts(dim)
        assert parts in [*((one,) for one in powers), *pairs]
        assert sum(parts) == min(sum(held) for held in ((padded_head_dim(dim),), *pairs) if sum(held) >= dim)
        assert len(parts) == 1 or sum(parts) < padded_head_dim(dim)  # two parts only where they save padding
