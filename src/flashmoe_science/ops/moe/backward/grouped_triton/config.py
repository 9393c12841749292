"""What moe_bwd_triton serves, and its tiles."""

from __future__ import annotations

from typing import NamedTuple

from flashmoe_science.hardware.gpus import why_no_triton
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.rows import why_no_tables
from flashmoe_science.problem import DTYPE_BYTES


class Tile(NamedTuple):
    """The tile of a product: rows, columns, the depth of a stage, warps, stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# The first product and that of dX, whose rows are those of the tables; and that of dW, whose depth they are.
HIDDEN, ROWS, WEIGHTS = "hidden", "rows", "weights"
_Tiles = tuple[Tile, Tile, Tile]  # in their order


def supports(problem: MoEProblem, device: Device) -> str | None:
    return why_no_triton(device) or why_no_tables(problem)


def configs(problem: MoEProblem, device: Device) -> tuple[Config, ...]:
    """Tiles by rows an expert that fit the GPU's shared memory, the best guess first."""
    assert device is not None
    size, wgmma = DTYPE_BYTES[problem.dtype], device.compute_capability[0] == 9
    every = _FP32 if problem.dtype == "fp32" else _tiles(problem.rows_per_expert(), wgmma)
    return tuple(_config(*tiles) for tiles in every if _bytes(tiles, size) <= device.shared_per_block)


def _bytes(tiles: _Tiles, size: int) -> int:
    """Bytes of shared memory. In the products of dW, whose rows are gathered by a loaded index, two stages have one buffer."""
    buffers = tiles[0].stages, tiles[1].stages, (tiles[2].stages + 1) // 2
    return max(count * (one.m + one.n) * one.k * size for count, one in zip(buffers, tiles, strict=True))


_FP32: list[_Tiles] = [(Tile(32, 64, 32, 4, 2), Tile(32, 64, 32, 4, 2), Tile(32, 64, 32, 4, 2))]


def _tiles(rows: float, wgmma: bool) -> list[_Tiles]:
    """``rows`` an expert, on average; ``wgmma``: on Hopper."""
    # Steps of 32 rows by wgmma were not right in attention's backward (docs/notes/backward.md).
    weights = Tile(128, 128, 64 if wgmma else 32, 8, 5)
    if rows <= 24:
        return [(Tile(32, 128, 64, 4, 3), Tile(32, 128, 64, 4, 3), weights),
                (Tile(16, 64, 64, 4, 3), Tile(16, 64, 64, 4, 3), Tile(64, 64, 64 if wgmma else 32, 4, 5))]  # fmt: skip
    few = (Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3), weights)
    if rows <= 64:
        return [few]
    if wgmma:
        return [(Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 5)), few]
    return [(Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 3), weights), few]


def _config(hidden: Tile, rows: Tile, weights: Tile) -> Config:
    named = {HIDDEN: hidden, ROWS: rows, WEIGHTS: weights}
    every = {f"{name}_{field}": value for name, tile in named.items() for field, value in tile._asdict().items()}
    return Config(**every)


def tile_of(config: Config, product: str) -> Tile:
    """The tile of one of the products."""
    return Tile(*(config[f"{product}_{field}"] for field in Tile._fields))
