"""The launch of a product by stream-K (stream_k.py): a program for each multiprocessor, and the copy engine's maps."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.ops.descriptors import ragged
from flashmoe_science.ops.launch import Build, Encoder
from flashmoe_science.ops.moe.call import KernelLaunch
from flashmoe_science.ops.moe.rows import RowCounts

MOST_PROGRAMS = 132  # multiprocessors of the largest GPU
Tile = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # of the copy engine: a consumer's bytes, shape and strides
# bind(counts) of a product: launch(a, w, out, further pointers as its kernel has them)
Product = Callable[[RowCounts], KernelLaunch]


def programs(gpu: Gpu) -> int:
    """A program for each multiprocessor."""
    return min(gpu.sm_count, MOST_PROGRAMS)


def bound(
    build: Build, templates: tuple[TensorDescriptor, ...], tile: Tile, depth: int, width: int, gpu: Gpu, values: tuple[Any, ...]
) -> Product:
    """The product of a build whose first three arguments are copies of a [rows, depth], w and out [rows, width], of which
    ``templates`` are the descriptors; ``values``: its constexprs."""
    a, w, out = templates
    encode_w, encode_out = build.encoder(1, w, *tile[1:]), build.encoder(2, out, *ragged((0, width), (width, 1)))

    @lru_cache(64)
    def encoder_of_a(of_rows: int) -> Encoder:
        """A map of more rows would let the copy engine read past the end of their memory."""
        return build.encoder(0, a, (of_rows, depth), (depth, 1))

    def bind(counts: RowCounts) -> KernelLaunch:
        encode_a = encoder_of_a(counts.pairs)
        start = build.bound((programs(gpu), 1, 1), counts.pairs, counts.tiles, *values)

        def launch(a: Any, w: Any, out: Any, *pointers: Any) -> None:
            start(*encode_a(a), *encode_w(w), *encode_out(out), *pointers)

        return launch

    return bind
