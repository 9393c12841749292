"""What the first attention call of its kind works out and later ones reuse: a Decision, and how its calls are bound.

The kind of a call (``_kind``) holds no length but its class (``AttentionProblem.representative``), so that the choice of kernel
and config depends on the kind alone and not on which length came first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch

from flashmoe_science.dispatch.peers import faster_peer
from flashmoe_science.dispatch.select import Decision, select
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.operations import TRITON_MISSING, kernel_named, operation
from flashmoe_science.ops.attention.call.inputs import (
    AttentionInputs,
    AttentionKernel,
    BoundLaunch,
    Launcher,
    Shapes,
    in_order_of,
    strides_like,
)
from flashmoe_science.ops.attention.call.spec import AttentionSpec, check_inputs, problem_like, problem_of
from flashmoe_science.ops.attention.front.fallback import pytorch_attention
from flashmoe_science.ops.attention.front.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.attention.front.kernels import ours
from flashmoe_science.ops.attention.problem import AttentionProblem, length_class
from flashmoe_science.ops.plan import (
    MOST_PLANS,
    NO_BACKWARD,
    Cache,
    check_kernel_with_gradients,
    device_guard,
    with_launch_path,
)
from flashmoe_science.problem import Dtype, rounded_up

# What Inductor's own code allocates by, on the current device: 1.2 us less than new_empty_strided (docs/notes/launch-cost.md).
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]

# (q, k, v, softmax_scale or None for the default, lse to fill or None for a new one) -> (out, lse or None)
BoundCall = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float | None, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]
]
Binder = Callable[[Shapes, Shapes], BoundCall]
# Shapes, strides, dtypes and devices of Q, K and V, three each; spec, needs_grad, whether the scale is positive, alignments.
CallKey = tuple[Any, ...]


class Plan(NamedTuple):
    """How calls of one kind are served: by which kernel and why; ``bind(shapes, strides)``, of Q, K and V, makes the call.

    serves_class: whether that call serves all numbers of keys of its ``length_class``.
    """

    decision: Decision
    bind: Binder
    serves_class: bool = False


class Span(NamedTuple):
    """Numbers of keys that one bound call serves: from ``first`` to ``last``, but those ``apart``."""

    first: int
    last: int
    apart: frozenset[int]


PLANS: Cache[Hashable, Plan] = Cache(MOST_PLANS)


def bind_call(
    key: CallKey, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None
) -> tuple[BoundCall, Span | None]:
    """The call for tensors of the key's shapes, strides and alignments, and the numbers of keys that it serves; None where it
    serves one number of keys alone. Raises as ``make_plan``."""
    spec, needs_grad = key[12], key[13]
    try:
        kind = _kind(key)
    except ValueError:  # not four dimensions
        kind = None
    if kind is None:
        check_inputs(q, k, v, spec)
        return make_plan(q, k, v, spec, softmax_scale, needs_grad)[1], None
    plan = PLANS.get(kind)
    if plan is None:
        plan, call = make_plan(q, k, v, spec, softmax_scale, needs_grad)
        PLANS[kind] = plan
    else:
        try:
            call = plan.bind(key[:3], key[3:6])
        except CannotServe as refusal:  # these very strides
            return make_plan(q, k, v, spec, softmax_scale, needs_grad, {plan.decision.kernel: str(refusal)})[1], None
    return call, _span(key) if plan.serves_class else None


def _span(key: CallKey) -> Span:
    """The numbers of keys that what is bound for a key serves where it serves its class."""
    (batch, heads, queries, width), _, (_, heads_v, keys, width_v), *_ = key
    measured = {one[4] for one in _measured_sizes() if one == (batch, heads, heads_v, queries, one[4], width, width_v)}
    if keys in measured:
        return Span(keys, keys, frozenset())
    if key[12].mask != "full":  # as many keys as queries: a problem of its own
        measured.add(queries)
    last = length_class(keys)
    return Span(bisect_left(range(keys + 1), last, key=length_class), last, frozenset(measured))


def _kind(key: CallKey) -> Hashable | None:
    """What a key has in the kind of a call: no length but its class, unless the very sizes were measured.

    None where the tensors are not alike in what they must be. All else that ``check_inputs`` looks at is in the kind, and was
    found right in its first call.
    """
    # Numbers are named one by one, here and where kernels bind: a slice of a shape or a call would take 0.1 us each.
    shape_q, shape_k, shape_v, of_q, of_k, of_v, dtype, dtype_k, dtype_v, device, device_k, device_v, spec, *options = key
    (batch, heads, queries, width), (batch_k, heads_k, keys_k, width_k) = shape_q, shape_k
    batch_v, heads_v, keys, width_v = shape_v
    (qb, qh, qm, qd), (kb, kh, kn, kd), (vb, vh, vn, vd) = of_q, of_k, of_v
    if not (
        (keys == keys_k and heads_v == heads_k and batch == batch_k == batch_v and width == width_k)
        and (dtype == dtype_k == dtype_v and device == device_k == device_v)
        and (heads == heads_k or (spec.gqa and heads_k > 0 == heads % heads_k))
        and 1 == qd == kd == vd
    ):
        return None
    sizes: tuple[int, ...] = (batch, heads, heads_v, queries, keys, width, width_v)
    if sizes not in _measured_sizes():
        sizes = (rounded_up(batch), heads, heads_v, length_class(queries), length_class(keys), width, width_v)
    # A problem of its own: the top-left mask is the other one there, and peers serve the bottom-right one by other kernels.
    square = queries == keys and spec.mask != "full"
    steps = 16 | qb | qh | qm | kb | kh | kn | vb | vh | vn
    broadcast = 0 in (qb, qh, qm, kb, kh, kn, vb, vh, vn)
    return (sizes, square, steps & -steps, broadcast, qh < qm, dtype, device, spec, *options)  # the power of 2 in all strides


@cache
def _measured_sizes() -> frozenset[tuple[int, ...]]:
    """Sizes of the problems in the dispatch table: each is a class of its own, for which its own record decides."""
    problems = [entry.problem for entry in committed_table().entries]
    return frozenset(
        (one.batch, one.heads, one.heads_kv, one.seqlen_q, one.seqlen_k, one.head_dim, one.head_dim_v)
        for one in problems
        if isinstance(one, AttentionProblem)
    )


def make_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    softmax_scale: float | None,
    needs_grad: bool,
    unable: Mapping[str, str] | None = None,
) -> tuple[Plan, BoundCall]:
    """Check the inputs, choose the kernel, compile it and bind it. ``unable`` are kernels found unable to take these tensors.

    Raises:
        TypeError, ValueError: the inputs (spec.py), or an unknown kernel.
        CannotServe: the kernel asked for cannot serve them; the message says why and what could.
    """
    check_inputs(q, k, v, spec)
    requested: AttentionKernel | None = None if spec.kernel is None else kernel_named(spec.kernel, AttentionProblem.op)
    gpu = gpu_of(q)
    if requested is not None and requested.name == PYTORCH:
        return _pytorch_plan(spec, Decision(PYTORCH, Config(), "asked for by name", "requested"))
    if needs_grad:
        check_kernel_with_gradients(spec.kernel, PYTORCH)
    if reason := _why_pytorch(q, k, needs_grad, q.is_cuda and gpu is None and requested is None):
        return _pytorch_plan(spec, Decision(PYTORCH, Config(), reason, "required"))
    problem = problem_of(q, k, v, spec.mask)
    found_unable = dict(unable or {}) | ({"ours": TRITON_MISSING} if TRITON_MISSING else {})
    while True:
        decision = select(problem, gpu, committed_table(), ours(), PYTORCH, requested, found_unable)
        if decision.kernel == PYTORCH:
            return _pytorch_plan(spec, decision)
        if requested is None:
            peers = operation(problem.op).peers()
            barred = _barred(peers, q, k, v, spec.return_lse, softmax_scale)
            decision = faster_peer(decision, problem, gpu, committed_table(), peers, barred | found_unable)
        kernel: AttentionKernel = requested or kernel_named(decision.kernel, problem.op)
        try:
            bind, serves_class = _kernel_binder(q, k, v, spec, softmax_scale, problem, kernel, decision.config, gpu)
            call = bind((q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride()))
        except CannotServe as refusal:
            # The next turn of select() passes this kernel over, or says why where it was asked for by name.
            found_unable[kernel.name] = str(refusal)
        else:
            decision = decision if kernel.plan is None else with_launch_path(decision)
            return Plan(decision, bind, serves_class), call


def _barred(
    peers: Iterable[AttentionKernel],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    return_lse: bool,
    softmax_scale: float | None,
) -> dict[str, str]:
    """Peers that an automatic choice must not take for these tensors, each with the reason."""
    steps = [step * one.element_size() for one in (q, k, v) for step in one.stride()[:3]]
    if softmax_scale is not None and softmax_scale <= 0.0:
        reason = f"the scale is {softmax_scale}, and was above 0 where it was measured"
    elif 0 in steps or any(place % 16 for place in (*steps, *(one.data_ptr() for one in (q, k, v)))):
        reason = "a tensor is broadcast, or does not lie in steps of 16 bytes as it did where it was measured"
    else:
        return {PYTORCH: "it gives no log-sum-exp"} if return_lse else {}
    return {peer.name: reason for peer in peers}


def _why_pytorch(q: torch.Tensor, k: torch.Tensor, needs_grad: bool, other_gpu: bool) -> str | None:
    """Why PyTorch's attention must serve the call, whatever our kernels support; None where it need not."""
    if needs_grad:
        return NO_BACKWARD
    if 0 in (*q.shape, *k.shape):
        return "a size is 0, so there is nothing to compute"
    if other_gpu:
        return f"{q.device} is not an NVIDIA GPU, and our kernels need one"
    return None


