"""Our kernels behind PyTorch's ``scaled_dot_product_attention`` and ``varlen_attn``, by its registry of FlashAttentions.

    from flashmoe_science.integrations import torch_sdpa

    with torch_sdpa.activated():
        model(inputs)

``register`` adds the name "flashmoe" for ``torch.nn.attention.activate_flash_attention_impl``; an import changes nothing.
While it is active, the operators of PyTorch's flash backend on CUDA are ours, and that backend is tried before cuDNN's, which
PyTorch prefers on Hopper. Calls that PyTorch does not give the flash backend (attention masks, fp32, causal ones with unequal
lengths) are served as before. Our backward serves if records show it no slower than PyTorch's (FlashAttention 2's), or if
PyTorch's switch for deterministic algorithms asks for equal bits; PyTorch's serves the rest.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.attention as registry
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from flashmoe_science.ops.attention.call.tensors import DTYPES, Options, Tensors
from flashmoe_science.ops.attention.front.arguments import of_features
from flashmoe_science.ops.attention.front.backward.choose import choose_backward
from flashmoe_science.ops.attention.front.backward.kernels import FALLBACK, FLASH
from flashmoe_science.ops.attention.front.backward.operator import OPERATOR as BACKWARD
from flashmoe_science.ops.attention.front.flash import mask_of, packed_view, window_of
from flashmoe_science.ops.attention.front.operator import attend
from flashmoe_science.ops.private import private
from flashmoe_science.serving import flash_attn_varlen_func

NAME = "flashmoe"

_LAST = "the flash backend may not be tried first"
_ORDER: Callable[[], list[int]] = private("_C._get_sdp_priority_order", list, _LAST)
_SET_ORDER: Callable[[list[int]], None] = private("_C._set_sdp_priority_order", lambda order: None, _LAST)
_CHOOSE: Callable[..., object] = private(
    "_fused_sdp_choice", F.scaled_dot_product_attention, "a kernel is launched in its place"
)
_DENSE, _PACKED = "_scaled_dot_product_flash_attention", "_flash_attention_forward"
_PACKED_OUT = "_flash_attention_forward_no_dropout_inplace"  # from PyTorch 2.12
_DENSE_BACKWARD, _PACKED_BACKWARD = "_scaled_dot_product_flash_attention_backward", "_flash_attention_backward"
_WANTED = [True, True, True, False, False]  # gradients: of q, k and v; there are no sinks and no bias
_OPTIONS = {causal: Options("causal" if causal else "full", return_lse=True) for causal in (False, True)}


def register() -> None:
    """Register "flashmoe" for ``torch.nn.attention.activate_flash_attention_impl``. A second call changes nothing."""
    registry.register_flash_attention_impl(NAME, register_fn=_activate)


@contextlib.contextmanager
def activated() -> Iterator[None]:
    """Serve PyTorch's attention by ours within the context, and restore the implementation before it afterwards."""
    before = registry.current_flash_attention_impl()
    register()
    registry.activate_flash_attention_impl(NAME)
    try:
        yield
    finally:
        if before is None:
            registry.restore_flash_attention_impl()
        else:
            registry.activate_flash_attention_impl(before)


class _Active:
    """The changes of an activation; ``remove`` undoes them."""

    def __init__(self) -> None:
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL", "CUDA")
        self.order = _put_flash_first()

    def override(self, name: str, make: Callable[[_Original], Callable[..., Any]]) -> None:
        assert self.library is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
            self.library.impl(name, make(_Original(name)), "CUDA", with_keyset=True)

    def remove(self) -> None:
        self.library = None  # PyTorch's own kernels serve again
        if self.order:
            _SET_ORDER(self.order)


def _activate() -> _Active:
    """Override the operators, for PyTorch's registry."""
    active = _Active()
    active.override(_DENSE, _dense)
    active.override(_PACKED, _packed)
    active.override(_DENSE_BACKWARD, _dense_backward)
    active.override(_PACKED_BACKWARD, _packed_backward)
    if hasattr(torch.ops.aten, _PACKED_OUT):
        active.override(_PACKED_OUT, _packed_out)
    return active


def _put_flash_first() -> list[int]:
    """Let the flash backend be tried first; returns the previous order."""
    if torch.cuda.is_available():  # the first choice of a process sets the order, and would overwrite ours
        small = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
        _CHOOSE(small, small, small)
    order, flash = _ORDER(), SDPBackend.FLASH_ATTENTION.value
    if order:
        _SET_ORDER([flash, *(one for one in order if one != flash)])
    return order


class _Original:
    """PyTorch's own kernel of an operator, for calls that ours do not serve."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kernel: Any = None
        with contextlib.suppress(RuntimeError):  # a PyTorch without CUDA
            self.kernel = torch.library.get_kernel(f"aten::{name}", "CUDA")

    def __call__(self, keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if self.kernel is None:
            raise NotImplementedError(
                f"aten::{self.name} has no kernel of PyTorch's here, and {NAME!r} does not serve this call"
            )
        return self.kernel.call_boxed(keys, *args, **kwargs)


class _Busy(threading.local):
    """Whether a call of ours is running: if it calls PyTorch's operator, PyTorch's own kernel serves."""

    now = False


_BUSY = _Busy()


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    """A context for an operator below autograd, where tensors still require gradients, which PyTorch's formula computes."""
    _BUSY.now = True
    try:
        with torch.no_grad():
            yield
    finally:
        _BUSY.now = False


