"""The operators ``flashmoe::moe_forward`` and ``moe_forward_saving``, and the path of plain eager calls around the dispatcher.

torch.compile, export, modes and tensor subclasses see the operator. A plain eager call finds its launch in the launch cache; a
new one is checked, planned (choose.py) and bound, and its launch is stored.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.ops.calls import (
    Launch,
    autocast,
    find_launch,
    guards_of,
    is_plain,
    is_transformed,
    needs_grad,
    store_launch,
)
from flashmoe_science.ops.checks import CHECK
from flashmoe_science.ops.explain import Explained, is_explaining
from flashmoe_science.ops.formats import columns_of
from flashmoe_science.ops.moe.call import Activation, Options, Rows, Tensors, checked, format_in, inputs_of
from flashmoe_science.ops.moe.call.backward import NEW, checked_sums
from flashmoe_science.ops.moe.call.formats import OF_FORMAT, check_positive
from flashmoe_science.ops.moe.call.pair import Pair, checked_pair, copied, follow, joined
from flashmoe_science.ops.moe.front.backward.autograd import differentiable, unviewed
from flashmoe_science.ops.moe.front.choose import bind_call, bind_rows, bind_training, decide_by_dtype, decide_training, plan_of
from flashmoe_science.ops.moe.front.kernels import FALLBACK
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.operator import register

Given = tuple[Any, ...]  # the fields of Tensors or of Options: a cached call makes no NamedTuple of them
_COUNT = len(Tensors._fields)
_ROWS, _TRAINING = f"{MoEProblem.op}, rows", f"{MoEProblem.op}, training"
_PLAIN = (True,) * (_COUNT - 5)


def experts_forward(tensors: Given, options: Given) -> torch.Tensor:
    """``fused_moe`` of its arguments. Raises TypeError, ValueError: an argument that is not allowed, an unknown kernel, a
    kernel that cannot serve the call."""
    if torch.compiler.is_compiling():
        return _through_operator(Tensors(*(_autocast(tensors) or tensors)), Options(*options))
    launch, key = _find(tensors, options)
    if launch is not None:
        return launch(*tensors)  # type: ignore[no-any-return]
    if (cast := _autocast(tensors)) is not None:
        return experts_forward(cast, options)
    if not is_plain(*tensors):
        if is_explaining():
            raise Explained(decide(Tensors(*tensors), Options(*options)))
        return _through_operator(Tensors(*tensors), Options(*options))
    return _serve(Tensors(*tensors), Options(*options), key)  # type: ignore[no-any-return]


def experts_of_pair(tensors: Given, options: Given, weight_grads: Any) -> torch.Tensor:
    """``fused_moe`` with gates and ups as two tensors. Raises as ``experts_forward``."""
    x, pair, w2, *rest = tensors
    how = Options(*options)
    if how.weight_format is not None:
        raise ValueError(f"gate_up_proj is a pair and weight_format is {how.weight_format!r}; it must be one tensor then")
    gate, up = checked_pair(pair, w2, how.transposed, how.interleaved)
    x, gate, up, w2 = autocast((x, gate, up, w2)) or (x, gate, up, w2)
    if how.transposed:
        gate, up = gate.mT, up.mT
    plain = not torch.compiler.is_compiling() and is_plain(x, gate, up, w2, *rest) and how.kernel != FALLBACK
    whole = joined(gate.detach(), up.detach()) if plain else copied(gate, up)
    given = (x, whole.mT if how.transposed else whole, w2, *rest)
    if is_explaining():
        decision, by = decide(Tensors(*given), how), "a view joins them" if follow(gate, up) else "copied into one"
        raise Explained(replace(decision, reason=f"{decision.reason}; gate_up_proj is two tensors, {by}"))
    if plain and needs_grad(x, gate, up, w2, *rest):
        return _experts_once(given, options, weight_grads, (gate, up))
    return experts_forward(given, options) if weight_grads is None else experts_adding(given, options, weight_grads)


def experts_rows(tensors: Given, options: Given) -> Rows | None:
    """The rows that ``fused_moe`` would sum by token; None if the kernel that serves it keeps none. Eager, without gradients.
    Raises as ``experts_forward``."""
    launch, key = _find(tensors, options, _ROWS)
    if launch is None:
        if not is_plain(*tensors):
            return None
        given = Tensors(*tensors)
        launch = _refusing_scales(bind_rows(given, Options(*options)), given)
        _store(key, tensors, launch)
    found: Rows | None = launch(*tensors)
    return found


def experts_adding(tensors: Given, options: Given, weight_grads: Any) -> torch.Tensor:
    """``fused_moe`` whose backward adds the weights' gradients to given tensors. Raises as ``experts_forward``."""
    if torch.compiler.is_compiling() or is_transformed():
        raise ValueError("weight_grads is given under torch.compile or a transform of torch.func; it must be None there")
    if is_explaining() or not needs_grad(*tensors):
        return experts_forward(tensors, options)
    return _experts_once(_autocast(tensors) or tensors, options, weight_grads)