def _pytorch_plan(spec: AttentionSpec, decision: Decision) -> tuple[Plan, BoundCall]:
    mask, return_lse = spec.mask, spec.return_lse

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, new_lse = pytorch_attention(q, k, v, mask, scale, return_lse)
        return out, new_lse if lse is None or new_lse is None else lse.copy_(new_lse)

    return Plan(decision, lambda shapes, strides: call), call


def _kernel_binder(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    softmax_scale: float | None,
    problem: AttentionProblem,
    kernel: AttentionKernel,
    config: Config,
    gpu: Gpu | None,
) -> tuple[Binder, bool]:
    """How calls are bound to the kernel, and whether what is bound serves a class of lengths."""
    guard = device_guard(q.get_device())
    if kernel.plan is None:
        bind_peer = partial(_bind_peer, kernel, config, spec, gpu, problem.dtype)
        return lambda shapes, strides: guard(bind_peer(shapes, strides)), False
    default_scale, return_lse = problem.softmax_scale, spec.return_lse
    width_v = problem.head_dim_v
    scale = default_scale if softmax_scale is None else softmax_scale
    with torch.cuda.device_of(q):
        launcher = cast("Launcher", kernel.plan(AttentionInputs(problem, q, k, v, scale, return_lse), config))

    def bind(shapes: Shapes, strides: Shapes) -> BoundCall:
        shape_q = shapes[0]
        batch, heads, rows, _ = shape_q
        of_out = strides_like(shape_q, strides[0], width_v)
        launch = launcher.bind(shapes, (*strides, of_out))
        return guard(_call(launch, (batch, heads, rows, width_v), of_out, return_lse, default_scale))

    return guard(bind), launcher.serves_class


