"""What serves an attention call: the kernel and config for its class, and the launch that its tensors are bound to.

A class (``_class_and_kind``) has rounded lengths, so that the choice depends on the class alone and not on which length came
first. Plans are stored by class; a new length costs a ``bind`` (microseconds), not a choice (milliseconds).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from flashmoe_science.dispatch.select import Basis, Decision, select
from flashmoe_science.dispatch.tuned import known_table
from flashmoe_science.hardware.probe import gpu_of, place_of
from flashmoe_science.kernel import AnyKernel, CannotServe, Config
from flashmoe_science.operations import operation
from flashmoe_science.ops.attention.call.checks import check_call
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionLaunch, Launcher
from flashmoe_science.ops.attention.call.lengths import lengths_of
from flashmoe_science.ops.attention.call.outputs import Result, in_order_of, tokens_first
from flashmoe_science.ops.attention.call.tensors import (
    NO_FEATURES,
    Given,
    MaybeTensor,
    Options,
    Tensors,
    features_of,
    max_keys,
    problem_of,
    sequences,
)
from flashmoe_science.ops.attention.front.backward.autograd import step_of
from flashmoe_science.ops.attention.front.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.attention.front.lengths import with_check
from flashmoe_science.ops.attention.front.pytorch import bind_pytorch
from flashmoe_science.ops.attention.problem import AttentionProblem, length_class
from flashmoe_science.ops.attention.problem.features import PLAIN
from flashmoe_science.ops.cache import MAX_PLANS, Cache
from flashmoe_science.ops.calls import alignment, device_guard, needs_grad
from flashmoe_science.ops.choose import GRADIENTS, choose, choose_fallback
from flashmoe_science.problem import ProblemError, rounded_up


class Plan(NamedTuple):
    """What serves the calls of one class, and why. ``launcher`` is our kernel's, None if a peer or PyTorch serves them;
    ``bind(tensors, options)`` makes the launch, and raises CannotServe."""

    decision: Decision
    bind: Callable[[Tensors, Options], AttentionLaunch]
    launcher: Launcher | None = None


class KeyLengths(NamedTuple):
    """Numbers of keys that one launch serves: from ``first`` to ``last``, except ``excluded``."""

    first: int
    last: int
    excluded: frozenset[int]


PLANS: Cache[Hashable, Plan] = Cache(MAX_PLANS)
LAUNCHERS: Cache[Hashable, Launcher] = Cache(MAX_PLANS)


def plan_call(tensors: Tensors, options: Options, scale: float | None) -> tuple[Plan, AttentionLaunch]:
    """The plan for a call, and the launch bound to its tensors. A call that shares a stored plan's class is not checked again.
    Raises TypeError, ValueError: what call/checks.py refuses; an unknown kernel. Raises CannotServe: the requested kernel
    cannot serve the call; the message says why and what could."""
    positive, key = scale is None or scale > 0.0, None
    if tensors[3:] == NO_FEATURES and options.kernel != PYTORCH:
        try:
            key = None if needs_grad(*tensors[:3]) else _class_and_kind(tensors, options, positive, checked=False)
        except (AttributeError, ValueError, RuntimeError):  # not a tensor, not four dimensions, nested
            key = None
    if checked := key is None:
        check_call(tensors, options)
        if tensors.needs_grad():
            return plan_training(tensors, options, scale)
        required = _why_pytorch(tensors, options)
        if required is not None or options.kernel == PYTORCH:
            decision = choose_fallback(AttentionProblem.op, options.kernel, required)
            assert decision is not None
            return _pytorch_plan(decision, tensors, options)
        key = _class_and_kind(tensors, options, positive, checked=True)
    plan = PLANS.get(key)
    if plan is None:
        if not checked:
            check_call(tensors, options)
        plan, launch = _new_plan(tensors, options, scale, {})
        PLANS[key] = plan
        return plan, launch
    try:
        return plan, plan.bind(tensors, options)
    except CannotServe as refusal:  # these very strides
        return _new_plan(tensors, options, scale, {plan.decision.kernel: str(refusal)})


def plan_training(tensors: Tensors, options: Options, scale: float | None) -> tuple[Plan, AttentionLaunch]:
    """The plan for a call whose inputs require gradients, valid until PyTorch's switch for deterministic algorithms changes.
    Its decision is the forward's; the reason also says what serves the backward."""
    step, chosen = step_of(tensors, options)
    if step is None:
        assert chosen is not None
        basis: Basis = "requested" if chosen.basis == "requested" else "required"
        decision = Decision(PYTORCH, Config(), f"{GRADIENTS}; {chosen.reason}", basis, None, chosen.others)
        plan, launch = _pytorch_plan(decision, tensors, options)
        return plan, _until_switched(launch)
    heads_first = step.options._replace(tokens_first=False, return_lse=options.return_lse or chosen is not None)
    with torch.no_grad():
        of_forward, forward = plan_call(tensors, heads_first, scale)
    if of_forward.launcher is not None:
        step = replace(step, launch=with_check(forward, lengths_of, tensors, options))
    by = f"no backward: {step.refusal}"
    if chosen is not None:
        by = f"its backward by {chosen.kernel}({chosen.config}): {chosen.reason}"
    decision = replace(of_forward.decision, reason=f"{of_forward.decision.reason}; {GRADIENTS}, {by}")

    packed = tensors.cu_seqlens_q is not None

    def launch_step(tensors: Given, scale: float | None, length: int, out: MaybeTensor, lse: MaybeTensor) -> Result:
        return _finished(step.served(tensors, scale), packed, options, lse)

    return Plan(decision, lambda tensors, options: plan_training(tensors, options, scale)[1]), _until_switched(launch_step)


