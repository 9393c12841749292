"""A mixture-of-experts call: its tensors and options, the checks that refuse bad input, and the arguments of kernels.

A refusal is one line: the argument, what it was, what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, get_args

import torch

from flashmoe_science.formats import FORMATS, Format
from flashmoe_science.hardware.probe import is_assumed
from flashmoe_science.kernel import CannotServe, Config, Kernel
from flashmoe_science.ops.formats import Weights, columns_of, format_of
from flashmoe_science.ops.moe.call.formats import (
    OF_FORMAT,
    check_codes,
    check_flags,
    check_input_scale,
    check_projections,
    check_scale,
    check_tensor,
    check_zero_point,
    checked_format,
    codes_of,
    input_scale_of,
    scale_of,
    sizes_of,
)
from flashmoe_science.ops.moe.problem import Function, MoEProblem
from flashmoe_science.printable import shown
from flashmoe_science.problem import Dtype

NO_PRE_ACTIVATIONS = "it does not give the pre-activations, which a backward needs unless recompute is True"
DTYPES: dict[torch.dtype, Dtype] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class Tensors(NamedTuple):
    """The tensors of ``fused_moe``, in one order from its arguments to the pointers of kernels.

    Kernels take x [T, H], w1 [E, 2I, H] ([E, I, H] without a gate), w2 [E, H, I] in any strides, the routing [T, K] and biases
    [E, 2I] and [E, H]. Codes, scales and zero points of quantised weights are as ``ops/formats.py`` describes; input scales are
    [E], for static formats.
    """

    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    gate_up_zero_point: torch.Tensor | None = None
    down_zero_point: torch.Tensor | None = None
    gate_up_input_scale: torch.Tensor | None = None
    down_input_scale: torch.Tensor | None = None

    def in_format(self) -> tuple[Weights, Weights] | None:
        """w1 and w2 with their scales and zero points; None for weights of the dtype of x."""
        if self.gate_up_scale is None or self.down_scale is None:
            return None
        first = Weights(self.w1, self.gate_up_scale, self.gate_up_zero_point)
        return first, Weights(self.w2, self.down_scale, self.down_zero_point)


class Options(NamedTuple):
    """The other arguments of ``fused_moe``."""

    activation: str
    transposed: bool
    interleaved: bool
    alpha: float | None
    limit: float
    kernel: str | None
    recompute: bool = False
    weight_format: str | None = None


@dataclass(frozen=True, slots=True)
class Activation:
    """The epilogue of the first product, in fp32: ``function`` of the gate, times the up projection if ``gated``. ``w8a8``: its
    result and x are quantised, as ``formats.Format`` says.

    "clamped_silu" is gpt-oss's: the gate at most ``limit``, the up projection within ``limit`` of 0, then
    ``(up + 1) * gate * sigmoid(alpha * gate)``. Rows of w1 are all gates, then all ups; if ``interleaved`` they alternate.
    """

    function: Function = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.702
    limit: float = 7.0
    w8a8: bool = False

    @property
    def halves(self) -> bool:
        """Whether rows of w1 are all gates, then all ups."""
        return self.gated and not self.interleaved


SWIGLU = Activation()


def activation_of(problem: MoEProblem) -> Activation:
    """The activation between a problem's products, with gpt-oss's numbers."""
    w8a8 = problem.weight_format is not None and FORMATS[problem.weight_format].w8a8
    return Activation(problem.activation, problem.gated, problem.interleaved, w8a8=w8a8)


@dataclass(frozen=True, slots=True)
class MoEInputs:
    """The arguments of a kernel: a problem from ids, its ``Tensors`` as kernels take them, and its activation.

    Routing and biases are contiguous; a problem with a bias may have one of the two. ``saves_z``: a launch returns (out, z),
    the pre-activations too, as ``BackwardTensors`` has them. ``sums`` is False: it returns ``Rows``."""

    problem: MoEProblem
    tensors: Tensors
    activation: Activation = SWIGLU
    saves_z: bool = False
    sums: bool = True


class Rows(NamedTuple):
    """The unsummed result: rows of pairs [P, H], and the tables of their places (``rows.py``), both as arguments of a launch.
    ``memory`` holds them."""

    memory: Any
    rows: Any
    tables: Any


def check_sums_alone(inputs: MoEInputs) -> None:
    """Raise CannotServe if the inputs ask for another result than the sums."""
    if inputs.saves_z:
        raise CannotServe(NO_PRE_ACTIVATIONS)
    if not inputs.sums:
        raise CannotServe("it keeps no row of each pair of a token and an expert")


# A call bound to shapes, strides and dtypes. It takes ``Tensors`` and uses only their addresses.
MoELaunch = Callable[..., Any]  # the result, (out, z) or Rows
# One of its kernels, bound to the same. It takes addresses: inputs, then the output, then the tables of rows.
KernelLaunch = Callable[..., None]
Shape = tuple[int, ...]
# What a kernel's ``plan`` returns: bind(inputs, shape) makes the launch for inputs like those planned for, with any supported
# number of tokens and a result of that shape. Neither keeps a tensor.
Bind = Callable[[MoEInputs, Shape], MoELaunch]
MoEKernel = Kernel[MoEProblem, MoEInputs, torch.Tensor]
our_kernel = partial(MoEKernel, origin="ours", op="moe")


def run_of(plan: Callable[[MoEInputs, Config], Bind]) -> Callable[[MoEInputs, Config], torch.Tensor]:
    """The ``run`` of a kernel that has a ``plan``."""
    return lambda inputs, config: plan(inputs, config)(inputs, inputs.tensors.x.shape)(*inputs.tensors)


def why_no_format(problem: MoEProblem) -> str | None:
    """Why a kernel for unquantised weights does not support a problem; None if it may."""
    form = problem.weight_format
    return f"its weights are {problem.dtype}, and the problem's {form}" if form else None


def format_in(tensors: Tensors, w8a8: bool) -> Format | None:
    """The format of a call's weights, as kernels take them."""
    form = format_of(tensors.w1, tensors.gate_up_scale, tensors.gate_up_zero_point)
    if form is None or not w8a8:
        return form
    return FORMATS[f"{form.name}_{'w8a8' if tensors.gate_up_input_scale is None else 'static'}"]


