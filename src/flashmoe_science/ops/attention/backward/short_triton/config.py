"""What bwd_short_triton serves, and its tiles."""

from __future__ import annotations

from flashmoe_science.hardware.gpus import Gpu, why_no_triton
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.problem import padded_head_dim
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.launch import cdiv
from flashmoe_science.problem import DTYPE_BYTES

NAMES = "keys_m", "keys_n", "queries_m", "queries_n", "num_stages", "num_warps"
_LONGEST = 512
_WIDEST = 128  # columns of a head: beyond, dK and dV of a tile do not fit the registers of four warps
# Scores times columns, for each multiprocessor: up to here computing scores twice costs less than more launches, as measured on
# an H200 (docs/notes/backward.md).
_MOST = 2**21


def supports(problem: AttentionBackwardProblem, device: Device) -> str | None:
    """None if the kernel can serve the problem there, else why not."""
    if problem.dtype == "fp32":
        return "it takes fp16 and bf16"
    if max(problem.head_dim, problem.head_dim_v) > _WIDEST:
        return f"it takes heads of up to {_WIDEST} columns"
    if max(problem.seqlen_q, problem.seqlen_k) > _LONGEST:
        return f"it takes up to {_LONGEST} queries and keys"
    return unsupported(problem.features) or why_no_triton(device)


def configs(problem: AttentionBackwardProblem, device: Device) -> tuple[Config, ...]:
    """Tiles that fit the GPU's shared memory, the best guess first."""
    limit = 99 * 1024 if device is None else device.shared_per_block
    width = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    wgmma = device is not None and device.compute_capability[0] == 9
    made = (Config(**dict(zip(NAMES, one, strict=True))) for one in _tiles(width, wgmma))
    return tuple(one for one in made if _fits(problem, one, limit))


def _tiles(width: int, wgmma: bool) -> list[tuple[int, ...]]:
    """By NAMES: queries and keys of a tile of dK and dV, and of dQ; stages of the loops."""
    if wgmma:
        return [(64, 64, 64, 64, 1, 4), *([(32, 64, 64, 64, 1, 4)] if width <= 64 else [])]
    return [(32, 64, 64, 32, 1, 4), (32, 32, 32, 32, 1, 4)] if width <= 64 else [(32, 64, 64, 64, 1, 8), (32, 32, 32, 32, 1, 8)]


def _fits(problem: AttentionBackwardProblem, config: Config, limit: int) -> bool:
    """Whether K, V, Q, dO and O of a step fit, or Q, dO, O and stages of K and V."""
    of_k, of_v = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    m, n, stages = config["queries_m"], config["queries_n"], config["num_stages"]
    of_keys = config["keys_n"] * (of_k + of_v) + config["keys_m"] * (of_k + 2 * of_v)
    scores = 2 * config["keys_m"] * config["keys_n"]
    return DTYPE_BYTES[problem.dtype] * max(of_keys + scores, m * (of_k + 2 * of_v) + stages * n * (of_k + of_v)) <= limit


def programs(config: Config, batch: int, heads: int, heads_kv: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """Of keys and of queries."""
    of_keys, of_queries = cdiv(seqlen_k, config["keys_n"]) * heads_kv, cdiv(seqlen_q, config["queries_m"]) * heads
    return of_keys * batch, of_queries * batch


def suits(problem: AttentionBackwardProblem, gpu: Gpu) -> bool:
    """Whether the problem is so small that one launch is worth computing scores twice."""
    return problem.scores() * max(problem.head_dim, problem.head_dim_v) <= _MOST * gpu.sm_count