def _until_switched(launch: AttentionLaunch) -> AttentionLaunch:
    """The launch; it returns None once PyTorch's switch for deterministic algorithms has changed, and the call is replanned."""
    switch = torch.are_deterministic_algorithms_enabled()

    def guarded(*arguments: Any) -> Result | None:
        return launch(*arguments) if torch.are_deterministic_algorithms_enabled() == switch else None

    return guarded


def _why_pytorch(tensors: Tensors, options: Options) -> str | None:
    """Why PyTorch's operators must serve the call, whatever our kernels support; None if they need not."""
    q, k = tensors.q, tensors.k
    if 0 in q.shape or 0 in k.shape or sequences(tensors) == 0:
        return "a size is 0, so there is nothing to compute"
    if q.is_cuda and gpu_of(q) is None and options.kernel is None:
        return f"{q.device} is not an NVIDIA GPU, and our kernels need one"
    return None


def _class_and_kind(
    tensors: Tensors, options: Options, positive: bool, checked: bool
) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]] | None:
    """The class of a call, and all else that a choice or a launcher depends on; None if Q, K and V do not fit each other.

    Equal classes share a choice. Sizes are rounded, except measured ones, for which their own record decides. With features,
    sizes are rounded only if keys and queries differ in number: keys may grow by a token a call. ``checked``: the call was
    checked; else it has only Q, K and V. Raises AttributeError, ValueError, RuntimeError: something unchecked is not a tensor,
    has not four dimensions, or is nested.
    """
    q, k, v = tensors[0], tensors[1], tensors[2]
    (batch, heads, queries, width), shape_k, (batch_v, heads_kv, keys, width_v) = q.shape, k.shape, v.shape
    (qb, qh, qm, qd), (kb, kh, kn, kd), (vb, vh, vn, vd) = q.stride(), k.stride(), v.stride()
    dtypes: Hashable = q.dtype
    if checked:
        dtypes = tuple([None if one is None else one.dtype for one in tensors])
        batch, keys = sequences(tensors), max_keys(tensors, options)
        queries = queries if tensors.cu_seqlens_q is None else options.max_seqlen_q
    elif not (
        (shape_k == (batch, heads_kv, keys, width) and batch_v == batch)
        and (dtypes == k.dtype == v.dtype and q.device == k.device == v.device)
        and (heads == heads_kv or (options.gqa and heads_kv > 0 == heads % heads_kv))
        and (1 == qd == kd == vd and 0 not in (batch, heads, queries, keys, width))
    ):
        return None
    plain = not checked and options.is_plain()
    features = PLAIN if plain else features_of(tensors, options)
    plain = plain or features == PLAIN
    # Under a causal mask, equal numbers of keys and queries are a class of their own: both causal masks are one there, kernels'
    # tiles depend on where the diagonal begins, and peers serve the bottom-right mask by other kernels.
    square = queries == keys and (options.mask != "full" or not plain)
    sizes: tuple[int, ...] = (batch, heads, heads_kv, queries, keys, width, width_v)
    if sizes not in _measured_sizes() if plain else features.lengths == "equal" and queries != keys:
        sizes = (rounded_up(batch), heads, heads_kv, length_class(queries), length_class(keys), width, width_v)
    step, broadcast = 16 | qb | qh | qm | kb | kh | kn | vb | vh | vn, 0 in (qb, qh, qm, kb, kh, kn, vb, vh, vn)
    rest = (options.return_lse, options.kernel, options.num_splits > 1, options.one_length)
    given = (q, k, v) if tensors.bias is None else (q, k, v, tensors.bias)
    kind = (place_of(q.device), positive, step & -step, broadcast, alignment(given), dtypes, rest)
    return (features, sizes, square, options.mask, qh < qm), kind