def contiguous(shape: Shape, dtype: torch.dtype) -> tuple[Shape, Shape, torch.dtype]:
    """Shape, strides and dtype of a contiguous result, as ``ops.launch.allocator`` takes them."""
    return tuple(shape), torch.empty(shape, device="meta").stride(), dtype


# Checks ----------------------------------------------------------------------------------------------------------------------


def checked(given: Tensors, options: Options) -> tuple[Tensors, Activation]:
    """Views of the tensors as kernels take them (x is copied if its rows are not contiguous), and the activation. Raises
    TypeError, ValueError: an argument of ``fused_moe`` that is not allowed."""
    hidden_states, gate_up_proj, down_proj, top_k_weights, top_k_ids, *biases = given[:7]
    if options.kernel is not None and not isinstance(options.kernel, str):
        raise TypeError(f"kernel is {shown(options.kernel)}; it must be the name of one, or None")
    check_flags(transposed=options.transposed, interleaved=options.interleaved, recompute=options.recompute)
    form = checked_format(options.weight_format, {name: getattr(given, name) for name in OF_FORMAT}, options.transposed)
    gate_up_proj, down_proj = _checked_weights(hidden_states, gate_up_proj, down_proj, options.transposed, form)
    _check_routing(hidden_states, top_k_weights, top_k_ids)
    activation = _checked_activation(options, gate_up_proj, down_proj)
    experts, rows, _ = gate_up_proj.shape
    dim = down_proj.shape[1]
    if form is not None:
        for name, weights, halves in (("gate_up", gate_up_proj, activation.halves), ("down", down_proj, False)):
            scale = getattr(given, f"{name}_scale")
            check_tensor(f"{name}_scale", scale, "hidden_states", hidden_states)
            check_scale(f"{name}_scale", scale, weights, form, halves)
            if form.zero_bits:
                zero_point = getattr(given, f"{name}_zero_point")
                check_tensor(f"{name}_zero_point", zero_point, "hidden_states", hidden_states)
                check_zero_point(f"{name}_zero_point", zero_point, weights, form)
            if form.static:
                input_scale = getattr(given, f"{name}_input_scale")
                check_tensor(f"{name}_input_scale", input_scale, "hidden_states", hidden_states)
                check_input_scale(f"{name}_input_scale", input_scale, experts)
    for name, bias, width in zip(("gate_up_bias", "down_bias"), biases, (rows, dim), strict=True):
        if bias is not None:
            _check_bias(name, bias, hidden_states, (experts, width))
    return views_of(given, options), activation


