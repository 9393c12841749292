"""humming (``humming-kernels``): products of weights of 4 and 8 bits, which it repacks at load, by wgmma.

It multiplies rows of experts that lie one after another ("grouped_contiguous"), or tokens by tables of tiles ("indexed").
Its input kernel places tokens by expert, activates, and quantises for fp8 products. It sorts no ids and sums nothing by token:
the sort is ours, one launch or two where PyTorch takes several; the sum is PyTorch's embedding bag. Up to 128 pairs each may be
a tile of its own: those tables are the same for any routing. Sizes are padded to whole tiles, as vLLM pads them.

It compiles by NVRTC, of a wheel where LD_LIBRARY_PATH has the wheel's libraries, or by nvcc with HUMMING_COMPILER=nvcc.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from flashmoe_science.formats import FORMATS
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.ops.moe.call import Activation, MoEInputs
from flashmoe_science.ops.moe.peers import peer_kernel
from flashmoe_science.ops.moe.peers.pytorch import summed
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.peer import not_installed

_FORMATS = ("mxfp4", "fp8_block", "fp8_block_w8a8", "int4_g32", "int4_g128")
_SIDE = 128  # of a block of fp8
_PADDED = {"pad_n_to_multiple": 256, "pad_k_to_multiple": 128}
_MAX_PAIRS = 128  # each a tile of its own
_LOCKS = 2048  # of stream-K, as many as its layers have; they end as they begin
_E4M3 = {"quant_mode": "dynamic_group", "quant_dtype": "float8e4m3", "quant_group_size": _SIDE, "group_scale_dtype": "float32"}
_NAMES = (("w1", "gate_up_scale", "gate_up_bias"), ("w2", "down_scale", "down_bias"))


class Product(NamedTuple):
    """What it calls the configs of a product, as text, and the rows of a tile."""

    layer: str
    compute: str
    tuning: str
    block_m: int


def absent() -> str | None:
    return not_installed("humming-kernels", "humming")


def supports(problem: MoEProblem, device: Device) -> str | None:
    if device is None:
        return "humming needs a GPU"
    if device.compute_capability != (9, 0):
        return f"humming is called here on Hopper; {device.product} is {device.arch}"
    if problem.dtype != "bf16":
        return f"the dtype is {problem.dtype}; humming is called with bf16"
    if problem.weight_format not in _FORMATS:
        return f"humming is called with weights in {', '.join(_FORMATS)}"
    if not problem.gated or problem.activation not in ("silu", "clamped_silu"):
        return "humming's input kernel is called with SwiGLU, plain or clamped"
    for name, size in (("dim", problem.dim), ("hidden", problem.hidden)):
        if FORMATS[problem.weight_format].in_blocks and size % _SIDE:
            return f"{name} is {size}; humming's blocks of fp8 are whole, a multiple of {_SIDE}"
    return None


def configs(problem: MoEProblem, device: Device) -> tuple[Config, ...]:
    grouped, indexed = Config(indexed=0), Config(indexed=1)
    return (indexed, grouped) if problem.pairs() <= _MAX_PAIRS else (grouped,)


def load(problem: MoEProblem, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from humming.transform import transform_humming_tensors

    made = dict(inputs)
    for layer, (weights, scale, bias) in zip(_layers(problem), _NAMES, strict=True):
        given = {"weight": inputs[weights].contiguous().view(torch.int32)}
        given["weight_scale"] = _scale(problem, inputs[scale], inputs[weights].shape[1])
        given |= {"bias": inputs[bias]} if bias in inputs else {}
        packed = transform_humming_tensors(layer, given)
        made |= {weights: packed["weight"], scale: packed["weight_scale"]}
        made |= {bias: packed["bias"]} if bias in inputs else {}
    return made


def _scale(problem: MoEProblem, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales as it takes them: with bf16 rows those of blocks in bf16, one to a row."""
    if problem.weight_format == "mxfp4":
        return scale.contiguous().view(torch.float8_e8m0fnu)
    if not FORMATS[str(problem.weight_format)].in_blocks:
        return scale.bfloat16()
    scale = (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()
    if problem.weight_format == "fp8_block_w8a8":
        return scale.contiguous()
    return scale.bfloat16().repeat_interleave(_SIDE, 1)[:, :rows].contiguous()


def run(inputs: MoEInputs, config: Config) -> torch.Tensor:
    return (_by_pair if config["indexed"] else _by_expert)(inputs)


def _by_pair(inputs: MoEInputs) -> torch.Tensor:
    p, a, (x, _, _, weights, ids, *_) = inputs.problem, inputs.activation, inputs.tensors
    first, second = _products(p, "indexed")
    experts = ids.flatten().int()
    both = _multiply(inputs, 0, first, _prepared(x, a), top_k=p.top_k, **_tiles(experts, first.block_m))
    down = _multiply(inputs, 1, second, _prepared(both, a, _activation(a)), top_k=1, **_tiles(experts, second.block_m))
    return torch.bmm(weights[:, None].to(x.dtype), down.view(p.tokens, p.top_k, p.dim)).squeeze(1)


def _by_expert(inputs: MoEInputs) -> torch.Tensor:
    p, a, (x, _, _, weights, ids, *_) = inputs.problem, inputs.activation, inputs.tensors
    first, second = _products(p, "grouped_contiguous")
    offsets, row_of_pair = _sorted(ids, p.experts)
    rows = _prepared(x, a, {"layout": "scatter", "scatter_idx": row_of_pair})
    both = _multiply(inputs, 0, first, rows, expert_layout=offsets)
    down = _multiply(inputs, 1, second, _prepared(both, a, _activation(a)), expert_layout=offsets)
    return summed(down, row_of_pair, weights.to(x.dtype))


def _sorted(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first row of each expert, then the number of rows; and the row of each pair."""
    from flashmoe_science.ops.launch import address  # it brings Triton
    from flashmoe_science.ops.moe.rows import RowCounts, bind_rows

    counts = RowCounts(ids.numel(), experts, _SIDE)
    tables = torch.empty(counts.length, dtype=torch.int32, device=ids.device)
    bind_rows(ids, counts, early_start=False)(address(ids), address(tables))
    row_of_pair, offsets = tables[counts.pairs :].split((counts.pairs, len(tables) - 2 * counts.pairs))
    return offsets[: experts + 1], row_of_pair.view(ids.shape)


def _multiply(
    inputs: MoEInputs, nth: int, product: Product, rows: tuple[torch.Tensor, torch.Tensor | None], **experts: Any
) -> torch.Tensor:
    from humming import ops

    weight, scale, bias = (getattr(inputs.tensors, name) for name in _NAMES[nth])
    out: torch.Tensor = ops.humming_gemm(
        layer_config=product.layer, compute_config=product.compute, tuning_config=product.tuning, inputs=rows[0],
        input_scale=rows[1], weight=weight, weight_scale=scale, bias=bias, locks=_locks(weight.device), **experts,
    )  # fmt: skip
    return out


def _prepared(
    rows: torch.Tensor, activation: Activation, how: Mapping[str, Any] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows as a product takes them, by its input kernel, and their scales where they are quantised."""
    from humming import ops

    asked = {**(how or {}), **(_E4M3 if activation.w8a8 else {})}
    if not asked:
        return rows, None
    made, scales, _ = ops.process_input(rows, **asked)
    return made, scales


def _activation(activation: Activation) -> dict[str, Any]:
    """The activation as its input kernel takes it: C++ of a gate ``a`` and an up projection ``b``."""
    words = "a / (1.0f + __expf(-a)) * b"
    if activation.function == "clamped_silu":
        limit, alpha = float(activation.limit), float(activation.alpha)
        gate, up = f"fminf(a, {limit}f)", f"fminf(fmaxf(b, {-limit}f), {limit}f)"
        words = f"{gate} / (1.0f + __expf(-{alpha}f * {gate})) * ({up} + 1.0f)"
    return {"activation_type": "binary_interleaved" if activation.interleaved else "binary_split", "activation_impl": words}


def _tiles(experts: torch.Tensor, block_m: int) -> dict[str, torch.Tensor]:
    """The tables of tiles of one pair each."""
    sorted_ids, rows = _one_pair_each(len(experts), block_m, experts.device)
    return {"sorted_ids": sorted_ids, "expert_ids": experts, "num_tokens_padded": rows}


@lru_cache(16)
def _one_pair_each(pairs: int, block_m: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of the rows of tiles, past the last one where there is none; and the number of rows."""
    ids = torch.full((pairs, block_m), pairs, dtype=torch.int32, device=device)
    ids[:, 0] = torch.arange(pairs, device=device)
    return ids.flatten(), torch.tensor([ids.numel()], dtype=torch.int32, device=device)


@cache
def _locks(device: torch.device) -> torch.Tensor:
    return torch.zeros(_LOCKS, dtype=torch.int32, device=device)


@lru_cache(64)
def _layers(problem: MoEProblem) -> tuple[Any, Any]:
    """Its configs of both products."""
    from humming import dtypes
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_layer_config

    form, rows = FORMATS[str(problem.weight_format)], HummingInputSchema()
    if form.name == "mxfp4":
        schema = HummingWeightSchema(b_dtype=dtypes.float4e2m1, bs_dtype=dtypes.float8e8m0, weight_scale_group_size=32)
    elif form.name == "fp8_block":
        schema = HummingWeightSchema(b_dtype=dtypes.float8e4m3, weight_scale_group_size=_SIDE)
    elif form.name == "fp8_block_w8a8":
        of_blocks = {"weight_scale_group_size": _SIDE, "weight_scale_group_size_n": _SIDE}
        schema = HummingWeightSchema(b_dtype=dtypes.float8e4m3, bs_dtype=dtypes.float32, **of_blocks)
        rows = HummingInputSchema(a_dtype=dtypes.float8e4m3, input_scale_group_size=_SIDE, input_scale_dtype=dtypes.float32)
    else:
        schema = HummingWeightSchema(b_dtype=dtypes.uint4, weight_scale_group_size=form.group)
    rest = {"num_experts": problem.experts, "has_bias": problem.bias, "torch_dtype": torch.bfloat16, **_PADDED}
    sizes = (problem.rows_of_w1(), problem.dim), (problem.dim, problem.hidden)
    first, second = (prepare_layer_config(*size, schema, rows, **rest) for size in sizes)
    return first, second


@lru_cache(64)
def _products(problem: MoEProblem, kind: str) -> tuple[Product, Product]:
    """Both products with the tuning that it chooses for so many pairs."""
    from humming.tune import get_heuristics_config

    made = []
    for layer in _layers(problem):
        tuning = get_heuristics_config(layer, shape_m=problem.pairs(), gemm_type=kind)
        made.append(Product(layer.to_str(), json.dumps({"gemm_type": kind}), json.dumps(tuning), tuning["block_shape"][0]))
    return made[0], made[1]


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    sort = () if config["indexed"] else (Launch("^flashmoe_moe_(rows|count)$"),)
    return (*sort, Launch("humming|^void process_input_kernel<"))


KERNEL = peer_kernel(
    name="humming",
    about="humming (humming-kernels): weights repacked at load, by wgmma on Hopper",
    supports=supports,
    configs=configs,
    run=run,
    launches=launches,
    load=load,
    slow=True,
    absent=absent,
)