@cache
def _measured_sizes() -> frozenset[tuple[int, ...]]:
    problems = [entry.problem for entry in known_table().entries]
    return frozenset(
        (one.batch, one.heads, one.heads_kv, one.seqlen_q, one.seqlen_k, one.head_dim, one.head_dim_v)
        for one in problems
        if type(one) is AttentionProblem
    )


def _representative(problem: AttentionProblem) -> AttentionProblem:
    """The problem that a choice is made for: with features, if keys may grow, the class's own."""
    grows = problem.features != PLAIN and problem.features.lengths == "equal" and problem.seqlen_k != problem.seqlen_q
    return problem.rounded() if grows else problem


def _new_plan(
    tensors: Tensors, options: Options, scale: float | None, unable: Mapping[str, str]
) -> tuple[Plan, AttentionLaunch]:
    try:
        problem = problem_of(tensors, options)
    except ProblemError as error:
        decision = choose_fallback(AttentionProblem.op, options.kernel, f"no kernel of ours takes the input: {error}")
        assert decision is not None
        return _pytorch_plan(decision, tensors, options)
    gpu, guard = gpu_of(tensors.q), device_guard(tensors.q.get_device())
    made: list[Plan] = []

    def bind(kernel: AnyKernel, config: Config) -> AttentionLaunch:
        made.append(_plan(kernel, config, tensors, options, problem, scale))
        return made[-1].bind(tensors, options)

    peers = _unable_peers(tensors, options, scale) if problem.features == PLAIN else None
    decision, launch = choose(_representative(problem), gpu, options.kernel, guard(bind), unable=unable, unable_peers=peers)
    if launch is None:
        return _pytorch_plan(decision, tensors, options)
    return made[-1]._replace(decision=decision), launch


def _unable_peers(tensors: Tensors, options: Options, scale: float | None) -> dict[str, str]:
    """Peers that an automatic choice must not take for these tensors, each with the reason."""
    qkv = tensors[:3]
    steps = [step * one.element_size() for one in qkv for step in one.stride()[:3]]
    if scale is not None and scale <= 0.0:
        reason = f"the scale is {scale}, and was above 0 where it was measured"
    elif options.num_splits > 1:
        reason = f"num_splits is {options.num_splits}"
    elif 0 in steps or any(place % 16 for place in (*steps, *(one.data_ptr() for one in qkv))):
        reason = "a tensor is broadcast, or does not lie in steps of 16 bytes as it did where it was measured"
    else:
        return {PYTORCH: "it gives no log-sum-exp"} if options.return_lse else {}
    return {peer.name: reason for peer in operation(AttentionProblem.op).peers()}


# Plans ------------------------------------------------------------------------------------------------------------------------


def _plan(
    kernel: AnyKernel, config: Config, tensors: Tensors, options: Options, problem: AttentionProblem, scale: float | None
) -> Plan:
    """The plan for a kernel, without its decision. Raises CannotServe."""
    decision, guard = Decision(kernel.name, config, "", "modelled"), device_guard(tensors.q.get_device())
    if kernel.plan is None:
        return Plan(decision, lambda tensors, options: guard(_bind_peer(kernel, config, tensors, options)))
    launcher = _launcher_for(kernel, config, tensors, options, problem, scale)
    return Plan(decision, guard(lambda tensors, options: guard(_bind(launcher, tensors, options))), launcher)


def _bind(launcher: Launcher, tensors: Tensors, options: Options) -> AttentionLaunch:
    if options.num_splits > 1 and not launcher.splits_keys:
        raise CannotServe(f"num_splits is {options.num_splits}; this kernel never splits keys")
    without = options.one_length and launcher.takes_length
    return launcher.bind(tensors._replace(cache_seqlens=None) if without else tensors, options)