def views_of(given: Tensors, options: Options) -> Tensors:
    """The tensors of a call whose arguments are allowed, as kernels take them."""
    hidden_states, gate_up_proj, down_proj, weights, ids, gate_up_bias, down_bias, gate_up_scale, down_scale = given[:9]
    if gate_up_scale is not None and down_scale is not None:
        gate_up_proj, down_proj = codes_of(gate_up_proj), codes_of(down_proj)
        gate_up_scale, down_scale = (scale_of(one, options.weight_format) for one in (gate_up_scale, down_scale))
    if options.transposed:
        gate_up_proj, down_proj = gate_up_proj.transpose(1, 2), down_proj.transpose(1, 2)
    if hidden_states.dim() != 2:
        top_k = ids.shape[-1]
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = weights.reshape(-1, top_k), ids.reshape(-1, top_k)
    if hidden_states.stride(-1) != 1 and hidden_states.numel():
        hidden_states = hidden_states.contiguous()
    of_inputs = (None if one is None else input_scale_of(one, gate_up_proj.shape[0]) for one in given[11:])
    rest = gate_up_bias, down_bias, gate_up_scale, down_scale, *given[9:11], *of_inputs
    return Tensors(hidden_states, gate_up_proj, down_proj, weights, ids, *rest)


def inputs_of(tensors: Tensors, activation: Activation, saves_z: bool = False) -> MoEInputs:
    """The inputs of a kernel, of checked tensors."""
    x, w1, w2, _, ids, gate_up_bias, down_bias, *_ = tensors
    sizes = x.shape[0], w1.shape[0], ids.shape[1], x.shape[1], columns_of(w2)
    form = format_in(tensors, activation.w8a8)
    transposed = form is None and any(one.stride(2) != 1 == one.stride(1) for one in (w1, w2))
    bias = gate_up_bias is not None or down_bias is not None
    words = bias, activation.gated, activation.interleaved, transposed
    problem = _problem(*sizes, x.dtype, activation.function, *words, form)
    return MoEInputs(problem, dense(tensors), activation, saves_z)


def dense(tensors: Tensors) -> Tensors:
    """The tensors with contiguous routing and biases; the weights are never copied."""
    x, w1, w2, weights, ids, gate_up_bias, down_bias, *of_weights = tensors
    gate_up_bias = None if gate_up_bias is None else gate_up_bias.contiguous()
    down_bias = None if down_bias is None else down_bias.contiguous()
    return Tensors(x, w1, w2, weights.contiguous(), ids.contiguous(), gate_up_bias, down_bias, *of_weights)


@lru_cache(maxsize=1024)
def _problem(
    tokens: int, experts: int, top_k: int, dim: int, hidden: int, dtype: torch.dtype, function: Function,
    bias: bool, gated: bool, interleaved: bool, transposed: bool, form: Format | None,
) -> MoEProblem:  # fmt: skip
    words = bias, gated, interleaved, transposed, None if form is None else form.name
    return MoEProblem(tokens, experts, top_k, dim, hidden, DTYPES[dtype], "ids", function, *words)


def check_activation(activation: object, alpha: object, limit: object) -> None:
    """Raise unless these arguments of ``fused_moe`` are allowed. Raises TypeError: ``alpha`` or ``limit`` is no number. Raises
    ValueError: it is NaN, ``alpha`` is infinite, ``limit`` is below 0, or ``activation`` is no word of Function."""
    if not isinstance(activation, str) or activation not in get_args(Function):
        raise ValueError(f"activation is {shown(activation)}; it must be one of {', '.join(map(repr, get_args(Function)))}")
    for name, number in (("alpha", alpha), ("limit", limit)):
        if isinstance(number, bool) or not isinstance(number, float | int):
            raise TypeError(f"{name} is {shown(number)}; it must be a number")
        if number != number:  # NaN, in a comparison, which torch.compile can trace
            raise ValueError(f"{name} is {number!r}; it must be a number")
    if abs(alpha) == float("inf"):  # type: ignore[arg-type]  # a number, as above
        raise ValueError(f"alpha is {alpha!r}; it must be finite")
    if limit < 0:  # type: ignore[operator]  # a number, as above
        raise ValueError(f"limit is {limit!r}; it must be at least 0")


