"""The MoE contract: its routing touches what the problem counts, its peers are right, a wrong layer is not."""

from __future__ import annotations

import re
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from tests.harness.honest_kernels import EXPERTS_IN_FORMATS

import flashmoe_science as fm
from flashmoe_science.contract import built_in, is_built_in
from flashmoe_science.formats import FORMATS
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.measure.tolerance import Expected, check_output, expected
from flashmoe_science.measure.worker.callers import KernelCaller
from flashmoe_science.operations import kernel_named, parse_problem
from flashmoe_science.ops.moe.call import Tensors
from flashmoe_science.ops.moe.front.kernels import PEERS
from flashmoe_science.ops.moe.peers import pytorch
from flashmoe_science.ops.moe.problem import MoEProblem, parse
from flashmoe_science.ops.moe.proof.contract import oracle_tensors
from flashmoe_science.ops.moe.proof.oracle import moe_oracle, moe_single_level

CPU = torch.device("cpu")
CONTRACT = built_in("moe")
PROBLEMS = ("moe t1 e8 k3 d16 f8 bf16", "moe t3 e8 k3 d16 f8 fp16", "moe t50 e7 k3 d24 f40 fp32", "moe t9 e4 k4 d64 f32 bf16")
WORDS = (
    "moe t9 e4 k2 d32 f24 bf16 bias clamped interleaved transposed",
    "moe t5 e4 k2 d24 f40 fp32 bias relu2 ungated",
    "moe t5 e4 k2 d24 f40 fp16 gelu_tanh interleaved logits",
    "moe t9 e4 k2 d96 f64 bf16 w:mxfp4 bias clamped interleaved",
    "moe t5 e4 k2 d200 f136 bf16 w:fp8_block gelu logits",
    "moe t5 e4 k2 d40 f72 fp16 w:fp8_channel relu",
    "moe t5 e4 k2 d40 f72 fp16 w:fp8_channel_static relu logits",
    "moe t5 e4 k2 d64 f96 bf16 w:int4_g32 gelu",
    "moe t5 e4 k2 d128 f256 fp16 w:int4_g128 relu interleaved",
    "moe t5 e4 k2 d64 f96 bf16 w:int4_g32_zero gelu logits",
)
FROM_LOGITS = ("moe t1 e8 k3 d16 f8 bf16 logits", "moe t50 e7 k3 d24 f40 fp32 zipf", "moe t9 e4 k4 d64 f32 bf16 logits")


def drawn(text: str, distribution: str = "normal", seed: int = 1) -> tuple[MoEProblem, dict[str, torch.Tensor]]:
    problem = parse(text)
    return problem, CONTRACT.vary(distribution, CONTRACT.inputs(problem, CPU, torch.Generator().manual_seed(seed)))


def expert_loop(*tensors: torch.Tensor) -> torch.Tensor:
    return pytorch.expert_loop(Tensors(*tensors))


def expected_of(problem: MoEProblem, inputs: dict[str, torch.Tensor]) -> Expected:
    right = CONTRACT.reference(problem, CONTRACT.widened(inputs))
    (one,) = expected([right], [CONTRACT.plain(problem, inputs)], CONTRACT.cap(problem, inputs, (right,)))
    return one


def wrong(problem: MoEProblem, inputs: dict[str, torch.Tensor], got: torch.Tensor) -> list[str]:
    return check_output("out", got, expected_of(problem, inputs))[1]


def test_the_cap_leaves_room_for_twice_what_honest_sums_err_by() -> None:
    for seed in range(100):
        one = expected_of(*drawn("moe t12 e1 k1 d64 f8 fp32", seed=seed))
        assert 2 * one.plain.max < one.cap.max
        assert 2 * one.plain.rms < one.cap.rms


@pytest.mark.parametrize("text", PROBLEMS)
def test_routing_touches_every_expert_that_it_can_and_none_twice_a_token(text: str) -> None:
    problem, inputs = drawn(text)
    ids = inputs["topk_ids"]
    assert ids.shape == (problem.tokens, problem.top_k)
    assert len(ids.unique()) == problem.touched()
    assert all(len(set(row)) == problem.top_k for row in ids.tolist())
    assert inputs["topk_weights"].dtype == torch.float32
    torch.testing.assert_close(inputs["topk_weights"].sum(1), torch.ones(problem.tokens))


