"""What fp32_gluon_sm90 serves, the shape of its programs, its grids, its constants and the sizes of its planes."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl

from flashmoe_science.hardware.gpus import Gpu, why_no_hopper
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.device.sm90 import PRODUCER_REGISTERS, ROWS, SHARED_BYTES, consumer_registers
from flashmoe_science.ops.attention.forward.fp32_sm90.planes import SPLIT_ROWS
from flashmoe_science.ops.attention.problem import AttentionProblem, head_parts, padded_head_dim
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.descriptors import Tile
from flashmoe_science.ops.launch import Grid, cdiv, workspace_bytes

Shapes = tuple[tuple[int, ...], ...]  # of Q, K and V
PLANES = gl.constexpr(3)
# Queries of a head, more where heads are narrow, and rows in all, from which on it is the fastest (docs/notes/fp32.md).
MIN_QUERIES, MIN_QUERIES_NARROW, MIN_ROWS = 64, 192, 512
# Not specialised on: a new batch or length must not compile anew.
SIZES = ("heads", "group", "seqlen_q", "seqlen_k", "causal_offset", "tiles_m")


def supports(problem: AttentionProblem, device: Device) -> str | None:
    if reason := unsupported(problem.features) or why_no_hopper(device):
        return reason
    return None if problem.dtype == "fp32" else f"serves fp32, not {problem.dtype}"


def suits(problem: AttentionProblem, gpu: Gpu) -> bool:
    """Whether rows are enough to be worth the writing of planes, and to fill a program's tile."""
    least = MIN_QUERIES if tile_widths(problem)[0] > 64 else MIN_QUERIES_NARROW
    return problem.seqlen_q >= least and problem.batch * problem.heads * problem.seqlen_q >= MIN_ROWS


def configs(problem: AttentionProblem, device: Device) -> tuple[Config, ...]:
    width = sum(tile_widths(problem))
    consumers, block_n = (2, 64) if width <= 160 else (2, 32) if width <= 192 else (1, 32)
    room = SHARED_BYTES - 2 * PLANES.value * consumers * ROWS * width
    return (Config(consumers=consumers, block_n=block_n, stages=min(12, room // (2 * block_n * width)), occupancy=1),)


def tile_widths(problem: AttentionProblem) -> tuple[int, ...]:
    """Columns of the one or two tiles that hold a head."""
    widths = head_parts(max(problem.head_dim, problem.head_dim_v))
    return (128, 128) if widths == (256,) else widths


def row_elements(dim: int) -> int:
    """Numbers of a row of a plane: the copy engine steps by 16 bytes."""
    return cdiv(dim, 8) * 8


def tile_shapes(problem: AttentionProblem, config: Config) -> tuple[Tile | None, ...]:
    """Copies of Q, K and V, then of their second parts: None for each that has none."""
    widths = tile_widths(problem)
    of_v = widths if problem.head_dim_v > widths[0] else widths[:1]
    tensors = ((ROWS, widths), (config["block_n"], widths), (config["block_n"], of_v))
    return tuple((1, 1, rows, of[n]) if n < len(of) else None for n in range(2) for rows, of in tensors)


def plane_elements(problem: AttentionProblem, shapes: Shapes) -> tuple[int, ...]:
    """Elements of all planes of Q, K and V, of [batch, heads, seqlen, ...] each."""
    dims = (problem.head_dim, problem.head_dim, problem.head_dim_v)
    return tuple(PLANES.value * b * h * s * row_elements(dim) for (b, h, s, _), dim in zip(shapes, dims, strict=True))


def tile_rows(config: Config) -> int:
    return int(config["consumers"] * ROWS)


def grid_of(heads_all: int, rows: int, config: Config) -> Grid:
    return heads_all * cdiv(rows, tile_rows(config)), 1, 1


def plane_blocks(rows: int, keys: int) -> tuple[int, int, int]:
    """Programs that write the planes of Q, of K and of V, of ``rows`` queries and ``keys`` keys in all."""
    return cdiv(rows, SPLIT_ROWS), cdiv(keys, SPLIT_ROWS), cdiv(keys, SPLIT_ROWS)


def plane_constexprs(problem: AttentionProblem, early: bool) -> dict[str, Any]:
    """The constants of the planes' build, in the order of the kernel's parameters."""
    dim, dim_v = problem.head_dim, problem.head_dim_v
    return {
        "D": dim, "DV": dim_v, "WIDTH": row_elements(dim), "WIDTH_V": row_elements(dim_v),
        "BLOCK_D": padded_head_dim(max(dim, dim_v)), "BLOCK_R": SPLIT_ROWS, "EARLY_START": early,
    }  # fmt: skip


def constexprs_of(problem: AttentionProblem, config: Config, early: bool) -> dict[str, Any]:
    """The constants of the main build, in the order of the kernel's parameters."""
    return {
        "DV": problem.head_dim_v, "CONSUMERS": config["consumers"], "STAGES": config["stages"], "CAUSAL": problem.causal,
        "EARLY_START": early, "CONSUMER_REGS": consumer_registers(config), "PRODUCER_REGS": PRODUCER_REGISTERS,
    }  # fmt: skip


def workspace(problem: AttentionProblem, config: Config) -> int:
    shape_q = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim)
    shape_k = (problem.batch, problem.heads_kv, problem.seqlen_k, problem.head_dim)
    parts = plane_elements(problem, (shape_q, shape_k, shape_k))
    return workspace_bytes([(elements, torch.bfloat16) for elements in parts])