def _launcher_for(
    kernel: AnyKernel, config: Config, tensors: Tensors, options: Options, problem: AttentionProblem, scale: float | None
) -> Launcher:
    """The kernel's launcher for calls of this kind, stored with what it builds. Raises CannotServe."""
    # A launcher for features depends on no size; one without may be specialised on its class.
    both = _class_and_kind(tensors, options, scale is None or scale > 0.0, checked=True)
    assert both is not None
    like, kind = both
    if problem.features != PLAIN:
        like = (problem.mask, problem.features, problem.head_dim, problem.head_dim_v, problem.heads // problem.heads_kv)
    key = (kernel.name, config, like, kind)
    launcher = LAUNCHERS.get(key)
    if launcher is None:
        assert kernel.plan is not None
        inputs = AttentionInputs(problem, tensors, options, problem.softmax_scale if scale is None else scale)
        with torch.cuda.device_of(tensors.q):
            launcher = kernel.plan(inputs, config)
            if options.one_length and launcher.takes_length:
                launcher = kernel.plan(replace(inputs, tensors=tensors._replace(cache_seqlens=None)), config)
        LAUNCHERS[key] = launcher
    return launcher


def bind_append(
    tensors: Tensors, options: Options, scale: float | None
) -> tuple[Decision, AttentionLaunch] | tuple[None, None]:
    """The launch that first appends to the cache, and why it serves; None if an append must be a separate launch.

    Records of attention alone do not choose it: a kernel that appends in its own launch saves one.
    """
    gpu = gpu_of(tensors.q)
    if gpu is None or tensors.needs_grad() or _why_pytorch(tensors, options) is not None:
        return None, None
    try:
        problem = problem_of(tensors, options)
    except ProblemError:
        return None, None
    kernels = [one for one in operation(problem.op).ours() if options.kernel in (None, one.name)]
    able = [one for one in kernels if one.cannot(problem, gpu) is None]
    for kernel in sorted(able, key=lambda one: not one.suits(problem, gpu)):
        decision = select(_representative(problem), gpu, known_table(), [kernel], None)
        try:
            plan = _plan(kernel, decision.config, tensors, options, problem, scale)
            assert plan.launcher is not None
            return (decision, plan.bind(tensors, options)) if plan.launcher.appends else (None, None)
        except CannotServe:
            continue
    return None, None


def key_lengths(tensors: Tensors) -> KeyLengths | None:
    """The numbers of keys that share a call's class; None if another tensor has a length too."""
    others = (one for one in tensors[3:] if one is not None and one is not tensors.sinks and one is not tensors.alibi_slopes)
    if next(others, None) is not None:
        return None
    queries, keys = tensors.q.shape[2], tensors.k.shape[2]
    measured = {other for rows, other in measured_lengths(tensors) if rows == queries}
    if keys in measured or keys == queries:
        return KeyLengths(keys, keys, frozenset())
    measured.add(queries)  # as many keys as queries: a class of its own under a mask
    return KeyLengths(*lengths_of_class(keys), frozenset(measured))


def lengths_of_class(keys: int) -> tuple[int, int]:
    """The least and the largest length of a length's class."""
    last = length_class(keys)
    return bisect_left(range(keys + 1), last, key=length_class), last


def measured_lengths(tensors: Tensors) -> frozenset[tuple[int, int]]:
    """Numbers of queries and keys that are classes of their own, with a call's other sizes."""
    (batch, heads, _, width), (_, heads_kv, _, width_v) = tensors.q.shape, tensors.v.shape
    others = batch, heads, heads_kv, width, width_v
    return frozenset(one[3:5] for one in _measured_sizes() if (*one[:3], *one[5:]) == others)  # type: ignore[misc]


def _pytorch_plan(decision: Decision, tensors: Tensors, options: Options) -> tuple[Plan, AttentionLaunch]:
    def bind(tensors: Tensors, options: Options) -> AttentionLaunch:
        call, packed = bind_pytorch(tensors, options), tensors.cu_seqlens_q is not None
        return lambda tensors, scale, length, out, lse: _finished(call(tensors, scale), packed, options, lse)

    return Plan(decision, bind), bind(tensors, options)


def _bind_peer(kernel: AnyKernel, config: Config, tensors: Tensors, options: Options) -> AttentionLaunch:
    problem = problem_of(tensors, options)
    reason = kernel.supports(problem, gpu_of(tensors.q))
    if reason is not None:
        raise CannotServe(reason)

    def launch(tensors: Given, scale: float | None, length: int, out: MaybeTensor, lse: MaybeTensor) -> Result:
        given = Tensors(*tensors)  # type: ignore[arg-type]  # q, k and v are never None
        inputs = AttentionInputs(problem, given, options, problem.softmax_scale if scale is None else scale)
        result = kernel.run(inputs, config)
        if options.return_lse and result.lse is None:
            raise CannotServe(f"kernel {kernel.name!r} gives no log-sum-exp; ours and {PYTORCH} do")
        new_lse = result.lse if options.return_lse else None
        return _finished((in_order_of(given.q, result.out), new_lse), given.cu_seqlens_q is not None, options, lse)

    return launch


def _finished(result: Result, packed: bool, options: Options, lse: torch.Tensor | None) -> Result:
    """A heads-first result in the order of the options, with the log-sum-exp in ``lse`` if given."""
    out, new_lse = result
    if lse is not None and new_lse is not None:
        new_lse = lse.copy_(new_lse)
    return tokens_first((out, new_lse), packed) if options.tokens_first else (out, new_lse)