def _checked_activation(options: Options, w1: torch.Tensor, w2: torch.Tensor) -> Activation:
    """The activation of weights as kernels take them."""
    function, _, interleaved, alpha, limit, *_ = options
    alpha = 1.702 if alpha is None else alpha  # no default: what torch.compile traces has no float there
    check_activation(function, alpha, limit)
    rows, width = w1.shape[1], columns_of(w2)
    if interleaved and rows == width:
        raise ValueError("interleaved is True, and gate_up_proj has no gates; it must be False")
    w8a8 = options.weight_format is not None and FORMATS[options.weight_format].w8a8
    return Activation(function, rows == 2 * width, interleaved, float(alpha), float(limit), w8a8)  # type: ignore[arg-type]


def _checked_weights(
    hidden_states: torch.Tensor, gate_up_proj: torch.Tensor, down_proj: torch.Tensor, transposed: bool, form: Format | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights, or a format's codes, as [experts, out, in] views."""
    for name, tensor in (("hidden_states", hidden_states), ("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        check_tensor(name, tensor, "hidden_states", hidden_states)
        if tensor is hidden_states and tensor.device.type not in ("cpu", "cuda") and not is_assumed():
            raise ValueError(f"{name} is on device {tensor.device}; it must be on a CPU or a CUDA device")
        if form is not None and tensor is not hidden_states:
            check_codes(name, tensor, form)
            continue
        if tensor.dtype not in (*DTYPES, torch.float64):
            raise TypeError(f"{name} has dtype {tensor.dtype}; it must be float16, bfloat16, float32 or float64")
        if tensor.dtype != hidden_states.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype} and hidden_states {hidden_states.dtype}; they must be the same")
    if form is not None:
        gate_up_proj, down_proj = codes_of(gate_up_proj), codes_of(down_proj)
    if hidden_states.dim() < 1:
        raise ValueError("hidden_states has no dimension; its last one must be the model's")
    for name, tensor in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have three dimensions, experts first")
        if 0 in tensor.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; no size of it may be 0")
    if transposed:
        gate_up_proj, down_proj = gate_up_proj.transpose(1, 2), down_proj.transpose(1, 2)
    dim, taken, given = hidden_states.shape[-1], columns_of(gate_up_proj), down_proj.shape[1]
    if taken != dim or given != dim:
        way = "transposed=True for weights that are [experts, in, out]"
        way = way if form is None else "weights in a format are [experts, out, in]"
        raise ValueError(
            f"hidden_states has {dim} columns, gate_up_proj takes {taken} and down_proj gives {given}; they must agree ({way})"
        )
    check_projections(sizes_of(gate_up_proj), sizes_of(down_proj))
    return gate_up_proj, down_proj


def _check_routing(hidden_states: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """Raise unless the routing is [..., top_k] of these tokens."""
    for name, tensor in (("top_k_weights", weights), ("top_k_ids", ids)):
        check_tensor(name, tensor, "hidden_states", hidden_states)
        if tensor.dim() != hidden_states.dim() or tensor.shape[:-1] != hidden_states.shape[:-1] or tensor.shape[-1] < 1:
            wanted = ", ".join(map(str, (*hidden_states.shape[:-1], "top_k")))
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [{wanted}]")
    _check_float("top_k_weights", weights, hidden_states)
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"top_k_ids has dtype {ids.dtype}; it must be int32 or int64")
    if weights.shape != ids.shape:
        raise ValueError(f"top_k_weights has shape {tuple(weights.shape)} and top_k_ids {tuple(ids.shape)}; they must agree")


def _check_bias(name: str, bias: torch.Tensor, hidden_states: torch.Tensor, shape: Shape) -> None:
    check_tensor(name, bias, "hidden_states", hidden_states)
    _check_float(name, bias, hidden_states)
    if tuple(bias.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(bias.shape)}; it must be {shape}")


def _check_float(name: str, tensor: torch.Tensor, hidden_states: torch.Tensor) -> None:
    """Raise TypeError unless the tensor is of a dtype that kernels take with ``hidden_states``."""
    if tensor.dtype not in DTYPES and tensor.dtype is not hidden_states.dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must be float32, bfloat16 or float16, or as hidden_states")