def test_inputs_are_the_seeds() -> None:
    (_, first), (_, again), (_, other) = drawn(PROBLEMS[2]), drawn(PROBLEMS[2]), drawn(PROBLEMS[2], seed=2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["topk_ids"], other["topk_ids"])


@pytest.mark.parametrize("text", FROM_LOGITS)
@pytest.mark.parametrize("distribution", ["normal", "crowded"])
def test_no_rounding_of_logits_changes_the_choice(text: str, distribution: str) -> None:
    problem, inputs = drawn(text, distribution)
    logits = inputs["router_logits"]
    assert (logits.shape, logits.dtype) == ((problem.tokens, problem.experts), torch.float32)
    ordered = logits.sort(-1, descending=True)
    assert (-ordered.values.diff(dim=-1)).min() >= 1 / 8
    assert ordered.values[:, 0].abs().max() <= 1
    chosen = ordered.indices[:, : problem.top_k]
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(logits.to(dtype).topk(problem.top_k).indices, chosen)
    if distribution == "crowded":
        assert (chosen == torch.arange(problem.top_k)).all()


def test_skewed_logits_prefer_few_experts() -> None:
    _, inputs = drawn("moe t2000 e32 k4 d1 f1 bf16 zipf")
    load = torch.bincount(inputs["router_logits"].topk(4).indices.flatten(), minlength=32).sort(descending=True).values
    assert load[0] > 1300
    assert load[-1] < 150
    _, inputs = drawn("moe t2000 e32 k4 d1 f1 bf16 logits")
    even = torch.bincount(inputs["router_logits"].topk(4).indices.flatten(), minlength=32)
    assert ((even > 150) & (even < 350)).all()


@pytest.mark.parametrize("distribution", CONTRACT.distributions)
@pytest.mark.parametrize("text", [*PROBLEMS, *FROM_LOGITS, *WORDS])
def test_the_peers_are_right(text: str, distribution: str) -> None:
    problem, inputs = drawn(text, distribution)
    able = [peer for peer in PEERS if peer.cannot(problem, None) is None]
    assert able
    for peer in able:
        got = KernelCaller(CONTRACT, problem, None, peer, peer.configs(problem, None)[0]).bind(inputs, "exam")()
        assert got.dtype == inputs["x"].dtype
        assert wrong(problem, inputs, got) == [], peer.name


@pytest.mark.parametrize("text", [*PROBLEMS, *FROM_LOGITS, *WORDS])
def test_a_user_s_function_is_given_what_fused_moe_takes(text: str) -> None:
    """The public function, called as a candidate is; with a router where the problem starts from logits."""
    problem, inputs = drawn(text)

    def layer(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *routing: Any, **rest: Any) -> torch.Tensor:
        chosen = routing if problem.routing == "ids" else fm.route(*routing, normalize="sum")
        return fm.fused_moe(x, w1, w2, *chosen, **rest)

    assert wrong(problem, inputs, CONTRACT.call(layer, problem, inputs)) == []


@pytest.mark.parametrize("text", WORDS)
def test_a_word_that_a_layer_does_not_heed_is_named(text: str) -> None:
    problem, inputs = drawn(text)
    exact = CONTRACT.widened(inputs)
    found = {one.code: one.outputs for one in CONTRACT.mistakes(problem, exact)}
    expected = (
        {"activation-silu"} | ({"bias-missing"} if problem.bias else set()) | ({"interleaved"} if problem.gated else set())
    )
    expected |= {"weights-not-renormalised"} if problem.routing != "ids" else set()
    if problem.weight_format is not None:
        expected |= {"scale-moved"} | ({"nibbles-swapped"} if FORMATS[problem.weight_format].bits == 4 else set())
        expected |= {"single-level-sum"}
        expected |= {"subnormals-flushed", "scales-rounded"} if problem.weight_format.startswith("fp8") else set()
        expected |= {"input-scale-moved"} if FORMATS[problem.weight_format].static else set()
        zero_points = {"zero-points-more", "zero-points-missing"}
        expected |= zero_points if "zero" in problem.weight_format else set()
        expected |= {"codes-signed"} if problem.weight_format in ("int4_g32", "int4_g128") else set()
    assert set(found) == expected
    unseen = {"single-level-sum", "subnormals-flushed", "scales-rounded"}  # on these inputs: see below
    for other in (outputs for code, outputs in found.items() if code not in unseen):
        assert isinstance(other, torch.Tensor)
        assert wrong(problem, inputs, other.to(CONTRACT.dtype(problem)))


