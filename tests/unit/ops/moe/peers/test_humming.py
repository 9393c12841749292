"""humming's peer: what it refuses, and what it asks humming for.

humming needs a GPU: in its place stand functions of the same arguments, computed by PyTorch's operators.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.ops.moe.proof.test_contract import CONTRACT, drawn, wrong

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.measure.worker.callers import KernelCaller
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.formats import Weights, dequantized, dequantized_rows, quantized_rows
from flashmoe_science.ops.moe.peers import humming

PROBLEMS = (
    "moe t5 e4 k2 d96 f64 bf16 w:mxfp4 bias clamped interleaved logits",
    "moe t9 e4 k4 d256 f128 bf16 w:fp8_block",
    "moe t1 e8 k3 d128 f256 bf16 w:fp8_block_w8a8 logits",
    "moe t9 e4 k2 d128 f128 bf16 w:fp8_block_w8a8",
    "moe t5 e4 k2 d128 f256 bf16 w:int4_g128 zipf",
    "moe t5 e4 k2 d64 f96 bf16 w:int4_g32 interleaved",
)


def _prepare_layer_config(n: int, k: int, schema: dict[str, Any], rows: dict[str, Any], **rest: Any) -> Any:
    assert (rest["pad_n_to_multiple"], rest["pad_k_to_multiple"]) == (256, 128)
    given = {"n": n, "k": k, **schema, "rows": rows, "experts": rest["num_experts"], "bias": rest["has_bias"]}
    return SimpleNamespace(to_str=lambda: json.dumps(given), **given)


def _repacked(layer: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every bit the other, in place of another order."""
    assert given["weight"].dtype == torch.int32
    assert ("bias" in given) == layer.bias
    return {**given, "weight": ~given["weight"]}


