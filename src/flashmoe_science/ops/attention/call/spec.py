"""The arguments of an attention call: AttentionSpec, and the checks that refuse bad input before anything is launched.

A refusal is one line: the argument, what it was, what is allowed.

Sizes are only ever compared, so the same checks hold for the symbolic sizes that torch.compile traces with.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flashmoe_science.ops.attention.call.inputs import Shapes
from flashmoe_science.ops.attention.problem import MAX_HEAD_DIM, AttentionProblem, Layout, Mask
from flashmoe_science.problem import Dtype

DTYPES: dict[torch.dtype, Dtype] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_DEVICES = ("cpu", "cuda")


class Names(NamedTuple):
    """What a public function calls its arguments, for its messages."""

    q: str
    k: str
    v: str
    scale: str


class AttentionSpec(NamedTuple):
    """How the tensors of one call are to be attended; with them it decides the plan.

    mask: of AttentionProblem.
    return_lse: also return the log-sum-exp.
    gqa: whether K and V may have fewer heads than Q.
    kernel: serve by this kernel or raise; None for the automatic choice.
    empty: whether a batch, head count or length of 0 is served here (the output is zeros, the log-sum-exp -inf).
    """

    mask: Mask
    return_lse: bool = False
    gqa: bool = True
    kernel: str | None = None
    empty: bool = True
    names: Names = Names("q", "k", "v", "softmax_scale")


class Unserved(Exception):
    """Raised with ValueError or TypeError: what is refused is no mistake of itself, only nothing that our kernels take."""


class UnservedValue(Unserved, ValueError):
    """A size, a stride or a number of dimensions that PyTorch's own attention may take."""


class UnservedType(Unserved, TypeError):
    """A dtype that PyTorch's own attention may take."""


def check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> None:
    """Raise unless the tensors can be attended as ``spec`` says.

    Raises:
        TypeError, ValueError: what is wrong, in one line; Unserved where PyTorch's own attention may take it.
    """
    check_tensors(q, k, v, spec.names)
    check_sizes(q, k, v, spec)
    _check_memory(q, k, v, spec.names)


def check_tensors(q: object, k: object, v: object, names: Names) -> None:
    """Raise unless the three are 4-D dense tensors of one supported dtype on one supported device.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported or not shared.
        ValueError: not four dimensions, a layout that is not dense, devices that differ or are not supported.
    """
    tensors = tuple(zip(names[:3], (q, k, v), strict=True))
    check_dense(tensors)
    assert isinstance(q, torch.Tensor)
    for name, tensor in tensors:
        assert isinstance(tensor, torch.Tensor)
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype} and {names.q} has {q.dtype}; they must be the same")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and {names.q} on {q.device}; they must be on the same device")
    if q.dtype not in DTYPES:
        allowed = "torch.float16, torch.bfloat16 or torch.float32"
        raise UnservedType(f"{names.q} has dtype {q.dtype}; it must be {allowed}")
    if q.device.type not in _DEVICES:
        raise UnservedValue(f"{names.q} is on device {q.device}; it must be on a CPU or a CUDA device")
    for name, tensor in tensors:
        assert isinstance(tensor, torch.Tensor)
        if tensor.dim() != 4:
            raise UnservedValue(f"{name} has {tensor.dim()} dimensions; it must have 4 (batch, heads, sequence, head_dim)")


def check_dense(tensors: tuple[tuple[str, object], ...]) -> None:
    """Raise unless each (name, tensor) is a dense tensor.

    Raises:
        TypeError: not a tensor.
        ValueError: a layout that is not dense.
    """
    for name, tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise ValueError(f"{name} is a {kind} tensor; it must be dense (torch.strided)")


def check_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> None:
    """Raise unless the sizes of [batch, heads, seqlen, head_dim] views fit each other and the last dimension is contiguous.

    Raises:
        ValueError: what does not fit, in one line.
    """
    names = spec.names
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"{names.v} has sequence length {v.shape[2]} and {names.k} has {k.shape[2]}; they must be equal")
    for name, tensor in zip(names[:3], (q, k, v), strict=True):
        _check_size(name, tensor, spec.empty)
    if q.shape[3] != k.shape[3]:
        raise UnservedValue(f"{names.k} has head_dim {k.shape[3]} and {names.q} has {q.shape[3]}; they must be equal")
    for name, tensor in ((names.k, k), (names.v, v)):
        if tensor.shape[0] != q.shape[0]:
            raise UnservedValue(f"{name} has batch size {tensor.shape[0]} and {names.q} has {q.shape[0]}; they must be equal")
    if k.shape[1] != v.shape[1]:
        raise UnservedValue(f"{names.v} has {v.shape[1]} heads and {names.k} has {k.shape[1]}; they must be equal")
    if q.shape[1] == k.shape[1]:
        return
    have = f"{names.k} has {k.shape[1]} heads and {names.q} has {q.shape[1]}"
    if not spec.gqa:
        raise UnservedValue(f"{have}; without enable_gqa=True they must be equal")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise UnservedValue(f"{have}; the first must divide the second")


