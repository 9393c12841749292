"""What serves a call of attention with modes, and why.

A kernel of ours serves it (chunk_gluon_sm90, fwd_gluon_sm90 or split_triton): the one that records have the fastest on the
problem or on a near one, else the first that it suits. PyTorch's operators do (modes_fallback.py) where none can or a gradient
is needed. What was found for a call is kept by a key of all that it is but its values, and holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashmoe_science.dispatch.select import Decision, select
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.kernel import CannotServe, Config, Device, Launcher
from flashmoe_science.operations import TRITON_MISSING, kernel_named
from flashmoe_science.ops.attention.call.inputs import AttentionInputs, AttentionKernel, AttentionOutput
from flashmoe_science.ops.attention.call.modes_spec import (
    ModesSpec,
    check_modes,
    check_splits,
    modes_of,
    problem_with_modes,
    sequences,
)
from flashmoe_science.ops.attention.front.append_fallback import Append
from flashmoe_science.ops.attention.front.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.attention.front.modes_fallback import modes_attention
from flashmoe_science.ops.attention.problem import KEY_CLASS, AttentionProblem
from flashmoe_science.ops.attention.problem.features import Extras, Modes
from flashmoe_science.ops.plan import (
    MOST_CALLS,
    MOST_PLANS,
    NO_BACKWARD,
    Cache,
    check_kernel_with_gradients,
    device_guard,
    with_launch_path,
)
from flashmoe_science.problem import ProblemError

if TYPE_CHECKING:
    from flashmoe_science.ops.attention.call.inputs import KnownLaunch

Result = tuple[torch.Tensor, torch.Tensor | None]


class Call(NamedTuple):
    """What serves calls of one kind, and why. ``keys``: the one number of keys that it serves, None for all of a class."""

    decision: Decision
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Extras, float | None], Result]
    keys: int | None = None


CALLS: Cache[Hashable, Call] = Cache(MOST_CALLS)
PLANS: Cache[Hashable, Launcher] = Cache(MOST_PLANS)


def decide_modes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec) -> Decision:
    """What ``attend_modes`` would serve the call by, and why; launches nothing. Raises as ``attend_modes``."""
    return call_for(q, k, v, extras, spec, None, needs_grad(q, k, v, extras)).decision


def takes_modes(kernel: str) -> bool:
    """Whether a kernel of that name is one of ours that takes modes."""
    return kernel in {one.name for one in _kernels()}


def needs_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras) -> bool:
    """Whether a gradient may be asked for."""
    if not torch.is_grad_enabled():
        return False
    learned = (q, k, v, extras.sinks, extras.alibi_slopes, extras.bias)
    return any(one is not None and one.requires_grad for one in learned)


def call_for(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec, scale: float | None, grad: bool
) -> Call:
    """How the call is served: found before, or checked and found now."""
    tensors = extras.tensors()
    try:
        keys = k.shape[2]
        shape_k: tuple[int, ...] = k.shape
        shape_v: tuple[int, ...] = v.shape
        if keys == shape_v[2] != q.shape[2] and _grows(extras, tensors):
            shape_k, shape_v = _class(*shape_k), _class(*shape_v)
        key = (
            q.shape, shape_k, shape_v, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, spec, grad, scale is None or scale > 0.0,
            extras.max_seqlen_q, extras.max_seqlen_k, extras.softcap,
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 and (q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15),
            extras.bias is not None and extras.bias.data_ptr() & 15,
            *[None if one is None else (one.shape, one.stride(), one.dtype, one.device) for one in tensors],
        )  # fmt: skip
        call = CALLS.get(key)
    except (RuntimeError, AttributeError, TypeError, IndexError):  # not tensors, without strides, of few dimensions
        check_modes(q, k, v, extras, spec)
        raise
    if call is None or call.keys not in (None, keys):
        call = CALLS[key] = _make_call(q, k, v, extras, spec, scale is None or scale > 0.0, grad)
    return call


def _grows(extras: Extras, tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether no tensor but sinks and slopes is given, so that nothing but the number of keys changes as they grow."""
    return all(one is None or one is extras.sinks or one is extras.alibi_slopes for one in tensors)