@pytest.mark.parametrize("form", FORMATS)
def test_large_products_that_cancel_show_sums_of_few_bits(form: str) -> None:
    """And an honest kernel's are right: what is large is exact, and gone."""
    problem = parse(f"moe t5 e2 k1 d2048 f128 bf16 w:{form}")
    contract = CONTRACT.variant("large products that cancel")
    inputs = contract.inputs(problem, CPU, torch.Generator().manual_seed(1))
    right = moe_oracle(oracle_tensors(problem, CONTRACT.widened(inputs), torch.float64))
    assert right.square().mean().sqrt() < 8
    assert wrong(problem, inputs, CONTRACT.call(fm.fused_moe, problem, inputs)) == []
    of_14_bits = moe_single_level(oracle_tensors(problem, CONTRACT.widened(inputs), torch.float64))
    assert wrong(problem, inputs, of_14_bits.bfloat16())


@pytest.mark.parametrize("name", ["e4m3 codes that are subnormal", "scales that bf16 does not have"])
@pytest.mark.parametrize("form", ["fp8_channel", "fp8_block", "fp8_block_w8a8"])
def test_honest_kernels_are_right_where_subnormal_codes_and_bits_of_scales_matter(name: str, form: str) -> None:
    problem, contract = parse(f"moe t5 e2 k1 d2048 f128 bf16 w:{form}"), CONTRACT.variant(name)
    kernels = [fm.fused_moe] if form == "fp8_block_w8a8" else EXPERTS_IN_FORMATS.values()
    for seed in range(3):
        inputs = contract.inputs(problem, CPU, torch.Generator().manual_seed(seed))
        for kernel in kernels:
            named = {"weight_format": form} | {one: inputs[one] for one in ("gate_up_scale", "down_scale")}
            got = kernel(*(inputs[one] for one in ("x", "w1", "w2", "topk_weights", "topk_ids")), **named)
            assert wrong(problem, inputs, got) == []


def test_a_layer_without_its_routing_weights_is_wrong() -> None:
    problem, inputs = drawn(PROBLEMS[2])
    even = torch.full_like(inputs["topk_weights"], 1 / problem.top_k)
    got = CONTRACT.call(expert_loop, problem, inputs | {"topk_weights": even})
    assert wrong(problem, inputs, got)


def test_a_router_that_does_not_renormalise_is_wrong() -> None:
    problem, inputs = drawn(FROM_LOGITS[1])

    def layer(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, logits: torch.Tensor, top_k: int) -> torch.Tensor:
        weights, ids = torch.softmax(logits, -1).topk(top_k)
        return expert_loop(x, w1, w2, weights / (weights.sum(-1, keepdim=True) if renormalise else 1), ids)

    renormalise = True
    assert wrong(problem, inputs, CONTRACT.call(layer, problem, inputs)) == []
    renormalise = False
    assert wrong(problem, inputs, CONTRACT.call(layer, problem, inputs))


def test_weights_are_widened_an_expert_at_a_time() -> None:
    """All of DeepSeek-V3's in fp64 are 90 GB."""
    for text in (PROBLEMS[0], FROM_LOGITS[0]):
        _, inputs = drawn(text)
        wide = CONTRACT.widened(inputs)
        assert list(wide) == list(inputs)
        kept = {name for name, one in wide.items() if one is inputs[name]}
        assert kept - {"topk_ids"} == {"w1", "w2"}
        assert wide["x"].dtype == torch.float64


def test_what_the_peers_need_is_said_in_words() -> None:
    h200, a100 = gpu_named("h200"), gpu_named("a100")
    said = {
        ("sonicmoe", "moe t8 e8 k2 d512 f64 bf16"): None,
        ("sonicmoe", "moe t8 e8 k2 d512 f64 fp32"): "SonicMoE takes fp16 and bf16",
        ("sonicmoe", "moe t8 e8 k2 d512 f72 bf16"): "hidden is 72; SonicMoE needs a multiple of 64",
        ("sonicmoe", "moe t8 e8 k2 d64 f64 bf16"): "dim is 64; SonicMoE needs 512 or more",
        ("sonicmoe", "moe t8 e12 k2 d512 f64 bf16"): "the problem has 2 of 12",
        ("batched_mm", "moe t8 e8 k8 d512 f64 bf16"): None,
        ("dequantised_at_load", "moe t8 e8 k2 d512 f64 bf16 w:mxfp4"): None,
        ("dequantised_at_load", "moe t8 e8 k2 d512 f64 bf16"): "there is nothing to dequantise",
        ("batched_mm", "moe t9 e8 k8 d512 f64 bf16"): "tokens times top_k is 72",
    }
    for (name, text), words in said.items():
        reason = kernel_named(name, "moe").cannot(parse_problem(text), h200)
        assert reason == words if words is None else words in str(reason)
    for word in ("bias", "clamped", "ungated", "interleaved", "transposed"):
        reason = kernel_named("sonicmoe", "moe").cannot(parse_problem(f"moe t8 e8 k2 d512 f64 bf16 {word}"), h200)
        assert f"the problem has {word}" in str(reason)
    assert "Hopper" in str(kernel_named("sonicmoe", "moe").cannot(parse_problem("moe t8 e8 k2 d512 f64 bf16"), a100))
    assert kernel_named("sonicmoe", "moe").slow