def _call(
    launch: BoundLaunch, shape: tuple[int, ...], strides: tuple[int, ...], return_lse: bool, default_scale: float
) -> BoundCall:
    lse_shape = shape[:3]

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = empty_strided_cuda(shape, strides, q.dtype) if q.is_cuda else q.new_empty_strided(shape, strides)
        if return_lse and lse is None:
            lse = q.new_empty(lse_shape, dtype=torch.float32)
        launch(q, k, v, out, lse, default_scale if scale is None else scale)
        return out, lse

    return call


def _bind_peer(
    kernel: AttentionKernel,
    config: Config,
    spec: AttentionSpec,
    gpu: Gpu | None,
    dtype: Dtype,
    shapes: Shapes,
    strides: Shapes,
) -> BoundCall:
    problem, return_lse = problem_like(shapes, strides[0], dtype, spec.mask), spec.return_lse
    reason = kernel.supports(problem, gpu)
    if reason is not None:
        raise CannotServe(reason)

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = AttentionInputs(problem, q, k, v, problem.softmax_scale if scale is None else scale, return_lse)
        result = kernel.run(inputs, config)
        out = in_order_of(strides[0], result.out)
        if not return_lse:
            return out, None
        if result.lse is None:
            raise CannotServe(f"kernel {kernel.name!r} gives no log-sum-exp; ours and {PYTORCH} do")
        return out, result.lse if lse is None else lse.copy_(result.lse)

    return call
