"""Attention's operator ``flashmoe::attention_forward``, and the path that plain eager calls take around the dispatcher.

torch.compile, export, fake tensors, modes and tensor subclasses see the operator. A plain eager call finds its launch in the
launch cache; a new one is checked, planned (choose.py) and bound, and its launch is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch

from flashmoe_science.dispatch.select import Decision, at_lengths
from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.kernel import CannotServe
from flashmoe_science.operations import operation
from flashmoe_science.ops.attention.call.append import Append, check_append
from flashmoe_science.ops.attention.call.checks import check_call, check_dropout, checked_scale
from flashmoe_science.ops.attention.call.kernel import AttentionLaunch
from flashmoe_science.ops.attention.call.lengths import lengths_of, lengths_of_append
from flashmoe_science.ops.attention.call.outputs import Result, in_order_of, out_strides, outputs_of, tokens_first
from flashmoe_science.ops.attention.call.tensors import ALL_KEYS, NO_FEATURES, Given, Options, Tensors, problem_of
from flashmoe_science.ops.attention.front.arguments import SCHEMA_OF_FEATURES, of_features, unpacked
from flashmoe_science.ops.attention.front.backward.autograd import differentiable
from flashmoe_science.ops.attention.front.choose import (
    KeyLengths,
    Plan,
    bind_append,
    key_lengths,
    lengths_of_class,
    measured_lengths,
    plan_call,
)
from flashmoe_science.ops.attention.front.flops import of_forward
from flashmoe_science.ops.attention.front.kernels import FALLBACK
from flashmoe_science.ops.attention.front.lengths import with_check
from flashmoe_science.ops.attention.front.pytorch import dropped_attention
from flashmoe_science.ops.attention.problem import AttentionProblem, length_class
from flashmoe_science.ops.cache import MAX_CALLS, MAX_PLANS, Cache
from flashmoe_science.ops.calls import autocast, find_launch, guards_of, is_plain, slow_path, store_launch
from flashmoe_science.ops.choose import GRADIENTS, choose_fallback
from flashmoe_science.ops.explain import Explained, is_explaining
from flashmoe_science.ops.operator import register

CallKey = tuple[Any, ...]  # the shape of Q, the options, then all else that is no tensor and decides how a call is served
SEEN: Cache[Hashable, bool] = Cache(MAX_CALLS)


class Store(NamedTuple):
    """What a launch is stored under: a public call's key, its own tensors, and the one length of all sequences that replaces
    ``cache_seqlens`` (ALL_KEYS for none)."""

    key: CallKey
    tensors: Given
    length: int

    def given(self) -> list[torch.Tensor]:
        return [one for one in self.tensors if one is not None]


def attend(
    tensors: Given,
    options: Options,
    softmax_scale: float | None = None,
    lse: torch.Tensor | None = None,
    store: Store | None = None,
    out: torch.Tensor | None = None,
) -> Result:
    """softmax(Q K^T * scale, with the features asked for) V; what every public attention function calls.

    Args:
        tensors: Tensors without anything to append, or their first three where the rest is None.
        softmax_scale: None for head_dim ** -0.5.
        lse: with ``options.return_lse``, a contiguous, 16-byte aligned fp32 tensor to fill in place of a new one.
        store: what ``cached_call`` gave for the public function's own tensors; later calls like it find the launch.
        out: a 16-byte aligned tensor with the strides that a new result would have; our kernels fill it in place of a new one.

    Returns:
        out in the memory order of ``q`` with the width of ``v``, zeros for a row that sees no key; and the log-sum-exp, or None
        where it is not asked for (call/outputs.py).

    Raises:
        TypeError, ValueError: what call/checks.py refuses, an unknown kernel, a kernel that cannot serve the call.
    """
    if torch.compiler.is_compiling():
        return _through_operator(Tensors(*tensors), options, softmax_scale, lse)  # type: ignore[arg-type]
    if softmax_scale is not None and not (type(softmax_scale) is float and isfinite(softmax_scale)):
        softmax_scale = checked_scale(softmax_scale, options.names.scale)
    key: CallKey | None = None
    found: Callable[..., Any] | None = None
    try:
        if len(tensors) == 3:  # written out: a call of _find is a fiftieth of the host's time
            key = (tensors[0].shape, options, softmax_scale is None or softmax_scale > 0.0, torch.is_grad_enabled())  # type: ignore[union-attr]
            found = find_launch(key, tensors) or find_launch(_class_key(key), tensors)  # type: ignore[arg-type]
        else:
            found, key = _find(tensors, options, (), softmax_scale)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # not a tensor, not four dimensions, nested
        key = None
    if found is not None:
        result: Result | None = found(tensors, softmax_scale, ALL_KEYS, out, lse)
        if result is not None:
            return result
    every = Tensors(*tensors)  # type: ignore[arg-type]  # q, k and v are never None
    if (cast := _autocast(every)) is not None:
        return attend(cast, options, softmax_scale, lse)
    if not is_plain(*tensors):
        if is_explaining():
            raise Explained(decide(every, options, softmax_scale))
        return _through_operator(every, options, softmax_scale, lse)
    return _serve(every, options, softmax_scale, lse, key, store, out)


def attend_with_dropout(
    tensors: Given, options: Options, softmax_scale: float | None, dropout_p: float
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """``attend`` by PyTorch's operators, with a share ``dropout_p`` of the weights dropped, and the weights of
    ``dropped_attention``. Raises as ``attend``."""
    every = Tensors(*tensors)  # type: ignore[arg-type]  # q, k and v are never None
    every = _autocast(every) or every
    check_dropout(dropout_p)
    if options.deterministic and every.needs_grad():
        raise CannotServe(f"deterministic is True, {GRADIENTS}, and dropout_p is {dropout_p}, which no kernel of ours takes")
    check_call(every, options)
    if options.kernel is not None or is_explaining():
        why = f"dropout_p is {dropout_p}, which no kernel of ours takes"
        decision = choose_fallback(AttentionProblem.op, options.kernel, why)
        if is_explaining() and decision is not None:
            raise Explained(decision)
    softmax_scale = checked_scale(softmax_scale, options.names.scale)
    out, lse, weights = dropped_attention(every, options, softmax_scale, float(dropout_p))
    if options.tokens_first:
        out, lse = tokens_first((out, lse), every.cu_seqlens_q is not None)
    return out, lse, weights


def append_and_attend(
    append: Append, tensors: Tensors, options: Options, softmax_scale: float | None, store: Store
) -> Result | None:
    """``attend`` after an append to the cache, in one launch; None if no kernel of ours does both. ``tensors``: without what is
    appended. ``store``: as of ``attend``."""
    if not is_plain(*store.tensors) and not is_explaining():
        return None
    check_call(tensors, options)
    check_append(append)
    new = append.k, append.v, append.rotary_cos, append.rotary_sin, append.rotary_seqlens
    decision, launch = bind_append(Tensors(*tensors[: -len(new)], *new), options, softmax_scale)  # type: ignore[arg-type, call-arg]
    if is_explaining():
        if decision is not None:
            raise Explained(decision)
        return None
    if launch is not None:
        launch = with_check(launch, lengths_of_append, append)
    store_launch(store.key, guards_of(store.given()), launch or slow_path)
    return None if launch is None else launch(store.tensors, softmax_scale, store.length, None, None)


def cached_call(
    tensors: Given, length: int, options: tuple[Hashable, ...], softmax_scale: Any
) -> tuple[Result | None, Store | None]:
    """The result of a call whose launch is stored under the public function's arguments, else None; and the Store for
    ``attend``, None if the launch is not to be stored.

    Args:
        tensors: the public function's, in the order of Tensors, before any view is made; ``cache_seqlens`` None if it is an
            integer.
        length: that integer, the keys of each sequence; ALL_KEYS without one. It is no part of the key.
        options: all other arguments that are no tensors, unchecked.
    """
    if length < 0 or not (softmax_scale is None or (softmax_scale.__class__ is float and isfinite(softmax_scale))):
        return None, None
    # Types tell True from 1.
    found, key = _find(tensors, options, tuple(map(type, options)), softmax_scale)
    if found is None:
        return None, None if key is None else Store(key, tensors, length)
    return found(tensors, softmax_scale, length, None, None), None


def _find(
    tensors: Given, options: Hashable, kinds: tuple[type, ...], softmax_scale: float | None
) -> tuple[Callable[..., Any] | None, CallKey | None]:
    """The stored launch of a call, and its key; None for both where an argument is no tensor, or has no hash."""
    try:
        q: Any = tensors[0]
        absent = tuple([one is None for one in tensors])
        key = (q.shape, options, softmax_scale is None or softmax_scale > 0.0, torch.is_grad_enabled(), absent, kinds)
        return find_launch(key, [one for one in tensors if one is not None]), key
    except (AttributeError, TypeError, RuntimeError):  # not a tensor, an option that has no hash, a nested query: no shape
        return None, None


def _serve(
    tensors: Tensors,
    options: Options,
    softmax_scale: float | None,
    lse: torch.Tensor | None,
    key: CallKey | None,
    store: Store | None,
    out: torch.Tensor | None = None,
) -> Result:
    """Check a new call, choose what serves it, and store its launch. Raises as ``attend``."""
    plan, launch = plan_call(tensors, options, softmax_scale)
    if plan.launcher is not None:
        launch = with_check(launch, lengths_of, tensors, options)
    # Launches of aligned tensors refuse others by themselves.
    aligned = not (tensors.q.data_ptr() | tensors.k.data_ptr() | tensors.v.data_ptr()) & 15
    if store is not None and plan.launcher is not None:
        direct = plan.launcher.takes_length or not options.one_length
        store_launch(store.key, guards_of(store.given(), aligned=not aligned), launch if direct else slow_path)
        if direct:
            return _launched(launch(store.tensors, softmax_scale, store.length, None, lse))
    elif key is not None:
        given = [one for one in tensors if one is not None]
        if plan.launcher is not None and plan.launcher.any_keys and (lengths := key_lengths(tensors)) is not None:
            store_launch(key, _of_lengths(given, lengths, aligned), launch)
        elif tensors[3:] != NO_FEATURES or _seen_before((key, tensors.k.shape)):
            store_launch(key, guards_of(given, aligned=not aligned), launch)
        elif plan.launcher is not None and _seen_before(shared := _class_key(key)) and (matches := _of_class(tensors, options)):
            binding = _binding(plan, options, key)
            store_launch(shared, matches, binding)
            store_launch(key, matches, binding)  # found first by keys that grow under the same queries
    return _launched(launch(tensors, softmax_scale, ALL_KEYS, out, lse))


def _seen_before(call: Hashable) -> bool:
    """Whether such a call came before: one whose lengths change from call to call is not worth its guards."""
    if call in SEEN:
        return True
    SEEN[call] = True
    return False


def _class_key(key: CallKey) -> CallKey:
    """The key of a plain call for all lengths like its own, from the call's own key."""
    batch, heads, queries, width = key[0]
    return batch, heads, width, length_class(queries), key[1:]


