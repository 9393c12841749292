"""Low-rank adapters of frozen weights: the checked arguments of ``fused_moe``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from flashmoe_science.ops.calls import needs_grad
from flashmoe_science.ops.checks import checked_tensor
from flashmoe_science.ops.formats import columns_of
from flashmoe_science.ops.moe.call import Tensors

ONCE = (
    "the derivative of the gradients of experts with adapters is asked for, which has none: differentiate such experts once, "
    "or use kernel='grouped_mm'"
)
_RANKS = 8  # ranks are padded to a multiple: PyTorch's grouped product takes rows of a multiple of 16 bytes


class LowRank(NamedTuple):
    """What is added to weights [E, out, in]: ``scaling`` times b [E, out, rank] times a [E, rank, in]."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    def transposed(self) -> LowRank:
        """The same for weights [E, in, out]."""
        return LowRank(self.b.mT, self.a.mT, self.scaling)


Adapters = tuple[LowRank | None, LowRank | None]  # beside w1, beside w2
NO_ADAPTERS: Adapters = (None, None)


def parts_of(adapters: Adapters) -> tuple[torch.Tensor | None, ...]:
    """a and b of the first, a and b of the second, as autograd takes them."""
    return tuple(part for low in adapters for part in ((None, None) if low is None else low[:2]))


def scalings_of(adapters: Adapters) -> tuple[float, float]:
    """Both scalings, 0 without an adapter."""
    first, second = (0.0 if low is None else low.scaling for low in adapters)
    return first, second


def adapters_of(parts: Any, scalings: tuple[float, float]) -> Adapters:
    """The adapters of ``parts_of`` and ``scalings_of``."""
    first, second = (
        None if a is None else LowRank(a, b, scaling) for (a, b), scaling in zip((parts[:2], parts[2:]), scalings, strict=True)
    )
    return first, second


def checked_adapters(adapters: Any, tensors: Tensors) -> Adapters:
    """The adapters as kernels take them: in the dtype of x, contiguous, the rank padded with zeros. Raises TypeError,
    ValueError: ``adapters`` of ``fused_moe`` that are not allowed."""
    if not isinstance(adapters, tuple | list) or len(adapters) != 2:
        raise TypeError("adapters must be a pair, for gate_up_proj and down_proj; None for one without an adapter")
    first, second = (
        None if one is None else _checked(f"adapters[{nth}]", one, weight, tensors.x.dtype)
        for nth, (one, weight) in enumerate(zip(adapters, (tensors.w1, tensors.w2), strict=True))
    )
    return first, second


def _checked(name: str, given: Any, weight: torch.Tensor, dtype: torch.dtype) -> LowRank:
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise TypeError(f"{name} must be (a, b, scaling), or None")
    a, b, scaling = given
    if isinstance(scaling, bool) or not isinstance(scaling, float | int):
        raise TypeError(f"{name} has scaling {scaling!r}; it must be a number")
    if not abs(scaling) < float("inf"):  # a comparison, which torch.compile can trace
        raise ValueError(f"{name} has scaling {scaling!r}; it must be finite")
    experts, out, inner = *weight.shape[:2], columns_of(weight)
    rank = a.shape[1] if isinstance(a, torch.Tensor) and a.dim() == 3 else 0
    for part, one, shape, words in (
        ("a", a, (experts, rank, inner), f"({experts}, rank, {inner})"),
        ("b", b, (experts, out, rank), f"({experts}, {out}, {rank or 'rank'})"),
    ):
        checked_tensor(f"{part} of {name}", one)
        if tuple(one.shape) != shape or not rank:
            raise ValueError(f"{name} has {part} of shape {tuple(one.shape)}; it must be {words}")
        if not one.is_floating_point() or one.device != weight.device:
            raise ValueError(f"{name} has {part} of {one.dtype} on {one.device}; it must be floating, on {weight.device}")
    if needs_grad(weight):
        raise ValueError(f"{name} is given and the weights beside it require a gradient; they must be frozen")
    a, b = a.to(dtype), b.to(dtype)
    if rest := -rank % _RANKS:
        a, b = F.pad(a, (0, 0, 0, rest)), F.pad(b, (0, rest))
    return LowRank(a.contiguous(), b.contiguous(), float(scaling))
