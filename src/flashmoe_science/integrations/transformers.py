"""Hugging Face transformers' models by our functions: ``attn_implementation="fms"`` and ``experts_implementation="fms"``.

    from flashmoe_science.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fms", experts_implementation="fms")

Attention is in ``transformers_attention``; here are the experts. transformers hands an implementation the experts module of a
layer, whose flags, ``act_fn`` and method ``_apply_gate`` define what it computes. All three are read at each call, and
what ``fused_moe`` does not compute is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType, NoneType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from flashmoe_science.integrations import transformers_attention
from flashmoe_science.moe import Adapter, fused_moe
from flashmoe_science.ops.moe.call import Activation
from flashmoe_science.ops.moe.problem import Function
from flashmoe_science.ops.moe.pytorch import activate

NAME = "fms"  # transformers takes a name with "flash" in it for a FlashAttention
OLDEST = "5.10"  # the first whose modules have is_concatenated

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_UNSERVED_FLAGS: dict[str, object] = {"has_post_expert_norm": False}  # and the value at which a flag changes nothing
_FUNCTIONS: dict[str, Function] = {
    "torch.nn.functional.silu": "silu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.ReLU": "relu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.ReLUSquaredActivation": "relu2",
}
# What may change a module's gate.
_GATE_ATTRIBUTES = ("alpha", "swiglu_alpha", "limit", "swiglu_limit", "gate_softcap", "up_softcap", "_apply_gate")
# What follows a weight's name in those of its codes and scales: FP8Experts', and gpt-oss's in a checkpoint.
_SUFFIXES = (("", "_scale_inv"), ("_blocks", "_scales"))
_STATIC = ("gate_up_proj_activation_scale", "down_proj_activation_scale")
_SCALES = ("gate_up_scale", "down_scale", "gate_up_input_scale", "down_input_scale")  # of fused_moe
_FORMATS = {torch.float8_e4m3fn: "fp8_block", torch.int8: "mxfp4", torch.uint8: "mxfp4"}  # by the dtype of codes


def register() -> None:
    """Register ``attn_implementation="fms"`` and ``experts_implementation="fms"``. A second call changes nothing.

    Raises:
        ImportError: transformers is not installed, or is too old.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
    except ImportError as error:
        raise ImportError(
            f"experts_implementation={NAME!r} needs transformers {OLDEST} or newer: pip install 'transformers>={OLDEST}'"
        ) from error
    flags = inspect.signature(use_experts_implementation).parameters
    if not flags.keys() >= set(_FLAGS):
        raise ImportError(f"experts_implementation={NAME!r} needs transformers {OLDEST} or newer; the one installed is older")
    handled = {"experts_class", "experts_interface", *_FLAGS, *_UNSERVED_FLAGS}
    _UNSERVED_FLAGS.update({name: flag.default for name, flag in flags.items() if name not in handled})
    _cached_layout.cache_clear()  # it was made for the flags before
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    except ImportError:
        pass  # a transformers whose FP8Experts have no registry: it refuses the name for them
    else:
        ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    transformers_attention.register()


def experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts, for transformers, of hidden_states [T, H] by top_k_index and top_k_weights [T, K].

    An id of ``num_experts``, which marks another rank's pair under expert parallelism, adds nothing. States of another dtype
    than the weights', as under autocast, are cast to theirs and back, as in transformers' own implementations. Quantised
    weights are served as they are and have no gradients; states are quantised only if the module has static scales.

    Raises:
        ValueError: the module computes what ``fused_moe`` does not.
        TypeError, ValueError: what ``fused_moe`` itself refuses.
    """
    return served(experts, hidden_states, top_k_index, top_k_weights, fused_moe)


def served(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
    moe: Callable[..., torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """``experts_forward`` by a function with the arguments of ``fused_moe``."""
    layout = _layout(*_described(experts))
    (first, of_first), (down, of_down) = (
        _weight(experts, name + layout.codes, layout.transposed) for name in (layout.first, "down_proj")
    )
    if experts.num_experts != first.shape[0]:
        raise ValueError(f"{type(experts).__name__} has num_experts {experts.num_experts}, and weights of {first.shape[0]}")
    in_format = layout.scales is not None
    form = _format(experts, layout, down.dtype) if in_format else {}
    dtype = hidden_states.dtype
    as_given = in_format or dtype == down.dtype
    out = moe(
        hidden_states if as_given else hidden_states.to(down.dtype),
        first.detach() if in_format else first,
        down.detach() if in_format else down,
        top_k_weights,
        top_k_index,
        activation=layout.activation.function,
        gate_up_bias=getattr(experts, f"{layout.first}_bias") if layout.has_bias else None,
        down_bias=experts.down_proj_bias if layout.has_bias else None,
        transposed=layout.transposed,
        interleaved=layout.activation.interleaved,
        alpha=layout.activation.alpha,
        limit=layout.activation.limit,
        adapters=None if of_first is of_down is None else (of_first, of_down),
        **form,
    )
    return out if as_given else out.to(dtype)


def _format(experts: Any, layout: _Layout, codes: torch.dtype) -> dict[str, Any]:
    """The format's arguments of ``fused_moe``. Raises ValueError: no format has codes of that dtype, another block size, or
    blocks with static scales."""
    form, block = _FORMATS.get(codes), getattr(experts, "block_size", None)
    if form is None:
        raise ValueError(
            f"{type(experts).__name__} has scales and weights of {codes}; they must be float8_e4m3fn, int8 or uint8"
        )
    if form == "fp8_block" and block is None:
        form = "fp8_channel_static" if layout.static else "fp8_channel"  # a scale to all gates, to all ups and to down_proj
    elif form == "fp8_block" and list(block or ()) != [128, 128]:
        raise ValueError(f"{type(experts).__name__} has block_size {block}; it must be [128, 128] or None")
    if layout.static and form != "fp8_channel_static":
        raise ValueError(
            f"{type(experts).__name__} has static activation scales, weights of {codes} and block_size {block}; they must be"
            " float8_e4m3fn and None then"
        )
    names = [f"{name}{layout.scales}" for name in (layout.first, "down_proj")] + list(_STATIC if layout.static else ())
    scales = (getattr(experts, name).detach() for name in names)
    return dict(zip(_SCALES, scales, strict=False)) | {"weight_format": form}


def _weight(experts: Any, name: str, transposed: bool) -> tuple[torch.Tensor, Adapter | None]:
    """The weights of that name and, if they are frozen, PEFT's one adapter, whose factors PEFT registers as a parametrisation
    for a call: scaling times lhs times rhs. Other parametrisations are computed into the weights."""
    parametrized = experts._modules.get("parametrizations")
    if parametrized is None or name not in parametrized:
        return getattr(experts, name), None
    of, factors = parametrized[name], parametrized[name][0]
    if len(of) > 1 or of.original.requires_grad or not all(hasattr(factors, part) for part in ("lhs", "rhs", "scaling")):
        return getattr(experts, name), None
    a, b = (factors.lhs.mT, factors.rhs.mT) if transposed else (factors.rhs, factors.lhs)
    return of.original, (a, b, factors.scaling)


class _Layout(NamedTuple):
    """The arguments of ``fused_moe`` for a module. ``first`` is the name of its first weights; ``codes`` and ``scales`` follow
    a weight's name if it is in a format, else they are "" and None. ``static``: it has scales for quantising states."""

    first: str
    codes: str
    scales: str | None
    static: bool
    has_bias: bool
    transposed: bool
    activation: Activation


class _Described(NamedTuple):
    """The parts of a module that its layout depends on."""

    name: str  # of its class
    gate: object  # the method of its class
    act_fn: type | FunctionType  # the function itself, or the class of a module
    members: tuple[str, ...]  # its tensors and modules
    attributes: tuple[tuple[str, object], ...]  # flags and numbers


def _described(experts: Any) -> _Described:
    """Read from the module's dictionaries: ``getattr`` of what a module lacks takes microseconds."""
    kind, plain, modules = type(experts), vars(experts), experts._modules
    act_fn = modules.get("act_fn", plain.get("act_fn"))
    function = act_fn if isinstance(act_fn, FunctionType) else type(act_fn)
    parameters = (name for name, one in experts._parameters.items() if one is not None)  # FP8Experts has biases of None
    members = (*parameters, *experts._buffers, *modules)
    attributes = tuple((name, _known(plain[name])) for name in (*_FLAGS, *_UNSERVED_FLAGS, *_GATE_ATTRIBUTES) if name in plain)
    return _Described(kind.__name__, getattr(kind, "_apply_gate", None), function, members, attributes)


def _known(attribute: object) -> object:
    """The attribute, as a number that torch.compile knows: with dynamic sizes it makes a symbol of a float."""
    return float.fromhex(attribute.hex()) if isinstance(attribute, float) and torch.compiler.is_compiling() else attribute


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch.compile calls it, and does not trace it
def _layout(*described: Any) -> _Layout:
    return _cached_layout(_Described(*described))  # torch.compile passes a tuple's fields, and not yet a named tuple


