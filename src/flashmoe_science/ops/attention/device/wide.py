"""O += P V for Hopper where V is not a power of two wide: one wgmma of all columns of a head.

Gluon has no such product: its tensors, and with them the accumulators of ``warpgroup_mma``, are powers of two in each
dimension, and two products of fewer columns take longer than one (docs/notes/fwd-gluon-sm90.md). Nor does it give an address
in shared memory. So the product is inline assembly, as is that of dK and of dV in the fused backward (backward/fused_sm90), by
the PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions":

- "Register Fragments for wgmma.mma_async.m64nNk16": of each 8 columns of O a thread holds two of row r and two of row r + 8, as
  in Gluon's NVMMADistributedLayout. O is a tuple of slices of ``slice_width`` columns, a power of two, side by side. Of each 16
  keys of P it holds four registers of two 16-bit numbers: keys 2 t of rows r and r + 8, then keys 2 t + 8 of both.
  ``to_wide_operand`` gives them as 32-bit numbers in O's layout, in the order r, r, r + 8, r + 8.
- "Matrix Descriptor Format" of V: address / 16 in bits 0 to 13; the leading dimension's offset / 16 in bits 16 to 29; the
  stride's in bits 32 to 45; 1 for the 128-byte swizzle in bits 62 and 63. V has keys as rows: it is "MN-major" (``imm-trans-b``
  of 1), in chunks of 64 columns, 128 bytes a row. The leading dimension's offset leads to the next chunk, the stride's
  to the next 8 keys. 16 keys are 2048 bytes on.
- "wgmma.fence" before the first product, "wgmma.commit_group" after the last: all are one group, for ``warpgroup_mma_wait``.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.ops.attention.device.softmax import as_column
from flashmoe_science.ops.attention.device.tiles import accumulator_layout
from flashmoe_science.ops.gluon_bridge import barrier, reinterpret

CHUNK = gl.constexpr(64)  # columns of V in one copy: a row of the widest swizzle


@gluon.constexpr_function
def slice_width(columns: int, keys: int) -> int:
    """Columns of a slice of O: the most that divide O, and no more than P as an operand has."""
    return min(columns & -columns, keys // 2)


@gluon.constexpr_function
def _floats(count: int) -> tuple[Any, ...]:
    return (gl.float32,) * count


@gluon.constexpr_function
def _pack_asm(given: Any, dtype: Any) -> str:
    if given == dtype:
        return "mov.b32 $0, {$1, $2};"
    return f"cvt.rn.{'bf16x2' if dtype == gl.bfloat16 else 'f16x2'}.f32 $0, $2, $1;"


@gluon.constexpr_function
def _pack_operands(given: Any) -> str:
    return "=r,f,f" if given == gl.float32 else "=r,h,h"


@gluon.constexpr_function
def _product_asm(columns: int, keys: int, dtype: Any) -> str:
    """PTX of O += P V. Operands: O, O, P, then the low half of V's descriptor, once for each number of a slice of O."""
    kind = "bf16" if dtype == gl.bfloat16 else "f16"
    low = columns + keys // 4
    out = ", ".join(f"${n}" for n in range(columns // 2))
    lines = ["{", ".reg .b64 v;", ".reg .b32 lo, hi;", ".reg .pred added;", "setp.eq.b32 added, 0, 0;"]
    lines += [f"mov.b32 hi, {1 << 30 | 1024 >> 4};", "wgmma.fence.sync.aligned;"]
    for step in range(keys // 16):
        probabilities = ", ".join(f"${columns + 4 * step + n}" for n in (0, 2, 1, 3))
        shape = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
        lines += [f"add.s32 lo, ${low}, {2048 * step >> 4};", "mov.b64 v, {lo, hi};"]
        lines += [f"{shape} {{{out}}}, {{{probabilities}}}, v, added, 1, 1, 1;"]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned;", "}"])


@gluon.constexpr_function
def _product_operands(columns: int, keys: int, width: int) -> str:
    out = columns // 2
    return ",".join(["=f"] * out + [str(n) for n in range(out)] + ["r"] * (keys // 4) + ["r"] * (width // 2))


@gluon.constexpr_function
def _rescale_asm(columns: int, width: int) -> str:
    """PTX of a thread's products of O and factors, unless the warp skips them. Operands: O, O, factors, 0 where it skips."""
    out = columns // 2
    products = [f"mul.f32 ${n}, ${n}, ${columns + n // 2 % 2 * 2};" for n in range(out)]  # two of a row, two of the other
    skip = ["{", ".reg .pred moved;", f"setp.ne.s32 moved, ${columns + width // 2}, 0;", "@!moved bra.uni DONE;"]
    return "\n".join([*skip, *products, "DONE:", "}"])


@gluon.constexpr_function
def _rescale_operands(columns: int, width: int) -> str:
    out = columns // 2
    return ",".join(["=&f"] * out + [str(n) for n in range(out)] + ["f"] * (width // 2) + ["r"] * (width // 2))


# Whether a factor of the warp's is not 1, for each of a thread's two rows. NaN is not 1 (``neu``).
_VOTE = gl.constexpr("""{
.reg .pred moved;
setp.neu.f32 moved, $2, 0f3F800000;
setp.neu.or.f32 moved, $3, 0f3F800000, moved;
vote.sync.any.pred moved, moved, 0xffffffff;
selp.s32 $0, 1, 0, moved;
mov.b32 $1, $0;
}""")
_MARK = gl.constexpr("""{
.reg .b32 base, at, size;
.reg .pred inside;
mov.u32 base, global_smem;
mov.u32 size, %dynamic_smem_size;
shl.b32 at, $1, 10;
setp.lt.u32 inside, at, size;
add.u32 at, at, base;
@inside st.shared.u32 [at], at;
mov.u32 $0, base;
}""")


@gluon.jit
def address_of(smem):
    """The address of shared memory, in bytes, of an array that begins at a multiple of 1024, as swizzled tiles do.

    All threads of the kernel's first warpgroup write into the first word of each KiB its own address, and read the word at the
    start of the array. To be called before anything else is in shared memory: before barriers are initialised and before other
    warps start, which wait at a barrier of their own. The reads are over at that barrier; whoever lets the copy engine write to
    shared memory then must fence first (``fence_async_shared``), as the marks are ordinary stores.
    """
    index = gl.arange(0, 256, gl.BlockedLayout([2], [32], [4], [0]))
    gl.inline_asm_elementwise(_MARK, "=r,r,~{memory}", [index], gl.int32, False, 1)
    barrier()
    WORDS: gl.constexpr = smem.shape[0] * smem.shape[-2] * smem.shape[-1] // 2
    words = reinterpret(smem, gl.int32, [WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return gl.sum(words.index(0).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def descriptor_of(v_smem):
    """The low half of the descriptor of V's first stage. ``v_smem`` is [stages * chunks, 1, 1, keys, CHUNK], of 16 bits, or
    [stages, 1, 1, keys, columns], whose chunks follow each other too."""
    return (address_of(v_smem) >> 4) | (v_smem.shape[-2] * CHUNK * 2 >> 4) << 16


@gluon.jit
def _split_columns(x, WIDTH: gl.constexpr):
    """Slices of WIDTH columns, each as an accumulator holds it."""
    if x.shape[1] == WIDTH:
        return (gl.convert_layout(x, accumulator_layout(WIDTH), assert_trivial=True),)
    else:
        left, right = gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))
        return _split_columns(left, WIDTH) + _split_columns(right, WIDTH)


@gluon.jit
def _join_columns(slices, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """COUNT slices, a power of two, as one matrix."""
    WIDTH: gl.constexpr = slices[0].shape[1]
    if COUNT == 1:
        return slices[FIRST]
    else:
        halves = gl.join(_join_columns(slices, FIRST, COUNT // 2), _join_columns(slices, FIRST + COUNT // 2, COUNT // 2))
        whole = halves.permute((0, 2, 1)).reshape([slices[0].shape[0], COUNT * WIDTH])
        return gl.convert_layout(whole, accumulator_layout(COUNT * WIDTH), assert_trivial=True)


@gluon.jit
def in_parts(o, FIRST: gl.constexpr):
    """The first FIRST columns of O, a power of two, and the others, which are one too."""
    COUNT: gl.constexpr = FIRST // o[0].shape[1]
    return _join_columns(o, 0, COUNT), _join_columns(o, COUNT, len(o) - COUNT)


@gluon.jit
def no_wide_output(ROWS: gl.constexpr, COLUMNS: gl.constexpr, KEYS: gl.constexpr):
    """O before the first product, in slices [ROWS, WIDTH]."""
    WIDTH: gl.constexpr = slice_width(COLUMNS, KEYS)
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, accumulator_layout(WIDTH))
    o = (zeros,)
    for n in gl.static_range(1, COLUMNS // WIDTH):
        o = o + (zeros,)  # type: ignore[assignment]
    return o


@gluon.jit
def to_wide_operand(p, DTYPE: gl.constexpr, COLUMNS: gl.constexpr):
    """P, [ROWS, KEYS] in fp32 or DTYPE, as the operand of a product with COLUMNS columns of V: pairs of 16-bit numbers, in
    slices."""
    ROWS: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    even, odd = gl.split(p.reshape([ROWS, KEYS // 2, 2]))
    asm: gl.constexpr = _pack_asm(p.dtype, DTYPE)
    pairs = gl.inline_asm_elementwise(asm, _pack_operands(p.dtype), [even, odd], gl.int32, True, 1)
    pairs = pairs.reshape([ROWS, KEYS // 16, 2, 4]).permute((0, 1, 3, 2)).reshape([ROWS, KEYS // 2])
    return _split_columns(pairs, slice_width(COLUMNS, KEYS))


@gluon.jit
def start_wide_output(p, o, v_low, DTYPE: gl.constexpr):
    """Start O += P V, with P of ``to_wide_operand`` and the low half of V's descriptor: accumulators in flight."""
    WIDTH: gl.constexpr = o[0].shape[1]
    COLUMNS: gl.constexpr = len(o) * WIDTH
    KEYS: gl.constexpr = len(p) * WIDTH * 2
    low = (gl.full([o[0].shape[0], WIDTH], 0, gl.int32, o[0].type.layout) + v_low,)
    asm: gl.constexpr = _product_asm(COLUMNS, KEYS, DTYPE)
    operands: gl.constexpr = _product_operands(COLUMNS, KEYS, WIDTH)
    return gl.inline_asm_elementwise(asm, operands, o + p + low, _floats(len(o)), False, WIDTH // 2)


@gluon.jit
def warp_moved(factor, LAZY: gl.constexpr):
    """1 in all rows of a warp one of whose factors is not 1, else 0. Computed before the wait for P V, it costs no
    time. Where not LAZY, 1."""
    if LAZY:
        return gl.inline_asm_elementwise(_VOTE, "=r,=r,f,f", [factor], gl.int32, False, 2)
    else:
        return gl.full([factor.shape[0]], 1, gl.int32, factor.type.layout)


@gluon.jit
def rescale_wide(o, factor, moved):
    """O with its rows times ``factor``; a warp leaves it as it is where ``moved`` is 0."""
    WIDTH: gl.constexpr = o[0].shape[1]
    COLUMNS: gl.constexpr = len(o) * WIDTH
    asm: gl.constexpr = _rescale_asm(COLUMNS, WIDTH)
    operands: gl.constexpr = _rescale_operands(COLUMNS, WIDTH)
    rows = (gl.broadcast(as_column(factor, o[0]), o[0])[0], gl.broadcast(as_column(moved, o[0]), o[0])[0])
    return gl.inline_asm_elementwise(asm, operands, o + rows, _floats(len(o)), False, WIDTH // 2)
