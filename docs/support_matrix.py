"""The page that says which kernel takes what on which GPU, by asking the kernels themselves (see generate.py)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.hardware.gpus import GPUS, Gpu, gpu_named
from flashmoe_science.kernel import AnyKernel
from flashmoe_science.measure import offline
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.ops.attention.problem import MAX_HEAD_DIM, AttentionProblem
from flashmoe_science.ops.attention.problem.features import KINDS
from flashmoe_science.problem import Dtype, Problem

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
# A prompt, a short sequence, a token over a cache: a kernel is asked at the first that it takes.
BASES = tuple(AttentionProblem(1, 16, 16, q, k, 64, 64) for q, k in ((4096, 4096), (128, 128), (1, 4096)))
# Each mode as the words that are added to a problem's text.
MODES: dict[str, str] = {
    "window": "causal left127",
    "softcap": "causal softcap50",
    "sinks": "causal sinks",
    "alibi": "causal alibi",
    "boolmask": "boolmask",
    "bias": "bias",
    "prefix": "causal prefix64",
    "ragged": "causal ragged",
    "packed": "causal packed",
    "page": "causal ragged page16",
    "leftpad": "causal ragged leftpad",
    "fp8kv": "causal ragged fp8kv",
}
INTRODUCTION = """# What runs where

For each kernel, at the lengths of the problem named with it: the head dimensions (of Q, K and V alike) that it takes in each
dtype, then what else it takes at a head dimension of 64. GPUs that take the same share a line. A kernel requested by name that
cannot serve raises an error with one of the reasons below.
"""


GPUS_INTRODUCTION = """## GPUs

*Measured*: the dispatch table has records of the GPU. *Builds*: our kernels compile for its architecture and fit its limits
(`make builds`); nothing was run there, and choices are called modelled.

| GPU | architecture | our kernels |
|---|---|---|"""

MODES_INTRODUCTION = """## Features

Which kernels take each mode alone on some GPU above, in bf16 at a head dimension of 64 and one of the lengths above. Words in a
problem's text ask for a mode; `flashmoe explain` says which kernel takes a problem, and why the others do not.

| mode | words | kernels |
|---|---|---|"""


KERNELS = operation("attention").kernels()


def page() -> str:
    return "\n".join([INTRODUCTION, GPUS_INTRODUCTION, *_gpus(), *map(_section, KERNELS), MODES_INTRODUCTION, *_modes()])


def _gpus() -> list[str]:
    measured, built = {entry.gpu for entry in committed_table().entries}, {gpu_named(name).arch for name in offline.GPUS}
    found = [(gpu, "measured" if gpu.name in measured else "builds" if gpu.arch in built else "-") for gpu in GPUS.values()]
    return [*(f"| {gpu.name} | {gpu.arch} | {status} |" for gpu, status in found), ""]


def _modes() -> list[str]:
    lines = []
    for kind, words in MODES.items():
        asked = [parse_problem(f"{base} {words}") for base in BASES]
        taking = [
            f"`{kernel.name}`" for kernel in KERNELS if any(_takes(kernel, one, gpu) for one in asked for gpu in GPUS.values())
        ]
        lines.append(f"| {KINDS[kind]} | `{words}` | {', '.join(taking)} |")
    return [*lines, ""]


def _section(kernel: AnyKernel) -> str:
    origin = "ours" if kernel.origin == "ours" else "a peer, for comparison"
    base = base_of(kernel)
    lines = [f"## `{kernel.name}`\n\n{kernel.about} ({origin}), at `{base}`.\n"]
    lines.append(f"| GPU | {' | '.join(DTYPES)} | also takes | does not take |\n|---|{'---|' * len(DTYPES)}---|---|")
    rows: dict[tuple[str, ...], list[str]] = {}
    for gpu in GPUS.values():
        rows.setdefault(_row(kernel, base, gpu), []).append(gpu.name)
    lines.extend(f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items())
    reasons = _reasons(kernel, base)
    if reasons:
        lines.append("\nReasons to refuse:\n")
        lines.extend(f"- {reason}" for reason in reasons)
    return "\n".join(lines) + "\n"


def base_of(kernel: AnyKernel) -> AttentionProblem:
    """The first base problem that the kernel takes on some GPU, in some dtype."""
    for base in BASES:
        if any(_takes(kernel, replace(base, dtype=dtype), gpu) for dtype in DTYPES for gpu in GPUS.values()):
            return base
    raise ValueError(f"{kernel.name} takes no problem of BASES on any GPU; add one that it takes")


def _features(base: AttentionProblem) -> dict[str, AttentionProblem]:
    """What else may be asked, each as a change to a problem that the kernel takes."""
    longer = 2 * base.seqlen_k
    return {
        "causal": replace(base, mask="causal"),
        "causal, bottom-right, Sq != Sk": replace(base, mask="causal", seqlen_k=longer),
        "causal, top-left, Sq != Sk": replace(base, mask="causal-topleft", seqlen_k=longer),
        "GQA": replace(base, heads_kv=4),
        "V of another head dimension": replace(base, head_dim_v=32),
        "[B, S, H, D] in memory": replace(base, layout="bshd"),
    }


def _row(kernel: AnyKernel, base: AttentionProblem, gpu: Gpu) -> tuple[str, ...]:
    dims = [_spans([d for d in range(1, MAX_HEAD_DIM + 1) if _takes(kernel, _square(base, d, dtype), gpu)]) for dtype in DTYPES]
    taken = [dtype for dtype in DTYPES if _takes(kernel, replace(base, dtype=dtype), gpu)]
    if not taken:
        return (*dims, "", "")
    can = {name: all(_takes(kernel, replace(one, dtype=d), gpu) for d in taken) for name, one in _features(base).items()}
    return (*dims, "; ".join(name for name in can if can[name]), "; ".join(name for name in can if not can[name]))


def _reasons(kernel: AnyKernel, base: AttentionProblem) -> list[str]:
    """Each reason once, in the order met, with the GPU's own names put in general terms."""
    reasons: dict[str, None] = {}
    for gpu in GPUS.values():
        problems = [_square(base, d, dtype) for d in (4, 8, 60, 64, 72, 128, 192, 256) for dtype in DTYPES]
        for problem in (*problems, *_features(base).values(), *BASES):
            reason = kernel.supports(problem, gpu)
            if reason is not None:
                reasons.setdefault(reason.replace(gpu.product, "*this GPU*").replace(f"is {gpu.arch}", "is *another*"))
    return list(reasons)


def _takes(kernel: AnyKernel, problem: Problem, gpu: Gpu) -> bool:
    return kernel.supports(problem, gpu) is None


def _square(base: AttentionProblem, dim: int, dtype: Dtype) -> AttentionProblem:
    return replace(base, head_dim=dim, head_dim_v=dim, dtype=dtype)


def _spans(dims: list[int]) -> str:
    """Such as "1 to 256", or "8 to 128 by 8, 256"; "-" where there is none."""
    if len(dims) < 2:
        return str(dims[0]) if dims else "-"
    step = min(after - before for before, after in itertools.pairwise(dims))
    starts = [0, *(i for i in range(1, len(dims)) if dims[i] - dims[i - 1] != step)]
    runs = [dims[a:b] for a, b in itertools.pairwise([*starts, len(dims)])]
    by = f" by {step}" if step > 1 else ""
    return ", ".join(f"{run[0]} to {run[-1]}{by}" if len(run) > 1 else str(run[0]) for run in runs)