@pytest.mark.parametrize("suite", ["moe", "moe-gpt-oss", "moe-skewed", "moe-ids", "moe-formats"])
def test_drawn_problems_differ_parse_and_have_no_more_weights(suite: str) -> None:
    chance = Random(1)
    for text in CONTRACT.suites()[suite][::3]:
        near = parse(text)
        drawn = {CONTRACT.draw(near, chance) for _ in range(30)}
        assert len(drawn) > 20
        for problem in drawn:
            assert parse_problem(str(problem)) == problem
            assert (problem.routing, problem.words()) == (near.routing, near.words())
            assert problem.top_k <= problem.experts
            assert problem.experts * problem.dim * problem.hidden <= near.experts * near.dim * near.hidden
        assert len({problem.top_k for problem in drawn}) > 1
        assert len({problem.experts for problem in drawn}) > 3


def test_it_comes_with_the_package() -> None:
    assert is_built_in(CONTRACT)
    assert CONTRACT.cannot(parse_problem("attn b1 h1 q8 d8 bf16")) is not None
    for text in CONTRACT.default_problems():
        assert parse_problem(str(text)).op == "moe"


def test_peers_promise_the_kernels_of_their_own_families() -> None:
    """A peer that launches one of a family that it did not promise is refused."""
    names = {
        "grouped_mm": "cutlass::gemm::GroupProblemShape<",
        "sonicmoe": "kernel_cutlass_kernel_quackgemm_sm90GemmSm90_object",
        "triton_kernels": "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x128x1_swiglu",
        "humming": "void humming<MmaOpClass, Shape<0u, 1536u, 2048u>, Shape<8u, 128u, 256u> >",
    }
    problem, h200 = parse_problem("moe t8 e8 k2 d512 f64 bf16"), gpu_named("h200")
    assert h200 is not None
    for name, launched in names.items():
        promised = kernel_named(name, "moe").launches(problem, Config(indexed=1), h200)
        assert any(re.search(one.name, launched) for one in promised)
        others = [one for other, one in names.items() if other != name]
        assert not any(re.search(one.name, other) for one in promised for other in others)
        assert all(any(re.search(pattern, one) for pattern in CONTRACT.families.values()) for one in names.values())


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("moe t4096 e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved logits", "^flashmoe_moe_up$"),
        ("moe t4096 e128 k8 d2048 f768 bf16 w:fp8_block_w8a8 logits", "^flashmoe_moe_up_gluon_sm90$"),
        ("moe t1 e128 k8 d2048 f768 bf16 w:int4_g128 logits", "^flashmoe_moe_gemv"),
    ],
)
def test_weights_dequantised_at_load_are_for_the_kernel_that_dispatch_would_choose(text: str, ours: str) -> None:
    """Its router is ours too: this project's best for who has the memory."""
    h200 = gpu_named("h200")
    assert h200 is not None
    promised = [one.name for one in kernel_named("dequantised_at_load", "moe").launches(parse_problem(text), Config(), h200)]
    assert promised[0].startswith("^flashmoe_moe_route")
    assert any(one.startswith(ours) for one in promised)


def test_fused_moe_refuses_a_peer_that_prepares_weights_at_load() -> None:
    problem, inputs = drawn("moe t9 e4 k2 d128 f128 bf16 w:fp8_block")
    with pytest.raises(ValueError, match="it prepares weights at load, and fused_moe takes a checkpoint's"):
        CONTRACT.call(partial(fm.fused_moe, kernel="dequantised_at_load"), problem, inputs)
