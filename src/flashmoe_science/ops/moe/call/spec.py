"""What a mixture-of-experts call may be given, and what is said of what it may not."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import get_args

import torch

from flashmoe_science.ops.moe.call.inputs import Activation, Function, MoEInputs
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.problem import Dtype

DTYPES: dict[torch.dtype, Dtype] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def checked_activation(
    activation: str, gate_up_proj: torch.Tensor, down_proj: torch.Tensor, interleaved: bool, alpha: float, limit: float
) -> Activation:
    """The activation of weights as a kernel takes them, [E, 2I, H] or [E, I, H], and [E, H, I].

    Raises:
        TypeError, ValueError: one that is not allowed.
    """
    if activation not in get_args(Function):
        raise ValueError(f"activation is {activation!r}; it must be one of {', '.join(map(repr, get_args(Function)))}")
    if not isinstance(interleaved, bool):
        raise TypeError(f"interleaved is {interleaved!r}; it must be True or False")
    for name, number in (("alpha", alpha), ("limit", limit)):
        if isinstance(number, bool) or not isinstance(number, float | int):
            raise TypeError(f"{name} is {number!r}; it must be a number")
        if math.isnan(number):
            raise ValueError(f"{name} is {number!r}; it must be a number")
    rows, width = gate_up_proj.shape[1], down_proj.shape[2]
    if rows not in (width, 2 * width):
        raise ValueError(
            f"gate_up_proj has {rows} rows an expert and down_proj {width} columns; there must be twice as many rows (gates "
            "and ups) or as many (no gate)"
        )
    if interleaved and rows == width:
        raise ValueError("interleaved is True, and gate_up_proj has no gates; it must be False")
    return Activation(activation, rows == 2 * width, interleaved, float(alpha), float(limit))  # type: ignore[arg-type]


def check_weights(hidden_states: torch.Tensor, gate_up_proj: torch.Tensor, down_proj: torch.Tensor) -> None:
    """Raises TypeError or ValueError where the three are not tensors of one dtype and device that fit together."""
    named = {"hidden_states": hidden_states, "gate_up_proj": gate_up_proj, "down_proj": down_proj}
    for name, tensor in named.items():
        _check_tensor(name, tensor)
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}; it must be float16, bfloat16 or float32")
        if tensor.dtype != hidden_states.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype} and hidden_states {hidden_states.dtype}; they must be the same")
        if tensor.device != hidden_states.device:
            raise ValueError(f"{name} is on {tensor.device} and hidden_states on {hidden_states.device}; they must be on one")
    if hidden_states.dim() < 1:
        raise ValueError("hidden_states has no dimension; its last one must be the model's")
    for name, tensor in list(named.items())[1:]:
        if tensor.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have three dimensions, experts first")
        if 0 in tensor.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; no size of it may be 0")
    dim, experts = hidden_states.shape[-1], gate_up_proj.shape[0]
    if gate_up_proj.shape[2] != dim or down_proj.shape[1] != dim:
        raise ValueError(
            f"hidden_states has {dim} columns, gate_up_proj takes {gate_up_proj.shape[2]} and down_proj gives "
            f"{down_proj.shape[1]}; they must agree (transposed=True for weights that are [experts, in, out])"
        )
    if down_proj.shape[0] != experts:
        raise ValueError(f"gate_up_proj has {experts} experts and down_proj {down_proj.shape[0]}; they must have as many")


def check_routing(hidden_states: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """Raises TypeError or ValueError where the routing is not [..., top_k] of these tokens."""
    for name, tensor in (("top_k_weights", weights), ("top_k_ids", ids)):
        _check_tensor(name, tensor)
        if tensor.device != hidden_states.device:
            raise ValueError(f"{name} is on {tensor.device} and hidden_states on {hidden_states.device}; they must be on one")
        if tensor.dim() != hidden_states.dim() or tensor.shape[:-1] != hidden_states.shape[:-1] or tensor.shape[-1] < 1:
            wanted = ", ".join(map(str, (*hidden_states.shape[:-1], "top_k")))
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [{wanted}]")
    if weights.dtype not in _FLOATS:
        raise TypeError(f"top_k_weights has dtype {weights.dtype}; it must be float32, bfloat16 or float16")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"top_k_ids has dtype {ids.dtype}; it must be int32 or int64")
    if weights.shape != ids.shape:
        raise ValueError(f"top_k_weights has shape {tuple(weights.shape)} and top_k_ids {tuple(ids.shape)}; they must agree")


def check_bias(name: str, bias: torch.Tensor | None, hidden_states: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises TypeError or ValueError where a bias is given that is not of that shape."""
    if bias is None:
        return
    _check_tensor(name, bias)
    if bias.dtype not in _FLOATS:
        raise TypeError(f"{name} has dtype {bias.dtype}; it must be float32, bfloat16 or float16")
    if tuple(bias.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(bias.shape)}; it must be {shape}")
    if bias.device != hidden_states.device:
        raise ValueError(f"{name} is on {bias.device} and hidden_states on {hidden_states.device}; they must be on one")


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.is_nested:
        raise TypeError(f"{name} is nested; it must be a dense tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; it must be torch.strided")


