"""The backward of PyTorch's own attention: as a user calls it, and of each backend by name.

A backend's backward operator is called by itself, with the forward's results, as autograd calls it: the forward is not timed.
``sdpa_bwd`` is the backward of the backend that PyTorch chooses; where that has no operator of its own (the math backend), and
where lengths differ under a bottom-right mask, it is autograd's, with the forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flashmoe_science.kernel import Config, Device, Kernel
from flashmoe_science.ops.attention.peers import sdpa
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.attention.problem.features import PLAIN, unsupported
from flashmoe_science.ops.peer import launches_of, one_config

if TYPE_CHECKING:
    import torch

    from flashmoe_science.ops.attention.call.backward import BackwardInputs, BackwardKernel, Gradients

Backward = Callable[..., Sequence["torch.Tensor"]]  # dQ, dK, dV and, where it is wanted, dBias
FLASH = "sdpa_bwd_flash"
_FLASH, _CUDNN = "pytorch_flash::flash_bwd", "cudnn.*(sdpa|attention|flash|bprop)"


_OF_FLASH = ("window", "packed")  # features that PyTorch's operator of FlashAttention-2 serves


def _plain(problem: AttentionBackwardProblem, supported: str | None) -> str | None:
    """Why a backend's backward cannot serve a problem that its forward ``supported`` serves or not."""
    return supported or unsupported(problem.features, (), "the backward of one of PyTorch's backends")


def _flash_supports(problem: AttentionBackwardProblem, device: Device) -> str | None:
    if problem.head_dim % 8:
        return "the backward of PyTorch's flash backend needs head dimensions that are multiples of 8"
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        return "PyTorch's is_causal is top-left, which is another mask where the lengths differ"
    return _plain(problem, sdpa.flash_supports(problem, device))


def _fa2_supports(problem: AttentionBackwardProblem, device: Device) -> str | None:
    if not problem.features.kinds():
        return f"{FLASH} is the backward of the same kernels without windows and packed sequences"
    if problem.mask == "causal-topleft":
        return "FlashAttention-2's causal mask is bottom-right"
    plain = replace(problem, features=PLAIN, mask="full")
    return _flash_supports(plain, device) or unsupported(problem.features, _OF_FLASH, "PyTorch's FlashAttention-2")


def _cudnn_supports(problem: AttentionBackwardProblem, device: Device) -> str | None:
    return _plain(problem, sdpa.cudnn_supports(problem, device))


def _empty(like: torch.Tensor) -> torch.Tensor:
    """The state of the random numbers that no dropout draws."""
    import torch

    return torch.empty(0, dtype=torch.int64, device=like.device)


def _flash(inputs: BackwardInputs) -> Sequence[torch.Tensor]:
    import torch

    (q, k, v, *_), (out, lse, dout, _), none = inputs.tensors, inputs.saved, _empty(inputs.tensors.q)
    rest = (None, None, q.shape[2], k.shape[2], 0.0, inputs.problem.causal, none, none)
    backward: Backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return backward(dout, q, k, v, out, lse, *rest, scale=inputs.softmax_scale)


def _fa2(inputs: BackwardInputs) -> Sequence[torch.Tensor]:
    """The gradients of [batch, seqlen, heads, head_dim], or of packed [total, heads, head_dim]: views of the call's tensors."""
    import torch

    (q, k, v, *_), (out, lse, dout, _), none = inputs.tensors, inputs.saved, _empty(inputs.tensors.q)
    problem, features, lengths = inputs.problem, inputs.problem.features, inputs.tensors
    packed = features.lengths == "packed"
    rows = [one[0].transpose(0, 1) if packed else one.transpose(1, 2) for one in (dout, q, k, v, out)]
    left, right = (-1 if one is None else one for one in (features.window_left, features.window_right))
    rest = (lengths.cu_seqlens_q, lengths.cu_seqlens_k, problem.seqlen_q, problem.seqlen_k, 0.0, problem.causal, none, none)
    backward: Backward = torch.ops.aten._flash_attention_backward
    window = {"window_size_left": left, "window_size_right": 0 if problem.causal else right}
    made = backward(*rows, lse[0] if packed else lse, *rest, scale=inputs.softmax_scale, **window)[:3]
    return [one.transpose(0, 1)[None] if packed else one.transpose(1, 2) for one in made]


