"""After ``warmup`` no call of the model compiles: it lists every build that the calls of each length need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flashmoe_science as fm
from flashmoe_science.ahead import Model, jobs_of, walked
from flashmoe_science.hardware.compiler import build_key
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.ops.launch import collect_builds, kernels_loaded

ATTENTION = Model(heads=16, heads_kv=4, head_dim=128, max_seqlen=1100)
LONG = ATTENTION._replace(max_seqlen=4096)
WINDOW = ATTENTION._replace(
    max_seqlen=600, head_dim=64, window_size=(127, 0), page_size=16, sinks=True, append=True, rotary_dim=64
)
EXPERTS = Model(experts=32, top_k=4, hidden=512, intermediate=256, max_tokens=1100)

Call = tuple[Callable[..., Any], dict[str, Any]]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def decoding(model: Model, keys: int, device: str = "meta") -> Iterator[Call]:
    """What decoding one more token calls, of caches that grow by concatenation."""
    heads, heads_kv, width = model.heads or 0, model.heads_kv or 0, model.head_dim or 0
    query, key = empty(1, heads, 1, width, device=device), empty(1, heads_kv, keys, width, device=device)
    yield fm.scaled_dot_product_attention, {"query": query, "key": key, "value": key.clone(), "enable_gqa": True}
    q, k = empty(1, 1, heads, width, device=device), empty(1, keys, heads_kv, width, device=device)
    yield fm.flash_attn_func, {"q": q, "k": k, "v": k.clone(), "causal": True}


def prefill(model: Model, rows: int) -> Iterator[Call]:
    heads, heads_kv, width = model.heads or 0, model.heads_kv or 0, model.head_dim or 0
    query, key = empty(1, heads, rows, width), empty(1, heads_kv, rows, width)
    yield fm.scaled_dot_product_attention, {"query": query, "key": key, "value": key, "is_causal": True, "enable_gqa": True}
    q, k, starts = empty(rows, heads, width), empty(rows, heads_kv, width), empty(2, dtype=torch.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": rows, "max_seqlen_k": rows}
    yield fm.flash_attn_varlen_func, {"q": q, "k": k, "v": k, "causal": True, **packed}


def from_pages(model: Model, keys: int) -> Iterator[Call]:
    heads, heads_kv, width, page = model.heads or 0, model.heads_kv or 0, model.head_dim or 0, model.page_size or 1
    cache, new = empty(200, page, heads_kv, width), empty(1, 1, heads_kv, width)
    features = {"causal": True, "window_size": model.window_size, "s_aux": empty(heads)}
    table, lengths, angles = empty(1, -(-keys // page), dtype=torch.int32), empty(1, dtype=torch.int32), empty(keys, 32)
    given = {"q": empty(1, 1, heads, width), "k_cache": cache, "v_cache": cache, "page_table": table, "cache_seqlens": lengths}
    yield fm.flash_attn_with_kvcache, {**given, **features}
    yield fm.flash_attn_with_kvcache, {**given, **features, "k": new, "v": new, "rotary_cos": angles, "rotary_sin": angles}


def of_experts(model: Model, tokens: int) -> Iterator[Call]:
    experts, top_k, dim, hidden = model.experts or 0, model.top_k or 0, model.hidden or 0, model.intermediate or 0
    routing = empty(tokens, top_k, dtype=torch.float32), empty(tokens, top_k, dtype=torch.int32)
    names = ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights", "top_k_ids")
    tensors = (empty(tokens, dim), empty(experts, 2 * hidden, dim), empty(experts, dim, hidden), *routing)
    yield fm.fused_moe, dict(zip(names, tensors, strict=True))


@pytest.mark.parametrize(
    ("model", "calls", "gpu"),
    [
        pytest.param(LONG, decoding, "h200", id="decoding, h200"),
        pytest.param(ATTENTION, decoding, "l4", id="decoding, l4"),
        pytest.param(ATTENTION, prefill, "h200", id="prefill, h200"),
        pytest.param(WINDOW, from_pages, "h200", id="pages, h200"),
        pytest.param(EXPERTS, of_experts, "h200", id="experts, h200"),
    ],
)
def test_calls_of_any_length_need_no_other_build(model: Model, calls: Callable[[Model, int], Iterator[Call]], gpu: str) -> None:
    card = gpu_named(gpu)
    listed = {build_key(job, card) for job in jobs_of(model, card)}
    with collect_builds(card) as jobs:
        longest = model.max_tokens or model.max_seqlen
        for length in (*range(1, 500), *range(500, longest + 1, 7)):  # a prime: every remainder by a tile comes up
            for function, arguments in calls(model, length):
                fm.explain(function, **arguments)
    assert jobs
    assert {build_key(job, card) for job in jobs} <= listed


def test_the_same_model_is_listed_twice_and_its_plans_serve_no_call_on_the_cpu() -> None:
    model, card = ATTENTION._replace(max_seqlen=8), gpu_named("h200")
    assert len(jobs_of(model, card)) == len(jobs_of(model, card)) > 1
    for function, arguments in decoding(model, 8, "cpu"):
        assert fm.explain(function, **arguments).kernel == "sdpa"
        function(**arguments)


def test_lengths_are_walked_to_the_longest() -> None:
    assert walked(1) == [1]
    assert walked(70)[:64] == [*range(1, 65)]
    assert walked(70)[-1] == 70
    assert {1023, 1024, 1025, 4031, 4032, 5000} - {*walked(5000)} == {1025}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "heads and experts are None; at least one of them must be given"),
        ({"heads": 4}, "head_dim is None and heads is given; it must be given too"),
        ({"heads": 4, "heads_kv": 3, "head_dim": 64}, "heads is 4 and heads_kv is 3; heads_kv must divide heads"),
        ({"heads": 4, "head_dim": 64, "batch": (1, 0)}, "batch is 0; it must be an integer from 1 to"),
        ({"heads": 4, "head_dim": 64, "max_seqlen": 0}, "max_seqlen is 0; it must be an integer from 1 to"),
        ({"heads": 4, "head_dim": 64, "page_size": 0}, "page_size is 0; it must be an integer from 1 to"),
        ({"heads": 4, "head_dim": 64, "head_dim_v": 0}, "head_dim_v is 0; it must be an integer from 1 to"),
        ({"heads": 4, "head_dim": -3}, "head_dim is -3; it must be an integer from 1 to"),
        ({"experts": 4, "top_k": 2, "hidden": 0, "intermediate": 8}, "hidden is 0; it must be an integer from 1 to"),
        ({"experts": 4, "top_k": 2, "hidden": 8, "intermediate": 0}, "intermediate is 0; it must be an integer from 1 to"),
        ({"heads": 4, "head_dim": 64, "dtype": torch.int8}, "dtype is torch.int8; it must be one of"),
        ({"heads": 4, "head_dim": 64, "append": True, "rotary_dim": 33}, "rotary_dim is 33; it must be a multiple of 16"),
        ({"heads": 4, "head_dim": 64, "append": True, "rotary_dim": -16}, "rotary_dim is -16; it must be at least 0"),
        ({"heads": 4, "head_dim": 64, "append": True, "rotary_dim": 32.0}, "rotary_dim is 32.0; it must be an integer"),
        ({"heads": 4, "head_dim": 64, "append": "no"}, "append is 'no'; it must be True or False"),
        ({"heads": 4, "head_dim": 64, "batch": []}, "batch has no number; it must have at least one"),
        ({"heads": 4, "head_dim": 64, "batch": 1.5}, "batch is 1.5; it must be an integer from 1 to"),
        ({"heads": 4, "head_dim": 64, "top_k": 2}, "experts is None and top_k is given; it must be given too"),
        ({"experts": 4, "top_k": 2, "hidden": 8, "intermediate": 8, "head_dim": 8}, "heads is None and head_dim is given"),
        ({"heads": 4, "head_dim": 64, "append": True, "rotary_dim": 80}, "rotary_dim is 80; it must be a multiple of 16, from"),
        ({"heads": 4, "head_dim": 64, "rotary_dim": 64}, "rotary_dim is 64 and append is False; only appended keys are"),
        ({"experts": 4}, "top_k is None and experts is given; it must be given too"),
        ({"experts": 4, "top_k": 2, "hidden": 8, "intermediate": 8, "activation": "swish"}, "activation is 'swish'; it must"),
    ],
)
def test_what_is_no_model_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refusal:
        jobs_of(Model(**given), gpu_named("l4"))
    assert str(refusal.value).startswith(message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no NVIDIA GPU here"):
        fm.warmup(heads=1, head_dim=16)


def test_the_command_refuses_in_one_line(flashmoe: Callable[..., tuple[int, str, str]]) -> None:
    assert flashmoe("warmup", "--gpu", "l4")[0::2] == (
        2, "flashmoe: heads and experts are None; at least one of them must be given\n",
    )  # fmt: skip
    code, _, said = flashmoe("warmup", "--gpu", "l4", "--heads", "1", "--head-dim", "16", "--dtype", "fp64")
    assert (code, said) == (2, "flashmoe: dtype is 'fp64'; it must be one of fp16, bf16, fp32\n")


@pytest.mark.slow
def test_the_command_compiles(flashmoe: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = flashmoe("warmup", "--gpu", "l4", "--heads", "1", "--head-dim", "16", "--max-seqlen", "1")
    assert code == 0
    assert "kernels for NVIDIA L4 are in " in out


@pytest.mark.gpu
def test_after_it_decoding_compiles_nothing() -> None:
    lines: list[str] = []
    warmed = fm.warmup(heads=16, heads_kv=4, head_dim=128, max_seqlen=4096, report=lines.append)
    before = kernels_loaded()
    for keys in range(1, 4097):
        for function, arguments in decoding(LONG, keys, "cuda"):
            function(**arguments)
    assert (warmed.kernels > 20, kernels_loaded() - before, lines[-1]) == (True, 0, str(warmed))
