"""Kernels that compile to something known, or fail in a known way. In a module of their own: the pool finds them by name."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def _die():
    import os  # Triton refuses a program that refers to a module above

    os.abort()


@triton.jit
def copies(source, target, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, tl.load(source + index, mask=index < count), mask=index < count)


@triton.jit
def multiplies(a, b, out, BLOCK: tl.constexpr):
    """One tile product, with both operands in shared memory."""
    rows = tl.arange(0, BLOCK)
    at = rows[:, None] * BLOCK + rows[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def takes_1000_static_bytes(target, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    value = tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 tile[1000]; st.shared.u32 [tile], $1; bar.sync 0; ld.shared.u32 $0, [tile]; }",
        "=r,r", [tl.load(target + index)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(target + index, value)


@triton.jit
def takes_160_static_kb(target, BLOCK: tl.constexpr):
    """The documents' tile of 160 KB that "the compiler handled"."""
    index = tl.arange(0, BLOCK)
    value = tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 tile[163840]; st.shared.u32 [tile], $1; bar.sync 0; ld.shared.u32 $0, [tile]; }",
        "=r,r", [tl.load(target + index)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(target + index, value)


@triton.jit
def tile_of_48_rows(target, BLOCK: tl.constexpr):
    tl.store(target + tl.arange(0, 48), 0)


@triton.jit
def aborts(target, BLOCK: tl.constexpr):
    """Takes the compiling process down, as some invalid Gluon programs do."""
    _die()
    tl.store(target + tl.arange(0, BLOCK), 0)


@gluon.jit
def gluon_copies(source, target, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    index = gl.arange(0, BLOCK, layout)
    gl.store(target + index, gl.load(source + index))