def _class(batch: int, heads: int, keys: int, width: int) -> tuple[int, ...]:
    """The shape with the class of its keys: they round up to one multiple, and are multiples of the same tile, if of any."""
    whole = keys | KEY_CLASS
    return batch, heads, -(-keys // KEY_CLASS), whole & -whole & ~15, width


# Which kernel ----------------------------------------------------------------------------------------------------------------


@cache
def _kernels() -> tuple[AttentionKernel, ...]:
    """Our kernels that take modes, the preferred first."""
    if TRITON_MISSING:
        return ()
    from flashmoe_science.ops.attention.forward.chunked_sm90 import kernel as chunk_gluon_sm90
    from flashmoe_science.ops.attention.forward.prefill_sm90 import kernel as fwd_gluon_sm90
    from flashmoe_science.ops.attention.forward.splitkv import decode as decode_gluon
    from flashmoe_science.ops.attention.forward.splitkv import kernel as split_triton

    return (chunk_gluon_sm90.KERNEL, fwd_gluon_sm90.KERNEL, decode_gluon.KERNEL, split_triton.KERNEL)


def _asked(spec: ModesSpec) -> tuple[AttentionKernel, ...]:
    """The kernel asked for by name, or all that take modes."""
    return tuple(one for one in _kernels() if spec.kernel in (None, one.name))


def _choice(problem: AttentionProblem, gpu: Device, able: Sequence[AttentionKernel], spec: ModesSpec) -> Decision:
    """Which of the kernels that can serve the problem does, by records or else by what suits it. Keys beside other numbers of
    queries may grow by a token from call to call: one choice for a class of their numbers."""
    grows = problem.modes.lengths == "equal" and problem.seqlen_k != problem.seqlen_q
    names = tuple([one.name for one in able])
    return _chosen(problem.rounded() if grows else problem, gpu, names, spec.kernel is not None)


@lru_cache(512)  # to look through the records takes 0.1 ms, for every token by which keys grow
def _chosen(problem: AttentionProblem, gpu: Device, able: tuple[str, ...], requested: bool) -> Decision:
    named = {one.name: one for one in _kernels()}
    kernels = [named[name] for name in able]
    return select(problem, gpu, committed_table(), kernels, None, kernels[0] if requested else None)


def _make_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec, positive: bool, grad: bool
) -> Call:
    """Check the inputs and choose. Raises as ``attend_modes``."""
    check_modes(q, k, v, extras, spec)
    check_splits(spec.num_splits)
    modes = modes_of(k, extras, spec.window_left, spec.window_right)
    requested = None if spec.kernel is None else kernel_named(spec.kernel, AttentionProblem.op)
    if requested is not None and requested.name == PYTORCH:
        return _by_pytorch(spec, modes, Decision(PYTORCH, Config(), "asked for by name", "requested"))
    if grad:
        check_kernel_with_gradients(spec.kernel, PYTORCH)
        return _by_pytorch(spec, modes, Decision(PYTORCH, Config(), NO_BACKWARD, "required"))
    if requested is not None and not takes_modes(requested.name):
        raise CannotServe(f"kernel {spec.kernel!r} cannot serve this call: it takes no modes; {PYTORCH!r} can")
    found = _by_kernel(q, k, v, extras, spec, modes, positive)
    if isinstance(found, Call):
        return found
    if requested is not None:
        raise CannotServe(f"kernel {spec.kernel!r} cannot serve this call: {found}; {PYTORCH!r} can")
    return _by_pytorch(spec, modes, Decision(PYTORCH, Config(), found, "required"))


def _by_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec, modes: Modes, positive: bool
) -> Call | str:
    """The call by a kernel of ours, or why none serves it. ``positive``: whether the scale is."""
    gpu = gpu_of(q)
    if q.is_cuda and gpu is None:
        return f"{q.device} is not an NVIDIA GPU, and our kernels need one"
    if 0 in (*q.shape, *k.shape, sequences(q, extras)):
        return "a size is 0, so there is nothing to compute"
    try:
        problem = problem_with_modes(q, k, v, spec.mask, modes, extras)
    except ProblemError as error:
        return f"no kernel of ours takes the input: {error}"
    unable = {one.name: reason for one in _asked(spec) if (reason := one.cannot(problem, gpu)) is not None}
    scale = problem.softmax_scale if positive else -1.0  # of which only the sign decides
    inputs = AttentionInputs(problem, q, k, v, scale, spec.return_lse, None, extras)
    guard = device_guard(q.get_device())
    while able := [one for one in _asked(spec) if one.name not in unable]:
        decision = _choice(problem, gpu, able, spec)
        kernel = next(one for one in able if one.name == decision.kernel)
        try:
            bound = guard(_bound)(kernel, inputs, decision.config, spec.num_splits)
        except CannotServe as refusal:
            unable[kernel.name] = str(refusal)
        else:
            serves_class = getattr(_plan(kernel, inputs, decision.config), "serves_class", False)
            run = guard(partial(_run_bound, bound, problem, spec.return_lse))
            decision = with_launch_path(replace(decision, others=(*decision.others, *unable.items())))
            return Call(decision, run, None if serves_class else k.shape[2])
    return "; ".join(f"{name}: {reason}" for name, reason in unable.items()) or str(TRITON_MISSING)