def _dequantised(layer: dict[str, Any], packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    words = ~packed
    if layer["b_dtype"] == "float8e4m3":
        codes = words.view(torch.float8_e4m3fn)
        if layer.get("weight_scale_group_size_n"):
            assert scale.dtype == torch.float32
            return dequantized(Weights(codes, scale), torch.float32)
        return codes.float() * scale.float().repeat_interleave(128, -1)
    if layer["b_dtype"] == "float4e2m1":
        return dequantized(Weights(words.view(torch.uint8), scale.view(torch.uint8)), torch.float32)
    return dequantized(Weights(words, scale), torch.float32)


def _gemm(
    *, layer_config: str, compute_config: str, tuning_config: str, inputs: torch.Tensor, input_scale: torch.Tensor | None,
    weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, locks: torch.Tensor, top_k: int = 1,
    sorted_ids: torch.Tensor | None = None, expert_ids: torch.Tensor | None = None,
    num_tokens_padded: torch.Tensor | None = None, expert_layout: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    layer, block_m = json.loads(layer_config), json.loads(tuning_config)["block_shape"][0]
    weights = _dequantised(layer, weight, weight_scale)
    assert weights.shape == (layer["experts"], layer["n"], layer["k"])
    assert locks.numel() == 2048
    assert not locks.any()
    assert (input_scale is not None) == bool(layer["rows"])
    rows = inputs.float() if input_scale is None else dequantized_rows(Weights(inputs, input_scale), torch.float32)
    out = torch.full((len(rows) * top_k, layer["n"]), torch.nan)
    if json.loads(compute_config) == {"gemm_type": "indexed"}:
        assert sorted_ids is not None
        assert expert_ids is not None
        assert num_tokens_padded is not None
        assert sorted_ids.dtype == expert_ids.dtype == num_tokens_padded.dtype == torch.int32
        assert num_tokens_padded.item() == len(expert_ids) * block_m == len(sorted_ids)
        places = [(pair, expert_ids[row // block_m]) for row, pair in enumerate(sorted_ids.tolist()) if pair < len(out)]
    else:
        assert expert_layout is not None
        assert top_k == 1
        counts = expert_layout.diff()
        assert (expert_layout[0], counts.sum()) == (0, len(out))
        places = list(enumerate(torch.arange(len(counts)).repeat_interleave(counts)))
    for row, expert in places:
        out[row] = weights[expert] @ rows[row // top_k] + (0 if bias is None else bias[expert].float())
    return out.bfloat16()


def _process_input(
    inputs: torch.Tensor, *, quant_mode: str = "none", quant_dtype: str | None = None, quant_group_size: int | None = None,
    group_scale_dtype: str | None = None, activation_type: str = "none", activation_impl: str = "", layout: str = "normal",
    scatter_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, None]:  # fmt: skip
    rows = inputs
    if activation_type != "none":
        a, b = (inputs[:, 0::2], inputs[:, 1::2]) if activation_type == "binary_interleaved" else inputs.chunk(2, -1)
        names = {"fminf": lambda one, most: one.clamp(max=most), "fmaxf": lambda one, least: one.clamp(min=least)}
        names |= {"__expf": torch.exp, "a": a.float(), "b": b.float()}
        rows = eval(re.sub(r"(?<=\d)f\b", "", activation_impl), names).bfloat16()  # the peer's own words
    if scatter_idx is not None:
        assert layout == "scatter"
        placed = torch.full((scatter_idx.numel(), rows.shape[1]), torch.nan, dtype=rows.dtype)
        placed[scatter_idx.flatten()] = rows.repeat_interleave(scatter_idx.shape[1], 0)
        rows = placed
    if quant_mode == "none":
        return rows, None, None
    assert (quant_mode, quant_dtype, quant_group_size, group_scale_dtype) == ("dynamic_group", "float8e4m3", 128, "float32")
    codes, scale, _ = quantized_rows(rows)
    return codes, scale, None


def _sorted(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    by_expert, order = ids.flatten().sort(stable=True)
    numbers = torch.arange(experts + 1, dtype=by_expert.dtype)
    return torch.searchsorted(by_expert, numbers, out_int32=True), order.argsort().view(ids.shape)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    members: dict[str, dict[str, Any]] = {
        "humming": {},
        "humming.ops": {"humming_gemm": _gemm, "process_input": _process_input},
        "humming.dtypes": {name: name for name in ("float4e2m1", "float8e8m0", "float8e4m3", "float32", "uint4")},
        "humming.schema": {"HummingInputSchema": dict, "HummingWeightSchema": dict},
        "humming.transform": {
            "prepare_layer_config": _prepare_layer_config,
            "transform_humming_tensors": _repacked,
        },
        "humming.tune": {"get_heuristics_config": lambda layer, *, shape_m, gemm_type: {"block_shape": [8, 128, 64]}},
    }
    for name, values in members.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            setattr(sys.modules["humming"], name.partition(".")[2], module)
    monkeypatch.setattr(humming, "_sorted", _sorted)  # our kernel's, which needs a GPU too
    cached = (humming._layers, humming._products)
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


@pytest.mark.parametrize("indexed", [0, 1])
@pytest.mark.parametrize("text", PROBLEMS)
def test_what_it_asks_humming_for_are_the_experts(text: str, indexed: int, stand_in: None) -> None:
    problem, inputs = drawn(text)
    got = KernelCaller(CONTRACT, problem, None, humming.KERNEL, Config(indexed=indexed)).bind(inputs, "exam")()
    assert got.dtype == torch.bfloat16
    assert wrong(problem, inputs, got) == []


@pytest.mark.parametrize(
    ("text", "gpu", "reason"),
    [
        ("d128 f128 bf16 w:mxfp4", None, "humming needs a GPU"),
        ("d128 f128 bf16 w:mxfp4", "a100", "humming is called here on Hopper; NVIDIA A100.* is sm_80"),
        ("d128 f128 fp16 w:mxfp4", "h200", "the dtype is fp16; humming is called with bf16"),
        ("d128 f128 bf16", "h200", "humming is called with weights in mxfp4, fp8_block, .*"),
        ("d128 f128 bf16 w:int4_g32_zero", "h200", "humming is called with weights in mxfp4, fp8_block, .*"),
        ("d128 f128 bf16 w:mxfp4 ungated", "h200", "humming's input kernel is called with SwiGLU, plain or clamped"),
        ("d128 f128 bf16 w:mxfp4 gelu", "h200", "humming's input kernel is called with SwiGLU, plain or clamped"),
        ("d128 f200 bf16 w:fp8_block", "h200", "hidden is 200; humming's blocks of fp8 are whole, a multiple of 128"),
        ("d2880 f2880 bf16 w:mxfp4 bias clamped interleaved", "h200", None),
    ],
)
def test_it_refuses_in_words(text: str, gpu: str | None, reason: str | None) -> None:
    problem = parse_problem(f"moe t8 e8 k2 {text}")
    said = humming.KERNEL.cannot(problem, None if gpu is None else gpu_named(gpu))
    assert said is None if reason is None else re.fullmatch(reason, str(said))


def test_it_says_so_where_humming_is_missing_and_runs_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)  # as find_spec has a module that is not there
    assert humming.KERNEL.absent() == "humming-kernels is not installed"
    assert humming.KERNEL.slow