def _cudnn(inputs: BackwardInputs) -> Sequence[torch.Tensor]:
    import torch

    (q, k, v, *_), (out, lse, dout, _), none = inputs.tensors, inputs.saved, _empty(inputs.tensors.q)
    rest = (none, none, None, None, None, q.shape[2], k.shape[2], 0.0, inputs.problem.causal)
    backward: Backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    return backward(dout, q, k, v, out, lse[..., None], *rest, scale=inputs.softmax_scale)


def _by_autograd(inputs: BackwardInputs) -> Sequence[torch.Tensor]:
    import torch

    from flashmoe_science.ops.attention.call.backward import unexpanded
    from flashmoe_science.ops.attention.call.kernel import AttentionInputs

    x, bias = inputs.tensors, inputs.tensors.bias
    leaves = [one.detach().requires_grad_() for one in x[:3]]
    with torch.enable_grad():
        if inputs.wanted.dbias and bias is not None:
            leaves.append(unexpanded(bias).detach().requires_grad_())
            bias = leaves[3].expand(bias.shape)
        tensors = x._replace(q=leaves[0], k=leaves[1], v=leaves[2], bias=bias)
        out = sdpa.attend(AttentionInputs(inputs.problem, tensors, inputs.options, inputs.softmax_scale))
    with torch.autograd.set_multithreading_enabled(False):  # work on another thread would count as strayed
        return torch.autograd.grad(out, leaves, inputs.saved.dout)


def _as_called(inputs: BackwardInputs) -> Sequence[torch.Tensor]:
    import torch
    from torch.nn.attention import SDPBackend

    problem, (q, k, v, *_) = inputs.problem, inputs.tensors
    own = {SDPBackend.FLASH_ATTENTION.value: _flash, SDPBackend.CUDNN_ATTENTION.value: _cudnn}
    if q.is_cuda and problem.features.bias == "none" and not (problem.causal and problem.seqlen_q != problem.seqlen_k):
        gqa = problem.heads != problem.heads_kv
        q, k, v = (one.detach().requires_grad_() for one in (q, k, v))
        with torch.enable_grad():
            chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, problem.causal, scale=inputs.softmax_scale, enable_gqa=gqa)
        return own.get(chosen, _by_autograd)(inputs)
    return _by_autograd(inputs)


def _kernel(
    name: str, about: str, supports: Callable[[AttentionBackwardProblem, Device], str | None], backward: Backward, launched: str
) -> BackwardKernel:
    def run(inputs: BackwardInputs, config: Config) -> Gradients:
        from flashmoe_science.ops.attention.call.backward import Gradients

        dq, dk, dv, dbias, *_ = *backward(inputs), None
        return Gradients(dq, dk, dv, None, dbias)

    return Kernel(
        name=name,
        origin="peer",
        op="attention_backward",
        about=about,
        supports=supports,
        configs=one_config,
        run=run,
        launches=launches_of(launched),
    )


KERNELS: tuple[BackwardKernel, ...] = (
    replace(
        _kernel("sdpa_bwd", "the backward of PyTorch's attention as a user calls it", sdpa.as_called_supports, _as_called,
                f"{_FLASH}|{_CUDNN}|fmha_cutlass|(?i:softmax)"),
        on_cpu=True,
        replaces_ours="always",
    ),
    _kernel(FLASH, "the backward of PyTorch's FlashAttention-2 backend", _flash_supports, _flash, _FLASH),
    _kernel("fa2_bwd", "PyTorch's FlashAttention-2 with windows and packed sequences", _fa2_supports, _fa2, _FLASH),
    _kernel("sdpa_bwd_cudnn", "the backward of PyTorch's cuDNN backend", _cudnn_supports, _cudnn, _CUDNN),
)  # fmt: skip