def _binding(plan: Plan, options: Options, key: CallKey) -> AttentionLaunch:
    """Binds and launches a call of the plan's class with new lengths; stores the launch when the lengths come again. This
    spares such calls the look-up of their plan, which takes as long as binding."""
    seen: Cache[tuple[int, int], bool] = Cache(MAX_PLANS)

    def bind_and_launch(
        tensors: Given, softmax_scale: float | None, length: int, out: torch.Tensor | None, lse: torch.Tensor | None
    ) -> Result | None:
        every = Tensors(*tensors)  # type: ignore[arg-type]  # q, k and v are never None
        try:
            launch = plan.bind(every, options)
        except CannotServe:  # these very strides
            return _serve(every, options, softmax_scale, lse, None, None, out)
        lengths = every.q.shape[2], every.k.shape[2]
        if lengths in seen:
            store_launch((every.q.shape, *key[1:]), guards_of(every[:3]), launch)
        seen[lengths] = True
        return launch(tensors, softmax_scale, length, out, lse)

    return bind_and_launch


def _of_class(tensors: Tensors, options: Options) -> Callable[..., bool] | None:
    """Whether other Q, K and V with a call's class key are of its class and kind, by lengths and memory too; None if its
    lengths are a class of their own, or its memory layout is unusual."""
    measured, layout = measured_lengths(tensors), _layout(*tensors[:3])
    queries, keys = tensors.q.shape[2], tensors.k.shape[2]
    square = queries == keys
    if layout == 0 or (queries, keys) in measured or (square and not options.is_plain()):
        return None
    guards, (first, last) = guards_of(tensors[:3], {0: 2, 1: 2, 2: 2}, any_strides=True), lengths_of_class(keys)

    def matches(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        queries, keys = lengths = q.shape[2], k.shape[2]
        if not (first <= keys <= last and keys == v.shape[2] and (queries == keys) is square and lengths not in measured):
            return False
        return guards(q, k, v) and _layout(q, k, v) == layout

    return matches


def _layout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """1 if Q's heads come first in memory, 2 if its tokens do; 0 if an address is not a multiple of 16 bytes, or a stride is 0
    or not a multiple of 16 elements."""
    (qb, qh, qm, _), (kb, kh, kn, _), (vb, vh, vn, _) = q.stride(), k.stride(), v.stride()
    steps, places = qb | qh | qm | kb | kh | kn | vb | vh | vn, q.data_ptr() | k.data_ptr() | v.data_ptr()
    if (steps | places) & 15 or 0 in (qb, qh, qm, kb, kh, kn, vb, vh, vn):
        return 0
    return 2 if qh < qm else 1


def _launched(result: Result | None) -> Result:
    assert result is not None, "a launch refuses the tensors that it was bound to"
    return result


def _of_lengths(given: Sequence[torch.Tensor], lengths: KeyLengths, aligned: bool) -> Callable[..., bool]:
    """Whether other tensors are like a call's, whose K and V may have other ``lengths``."""
    guards, (first, last, excluded) = guards_of(given, {1: 2, 2: 2}, not aligned), lengths

    def matches(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor) -> bool:
        keys = k.shape[2]
        return guards(q, k, v, *others) and first <= keys <= last and keys == v.shape[2] and keys not in excluded

    return matches


def decide(tensors: Given, options: Options, softmax_scale: float | None = None) -> Decision:
    """What would serve the call, and why. Compiles the kernel; launches nothing. Raises as ``attend``."""
    every = Tensors(*tensors)  # type: ignore[arg-type]  # q, k and v are never None
    every = _autocast(every) or every
    check_call(every, options)
    softmax_scale = checked_scale(softmax_scale, options.names.scale)
    decision = plan_call(every, options, softmax_scale)[0].decision
    if decision.kernel == FALLBACK:
        return decision
    return at_lengths(decision, problem_of(every, options), gpu_of(every.q), operation(AttentionProblem.op).ours())


# The operator -----------------------------------------------------------------------------------------------------------------


def _autocast(tensors: Tensors) -> Tensors | None:
    """The tensors as PyTorch's own attention casts them under torch.autocast; None if nothing is to be cast. fp32 sinks stay
    fp32."""
    sinks = tensors.sinks if tensors.sinks is not None and tensors.sinks.dtype != torch.float32 else None
    cast = autocast((*tensors[:3], sinks, tensors.bias))
    if cast is None:
        return None
    q, k, v, sinks, bias = cast
    return tensors._replace(q=q, k=k, v=v, sinks=tensors.sinks if sinks is None else sinks, bias=bias)


def _through_operator(tensors: Tensors, options: Options, softmax_scale: float | None, lse: torch.Tensor | None) -> Result:
    tensors = _autocast(tensors) or tensors
    check_call(tensors, options)
    o = options
    out, new_lse = _OPERATOR(*tensors[:3], o.mask, softmax_scale, o.return_lse, o.kernel, *of_features(tensors, options))
    if lse is not None and o.return_lse:
        new_lse = lse.copy_(new_lse)
    result = (out, new_lse if o.return_lse else None)
    return tokens_first(result, tensors.cu_seqlens_q is not None) if o.tokens_first else result


@torch.no_grad()
def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator on CPU and CUDA: ``lse`` is empty where it was not asked for."""
    tensors, options, softmax_scale = unpacked(args[:3], *args[3:])
    found, key = _find(tensors, options, (), softmax_scale)
    result = None if found is None else found(tensors, softmax_scale, ALL_KEYS, None, None)
    out, lse = result or _serve(tensors, options, softmax_scale, None, key, None)
    # A compiled graph relies on the strides that _fake promised.
    return in_order_of(tensors.q, out), _or_empty(tensors.q, None if lse is None else lse.contiguous())


def _fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes, strides and dtypes of ``_forward``'s results without the work."""
    tensors, options, _ = unpacked(args[:3], *args[3:])
    check_call(tensors, options)
    out, lse = outputs_of(tensors, options, out_strides(tensors))
    made = [tensors.q.new_empty_strided(one.shape, one.strides, dtype=one.dtype) for one in (out, lse) if one is not None]
    return made[0], _or_empty(tensors.q, made[1] if lse is not None else None)


def _differentiable(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator as a part of PyTorch's graph."""
    tensors, options, softmax_scale = unpacked(args[:3], *args[3:])
    check_call(tensors, options)
    out, lse = differentiable(tensors, options, softmax_scale)
    return out, _or_empty(tensors.q, lse)


def _or_empty(q: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """The log-sum-exp as an operator returns it, which cannot return None."""
    return q.new_empty(0, dtype=torch.float32) if lse is None else lse


_OPERATOR = register(
    "attention_forward(Tensor q, Tensor k, Tensor v, str mask, float? softmax_scale=None, bool return_lse=False, "
    # Inductor has a parameter "kernel" of its own.
    f"str? kernel_name=None, {SCHEMA_OF_FEATURES}) -> (Tensor out, Tensor lse)",
    _forward,
    _fake,
    _differentiable,
    of_forward,
)