# Of fused_moe: hidden_states, gate_up_proj, down_proj, top_k_weights, top_k_ids, gate_up_bias, down_bias.
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
# x [T, H], w1 [E, 2I or I, H], w2 [E, H, I], weights [T, K], ids [T, K], the activation and the biases.
Views = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Activation, torch.Tensor | None, torch.Tensor | None
]


# Its other arguments, as they are given: activation, transposed, interleaved, alpha, limit, kernel.
Options = tuple[str, bool, bool, float, float, str | None]


def checked(tensors: Tensors, options: Options) -> Views:
    """What ``inputs_of`` takes, of the arguments of ``fused_moe``.

    Raises:
        TypeError, ValueError: one that is not allowed.
    """
    hidden_states, gate_up_proj, down_proj, top_k_weights, top_k_ids, gate_up_bias, down_bias = tensors
    activation, transposed, interleaved, alpha, limit, kernel = options
    if kernel is not None and not isinstance(kernel, str):
        raise TypeError(f"kernel is {kernel!r}; it must be the name of one, or None")
    if not isinstance(transposed, bool):
        raise TypeError(f"transposed is {transposed!r}; it must be True or False")
    if transposed:
        for name, tensor in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 3:
                raise ValueError(f"{name} must be a tensor of three dimensions, experts first")
        gate_up_proj, down_proj = gate_up_proj.transpose(1, 2), down_proj.transpose(1, 2)
    check_weights(hidden_states, gate_up_proj, down_proj)
    check_routing(hidden_states, top_k_weights, top_k_ids)
    act = checked_activation(activation, gate_up_proj, down_proj, interleaved, alpha, limit)
    experts, rows, dim = gate_up_proj.shape
    check_bias("gate_up_bias", gate_up_bias, hidden_states, (experts, rows))
    check_bias("down_bias", down_bias, hidden_states, (experts, dim))
    top_k = top_k_ids.shape[-1]
    x = hidden_states.reshape(-1, dim)
    if x.stride(-1) != 1 and x.numel():
        x = x.contiguous()
    weights, ids = top_k_weights.reshape(-1, top_k), top_k_ids.reshape(-1, top_k)
    return x, gate_up_proj, down_proj, weights, ids, act, gate_up_bias, down_bias


@lru_cache(maxsize=1024)
def _problem(tokens: int, experts: int, top_k: int, dim: int, hidden: int, dtype: torch.dtype) -> MoEProblem:
    return MoEProblem(tokens, experts, top_k, dim, hidden, DTYPES[dtype])


def inputs_of(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: Activation,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> MoEInputs:
    """The inputs of a kernel: tokens in two dimensions, contiguous routing and biases; the weights are never copied."""
    problem = _problem(x.shape[0], w1.shape[0], ids.shape[1], x.shape[1], w2.shape[2], x.dtype)
    contiguous = [None if one is None else one.contiguous() for one in (gate_up_bias, down_bias)]
    return MoEInputs(problem, x, w1, w2, weights.contiguous(), ids.contiguous(), activation, *contiguous)