@lru_cache(maxsize=256)
def _cached_layout(module: _Described) -> _Layout:
    """The layout of a module. Raises ValueError: ``fused_moe`` does not compute it."""
    try:
        return _checked_layout(module, dict(module.attributes))
    except _NotServed as reason:
        raise ValueError(
            f"experts_implementation={NAME!r} cannot serve {module.name}: {reason}; another, such as 'grouped_mm', may"
        ) from None


class _NotServed(Exception):
    """Why a module is not served."""


def _checked_layout(module: _Described, attributes: dict[str, Any]) -> _Layout:
    """``_cached_layout`` of a dictionary of attributes. Raises _NotServed."""
    for flag in _FLAGS:
        if not isinstance(attributes.get(flag), bool):
            raise _NotServed(f"its {flag} is not True or False")
    for flag, neutral in _UNSERVED_FLAGS.items():
        if attributes.get(flag, neutral) != neutral:
            raise _NotServed(f"{flag} is {attributes[flag]!r}, and only {neutral!r} is served")
    first = "gate_up_proj" if attributes["has_gate"] else "up_proj"
    codes, scales = next((both for both in _SUFFIXES if first + both[1] in module.members), ("", None))
    used = {first + codes, f"down_proj{codes}", "act_fn", "parametrizations"}
    if attributes["has_bias"]:
        used |= {f"{first}_bias", "down_proj_bias"}
    if scales is not None:
        used |= {first + scales, f"down_proj{scales}"}
    if static := scales is not None and set(_STATIC) <= set(module.members):
        used |= set(_STATIC)
    if unused := set(module.members) - used:  # a norm, a bias
        raise _NotServed(f"it has {', '.join(sorted(unused))}, which would not be used")
    function = _FUNCTIONS.get(f"{module.act_fn.__module__}.{module.act_fn.__qualname__}")
    if function is None and module.act_fn is not NoneType:
        raise _NotServed(f"act_fn is {module.act_fn.__name__}; those served are {', '.join(sorted(set(_FUNCTIONS.values())))}")
    if attributes["has_gate"]:
        activation = _gate_activation(module.gate, function, attributes)
    elif function is not None:
        activation = Activation(function, gated=False)
    else:
        raise _NotServed("it has neither a gate nor an act_fn")
    return _Layout(first, codes, scales, static, attributes["has_bias"], attributes["is_transposed"], activation)


def _gate_activation(gate: Any, function: Function | None, attributes: dict[str, Any]) -> Activation:
    """The activation that a method ``_apply_gate`` computes, found by calling it on numbers, so that classes of other names or
    of a later transformers are served too. A method that reads more of its module than ``act_fn`` and _GATE_ATTRIBUTES is not
    served."""
    if "_apply_gate" in attributes:
        raise _NotServed("its _apply_gate is set on the module, and only a class's can be examined")
    module = SimpleNamespace(**attributes)
    interleaved = not attributes["is_concatenated"]
    candidates = []
    if function is not None:
        module.act_fn = lambda x: activate(x, Activation(function, gated=False))
        candidates.append(Activation(function, interleaved=interleaved))
    alpha = attributes.get("alpha", attributes.get("swiglu_alpha"))
    limit = attributes.get("limit", attributes.get("swiglu_limit"))
    if isinstance(alpha, float | int) and isinstance(limit, float | int):
        candidates.append(Activation("clamped_silu", True, interleaved, float(alpha), float(limit)))
    both = _gates_and_ups(interleaved)
    try:
        with torch.no_grad():
            found = gate(module, both).double()
    except Exception as error:
        raise _NotServed(f"its _apply_gate could not be examined ({type(error).__name__}: {error})") from None
    for candidate in candidates:
        expected = activate(both, candidate)
        if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
            return candidate
    raise _NotServed("its _apply_gate computes neither act_fn(gate) * up nor gpt-oss's clamped gate")


def _gates_and_ups(interleaved: bool) -> torch.Tensor:
    """[1, 2 * N] on the CPU: every gate of a set with every up, from -2**13 to 2**13, where a clamp shows."""
    powers = 2.0 ** torch.arange(-4, 14, dtype=torch.float64, device="cpu")
    points = torch.cat([-powers, powers.new_zeros(1), powers])
    pairs = torch.cartesian_prod(points, points)
    return (pairs if interleaved else pairs.T).reshape(1, -1)
