"""MoE problems: their text form, their cost by counting, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_science.formats import FORMATS
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.ops.moe.problem import Function, MoEProblem
from flashmoe_science.problem import ProblemError

SIZES = st.integers(1, 12)


@st.composite
def problems(draw: st.DrawFn) -> MoEProblem:
    experts, gated = draw(SIZES), draw(st.booleans())
    weight_format = draw(st.sampled_from([None, *FORMATS]))
    group = weight_format and FORMATS[weight_format].group
    sizes = SIZES.map(lambda n: n * (group or 1))
    return MoEProblem(
        tokens=draw(SIZES),
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        dim=draw(sizes),
        hidden=draw(sizes),
        dtype=draw(st.sampled_from(["fp16", "bf16", "fp32"])),
        routing=draw(st.sampled_from(["ids", "logits", "zipf"])),
        activation=draw(st.sampled_from(get_args(Function))),
        bias=draw(st.booleans()),
        gated=gated,
        interleaved=gated and draw(st.booleans()),
        transposed=weight_format is None and draw(st.booleans()),
        weight_format=weight_format,
    )


@given(problems())
def test_the_text_form_reads_back(problem: MoEProblem) -> None:
    assert parse_problem(str(problem)) == problem
    assert problem.op == "moe"


def test_weights_in_a_format_are_counted_with_their_scales() -> None:
    """gpt-oss-20b's expert: 13.22 MB at 4.25 bits a weight; Qwen3-30B's: 4.72 MB, a scale to 128 x 128."""
    text = "moe t1 e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved"
    gpt_oss = parse_problem(text)
    assert isinstance(gpt_oss, MoEProblem)
    assert str(gpt_oss) == text
    assert gpt_oss.weight_format == "mxfp4"
    assert gpt_oss.weight_bytes() == 3 * 2880 * 2880 * 17 // 32
    plain = replace(gpt_oss, weight_format=None)
    assert plain.min_bytes() - gpt_oss.min_bytes() == 4 * (plain.weight_bytes() - gpt_oss.weight_bytes())
    assert (plain.flops(), plain.arithmetic()) == (gpt_oss.flops(), gpt_oss.arithmetic())
    assert plain.tile_key() != gpt_oss.tile_key()
    assert plain.distance(gpt_oss) == math.inf
    qwen = parse_problem("moe t1 e128 k8 d2048 f768 bf16 w:fp8_block")
    assert isinstance(qwen, MoEProblem)
    assert qwen.weight_bytes() == 3 * 768 * 2048 + 4 * 3 * 6 * 16
    odd = parse_problem("moe t1 e4 k2 d200 f100 bf16 w:fp8_block")
    assert isinstance(odd, MoEProblem)
    assert odd.weight_bytes() == 3 * 100 * 200 + 4 * (2 * 2 + 2 * 1)
    by_channel = parse_problem("moe t1 e4 k2 d200 f100 fp16 w:fp8_channel")
    assert isinstance(by_channel, MoEProblem)
    assert by_channel.weight_bytes() == 3 * 100 * 200 + 4 * (200 + 200)
    in_groups = parse_problem("moe t1 e4 k2 d2048 f768 bf16 w:int4_g128")
    assert isinstance(in_groups, MoEProblem)
    assert in_groups.weight_bytes() == 3 * 2048 * 768 // 2 + 3 * 2048 * 768 // 128 * 2
    with_zeros = parse_problem("moe t1 e4 k2 d2048 f768 bf16 w:int4_g128_zero")
    assert isinstance(with_zeros, MoEProblem)
    assert with_zeros.weight_bytes() == in_groups.weight_bytes() + 3 * 2048 * 768 // 128 // 2
    assert with_zeros.distance(in_groups) == math.inf


@given(problems())
def test_flops_count_the_products_of_every_pair(problem: MoEProblem) -> None:
    up = down = 2 * problem.dim * problem.hidden
    gate = up if problem.gated else 0
    assert problem.flops() == sum(up + gate + down for _ in range(problem.tokens) for _ in range(problem.top_k))


@pytest.mark.parametrize(("tokens", "experts"), [(1, 2), (2, 4), (100, 8)])
def test_bytes_count_no_expert_that_nothing_is_routed_to(tokens: int, experts: int) -> None:
    problem = parse_problem(f"moe t{tokens} e8 k2 d16 f4 bf16")
    weights = experts * (2 * 4 * 16 + 16 * 4) * 2
    routing = tokens * 2 * (4 + 4)
    assert problem.min_bytes() == 2 * tokens * 16 * 2 + weights + routing
    biased = parse_problem(f"moe t{tokens} e8 k2 d16 f4 bf16 bias")
    assert biased.min_bytes() - problem.min_bytes() == experts * (2 * 4 + 16) * 2
    ungated = parse_problem(f"moe t{tokens} e8 k2 d16 f4 bf16 bias ungated")
    assert biased.min_bytes() - ungated.min_bytes() == experts * (4 * 16 + 4) * 2


def test_from_ids_nothing_is_added_to_the_text() -> None:
    """The text form of committed records."""
    assert str(parse_problem("moe t8 e4 k2 d16 f16 bf16 ids")) == "moe t8 e4 k2 d16 f16 bf16"
    assert str(parse_problem("moe logits t8 e4 k2 d16 f16 bf16")) == "moe t8 e4 k2 d16 f16 bf16 logits"


def test_what_is_as_ever_adds_no_word() -> None:
    gpt_oss = "moe t16 e32 k4 d2880 f2880 bf16 bias clamped interleaved transposed logits"
    problem = parse_problem("moe logits transposed t16 e32 interleaved k4 d2880 clamped f2880 bias")
    assert str(problem) == gpt_oss
    assert problem == MoEProblem(16, 32, 4, 2880, 2880, "bf16", "logits", "clamped_silu", True, True, True, True)
    assert str(parse_problem("moe t8 e4 k2 d16 f16 bf16 silu")) == "moe t8 e4 k2 d16 f16 bf16"
    assert MoEProblem(8, 4, 2, 16, 16).words() == ()


def test_a_record_of_another_layout_says_which_kernel_and_not_which_tile() -> None:
    plain, biased, layout = (parse_problem(f"moe t16 e32 k4 d2880 f2880{words}") for words in ("", " bias gelu", " transposed"))
    assert plain.distance(layout) == plain.distance(biased) == 0.0
    assert plain.tile_key() == biased.tile_key() != layout.tile_key()
    assert layout.without_layout() == layout


@given(problems())
def test_what_a_call_starts_from_shapes_no_kernel(problem: MoEProblem) -> None:
    given_ids = problem.from_ids()
    assert given_ids.routing == "ids"
    assert problem.without_layout() == given_ids
    assert problem.distance(given_ids) == 0.0
    assert (problem.tile_key(), problem.rows_per_expert(), problem.flops()) == (
        given_ids.tile_key(),
        given_ids.rows_per_expert(),
        given_ids.flops(),
    )


@given(problems())
def test_logits_touch_as_many_experts_as_a_token_chooses_and_no_more_than_ids_can(problem: MoEProblem) -> None:
    assert min(problem.top_k, problem.experts) <= problem.touched() <= problem.from_ids().touched()


@pytest.mark.parametrize(("tokens", "logits", "zipf"), [(1, 8, 8), (4, 29, 24), (16, 82, 58), (64, 126, 106), (4096, 128, 128)])
def test_logits_touch_the_expected_number_of_experts(tokens: int, logits: int, zipf: int) -> None:
    """Of Qwen3-30B; counted over 20 drawn routings: 28.9, 82.2 and 125.9, skewed 24.3, 58.5 and 103.8."""
    text = f"moe t{tokens} e128 k8 d16 f4 bf16"
    assert [parse_problem(f"{text} {word}").touched() for word in ("logits", "zipf")] == [logits, zipf]
    problem = parse_problem(f"{text} logits")
    weights = logits * (2 * 4 * 16 + 16 * 4) * 2
    assert problem.min_bytes() == 2 * tokens * 16 * 2 + weights + tokens * 128 * 4


def test_ids_of_other_ranks_may_be_more_than_there_are_experts() -> None:
    assert MoEProblem(tokens=4, experts=2, top_k=8, dim=16, hidden=16).touched() == 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("moe t8 e4 k5 d16 f16", "top_k is 5 and experts is 4; top_k must be at most experts"),
        ("moe t8 e4 k2 d16", "lacks f<n>"),
        ("moe t8 e4 k2 d16 f16 causal", "unknown word 'causal'"),
        ("moe t0 e4 k2 d16 f16", "tokens is 0"),
        ("moe t8 e4 k2 d16 f16 logits zipf", "gives the routing twice ('logits' and 'zipf')"),
        ("moe t8 e4 k2 d16 f16 relu gelu", "gives the activation twice ('relu' and 'gelu')"),
        ("moe t8 e4 k2 d16 f16 bias bias", "gives the bias twice"),
        ("moe t8 e4 k2 d32 f16 w:mxfp4", "hidden is 16 and weight_format is 'mxfp4'; it must be a multiple of 32"),
        ("moe t8 e4 k2 d128 f96 w:int4_g128", "hidden is 96 and weight_format is 'int4_g128'; it must be a multiple of 128"),
        ("moe t8 e4 k2 d32 f32 w:mxfp4 transposed", "transposed is True and weight_format is 'mxfp4'"),
        ("moe t8 e4 k2 d32 f32 w:mxfp4 w:fp8_block", "gives the format twice ('w:mxfp4' and 'w:fp8_block')"),
        ("moebwd t8 e4 k2 d32 f32 w:mxfp4", "weights in a format have no gradients"),
        ("moe t8 e4 k2 d16 f16 interleaved ungated", "interleaved is True and gated is False"),
    ],
)
def test_a_wrong_text_is_refused_in_one_line(text: str, what: str) -> None:
    with pytest.raises(ProblemError) as refusal:
        parse_problem(text)
    assert what in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_our_attention_kernels_refuse_it_in_words() -> None:
    problem = parse_problem("moe t8 e4 k2 d16 f16 bf16")
    for kernel in operation("attention").kernels():
        assert kernel.cannot(problem, gpu_named("h200")) == "it computes attention, not moe"
