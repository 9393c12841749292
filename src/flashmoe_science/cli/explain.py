"""``flashmoe explain``: which kernel and config would serve a problem on a GPU, and why."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from flashmoe_science.dispatch.peers import faster_peer
from flashmoe_science.dispatch.select import at_lengths, select
from flashmoe_science.dispatch.tuned import known_table
from flashmoe_science.hardware import probe
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.operations import TRITON_MISSING, kernel_named, operation, parse_problem


def explain(
    problem: Annotated[
        str, typer.Argument(metavar="PROBLEM", help='The problem as text, such as "attn b1 h16 q4096 d128 bf16 causal".')
    ],
    gpu: Annotated[str | None, typer.Option(help="Decide for this GPU, such as l4 or h200; by default the one here.")] = None,
    kernel: Annotated[str | None, typer.Option(help="Decide as if the call named this kernel.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which kernel and config would serve a problem, by which record, and why the others would not.

    The basis is "measured" (a record of this problem on this GPU), "modelled" (a record of a similar problem, or the kernel's
    own first guess), "requested" (--kernel) or "required" (nothing else can serve it). PyTorch's own attention is chosen if
    records show it faster than ours by more than 3%; so are FlashAttention-3 and -4 if they are installed and FLASHMOE_PEERS is
    1. Measurements of `flashmoe tune` on this machine come before the records, and the reason says so. On a machine without a
    GPU, name one with --gpu; else the answer is for tensors on the CPU.

    \b
    Examples:
      flashmoe explain "attn b1 h16 q4096 d128 bf16 causal" --gpu h200
      flashmoe explain "attn b1 h32 hk8 q1 k8192 d128" --gpu l4 --json
    """
    parsed = parse_problem(problem)
    device = gpu_named(gpu) if gpu is not None else probe.current_gpu()
    requested = kernel_named(kernel, parsed.op) if kernel is not None else None
    unsupported, served = {"ours": TRITON_MISSING} if TRITON_MISSING else {}, operation(parsed.op)
    decision = select(parsed, device, known_table(), served.ours(), served.fallback(), requested, unsupported)
    if requested is None:
        decision = faster_peer(decision, parsed, device, known_table(), served.peers())
    decision = at_lengths(decision, parsed, device, served.ours())
    answer: dict[str, Any] = {
        "problem": str(parsed),
        "gpu": device.name if device is not None else "cpu",
        "kernel": decision.kernel,
        "config": str(decision.config),
        "basis": decision.basis,
        "record": decision.record,
        "reason": decision.reason,
        "others": dict(decision.others),
    }
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    others = answer.pop("others")
    answer["gpu"] = device.product if device is not None else "none here (tensors on the CPU); name one with --gpu"
    for name, value in answer.items():
        typer.echo(f"{name:8} {value if value not in (None, '') else '-'}")
    for name, why in others.items():
        typer.echo(f"not      {name}: {why}")