def bind_known_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras,
    spec: ModesSpec,
    positive: bool,
    append: Append | None,
    says_length: bool,
    tokens_first: bool,
) -> KnownLaunch | None:
    """The launch of calls like this one by our kernel; None where another kernel serves them, or one launch cannot.

    Args:
        append: what a cache grows by first.
        says_length: where the extras have lengths of a cache, whether each call says one length in their place.
        tokens_first: whether the output's tokens come before its heads.

    Raises:
        TypeError, ValueError: as ``attend_modes``.
    """
    check_modes(q, k, v, extras, spec)
    check_splits(spec.num_splits)
    gpu = gpu_of(q)
    if gpu is None or 0 in (*q.shape, *k.shape) or needs_grad(q, k, v, extras) or TRITON_MISSING:
        return None
    try:
        problem = problem_with_modes(q, k, v, spec.mask, modes_of(k, extras, spec.window_left, spec.window_right), extras)
    except ProblemError:
        return None
    if says_length:
        extras = replace(extras, cache_seqlens=None)
    able = [one for one in _asked(spec) if one.cannot(problem, gpu) is None]
    if append is not None:  # not by records of attention alone: a kernel that appends in its own launch spares the call one
        able.sort(key=lambda one: not one.suits(problem, gpu))
    scale = problem.softmax_scale if positive else -problem.softmax_scale
    inputs = AttentionInputs(problem, q, k, v, scale, spec.return_lse, None, extras)
    guard = device_guard(q.get_device())
    while able:
        decision = _choice(problem, gpu, able if append is None else able[:1], spec)
        kernel = next(one for one in able if one.name == decision.kernel)
        try:
            bind = getattr(guard(_plan)(kernel, inputs, decision.config), "bind_known", None)
            launch = None if bind is None else guard(bind)(inputs, spec.num_splits, append, tokens_first)
        except CannotServe:
            able.remove(kernel)
        else:
            return None if launch is None else guard(launch)
    return None


def _bound(
    kernel: AttentionKernel, inputs: AttentionInputs, config: Config, num_splits: int
) -> Callable[[AttentionInputs], AttentionOutput]:
    """The kernel for tensors of these shapes and strides, by a plan that holds no length."""
    return _plan(kernel, inputs, config).bind_inputs(inputs, num_splits)  # type: ignore[no-any-return]


def _plan(kernel: AttentionKernel, inputs: AttentionInputs, config: Config) -> Any:
    """The kernel's plan for calls of this kind."""
    problem, q, k, v, extras = inputs.problem, inputs.q, inputs.k, inputs.v, inputs.extras
    kind = (
        kernel.name, config, problem.mask, problem.modes, problem.head_dim, problem.head_dim_v, q.shape[1] // k.shape[1],
        q.dtype, k.dtype, q.device, inputs.return_lse, inputs.softmax_scale > 0.0,
        *[None if one is None else (one.dtype, one.data_ptr() & 15) for one in (q, k, v, extras.bias)],
        *[None if one is None else one.dtype for one in extras.tensors()],
    )  # fmt: skip
    plan = PLANS.get(kind)
    if plan is None:
        assert kernel.plan is not None
        plan = PLANS[kind] = kernel.plan(inputs, config)
    return plan


def _run_bound(
    bound: Callable[[AttentionInputs], AttentionOutput],
    problem: AttentionProblem,
    return_lse: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras,
    scale: float | None,
) -> Result:
    result = bound(
        AttentionInputs(problem, q, k, v, problem.softmax_scale if scale is None else scale, return_lse, None, extras)
    )
    lse = result.lse
    return result.out, lse if lse is None or lse.dim() == 3 else lse.unsqueeze(0)  # of packed queries it is [heads, total]


def _by_pytorch(spec: ModesSpec, modes: Modes, decision: Decision) -> Call:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, scale: float | None) -> Result:
        return modes_attention(q, k, v, spec.mask, modes, extras, scale, spec.return_lse)

    return Call(decision, run)
