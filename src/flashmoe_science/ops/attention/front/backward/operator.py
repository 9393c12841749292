"""The operator ``flashmoe::attention_backward``: the gradients of one call from its results; our sums have a fixed order.

The autograd rule of ``flashmoe::attention_forward`` (autograd.py) calls it, and a user's rule may.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.kernel import Config
from flashmoe_science.operations import kernel_named
from flashmoe_science.ops.attention.call.backward import (
    BackwardInputs,
    BackwardLaunch,
    BackwardLauncher,
    Gradients,
    Saved,
    Wanted,
    backward_problem_of,
    gradients_like,
    unexpanded,
)
from flashmoe_science.ops.attention.call.checks import check_call
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.front.arguments import SCHEMA_OF_FEATURES, unpacked
from flashmoe_science.ops.attention.front.backward.choose import choose_backward
from flashmoe_science.ops.attention.front.backward.kernels import FALLBACK
from flashmoe_science.ops.attention.front.flops import of_backward
from flashmoe_science.ops.attention.front.pytorch import pytorch_attention
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.cache import MAX_PLANS, Cache
from flashmoe_science.ops.calls import alignment, device_guard, find_launch, guards_of, store_launch
from flashmoe_science.ops.checks import check_device
from flashmoe_science.ops.operator import gradients, register

LAUNCHERS: Cache[Hashable, BackwardLauncher] = Cache(MAX_PLANS)


def backward(
    tensors: Tensors, saved: Saved, options: Options, softmax_scale: float, wanted: Wanted, decision: Decision | None = None,
    key: Hashable = None,
) -> Gradients:  # fmt: skip
    """The gradients of a checked call. ``decision``: None for the automatic one. ``key``: its launch is stored under it, with
    the tensors' shapes, strides and dtypes; None makes one."""
    given = [one for one in (*tensors, *saved) if one is not None]
    if key is None:
        absent, switch = tuple([one is None for one in (*tensors, *saved)]), torch.are_deterministic_algorithms_enabled()
        key = (AttentionBackwardProblem.op, options, wanted, absent, tensors.q.shape, switch)
    launch: BackwardLaunch | None = find_launch(key, given)
    if launch is None:
        launch = _bound(tensors, saved, options, softmax_scale, wanted, decision or choose_backward(tensors, options))
        store_launch(key, guards_of(given, aligned=True), launch)
    return launch(tensors, saved, softmax_scale)


def _bound(
    tensors: Tensors, saved: Saved, options: Options, scale: float, wanted: Wanted, decision: Decision
) -> BackwardLaunch:
    """The launch of the chosen kernel."""
    if decision.kernel == FALLBACK:
        return lambda tensors, saved, scale: _by_pytorch(Tensors(*tensors), Saved(*saved), options, scale, wanted)  # type: ignore[arg-type]
    problem = backward_problem_of(tensors, options)
    inputs = BackwardInputs(problem, tensors, saved, options, scale, wanted)
    guard = device_guard(tensors.q.get_device())
    return guard(guard(_launcher(decision.kernel, decision.config, inputs).bind)(tensors, saved, options, wanted))


def _launcher(name: str, config: Config, inputs: BackwardInputs) -> BackwardLauncher:
    """The kernel's launcher for calls of this kind, stored with what it builds."""
    problem, every = inputs.problem, (*inputs.tensors, *inputs.saved)
    dtypes = tuple([None if one is None else one.dtype for one in every])
    places = alignment([*inputs.tensors[:3], inputs.saved.out, inputs.saved.dout])
    kind = (problem.mask, problem.features, problem.head_dim, problem.head_dim_v)
    key = (name, config, kind, dtypes, places, inputs.tensors.q.device)
    launcher = LAUNCHERS.get(key)
    if launcher is None:
        plan = kernel_named(name, problem.op).plan
        assert plan is not None
        launcher = LAUNCHERS[key] = plan(inputs, config)
    return launcher