def _dense(original: _Original) -> Callable[..., Any]:
    def scaled_dot_product(
        keys: torch.DispatchKeySet,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        """[batch, heads, length, head_dim], causal only with equal lengths."""
        if _BUSY.now or dropout_p or return_debug_mask or query.dtype not in DTYPES:
            return original(keys, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale)
        with _ours():
            out, lse = attend((query, key, value), _OPTIONS[is_causal], scale)
        return out, lse, None, None, query.shape[2], key.shape[2], *_nothing_random(query)

    return scaled_dot_product


def _packed(original: _Original) -> Callable[..., Any]:
    def flash_attention(keys: torch.DispatchKeySet, query: torch.Tensor, *args: Any, **options: Any) -> Any:
        served = _attend_packed(query, *args, **options)
        return original(keys, query, *args, **options) if served is None else (*served, *_nothing_random(query))

    return flash_attention


def _packed_out(original: _Original) -> Callable[..., Any]:
    def flash_attention_into(keys: torch.DispatchKeySet, out: torch.Tensor, *args: Any, **options: Any) -> Any:
        """``flash_attention`` that writes the output to ``out``. Returns the log-sum-exp."""
        served = _attend_packed(*args, **options)
        if served is None:
            return original(keys, out, *args, **options)
        out.copy_(served[0])
        return served[1]

    return flash_attention_into


def _attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(out, log-sum-exp [heads, tokens]) of [tokens, heads, head_dim] with ``cum_seq_q``, as ``varlen_attn`` has them; keys are
    packed, or pages if there is a ``block_table``. None for a call that PyTorch's own kernel serves."""
    unsupported = any(other is not None for other in others.values())  # ALiBi, and what a later PyTorch adds
    if cum_seq_q is None or _BUSY.now or dropout_p or return_debug_mask or unsupported or query.dtype not in DTYPES:
        return None
    left, right = (-1 if size is None else size for size in (window_size_left, window_size_right))
    with _ours():
        out, lse = flash_attn_varlen_func(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, None, seqused_k, scale, is_causal, window_size=(left, right),
            num_splits=num_splits or 0, return_attn_probs=True, block_table=block_table,
        )  # fmt: skip
    return out.contiguous(), lse


def _dense_backward(original: _Original) -> Callable[..., Any]:
    def scaled_dot_product_backward(
        keys: torch.DispatchKeySet,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        cum_seq_q: torch.Tensor | None,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: torch.Tensor,
        philox_offset: torch.Tensor,
        *,
        scale: float | None = None,
    ) -> Any:
        """The gradients of ``scaled_dot_product``. Without dropout its random state is not used."""
        made = None
        if not (_BUSY.now or dropout_p):
            made = _gradients(Tensors(query, key, value), Options(mask_of(is_causal)), scale, grad_out, out, logsumexp)
        if made is not None:
            return made
        rest = (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset)
        return original(keys, grad_out, query, key, value, out, logsumexp, *rest, scale=scale)

    return scaled_dot_product_backward


def _packed_backward(original: _Original) -> Callable[..., Any]:
    def flash_attention_backward(keys: torch.DispatchKeySet, *args: Any, **options: Any) -> Any:
        return _differentiate_packed(*args, **options) or original(keys, *args, **options)

    return flash_attention_backward


def _differentiate_packed(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...] | None:
    """The gradients of ``_attend_packed``'s query, key and value; None for a call that PyTorch's own kernel serves."""
    if cum_seq_q is None or cum_seq_k is None or _BUSY.now or dropout_p:
        return None
    left, right = window_of((window_size_left, window_size_right), is_causal)
    options = Options(mask_of(is_causal), window_left=left, window_right=right, max_seqlen_q=max_q, max_seqlen_k=max_k)
    tensors = Tensors(packed_view(query), packed_view(key), packed_view(value), cum_seq_q, cum_seq_k)
    made = _gradients(tensors, options, scale, packed_view(grad_out), packed_view(out), logsumexp[None])
    return None if made is None else tuple(one[0].transpose(0, 1) for one in made)


def _gradients(
    tensors: Tensors, options: Options, scale: float | None, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, ...] | None:
    """(dq, dk, dv); None if no backward of ours serves the call."""
    chosen = choose_backward(tensors, options, FLASH).kernel
    if chosen == FALLBACK:
        return None
    with _ours():
        rest = options.mask, scale, chosen, *of_features(tensors, options)
        dq, dk, dv, *_ = BACKWARD(dout, None, *tensors[:3], out, lse, _WANTED, *rest)
    return dq, dk, dv


def _nothing_random(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The state of a random generator, which the backward pass does not read without dropout, and an empty debug mask."""
    state = query.new_empty(2, dtype=torch.uint64)
    return state, query.new_empty((), dtype=torch.uint64), query.new_empty(0)