def _check_size(name: str, tensor: torch.Tensor, empty: bool) -> None:
    for dim, size_name in enumerate(("batch size", "head count", "sequence length")):
        if not empty and tensor.shape[dim] < 1:
            raise UnservedValue(f"{name} has {size_name} 0; it must be at least 1")
    width = tensor.shape[3]
    if width < 1 or width > MAX_HEAD_DIM:
        raise UnservedValue(f"{name} has head_dim {width}; it must be from 1 to {MAX_HEAD_DIM}")
    if tensor.stride(3) != 1 and width != 1:
        raise UnservedValue(
            f"{name} has stride {tensor.stride(3)} in its last dimension; it must be contiguous there (stride 1): "
            f"pass {name}.contiguous()"
        )


def _check_memory(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: Names) -> None:
    """Raise unless each tensor's memory holds its values, as a kernel reads them.

    Raises:
        ValueError: a lazily negated view, such as the imaginary part of a conjugate.
    """
    for name, tensor in zip(names[:3], (q, k, v), strict=True):
        if tensor.is_neg():
            raise UnservedValue(f"{name} is a lazily negated view; its memory must hold its values: pass {name}.resolve_neg()")


def check_name(value: object, name: str) -> None:
    """Raise TypeError unless ``value`` is a string."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {_shown(value)}; it must be a string or None")


def check_flag(value: object, name: str) -> None:
    """Raise TypeError unless ``value`` is True or False: a word such as "no" would be taken for true."""
    if value is not True and value is not False:
        raise TypeError(f"{name} is {_shown(value)}; it must be True or False")


def checked_scale(scale: object, name: str) -> float:
    """``scale`` as a finite Python float.

    Raises:
        TypeError: not a real number.
        ValueError: NaN or infinite.
    """
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"{name} is {_shown(scale)}; it must be a real number or None")
    if not math.isfinite(scale):
        raise ValueError(f"{name} is {scale}; it must be finite")
    return float(scale)


def check_probability(value: object, name: str) -> None:
    """Raise unless ``value`` is a number from 0 to 1.

    Raises:
        TypeError: not a real number.
        ValueError: below 0 or above 1.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {_shown(value)}; it must be a real number from 0 to 1")
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value}; it must be from 0 to 1")


def _shown(value: object) -> str:
    """A short, one-line text of any value that a user may have passed by mistake."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


def check_mask_argument(attn_mask: object, q: torch.Tensor, k: torch.Tensor, names: Names) -> None:
    """Raise unless ``attn_mask`` is a tensor that broadcasts to [batch, heads, seqlen_q, seqlen_k].

    Raises:
        TypeError: not a tensor, or neither boolean nor of the query's dtype.
        ValueError: of another device, or of a shape that does not broadcast.
    """
    if not isinstance(attn_mask, torch.Tensor):
        raise TypeError(f"attn_mask is {_shown(attn_mask)}; it must be a torch.Tensor or None")
    if attn_mask.dtype not in (torch.bool, q.dtype):
        raise TypeError(f"attn_mask has dtype {attn_mask.dtype}; it must be torch.bool or that of {names.q}, {q.dtype}")
    if attn_mask.device != q.device:
        raise ValueError(f"attn_mask is on {attn_mask.device} and {names.q} on {q.device}; they must be on the same device")
    full = (*q.shape[:-1], k.shape[-2])
    shape = tuple(attn_mask.shape)
    fits = 2 <= len(shape) <= 4 and all(a in (1, b) for a, b in zip(reversed(shape), reversed(full), strict=False))
    if not fits:
        raise ValueError(f"attn_mask has shape {shape}; it must have 2 to 4 dimensions and broadcast to {full}")


def problem_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> AttentionProblem:
    """The AttentionProblem of [batch, heads, seqlen, head_dim] views that have been checked."""
    return problem_like((q.shape, k.shape, v.shape), q.stride(), DTYPES[q.dtype], mask)


def problem_like(shapes: Shapes, strides_q: tuple[int, ...], dtype: Dtype, mask: Mask) -> AttentionProblem:
    """``problem_of`` tensors of such shapes."""
    layout: Layout = "bshd" if strides_q[1] < strides_q[2] else "bhsd"
    batch, heads, seqlen_q, head_dim = shapes[0]
    _, heads_kv, seqlen_k, head_dim_v = shapes[2]
    return AttentionProblem(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, dtype, mask, layout)
