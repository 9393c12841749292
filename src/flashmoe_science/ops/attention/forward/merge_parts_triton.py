"""Merge of attention to parts of the keys in portable Triton: one launch that reads each part once, where it lies.

Shapes: of each part O [B, T, H, D] in any strides that all parts share, and LSE [B, H, T] fp32 -> O [B, T, H, D] and LSE
[B, H, T], contiguous. A program merges a tile of tokens and heads, in fp32 and in the order of the parts: equal calls give
equal bits. sm_80 and up.

Online softmax: Milakov and Gimelshein 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.hardware.gpus import Gpu, why_no_triton
from flashmoe_science.kernel import CannotServe, Config, Device, Launch
from flashmoe_science.ops.attention.call.merge import MergeInputs, MergeKernel, Result
from flashmoe_science.ops.attention.device.launch import check_programs, element_pointer
from flashmoe_science.ops.attention.device.softmax_triton import add_part
from flashmoe_science.ops.attention.device.strided import in_units
from flashmoe_science.ops.attention.problem import padded_head_dim
from flashmoe_science.ops.attention.problem.merge import AttentionMergeProblem
from flashmoe_science.ops.calls import device_guard
from flashmoe_science.ops.launch import (
    INTERPRETING,
    Pointer,
    address,
    allocator,
    can_start_early,
    cdiv,
    kept_build,
    next_power_of_2,
    stand_in,
    stride_class,
    stride_unit,
)

MAX_PARTS, MAX_HEAD_DIM = 32, 512  # each part is code of its own: 65 take 20 s to compile
# Not specialised on: a new batch or length must not compile anew.
SIZES = ("stride_d", "stride_lb", "stride_lh", "stride_lt", "tokens", "heads")
_PER_WARP = 512  # elements of a part: two loads of 16 bytes a thread, of 16 bits each
_TOKENS = 8  # of a tile, where there are as many: their log-sum-exps fill a sector


@triton.jit(do_not_specialize=SIZES)
def flashmoe_merge_parts_triton(
    outs, lses, out, lse, stride_b, stride_t, stride_h, stride_d, stride_lb, stride_lh, stride_lt, tokens, heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, UNIT: tl.constexpr,
    EARLY_START: tl.constexpr,
):  # fmt: skip
    """Merge a tile of BLOCK_T tokens and BLOCK_H heads. ``outs`` and ``lses`` are tuples; ``stride_d``: None for 1."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    stride_b, stride_t, stride_h = in_units(stride_b, stride_t, stride_h, UNIT)
    tiles_h, tiles_t = tl.cdiv(heads, BLOCK_H), tl.cdiv(tokens, BLOCK_T)
    pid, row, dims = tl.program_id(0), tl.arange(0, BLOCK_T * BLOCK_H), tl.arange(0, BLOCK_D)
    head = pid % tiles_h * BLOCK_H + row % BLOCK_H  # [rows]
    token = pid // tiles_h % tiles_t * BLOCK_T + row // BLOCK_H
    inside = (head < heads) & (token < tokens)
    here = inside[:, None] & (dims < D)[None, :]
    batch, head, token = (pid // tiles_h // tiles_t).to(tl.int64), head.to(tl.int64), token.to(tl.int64)
    column = dims if stride_d is None else dims.to(tl.int64) * stride_d
    at = (batch * stride_b + token * stride_t + head * stride_h)[:, None] + column[None, :]
    at_lse = batch * stride_lb + head * stride_lh + token * stride_lt
    highest, total = tl.full([BLOCK_T * BLOCK_H], float("-inf"), tl.float32), tl.zeros([BLOCK_T * BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_T * BLOCK_H, BLOCK_D], tl.float32)
    for n in tl.static_range(len(outs)):
        found = tl.load(lses[n] + at_lse, mask=inside, other=float("-inf"))
        value = tl.load(outs[n] + at, mask=here, other=0.0).to(tl.float32)  # [rows, BLOCK_D]
        highest, total, acc = add_part(found, value, highest, total, acc)
    acc = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    place = ((batch * tokens + token) * heads + head)[:, None] * D + dims[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=here)
    of_all = tl.where(highest == float("-inf"), 0.0, highest) + tl.log(total)
    tl.store(lse + (batch * heads + head) * tokens + token, of_all, mask=inside)


def supports(problem: AttentionMergeProblem, device: Device) -> str | None:
    if (reason := why_no_triton(device)) is not None:
        return reason
    for name, number, most in (("parts", problem.parts, MAX_PARTS), ("head_dim", problem.head_dim, MAX_HEAD_DIM)):
        if number > most:
            return f"{name} is {number}; the kernel takes at most {most}"
    return None


def configs(problem: AttentionMergeProblem, device: Device) -> tuple[Config, ...]:
    """Tiles of four warps; of one first, where those would not give each SM two programs."""
    assert device is not None
    tiles = Config(num_warps=4), Config(num_warps=1)
    few = problem.rows() * padded_head_dim(problem.head_dim) < 2 * device.sm_count * 4 * _PER_WARP
    return tiles[::-1] if few else tiles


def _tile(tokens: int, heads: int, head_dim: int, config: Config) -> tuple[int, int]:
    """Tokens and heads of a program."""
    rows = max(1, config["num_warps"] * _PER_WARP // padded_head_dim(head_dim))
    most_t, most_h = next_power_of_2(tokens), next_power_of_2(heads)
    block_t = min(max(min(rows, _TOKENS), rows // most_h), most_t)
    return block_t, min(rows // block_t, most_h)


def _shared_strides(name: str, parts: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The strides of all parts, 0 where a size is 1. Raises CannotServe: they differ."""
    found = {tuple([0 if size == 1 else step for size, step in zip(one.shape, one.stride(), strict=True)]) for one in parts}
    if len(found) > 1:
        raise CannotServe(f"{name} differ in strides")
    return found.pop()


def plan(like: MergeInputs, config: Config) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Result]:
    """launch(outs, lses) for parts of these shapes, strides, dtypes and alignments. Raises CannotServe: more dimensions than
    the kernel takes; parts that differ in strides; more programs than a launch may have."""
    outs, lses = [*like.outs], [*like.lses]
    (*batch, tokens, heads, width), dtype = outs[0].shape, outs[0].dtype
    if len(batch) > 1:
        raise CannotServe(f"outs[0] has {outs[0].dim()} dimensions; the kernel takes at most 4")
    no_batch = (0,) * (1 - len(batch))
    *strides, stride_d = *no_batch, *_shared_strides("outs", outs)
    strides_lse = *no_batch, *_shared_strides("lses", lses)
    block_t, block_h = _tile(tokens, heads, width, config)
    programs = math.prod(batch) * cdiv(tokens, block_t) * cdiv(heads, block_h)
    check_programs(programs)
    early = not INTERPRETING and can_start_early(outs[0].device)
    constexprs = (width, padded_head_dim(width), block_t, block_h, stride_unit(strides), early)
    singles = (None if stride_d == 1 or width == 1 else stride_d, *strides_lse)
    tail = (*strides, *singles, tokens, heads, *constexprs)
    options = {"num_warps": config["num_warps"], "launch_pdl": early}
    kinds = (outs[0].device, dtype, tuple([one.data_ptr() % 16 for one in outs]), *options.values())
    of_singles = tuple([None if one is None else one >= 2**31 for one in singles])  # integers of 64 bits
    pointers = (tuple(map(stand_in, outs)), tuple(map(element_pointer, lses)), Pointer(dtype), element_pointer(lses[0]))
    guard, new = device_guard(outs[0].get_device()), allocator(outs[0].is_cuda)
    key = (kinds, stride_class(strides), of_singles, constexprs)
    build = guard(lambda: kept_build(key, flashmoe_merge_parts_triton, (*pointers, *tail), **options))()
    start = build.bound((programs, 1, 1), *tail)
    of_out, of_lse = (
        (shape, tuple([math.prod(shape[n + 1 :]) for n in range(len(shape))]), dtype)
        for shape, dtype in ((tuple(outs[0].shape), dtype), (tuple(lses[0].shape), torch.float32))
    )  # fmt: skip

    def launch(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> Result:
        out, lse = new(*of_out), new(*of_lse)
        start(tuple(map(address, outs)), tuple(map(address, lses)), address(out), address(lse))
        return out, lse

    return guard(launch)


def launches(problem: AttentionMergeProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    block_t, block_h = _tile(problem.tokens, problem.heads, problem.head_dim, config)
    grid = (cdiv(problem.tokens, block_t) * cdiv(problem.heads, block_h), 1, 1)
    return (Launch(f"^{flashmoe_merge_parts_triton.__name__}$", grid, 32 * config["num_warps"]),)


KERNEL = MergeKernel(
    name="merge_parts_triton",
    origin="ours",
    op="attention_merge",
    about="portable Triton: one launch, each part read once where it lies",
    supports=supports,
    configs=configs,
    run=lambda inputs, config: plan(inputs, config)(*inputs),
    launches=launches,
    plan=plan,
    interpretable=True,
)
