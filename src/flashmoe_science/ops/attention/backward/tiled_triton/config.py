"""What bwd_triton serves, and its tiles."""

from __future__ import annotations

from typing import Any

from flashmoe_science.hardware.gpus import Gpu, why_no_triton
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.problem import padded_head_dim
from flashmoe_science.ops.attention.problem.backward import DIFFERENTIABLE, AttentionBackwardProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.launch import INTERPRETING
from flashmoe_science.problem import DTYPE_BYTES

DELTA_ROWS, DELTA_WARPS = 32, 4  # of a program that sums rows
Tile = tuple[int, int, int, int]  # block_m, block_n, num_warps, num_stages
KEYS, QUERIES = "dkdv", "dq"  # the kernels that have tiles of their own: dBias has dQ's


def supports(problem: AttentionBackwardProblem, device: Device) -> str | None:
    """None if the kernel can serve the problem there, else why not."""
    return unsupported(problem.features, DIFFERENTIABLE) or why_no_triton(device)


def configs(problem: AttentionBackwardProblem, device: Device) -> tuple[Config, ...]:
    """Tiles that fit the GPU's shared memory, the best guess first."""
    limit = 99 * 1024 if device is None else device.shared_per_block
    pairs = [(keys, queries) for keys, queries in _tiles(problem, device) if _fits(problem, keys, queries, limit)]
    return tuple(_config(keys, queries) for keys, queries in dict.fromkeys(pairs))


def _config(keys: Tile, queries: Tile) -> Config:
    names = ("block_m", "block_n", "warps", "stages")
    values = {f"{name}_{KEYS}": value for name, value in zip(names, keys, strict=True)}
    return Config(**values, **{f"{name}_{QUERIES}": value for name, value in zip(names, queries, strict=True)})


def tile_of(config: Config, kernel: str) -> Tile:
    """The tile of one of the kernels of a config."""
    return (
        config[f"block_m_{kernel}"], config[f"block_n_{kernel}"], config[f"warps_{kernel}"], config[f"stages_{kernel}"],
    )  # fmt: skip


def keys_first(tile: Tile) -> bool:
    """Whether keys are the rows of dK's and dV's tiles of scores: where each warp has 16 of them, P and dS go from registers
    into the next product, and else by way of shared memory."""
    _, block_n, warps, _ = tile
    return block_n == 16 * warps


def _tiles(problem: AttentionBackwardProblem, gpu: Gpu | None) -> list[tuple[Tile, Tile]]:
    """Tiles of dK and dV, and of dQ. The first that fits a GPU spills none of its registers, but of fp32, and a few on Hopper,
    where it was measured."""
    width = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    wgmma = gpu is not None and gpu.compute_capability[0] == 9
    if problem.dtype == "fp32":
        if width <= 128:
            first = ((16, 32, 4, 1), (32, 16, 4, 1)) if width <= 64 else ((16, 32, 8, 1), (16, 16, 4, 1))
            return [first, ((16, 16, 4, 1), (16, 16, 4, 1))]
        return [((16, 16, 8, 1), (16, 16, 8, 1))]
    if wgmma and width <= 64:
        return [((64, 64, 4, 1), (128, 64, 8, 3)), ((64, 64, 4, 1), (64, 64, 4, 2)), ((64, 128, 8, 2), (128, 64, 8, 3))]
    if wgmma and width <= 128:
        keys: list[Tile] = [(64, 128, 8, 1), (64, 64, 4, 1), (32, 128, 8, 2)]
        if problem.features.bias != "none":  # which is read beside the products: the last tile has registers left for it
            keys.reverse()
        return [(one, (64, 64, 4, 2)) for one in keys]
    if width <= 64:
        return [((32, 64, 8, 2), (64, 32, 4, 2)), ((32, 64, 4, 2), (64, 32, 4, 2))]
    if width <= 128:
        tall = [((64, 64, 8, 2), (64, 64, 8, 2))] if gpu is not None and gpu.compute_capability[0] <= 9 else []
        return [((32, 64, 8, 2), (64, 64, 8, 2)), *tall, ((32, 64, 8, 1), (64, 32, 4, 2))]
    # By wgmma, 32 queries that are the rows, in two stages, give dK that differs from call to call and is wrong: measured on an
    # H100 with Triton 3.6 (docs/notes/backward.md). One stage is right.
    tall = [((32, 64, 8, 1), (64, 32, 8, 2)), ((32, 64, 8, 1), (64, 32, 8, 1))]
    return [*tall, ((32, 32, 8, 1), (32, 32, 8, 2)), ((32, 32, 8, 1), (32, 32, 8, 1))]


def _fits(problem: AttentionBackwardProblem, keys: Tile, queries: Tile, limit: int) -> bool:
    """Whether K, V and stages of Q and dO, or the other way round, fit, and with them P and dS of dK and dV."""
    width = padded_head_dim(problem.head_dim) + padded_head_dim(problem.head_dim_v)
    size = DTYPE_BYTES[problem.dtype]
    (m, n, _, stages), (m_q, n_q, _, stages_q) = keys, queries
    shared = 0 if keys_first(keys) else 2 * m * n
    return size * max((n + stages * m) * width + shared, (m_q + stages_q * n_q) * width) <= limit


def constexprs_of(problem: AttentionBackwardProblem, tile: Tile, right: bool, wide: bool, unit: int) -> dict[str, Any]:
    """The constexprs that the kernels share, in their order."""
    features, (block_m, block_n, _, stages) = problem.features, tile
    return {
        "D": problem.head_dim,
        "DV": problem.head_dim_v,
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "NUM_STAGES": stages,
        "LEFT": features.window_left is not None,
        "RIGHT": right,
        "TOPLEFT": problem.mask == "causal-topleft",
        "SOFTCAP": bool(features.softcap),
        "BIAS": features.bias,
        "WIDE": wide,
        "UNIT": unit,
        "PRECISION": "bf16x6" if problem.dtype == "fp32" else "tf32",
        "INTERPRET": INTERPRETING,
    }
