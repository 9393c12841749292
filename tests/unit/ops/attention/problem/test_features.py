"""Features of attention problems: their text form, their cost against brute force, and what cannot be combined."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.features import KINDS, PLAIN, Features, unsupported
from flashmoe_science.ops.attention.problem.lengths import SequenceLengths, visible_keys, visible_pairs
from flashmoe_science.problem import ProblemError

SMALL = st.integers(1, 9)


@st.composite
def problems(draw: DrawFn) -> AttentionProblem:
    """Any problem with features that can be combined."""
    limit = st.none() | st.integers(0, 9)
    try:
        return AttentionProblem(
            batch=draw(st.integers(1, 20)),
            heads=2 * (heads_kv := draw(st.integers(1, 3))),
            heads_kv=heads_kv,
            seqlen_q=draw(SMALL),
            seqlen_k=draw(SMALL),
            head_dim=draw(SMALL),
            head_dim_v=draw(SMALL),
            dtype=draw(st.sampled_from(["fp16", "bf16", "fp32"])),
            mask=draw(st.sampled_from(["full", "causal", "causal-topleft"])),
            layout=draw(st.sampled_from(["bhsd", "bshd"])),
            features=Features(
                draw(limit),
                draw(limit),
                draw(st.sampled_from([0, 0, 30])),
                draw(st.booleans()),
                draw(st.sampled_from(["none", "none", "alibi", "boolean", "additive"])),
                draw(st.sampled_from([0, 0, 3])),
                draw(st.sampled_from(["equal", "ragged", "packed"])),
                draw(st.sampled_from([0, 0, 8])),
                draw(st.booleans()),
                draw(st.booleans()),
            ),
        )
    except ProblemError:
        return parse_problem("attn b2 h2 q3 k8 d8 causal left3 ragged page4 sinks")  # type: ignore[return-value]


@given(problems())
def test_the_text_form_of_modes_reads_back(problem: AttentionProblem) -> None:
    assert parse_problem(str(problem)) == problem
    assert problem.representative().features == problem.features


def sees(problem: AttentionProblem, one: SequenceLengths, query: int, key: int) -> bool:
    """Whether a query of a sequence sees a key, said as FlashAttention says it."""
    features, here = problem.features, query + (0 if problem.mask == "causal-topleft" else one.keys - one.queries)
    before = features.window_left is None or key >= here - features.window_left
    after = features.window_right is None or key <= here + features.window_right
    causal = not problem.causal or key <= here
    return ((before and after and causal) or key < features.prefix) and key >= one.first


@given(problems())
def test_scores_and_bytes_agree_with_counting(problem: AttentionProblem) -> None:
    lengths, features = problem.sequence_lengths(), problem.features
    assert len(lengths) == problem.batch
    assert lengths[0].queries == problem.seqlen_q
    assert max(one.keys for one in lengths) >= problem.seqlen_k
    pairs, keys = 0, 0
    for one in lengths:
        seen = {(i, j) for i in range(one.queries) for j in range(one.keys) if sees(problem, one, i, j)}
        pairs += len(seen)
        keys += one.keys if features == PLAIN else len({j for _, j in seen})
    assert problem.scores() == problem.heads * pairs
    assert problem.flops() == 2 * problem.heads * pairs * (problem.head_dim + problem.head_dim_v)
    assert problem.queries() == sum(one.queries for one in lengths)
    width = 4 if problem.dtype == "fp32" else 2
    read = problem.queries() * problem.heads * problem.head_dim * width
    read += keys * problem.heads_kv * (problem.head_dim + problem.head_dim_v) * (1 if features.fp8_cache else width)
    read += {"boolean": pairs, "additive": pairs // problem.batch * problem.heads * width}.get(features.bias, 0)
    if not (features.bias == "additive" and features.lengths == "ragged"):  # there it is an average over the batch
        assert problem.input_bytes() == read
    assert problem.min_bytes() - problem.input_bytes() == problem.queries() * problem.heads * problem.head_dim_v * width


@given(SMALL, SMALL, st.integers(0, 4), st.integers(-9, 9), st.none() | st.integers(0, 9), st.booleans())
def test_pairs_of_one_sequence(queries: int, keys: int, first: int, offset: int, left: int | None, causal: bool) -> None:
    one, features = SequenceLengths(queries, keys, min(first, keys)), Features(window_left=left)
    seen = [
        (i, j)
        for i in range(queries)
        for j in range(one.first, keys)
        if (not causal or j <= i + offset) and (left is None or j >= i + offset - left)
    ]
    assert visible_pairs(one, features, causal, offset) == len(seen)
    if seen:
        assert visible_keys(one, features, causal, offset) >= len({j for _, j in seen})


def test_lengths_follow_from_the_problem_and_differ() -> None:
    ragged = parse_problem("attn b16 h4 hk1 q2 k8192 d128 causal ragged page16")
    assert isinstance(ragged, AttentionProblem)
    keys = [one.keys for one in ragged.sequence_lengths()]
    assert keys[0] == max(keys) == 8192
    assert min(keys) > 8192 // 4
    assert len(set(keys)) == 16
    assert {one.queries for one in ragged.sequence_lengths()} == {2}
    packed = parse_problem("attn b20 h4 q2048 d64 causal packed")
    assert isinstance(packed, AttentionProblem)
    assert all(one.queries == one.keys for one in packed.sequence_lengths())
    assert min(one.queries for one in packed.sequence_lengths()) < 100
    mixed = parse_problem("attn b20 h4 q256 k2048 d64 causal packed page16 leftpad")
    assert isinstance(mixed, AttentionProblem)
    assert all(one.first < one.keys >= one.queries for one in mixed.sequence_lengths())
    assert len({one.first for one in mixed.sequence_lengths()}) > 5


def test_a_right_of_zero_is_a_causal_mask() -> None:
    causal = parse_problem("attn b1 h1 q8 d64 causal left4")
    assert parse_problem("attn b1 h1 q8 d64 left4 right0") == causal
    assert parse_problem("attn b1 h1 q8 d64 causal left4 right3") == causal
    assert str(causal) == "attn b1 h1 q8 d64 bf16 causal left4"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("page16", "page is 16 and lengths equal; pages need ragged or packed"),
        ("leftpad", "leftpad is of a cache"),
        ("packed leftpad", "leftpad is of a cache"),
        ("prefix4", "prefix is 4 and mask is 'full'"),
        ("packed boolmask", "bias is boolean and lengths packed"),
        ("fp32 fp8kv", "fp8_cache is True and dtype is 'fp32'"),
        ("causal-topleft left4", "mask is 'causal-topleft' with left4"),
        ("causal-topleft ragged", "aligned bottom-right"),
        ("alibi bias", "gives the bias twice"),
        ("ragged packed", "gives the lengths twice"),
        ("softcap0", "softcap is 0; it must be an integer from 1"),
        ("page0 ragged", "page is 0; it must be an integer from 1"),
        ("left", "unknown word 'left'"),
        ("left-1", "unknown word 'left-1'"),
        ("window4", "unknown word 'window4'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: str, what: str) -> None:
    with pytest.raises(ProblemError) as refusal:
        parse_problem(f"attn b2 h2 q8 k16 d64 {words}")
    assert what in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("field", ["window_left", "softcap", "page", "bias", "lengths", "sinks"])
def test_values_that_no_mode_has_are_refused(field: str) -> None:
    with pytest.raises(ProblemError, match=f"{field} is "):
        Features(**{field: -1}).check()  # type: ignore[arg-type]


def test_problems_of_different_modes_are_never_near() -> None:
    plain = parse_problem("attn b8 h32 hk8 q1 k8192 d128 ragged")
    for words in ("ragged page16", "ragged left127", "ragged sinks", "packed", ""):
        other = parse_problem(f"attn b8 h32 hk8 q1 k8192 d128 {words}")
        assert plain.distance(other) == other.distance(plain) == math.inf, words
        assert plain.order() != other.order()
        assert plain.traits() != other.traits()
    assert isinstance(plain, AttentionProblem)
    assert plain.distance(replace(plain, batch=16)) == 1.0


def test_every_kind_has_a_word_that_says_it() -> None:
    every = {
        "left3": "window", "softcap30": "softcap", "sinks": "sinks", "alibi": "alibi", "boolmask": "boolmask", "bias": "bias",
        "prefix3": "prefix", "ragged": "ragged", "packed": "packed", "ragged page8": "page", "ragged leftpad": "leftpad",
        "fp8kv": "fp8kv",
    }  # fmt: skip
    assert set(every.values()) == set(KINDS)
    for words, kind in every.items():
        problem = parse_problem(f"attn b1 h1 q8 d64 causal {words}")
        assert isinstance(problem, AttentionProblem)
        assert kind in problem.features.kinds()
        assert unsupported(problem.features, set(KINDS) - {kind}) == f"it does not serve {KINDS[kind]}"
    assert unsupported(PLAIN) is None
