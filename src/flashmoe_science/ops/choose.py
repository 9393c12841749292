"""The one choice of what serves a call, for every operation: requested, required, able, by records, refused, the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from flashmoe_science.dispatch.peers import faster_peer
from flashmoe_science.dispatch.select import Decision, nearest, select
from flashmoe_science.dispatch.tuned import known_table
from flashmoe_science.kernel import AnyKernel, CannotServe, Config, Device
from flashmoe_science.operations import TRITON_MISSING, kernel_named, operation
from flashmoe_science.problem import Problem

T = TypeVar("T")

GRADIENTS = "an input requires gradients"
TRANSFORMED = "in forward mode or of a transform of torch.func"


def choose_fallback(op: str, requested: str | None, required: str | None) -> Decision | None:
    """The decision for the framework's own operators if they were asked for or must serve the call; else None.

    Args:
        op: the operation's name.
        requested: the kernel asked for by name, None for an automatic choice.
        required: why the framework's operators must serve the call, in words; None if kernels may.

    Raises:
        CannotServe: another kernel was asked for, and the framework's operators must serve the call.
        ValueError: no kernel has the name.
    """
    fallback = operation(op).fallback()
    if requested is not None and kernel_named(requested, op).name == fallback:
        return Decision(fallback, Config(), "asked for by name", "requested")
    if required is None:
        return None
    if requested is not None:
        raise CannotServe(f"kernel {requested!r} cannot serve this call: {required}; {fallback!r} can")
    return Decision(fallback, Config(), required, "required")


def would_run(kernel: AnyKernel, config: Config, problem: Problem, device: Device) -> bool:
    """Whether a call that names a kernel of ours runs this config of it; never without a GPU."""
    if device is None or kernel.origin != "ours":
        return False
    return select(problem, device, known_table(), [kernel], None, requested=kernel).config == config


def choose(
    problem: Problem,
    device: Device,
    requested: str | None,
    bind: Callable[[AnyKernel, Config], T],
    *,
    unable: Mapping[str, str] | None = None,
    unable_peers: Mapping[str, str] | None = None,
) -> tuple[Decision, T | None]:
    """The decision for a problem, and what ``bind`` makes of its kernel and config.

    In order: the kernel asked for by name; our fastest supporting kernel on record, else the first that suits the problem;
    instead of it, a peer that records show faster. A kernel whose ``bind`` raises CannotServe is skipped, and the decision
    keeps the reason.

    Args:
        device: None for the CPU.
        unable: kernels that cannot take the call's tensors, with the reason.
        unable_peers: peers that an automatic choice must not take, with the reason; None for no peer at all.

    Returns:
        The decision and what was bound, None if the framework's own operators serve the call.

    Raises:
        CannotServe: the kernel asked for cannot serve the call; the message says why and what could.
    """
    op, table = operation(problem.op), known_table()
    kernel = None if requested is None else kernel_named(requested, op.name)
    refused = dict(unable or {}) | ({"ours": TRITON_MISSING} if TRITON_MISSING else {})
    while True:
        decision = select(problem, device, table, op.ours(), op.fallback(), kernel, refused)
        if decision.kernel == op.fallback():
            return decision, None
        if kernel is None and unable_peers is not None:
            decision = faster_peer(decision, problem, device, table, op.peers(), {**unable_peers, **refused})
        chosen = kernel or kernel_named(decision.kernel, op.name)
        try:
            bound = bind(chosen, decision.config)
            return _with_launch_path(decision, chosen), bound
        except CannotServe as refusal:
            refused[chosen.name] = str(refusal)  # select() passes it over next, or refuses with the reason


NO_RECORD = "no record has a backward of ours faster than PyTorch's"


def asked_by_switch() -> str:
    """The reason if PyTorch is set to deterministic algorithms; else empty."""
    return "deterministic algorithms are asked of PyTorch" if torch.are_deterministic_algorithms_enabled() else ""


def asked_backward(
    problem: Problem, gpu: Device, requested: str | None, words: str, unable: Mapping[str, str] | None = None
) -> Decision:
    """The decision for a backward of ours, or for the named one; ``words`` say how it was asked for. ``unable``: as of
    ``choose``. Raises CannotServe."""
    ours = operation(problem.op).ours()
    chosen = next((one for one in ours if one.name == requested), None)
    decision = select(problem, gpu, known_table(), ours, None, chosen, unable)
    return replace(decision, reason=f"{words}; {decision.reason}", basis="requested")


def backward_by_record(
    problem: Problem, gpu: Device, rival: str, any_tiles: bool = False, unable: Mapping[str, str] | None = None
) -> tuple[Decision, Decision | None]:
    """Our kernel for a backward; and the decision between it and the framework's rival by the nearest record, with the same
    tiles unless ``any_tiles``, None if there is none. ``unable``: as of ``choose``."""
    op, table = operation(problem.op), known_table()
    decision = select(problem, gpu, table, op.ours(), op.fallback(), unable=unable)
    able = [one for one in op.ours() if one.name == decision.kernel]
    entry = nearest(problem, gpu, table, able) if gpu is not None and able else None
    if entry is None or not (any_tiles or entry.problem.tile_key() == problem.representative().tile_key()):
        return decision, None
    faster = next((one for one in entry.peers if one.kernel == rival), None)
    if faster is None:
        return decision, decision
    reason = f"{faster.ratio:.2f}x the speed of ours ({entry.kernel}) on {entry.problem} on {entry.gpu}"
    return decision, Decision(op.fallback(), Config(), reason, decision.basis, entry.run, decision.others)


def _with_launch_path(decision: Decision, kernel: AnyKernel) -> Decision:
    """The decision; its reason says so if launches of a planned kernel take a slower path."""
    if kernel.plan is None:
        return decision
    from flashmoe_science.ops.launch import launch_path  # it brings Triton

    path = launch_path()
    return decision if path is None else replace(decision, reason=f"{decision.reason}; {path}")
