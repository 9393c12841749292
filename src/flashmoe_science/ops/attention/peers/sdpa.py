"""PyTorch's own attention: as a user calls it, and each backend by name.

PyTorch aligns ``is_causal`` top-left. A bottom-right mask with seqlen_q != seqlen_k is asked for with its own bias,
``causal_lower_right``, which its flash and memory-efficient backends know; the others would be given a dense mask: they refuse.
A boolean mask or an additive bias goes to it as ``attn_mask``, which it does not take beside ``is_causal``. Caches, packed
sequences, windows, caps and sinks it would be given as a dense mask or not at all: not served.
Selecting a backend costs a context manager of some 15 us on the host: eager rows of ``sdpa_*`` carry it, ``sdpa`` does not. It
also switches the backends off for all threads of the process, so that an automatic choice takes ``sdpa`` alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionKernel, AttentionOutput, finish
from flashmoe_science.ops.attention.peers import peer_kernel
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.peer import launches_of
from flashmoe_science.problem import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

Supports = Callable[[AttentionProblem, Device], str | None]
_MASKS = ("boolmask", "bias")
_FLASH, _CUDNN, _EFFICIENT = "pytorch_flash::flash_fwd", "cudnn.*(sdpa|attention|flash)", "fmha_cutlass"


def _bottom_right(problem: AttentionProblem) -> bool:
    """Whether PyTorch's ``is_causal`` would give the wrong mask (where the lengths agree, the two alignments do)."""
    return problem.mask == "causal" and problem.seqlen_q != problem.seqlen_k and not _sees_all(problem)


def _sees_all(problem: AttentionProblem) -> bool:
    """Whether the mask hides nothing: one query, the last, sees every key."""
    return problem.mask == "causal" and problem.seqlen_q == 1


def _common(problem: AttentionProblem) -> str | None:
    if _bottom_right(problem) and problem.seqlen_q > problem.seqlen_k:
        return "PyTorch's lower-right causal bias gives NaN for queries that see no key"
    if problem.causal and problem.features.bias in ("boolean", "additive"):
        return "PyTorch's attention takes no mask tensor beside is_causal"
    return unsupported(problem.features, _MASKS, "PyTorch's attention")


def flash_supports(problem: AttentionProblem, device: Device) -> str | None:
    if device is None:
        return "PyTorch's flash backend is asked for by name only on a GPU"
    if device.compute_capability < (8, 0):
        return "PyTorch's flash backend needs compute capability 8.0"
    if problem.dtype == "fp32":
        return "PyTorch's flash backend takes fp16 and bf16"
    if problem.head_dim != problem.head_dim_v:
        return "PyTorch's flash backend needs head_dim_v equal to head_dim"
    if problem.mask == "causal-topleft":
        return "PyTorch's flash backend takes no top-left causal mask where seqlen_q differs from seqlen_k"
    return _common(problem) or unsupported(problem.features, (), "PyTorch's flash backend")


def cudnn_supports(problem: AttentionProblem, device: Device) -> str | None:
    if device is None:
        return "cuDNN needs a GPU"
    if device.compute_capability < (8, 0):
        return "cuDNN's attention needs compute capability 8.0"
    if problem.dtype == "fp32":
        return "cuDNN's attention takes fp16 and bf16"
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return "cuDNN's attention needs head dimensions that are multiples of 8"
    limit = 256 if device.compute_capability[0] in (9, 10) else 128
    if max(problem.head_dim, problem.head_dim_v) > limit:
        return f"cuDNN's attention takes head dimensions up to {limit} on {device.product}"
    if _bottom_right(problem):
        return "PyTorch gives cuDNN no bottom-right causal mask"
    return _common(problem)


def _efficient(problem: AttentionProblem, device: Device) -> str | None:
    if device is None:
        return "PyTorch's memory-efficient backend needs a GPU"
    if problem.heads != problem.heads_kv:
        return "PyTorch's memory-efficient backend does not share K and V among query heads"
    multiple = 4 if problem.dtype == "fp32" else 8
    if problem.head_dim % multiple or problem.head_dim_v % multiple:
        return f"PyTorch's memory-efficient backend needs head dimensions that are multiples of {multiple} in {problem.dtype}"
    return _common(problem)


def _math(problem: AttentionProblem, device: Device) -> str | None:
    if _bottom_right(problem):
        return "PyTorch's math backend would be given a dense bottom-right mask, which is not what it is measured for"
    scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k * max(4, DTYPE_BYTES[problem.dtype])
    if device is not None and 4 * scores > device.memory_bytes:
        return f"its score matrices would take {4 * scores / 2**30:.0f} GiB of {device.product}'s memory"
    return _common(problem)


def as_called_supports(problem: AttentionProblem, device: Device) -> str | None:
    return _common(problem)


@functools.lru_cache(maxsize=64)
def _lower_right(seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    from torch.nn.attention.bias import causal_lower_right

    bias: torch.Tensor = causal_lower_right(seqlen_q, seqlen_k)
    return bias


def attend(inputs: AttentionInputs) -> torch.Tensor:
    from torch.nn.functional import scaled_dot_product_attention

    from flashmoe_science.ops.attention.call.backward import unexpanded

    problem = inputs.problem
    bias = _lower_right(problem.seqlen_q, problem.seqlen_k) if _bottom_right(problem) else None
    return scaled_dot_product_attention(
        *inputs.tensors[:3],
        attn_mask=bias if inputs.tensors.bias is None else unexpanded(inputs.tensors.bias),
        is_causal=problem.causal and bias is None and not _sees_all(problem),
        scale=inputs.softmax_scale,
        enable_gqa=problem.heads != problem.heads_kv,
    )


def _backend(name: str, about: str, supports: Supports, backend: str, launched: str) -> AttentionKernel:
    """PyTorch's attention by one of its backends."""

    def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return finish(inputs, attend(inputs))

    return peer_kernel(name=name, about=about, supports=supports, run=run, launches=launches_of(launched))


# The math backend is matrix products and a softmax, under whatever names cuBLAS and ATen give them: the softmax is promised.
KERNELS: tuple[AttentionKernel, ...] = (
    peer_kernel(
        name="sdpa",
        about="PyTorch's attention as a user calls it: PyTorch chooses the backend",
        supports=as_called_supports,
        run=lambda inputs, config: finish(inputs, attend(inputs)),
        launches=launches_of(f"{_FLASH}|{_CUDNN}|{_EFFICIENT}|(?i:softmax)"),
        on_cpu=True,
        replaces_ours="always",
    ),
    _backend("sdpa_flash", "PyTorch's FlashAttention-2 backend", flash_supports, "FLASH_ATTENTION", _FLASH),
    _backend("sdpa_cudnn", "PyTorch's cuDNN backend", cudnn_supports, "CUDNN_ATTENTION", _CUDNN),
    _backend("sdpa_efficient", "PyTorch's memory-efficient (CUTLASS) backend", _efficient, "EFFICIENT_ATTENTION", _EFFICIENT),
    replace(
        _backend(
            "sdpa_math", "PyTorch's plain attention: matrix product, softmax, matrix product", _math, "MATH", "(?i:softmax)"
        ),
        slow=True,
        on_cpu=True,
    ),
)