def _by_pytorch(tensors: Tensors, saved: Saved, options: Options, scale: float, wanted: Wanted) -> Gradients:
    """The gradients by autograd of PyTorch's operators, which recompute the forward."""
    bias = None if tensors.bias is None else unexpanded(tensors.bias)
    every = [None if one is None else one.detach() for one in (tensors.q, tensors.k, tensors.v, tensors.sinks, bias)]
    asked = [needed and one is not None for one, needed in zip(every, wanted, strict=True)]

    def forward(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left = iter(leaves)
        q, k, v, sinks, bias = (next(left) if taken else one for one, taken in zip(every, asked, strict=True))
        if bias is not None and tensors.bias is not None:
            bias = bias.expand(tensors.bias.shape)
        call = tensors._replace(q=q, k=k, v=v, sinks=sinks, bias=bias)  # type: ignore[arg-type]  # q, k and v are not None
        out, lse = pytorch_attention(call, options._replace(return_lse=saved.dlse is not None), scale)
        return (out,) if lse is None else (out, lse)

    into = (saved.dout,) if saved.dlse is None else (saved.dout, saved.dlse)
    leaves = [one for one, taken in zip(every, asked, strict=True) if one is not None and taken]
    found = iter(gradients(forward, leaves, into)[1])
    like = gradients_like(tensors, wanted)
    made = []
    for shape in like:
        gradient = None if shape is None else next(found)
        if shape is not None:
            new = tensors.q.new_zeros(0, dtype=shape.dtype).new_empty_strided(shape.shape, shape.strides)
            gradient = new.zero_() if gradient is None else new.copy_(gradient.expand(shape.shape))
        made.append(gradient)
    return Gradients(*made)


# The operator -----------------------------------------------------------------------------------------------------------------


def _unpacked(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    wanted: list[bool],
    mask: Any,
    softmax_scale: float | None = None,
    kernel_name: str | None = None,
    *rest: Any,
) -> tuple[Tensors, Saved, Options, float, Wanted]:
    tensors, options, scale = unpacked((q, k, v), mask, softmax_scale, True, kernel_name, *rest)
    check_call(tensors, options)
    _check(tensors, Saved(out, lse, dout, dlse))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return tensors, Saved(out, lse, dout, dlse), options, scale, Wanted(*wanted)


def _check(tensors: Tensors, saved: Saved) -> None:
    """Raise ValueError or TypeError unless the forward's results, and the gradients into them, are of such a call."""
    rows = tensors.q.shape[:3]
    of_out, of_lse = (*rows, tensors.v.shape[3]), tuple(rows)
    for name, one, shape, dtype in (
        ("out", saved.out, of_out, tensors.q.dtype), ("dout", saved.dout, of_out, tensors.q.dtype),
        ("lse", saved.lse, of_lse, torch.float32), ("dlse", saved.dlse, of_lse, torch.float32),
    ):  # fmt: skip
        if one is None:
            continue
        if one.shape != shape:
            raise ValueError(f"{name} has shape {tuple(one.shape)}; it must be {tuple(shape)}")
        if one.dtype != dtype:
            raise TypeError(f"{name} has dtype {one.dtype}; it must be {dtype}")
        check_device(name, one, "q", tensors.q)


@torch.no_grad()
def _backward(*args: Any) -> tuple[torch.Tensor, ...]:
    """The operator on CPU and CUDA: what is not wanted is empty."""
    tensors, saved, options, scale, wanted = _unpacked(*args)
    if 0 in (*tensors.q.shape, *tensors.k.shape):
        made = _by_pytorch(tensors, saved, options, scale, wanted)
    else:
        made = by_kernel(tensors, saved, options, scale, wanted)
    return tuple(_or_empty(tensors.q, one) for one in made)


def by_kernel(
    tensors: Tensors, saved: Saved, options: Options, softmax_scale: float | None, wanted: Wanted, key: Hashable = None
) -> Gradients:
    """``backward`` with what autograd gives: O, dO and row sums of any strides; scale None for the default."""
    scale = tensors.q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    return backward(tensors, _as_kernels_take(saved), options, scale, wanted, key=key)


def _as_kernels_take(saved: Saved) -> Saved:
    """O and dO with a contiguous last dimension, which an expanded gradient lacks; row sums contiguous and aligned to 16
    bytes."""
    out, dout = (one if one.stride(3) == 1 or one.shape[3] == 1 else one.contiguous() for one in (saved.out, saved.dout))
    return Saved(out, _aligned(saved.lse), dout, None if saved.dlse is None else _aligned(saved.dlse))


def _aligned(sums: torch.Tensor) -> torch.Tensor:
    sums = sums.contiguous()
    return sums.clone() if sums.data_ptr() % 16 else sums


def _fake(*args: Any) -> tuple[torch.Tensor, ...]:
    """Shapes, strides and dtypes of ``_backward``'s results without the work."""
    tensors, _, _, _, wanted = _unpacked(*args)
    return tuple(
        _or_empty(tensors.q, None if one is None else tensors.q.new_empty_strided(one.shape, one.strides, dtype=one.dtype))
        for one in gradients_like(tensors, wanted)
    )


def _or_empty(q: torch.Tensor, one: torch.Tensor | None) -> torch.Tensor:
    return q.new_empty(0) if one is None else one


Op = Callable[..., Any]
OPERATOR: Op = register(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool[5] wanted, "
    f"str mask, float? softmax_scale=None, str? kernel_name=None, {SCHEMA_OF_FEATURES}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dbias)",
    _backward,
    _fake,
    "the gradients of flashmoe::attention_backward are asked for, which has none: differentiate attention once, or use "
    "kernel='sdpa' under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
    of_backward,
)
