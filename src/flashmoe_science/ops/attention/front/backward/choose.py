"""Which backward serves a call whose inputs require gradients, and why.

PyTorch's operators serve the forward and the backward unless a record says that our backward is as fast on the GPU, or they
would hold all scores: for windows, packed sequences and the like. Ours serve if asked for: by a kernel's name, by
``deterministic``, or by PyTorch's switch for deterministic algorithms.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.kernel import CannotServe, Config, Device
from flashmoe_science.operations import kernel_named, operation
from flashmoe_science.ops.attention.call.backward import backward_problem_of
from flashmoe_science.ops.attention.call.tensors import E4M3, Options, Tensors, sequences
from flashmoe_science.ops.attention.front.backward.kernels import FALLBACK, FUSED, SPLIT
from flashmoe_science.ops.attention.front.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.cache import MAX_PLANS, Cache
from flashmoe_science.ops.calls import is_transformed
from flashmoe_science.ops.choose import GRADIENTS, NO_RECORD, TRANSFORMED, asked_backward, asked_by_switch, backward_by_record
from flashmoe_science.problem import ProblemError

_OP = AttentionBackwardProblem.op
_FUSED = ("boolmask", "bias")  # features that a fused backward of PyTorch serves
_NARROW = 64  # columns of a head to which the fused kernel's dQ alone is the faster
DECISIONS: Cache[Hashable, Decision] = Cache(MAX_PLANS)


def why_no_backward(tensors: Tensors, options: Options) -> str | None:
    """Why no backward serves a call whose forward is served; None if one does."""
    for given, what in (
        (tensors.page_table is not None, f"{options.names.page_table} is given"),
        (tensors.k.dtype == E4M3, f"{options.names.k} is e4m3"),
    ):
        if given:
            return f"{what}, and a cache in pages or in 8 bits has no gradients"
    return None


def check_gradients(tensors: Tensors, options: Options) -> None:
    """Raise ValueError if a gradient is asked for that does not exist."""
    slopes = tensors.alibi_slopes
    if slopes is not None and slopes.requires_grad:
        name = options.names.alibi_slopes
        raise ValueError(f"{name} requires gradients, and is not differentiable: pass {name}.detach()")


def choose_backward(tensors: Tensors, options: Options, rival: str = FALLBACK) -> Decision:
    """The decision for a checked call: FALLBACK if PyTorch's operators serve it, and the forward.

    Args:
        rival: PyTorch's kernel that then serves; ours must be no slower on record.

    Raises:
        CannotServe: a kernel or equal bits were asked for, and nothing can serve the call so.
        ValueError: no kernel has the name.
    """
    kernel, named = _requested(options)
    if kernel == FALLBACK:
        if options.deterministic:
            raise CannotServe(f"deterministic is True and kernel is {options.kernel!r}, which does not promise that")
        return Decision(FALLBACK, Config(), "asked for by name", "requested")
    gpu = gpu_of(tensors.q)
    if 0 in tensors.q.shape or 0 in tensors.k.shape or sequences(tensors) == 0:
        return Decision(FALLBACK, Config(), "a size is 0, so there is nothing to compute", "required")
    if gpu is None and not named:
        return Decision(FALLBACK, Config(), "PyTorch's operators serve tensors on the CPU", "required")
    by_option = "deterministic is True" if options.deterministic else ""
    asked = named or by_option or asked_by_switch()
    if is_transformed():
        if named or by_option:
            raise CannotServe(f"{asked} and {GRADIENTS} {TRANSFORMED}, which only {PYTORCH!r} serves")
        return Decision(FALLBACK, Config(), f"gradients may be asked for {TRANSFORMED}", "required")
    if any(isinstance(size, torch.SymInt) for one in tensors[:3] for size in one.shape):
        # Whether it can is seen when it is called; the last of ours takes the most.
        if asked and (ours := operation(_OP).ours()):
            return Decision(kernel or ours[-1].name, Config(), asked, "requested")
        return Decision(FALLBACK, Config(), "no record is of sizes that are not known yet", "modelled")
    try:
        problem = backward_problem_of(tensors, options)
        key = (problem, gpu, kernel, asked, rival)
        if key not in DECISIONS:
            DECISIONS[key] = asked_backward(problem, gpu, kernel, asked) if asked else _by_record(problem, gpu, rival)
        decision = DECISIONS[key]
        return _of_one_side(decision, problem, gpu) if kernel is None and _is_faster_split(tensors) else decision
    except (CannotServe, ProblemError) as error:
        if named or by_option:
            without = f"{PYTORCH!r} can" if named else f"without it {PYTORCH!r} can"
            raise CannotServe(f"{asked} and {GRADIENTS}: {error}; {without}, or call it under torch.no_grad()") from error
        return Decision(FALLBACK, Config(), f"no backward of ours takes the input: {error}", "required")


def _is_faster_split(tensors: Tensors) -> bool:
    """Whether the split kernel is faster for the wanted gradients than the fused one, which computes all three: without dQ, and
    for dQ alone of more than 64 columns (docs/notes/backward.md)."""
    of_queries, *of_keys = (one.requires_grad for one in tensors[:3])
    if of_queries:
        return not any(of_keys) and tensors.q.shape[-1] > _NARROW
    return tensors.needs_grad()


def _of_one_side(decision: Decision, problem: AttentionBackwardProblem, gpu: Device) -> Decision:
    """The decision for the split kernel instead of the fused one, which would compute the other side too."""
    if decision.kernel != FUSED:
        return decision
    config = asked_backward(problem, gpu, SPLIT, "").config
    reason = f"dQ alone, or none, is wanted; for all gradients {FUSED}: {decision.reason}"
    return Decision(SPLIT, config, reason, "requested" if decision.basis == "requested" else "modelled", None, decision.others)


def _by_record(problem: AttentionBackwardProblem, gpu: Device, rival: str) -> Decision:
    """The decision for our kernel if the nearest record with the same tiles shows the rival no faster, or, without a record, if
    PyTorch's operators hold all scores in fp32; else FALLBACK."""
    decision, by_record = backward_by_record(problem, gpu, rival)
    if by_record is not None:
        return by_record
    unfused = unsupported(problem.features, _FUSED, "what PyTorch has fused")
    # On other GPUs the tests of ours have not been run.
    if unfused is not None and rival == FALLBACK and gpu is not None and gpu.arch == "sm_90":
        return replace(decision, reason=f"{unfused}; {decision.reason}")
    return Decision(FALLBACK, Config(), NO_RECORD, "modelled", None, decision.others)


def _requested(options: Options) -> tuple[str | None, str]:
    """The backward that a kernel's name asks for, FALLBACK for PyTorch's, None for any of ours; and the words for it, empty
    without a name. A forward of ours asks for a backward of ours. Raises CannotServe: a peer's name. Raises ValueError: no
    kernel has the name."""
    if options.kernel is None:
        return None, ""
    if options.kernel in (PYTORCH, FALLBACK):
        return FALLBACK, "asked for by name"
    backward = next((one for one in operation(_OP).kernels() if one.name == options.kernel), None)
    kernel = backward or kernel_named(options.kernel, "attention")
    if kernel.origin != "ours":
        raise CannotServe(
            f"kernel {options.kernel!r} cannot serve this call: {GRADIENTS}, and it is a peer's; {PYTORCH!r} and ours can, or "
            "call it under torch.no_grad()"
        )
    return kernel.name if kernel.op == _OP else None, f"kernel {options.kernel!r} is asked for by name"