def _experts_once(tensors: Given, options: Given, weight_grads: Any, pair: Pair | None = None) -> torch.Tensor:
    """Experts in PyTorch's graph whose weight gradients are added to tensors, or go to gates and ups as two tensors. Raises as
    ``experts_forward``."""
    given, how, sums = Tensors(*tensors), Options(*options), NEW
    train, key = _find(tensors, options, _TRAINING)
    if train is None:
        if weight_grads is not None and how.kernel == FALLBACK:
            raise ValueError(f"weight_grads is given and kernel is {how.kernel!r}, whose gradients are autograd's own")
        train = bind_training(given, how)
        if is_plain(*tensors):
            _store(key, tensors, train)
    if weight_grads is not None:
        sums = checked_sums(weight_grads, given, how)
    return train(given, sums, pair)


def _autocast(tensors: Given) -> Given | None:
    """The tensors as PyTorch's own products cast them under torch.autocast, None if nothing is to be cast. The routing and
    biases keep their dtypes."""
    cast = autocast(tensors[:3])
    return None if cast is None else cast + tensors[3:]


def _find(tensors: Given, options: Given, op: str = MoEProblem.op) -> tuple[Launch | None, Hashable]:
    """The stored launch of a call, and its key; None for both where an argument is no tensor, or has no hash."""
    _, _, _, _, _, a, b, c, d, e, f, g, h = tensors
    absent = a is None, b is None, c is None, d is None, e is None, f is None, g is None, h is None
    given = tensors[:5] if absent == _PLAIN else [one for one in tensors if one is not None]
    try:
        # The types of options too: True and 1 are equal.
        kinds = (options, *map(type, options), absent, torch.is_grad_enabled())
        key = (op, tensors[0].shape, kinds)
        return find_launch(key, given), key
    except (AttributeError, RuntimeError, TypeError):  # no tensor, a nested one, an option that has no hash
        return None, None


def _serve(tensors: Tensors, options: Options, key: Hashable, saves_z: bool = False) -> Any:
    """Check a new call, choose what serves it, and store its launch. Raises as ``experts_forward``."""
    launch = _refusing_scales(bind_call(tensors, options, saves_z), tensors)
    _store(key, tensors, launch)
    return launch(*tensors)


def _refusing_scales(launch: Launch, tensors: Tensors) -> Launch:
    """The launch, with a check of each call's input scales before it: on the CPU, and on a GPU with FLASHMOE_CHECK=1, where the
    host waits; else the launch itself."""
    on_gpu = tensors.x.is_cuda
    if tensors.gate_up_input_scale is None or (on_gpu and not CHECK):
        return launch

    def refusing(*given: Any) -> Any:
        if not (on_gpu and torch.cuda.is_current_stream_capturing()):
            for name, scale in zip(OF_FORMAT[-2:], given[-2:], strict=True):
                check_positive(name, scale)
        return launch(*given)

    return refusing


