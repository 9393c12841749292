"""Seeded inputs of a problem, in as many sets as it takes for the L2 cache to be cold at every call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import torch

from flashmoe_science.ops.attention.inputs import AttentionInputs
from flashmoe_science.ops.attention.problem import AttentionProblem, Layout, as_attention
from flashmoe_science.problem import DTYPE_BYTES, Problem
from flashmoe_science.records import Cache

TORCH_DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MAX_SETS = 6000  # kernels in one CUDA graph; [1, 1, 64, 64] in fp16 needs 5121 to be twice the 60 MiB of an H200
_ALIGNMENT = 512  # bytes, as PyTorch's CUDA allocator aligns


@dataclass(frozen=True, slots=True)
class InputSets:
    """``sets`` to be used in turn. ``cache`` is "cold" when they are together more than twice the L2, so that a set's lines are
    gone when its turn comes again; the sets of a tiny problem cannot be, and then there is one set and it is "warm"."""

    sets: tuple[AttentionInputs, ...]
    cache: Cache
    turns: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    def next(self) -> AttentionInputs:
        """The set whose turn it is. All who sample a problem share its turns: with turns of its own, one of two kernels would
        meet the sets that the other has just used, still in the host's cache (5% of an eager call)."""
        return self.sets[next(self.turns) % len(self.sets)]

    @property
    def first(self) -> AttentionInputs:
        return self.sets[0]


def input_bytes(problem: AttentionProblem) -> int:
    """Bytes of Q, K and V. The output is left out: it is allocated anew at each call, and may well reuse cached lines."""
    rows_q, rows_k = problem.batch * problem.heads * problem.seqlen_q, problem.batch * problem.heads_kv * problem.seqlen_k
    elements = rows_q * problem.head_dim + rows_k * (problem.head_dim + problem.head_dim_v)
    return elements * DTYPE_BYTES[problem.dtype]


def sets_for_cold(problem: AttentionProblem, l2_bytes: int) -> int:
    """How many sets of a problem's inputs leave the L2 cold."""
    return sets_beyond(l2_bytes, input_bytes(problem))


def sets_beyond(l2_bytes: int, set_bytes: int) -> int:
    """How many sets are more than twice the L2; at least two, so that a call never repeats the one before it."""
    return max(2, 2 * l2_bytes // set_bytes + 1)


def make_inputs(asked: Problem, device: torch.device, seed: int, l2_bytes: int) -> InputSets:
    """Standard normal Q, K and V, each set with values of its own, [B, H, S, D] views in the problem's memory layout.

    ``l2_bytes`` of 0 (a CPU, whose caches are not managed here) gives one warm set.

    Raises:
        ProblemError: the problem is another operation's.
    """
    problem = as_attention(asked)
    wanted = sets_for_cold(problem, l2_bytes) if l2_bytes else 1
    count, cache = (wanted, "cold") if 1 < wanted <= MAX_SETS else (1, "warm")
    shapes = (
        (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim),
        (problem.batch, problem.heads_kv, problem.seqlen_k, problem.head_dim),
        (problem.batch, problem.heads_kv, problem.seqlen_k, problem.head_dim_v),
    )
    step = _ALIGNMENT // DTYPE_BYTES[problem.dtype]
    sizes = [-(-math.prod(shape) // step) * step for shape in shapes]
    generator = torch.Generator(device).manual_seed(seed)
    pool = torch.empty(count * sum(sizes), dtype=TORCH_DTYPE[problem.dtype], device=device)
    pool.normal_(generator=generator)
    sets = []
    for index in range(count):
        parts = pool[index * sum(sizes) : (index + 1) * sum(sizes)].split(sizes)
        q, k, v = (_view(part, shape, problem.layout) for part, shape in zip(parts, shapes, strict=True))
        sets.append(AttentionInputs(problem, q, k, v, problem.softmax_scale))
    return InputSets(tuple(sets), "cold" if cache == "cold" else "warm")


def _view(flat: torch.Tensor, shape: tuple[int, int, int, int], layout: Layout) -> torch.Tensor:
    batch, heads, seqlen, dim = shape
    flat = flat[: math.prod(shape)]
    if layout == "bhsd":
        return flat.view(shape)
    return flat.view(batch, seqlen, heads, dim).transpose(1, 2)
