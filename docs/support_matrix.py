"""The page that says which kernel takes what on which GPU, by asking the kernels themselves (see generate.py)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, get_args

from flashmoe_science.hardware.gpus import GPUS, Gpu
from flashmoe_science.kernel import AnyKernel
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.ops.attention.problem import MAX_HEAD_DIM, AttentionProblem
from flashmoe_science.ops.attention.problem.features import KINDS
from flashmoe_science.problem import Dtype

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
BASE = AttentionProblem(1, 16, 16, 4096, 4096, 64, 64)
# What else may be asked, each as a change to a problem that the kernel takes.
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "causal, bottom-right, Sq != Sk": {"mask": "causal", "seqlen_k": 8192},
    "causal, top-left, Sq != Sk": {"mask": "causal-topleft", "seqlen_k": 8192},
    "GQA": {"heads_kv": 4},
    "V of another head dimension": {"head_dim_v": 32},
    "[B, S, H, D] in memory": {"layout": "bshd"},
}
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

For each kernel: the head dimensions (of Q, K and V alike) that it takes of each dtype, then what else it takes at a head
dimension of 64. GPUs that take the same share a line. To ask by name for a kernel that cannot serve is an error, and the
reasons below are what it says.
"""


MODES_INTRODUCTION = """## Modes

Which kernels take each mode alone on some GPU of the above, in bf16 at a head dimension of 64. A mode is asked for by words
in a problem's text; `flashmoe explain` says for any problem which kernel takes it, and why the others do not.

| mode | words | kernels |
|---|---|---|"""


def page() -> str:
    return "\n".join(
        [INTRODUCTION, *(_section(kernel) for kernel in operation(BASE.op).kernels()), MODES_INTRODUCTION, *_modes()]
    )


def _modes() -> list[str]:
    lines = []
    for kind, words in MODES.items():
        problem = parse_problem(f"{BASE} {words}")
        assert isinstance(problem, AttentionProblem)
        taking = [
            f"`{kernel.name}`"
            for kernel in operation(BASE.op).kernels()
            if any(_takes(kernel, problem, gpu) for gpu in GPUS.values())
        ]
        lines.append(f"| {KINDS[kind]} | `{words}` | {', '.join(taking)} |")
    return [*lines, ""]


def _section(kernel: AnyKernel) -> str:
    origin = "ours" if kernel.origin == "ours" else "a peer, for comparison"
    lines = [f"## `{kernel.name}`\n\n{kernel.about} ({origin}).\n"]
    lines.append(f"| GPU | {' | '.join(DTYPES)} | also takes | does not take |\n|---|{'---|' * len(DTYPES)}---|---|")
    rows: dict[tuple[str, ...], list[str]] = {}
    for gpu in GPUS.values():
        rows.setdefault(_row(kernel, gpu), []).append(gpu.name)
    lines.extend(f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items())
    reasons = _reasons(kernel)
    if reasons:
        lines.append("\nIt says, where it cannot serve:\n")
        lines.extend(f"- {reason}" for reason in reasons)
    return "\n".join(lines) + "\n"


def _row(kernel: AnyKernel, gpu: Gpu) -> tuple[str, ...]:
    dims = [_spans([d for d in range(1, MAX_HEAD_DIM + 1) if _takes(kernel, _square(d, dtype), gpu)]) for dtype in DTYPES]
    taken = [dtype for dtype in DTYPES if _takes(kernel, _square(BASE.head_dim, dtype), gpu)]
    if not taken:
        return (*dims, "", "")
    can = {name: all(_takes(kernel, replace(BASE, dtype=d, **change), gpu) for d in taken) for name, change in FEATURES.items()}
    return (*dims, "; ".join(name for name in can if can[name]), "; ".join(name for name in can if not can[name]))


def _reasons(kernel: AnyKernel) -> list[str]:
    """Each reason once, in the order met, with the GPU's own names put in general terms."""
    reasons: dict[str, None] = {}
    for gpu in GPUS.values():
        problems = [_square(d, dtype) for d in (4, 8, 60, 64, 72, 128, 192, 256) for dtype in DTYPES]
        problems += [replace(BASE, **change) for change in FEATURES.values()]
        for problem in problems:
            reason = kernel.supports(problem, gpu)
            if reason is not None:
                reasons.setdefault(reason.replace(gpu.product, "*this GPU*").replace(f"is {gpu.arch}", "is *another*"))
    return list(reasons)


def _takes(kernel: AnyKernel, problem: AttentionProblem, gpu: Gpu) -> bool:
    return kernel.supports(problem, gpu) is None


def _square(dim: int, dtype: Dtype) -> AttentionProblem:
    return replace(BASE, head_dim=dim, head_dim_v=dim, dtype=dtype)


def _spans(dims: list[int]) -> str:
    """Such as "1 to 256", or "8 to 128 by 8, 256"; "-" where there is none."""
    if len(dims) < 2:
        return str(dims[0]) if dims else "-"
    step = min(after - before for before, after in itertools.pairwise(dims))
    starts = [0, *(i for i in range(1, len(dims)) if dims[i] - dims[i - 1] != step)]
    runs = [dims[a:b] for a, b in itertools.pairwise([*starts, len(dims)])]
    by = f" by {step}" if step > 1 else ""
    return ", ".join(f"{run[0]} to {run[-1]}{by}" if len(run) > 1 else str(run[0]) for run in runs)