def _store(key: Hashable, tensors: Given, launch: Launch) -> None:
    if key is not None:
        store_launch(key, guards_of([one for one in tensors if one is not None], aligned=True), launch)


def decide(tensors: Tensors, options: Options) -> Decision:
    """The decision for such a call. Compiles the kernels; launches nothing. Raises as ``experts_forward``."""
    views, activation = checked(Tensors(*(_autocast(tensors) or tensors)), options)
    if needs_grad(*tensors) or not views.x.shape[0]:
        return decide_training(views, activation, options)
    if (decision := decide_by_dtype(views.x, options.kernel)) is not None:
        return decision
    inputs = inputs_of(views, activation)
    plan = plan_of(inputs, options.kernel)
    plan.bind(inputs, tensors.x.shape)
    return plan.decision


# The operator ----------------------------------------------------------------------------------------------------------------


def _through_operator(tensors: Tensors, options: Options) -> torch.Tensor:
    views, a = checked(tensors, options)
    rest = a.function, a.gated, a.interleaved, a.alpha, a.limit, options.kernel, a.w8a8, options.recompute
    out: torch.Tensor = _OPERATOR(*views, *rest)
    return unviewed(out, tensors.x.shape)


_SAVING = f"{MoEProblem.op}, saving", f"{MoEProblem.op}, saving, deterministic"


def _forward(*args: Any) -> torch.Tensor:
    return _launched(MoEProblem.op, *args)  # type: ignore[no-any-return]


def _saving(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _launched(_SAVING[torch.are_deterministic_algorithms_enabled()], *args)  # type: ignore[no-any-return]


def _launched(op: str, *args: Any) -> Any:
    tensors, (function, _, interleaved, alpha, limit, *rest) = args[:_COUNT], args[_COUNT:]
    kernel, w8a8 = (*rest, None, False)[:2]
    form = format_in(Tensors(*tensors), w8a8)
    name = None if form is None else form.name
    options = (function, False, interleaved, alpha, limit, kernel, False, name)
    launch, key = _find(tensors, options, op)
    if launch is not None:
        return launch(*tensors)
    return _serve(Tensors(*tensors), Options(*options), key, saves_z=op != MoEProblem.op)


def _fake(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fake_saving(x: torch.Tensor, w1: torch.Tensor, w2: object, weights: torch.Tensor, *rest: object) -> Any:
    return x.new_empty(x.shape), x.new_empty(weights.shape[0] * weights.shape[1], w1.shape[1])


def _differentiable(*args: Any) -> torch.Tensor:
    tensors, (function, gated, interleaved, alpha, limit, *rest) = Tensors(*args[:_COUNT]), args[_COUNT:]
    kernel, w8a8, recompute = (*rest, None, False, False)[:3]
    return differentiable(tensors, Activation(function, gated, interleaved, alpha, limit, w8a8), kernel, recompute)


def _flops(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, *rest: Any, **results: Any) -> int:
    """FLOPs of the two products of every pair of a token and an expert."""
    return 2 * topk_weights.numel() * x.shape[1] * (w1.shape[1] + columns_of(w2))


_SCHEMA = (
    "(Tensor x, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? gate_up_bias, Tensor? down_bias, "
    "Tensor? gate_up_scale, Tensor? down_scale, Tensor? gate_up_zero_point, Tensor? down_zero_point, "
    "Tensor? gate_up_input_scale, Tensor? down_input_scale, str function, bool gated, bool interleaved, float alpha, "
    "float limit, str? kernel_name=None, bool w8a8=False"
)
_FORWARD = f"moe_forward{_SCHEMA}, bool recompute=False) -> Tensor"
_OPERATOR = register(_FORWARD, _forward, _fake, _differentiable, _flops)
# What the autograd rule calls instead; it returns the pre-activations too.
register(f"moe_forward_saving{_SCHEMA}) -> (Tensor out, Tensor z)", _saving, _fake_saving, None, _flops)
