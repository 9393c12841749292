"""Which backward serves experts whose inputs require gradients, and why.

Ours serve by the nearest record; if none is near, by all records on the GPU's architecture; by name; and by PyTorch's switch
for deterministic algorithms. Else PyTorch's grouped products serve both passes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.dispatch.tuned import known_table
from flashmoe_science.hardware.gpus import Gpu, gpu_named
from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.kernel import CannotServe, Config, Device
from flashmoe_science.operations import kernel_named, operation
from flashmoe_science.ops.cache import MAX_PLANS, Cache
from flashmoe_science.ops.calls import is_transformed
from flashmoe_science.ops.choose import GRADIENTS, NO_RECORD, TRANSFORMED, asked_backward, asked_by_switch, backward_by_record
from flashmoe_science.ops.moe.call import Activation, Tensors, format_in, inputs_of
from flashmoe_science.ops.moe.call.backward import backward_problem_of
from flashmoe_science.ops.moe.front.backward.kernels import FALLBACK, PYTORCHS
from flashmoe_science.ops.moe.front.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.problem.backward import MoEBackwardProblem

_OP = MoEBackwardProblem.op
_DECISIONS: Cache[Hashable, Decision] = Cache(MAX_PLANS)


def names_of(kernel: str | None) -> tuple[str | None, str | None]:
    """The forward's and the backward's kernel that a name asks for; None leaves the choice. Raises CannotServe: a peer's
    backward, which only a measurement calls; one of ours, for gradients that it lacks. Raises ValueError: an unknown name, as
    far as that is seen here."""
    backward = next((one for one in operation(_OP).kernels() if one.name == kernel), None)
    if kernel not in (None, FALLBACK) and is_transformed():
        name = (backward or kernel_named(kernel, MoEProblem.op)).name
        raise CannotServe(f"kernel {name!r} cannot serve this call: {GRADIENTS} {TRANSFORMED}; {PYTORCH!r} can")
    if backward is None:
        return kernel, None
    if backward.origin != "ours" and kernel != FALLBACK:
        raise CannotServe(f"kernel {kernel!r} cannot serve this call: it is a peer's; {FALLBACK!r} and ours can")
    return None, kernel


def why_pytorch(tensors: Tensors, w8a8: bool = False) -> str | None:
    """Why PyTorch's operators must serve the backward, in words; None if ours may."""
    x, form = tensors.x, format_in(tensors, w8a8)
    if form is not None:
        return f"weights are in {form.name}, which PyTorch's operators dequantise for the gradients of all but the weights"
    if x.dtype == torch.float64:
        return "hidden_states has dtype torch.float64, which no kernel of ours takes"
    return "PyTorch's operators serve tensors on the CPU" if gpu_of(x) is None else None


def choose_backward(
    tensors: Tensors, activation: Activation, kernel: str | None, unable: Mapping[str, str] | None = None
) -> Decision:
    """The decision for the backward of a call. ``kernel``: the name of one, None for an automatic choice. ``unable``: kernels
    that cannot take the call's tensors, with the reason. Raises CannotServe: the requested kernel cannot serve the call. Raises
    ValueError: no kernel has the name."""
    if kernel == FALLBACK:
        return Decision(FALLBACK, Config(), "asked for by name", "requested")
    if (required := why_pytorch(tensors, activation.w8a8)) is not None:
        if kernel is not None:
            raise CannotServe(f"kernel {kernel!r} cannot serve this call: {GRADIENTS}, and {required}")
        return Decision(FALLBACK, Config(), required, "required")
    asked = asked_by_switch() if kernel is None else f"kernel {kernel_named(kernel, _OP).name!r} is asked for by name"
    problem, gpu = backward_problem_of(inputs_of(tensors, activation).problem), gpu_of(tensors.x)
    key = (problem, gpu, kernel, asked, *(unable or ()))
    if key not in _DECISIONS:
        by_name = asked_backward(problem, gpu, kernel, asked, unable) if asked else None
        _DECISIONS[key] = by_name or _by_record(problem, gpu, unable)
    return _DECISIONS[key]


def _by_record(problem: MoEBackwardProblem, gpu: Device, unable: Mapping[str, str] | None) -> Decision:
    """The decision for our kernel if the nearest record shows PyTorch's no faster, or, with none near, if no record on the
    GPU's architecture shows the kernel slower than PyTorch's; else FALLBACK.

    Tiles need not match: PyTorch's products move several times the bytes, and no record has them near ours.
    """
    ours, by_record = backward_by_record(problem, gpu, FALLBACK, any_tiles=True, unable=unable)
    if by_record is not None:
        return by_record
    if gpu is not None and _is_never_slower(ours.kernel, gpu):
        return replace(ours, reason=f"{ours.reason}; no record on {gpu.arch} has PyTorch's products faster than it")
    return Decision(FALLBACK, Config(), NO_RECORD, "modelled", None, ours.others)


def _is_never_slower(kernel: str, gpu: Gpu) -> bool:
    """Whether the committed records on the GPU's architecture have the kernel, and none has PyTorch's products faster."""
    entries = (one for one in known_table().entries if one.kernel == kernel and not one.tuned)
    beside = [(one.rival, one.ratio or 1.0) for one in entries if gpu_named(one.gpu).arch == gpu.arch]
    return bool(beside) and not any(rival in PYTORCHS and ratio < 1.0 for rival, ratio in beside)
