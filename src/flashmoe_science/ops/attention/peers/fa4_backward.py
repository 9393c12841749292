"""The backward of FlashAttention-4 (``flash-attn-4``), called as its autograd calls it: at its fastest, and with equal bits.

With equal bits each tile of dQ is added to in turns, and those of dK and dV that query heads share.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from flashmoe_science.kernel import Config, Device, Kernel
from flashmoe_science.ops.attention.peers import fa4
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.peer import launches_of, one_config

if TYPE_CHECKING:
    from flashmoe_science.ops.attention.call.backward import BackwardInputs, BackwardKernel, Gradients

_SERVED = ("window", "packed")
_ON_HOPPER = (*_SERVED, "softcap", "sinks")  # not by each of 4.0.0b36's kernels for other GPUs


def _supports(problem: AttentionBackwardProblem, device: Device, deterministic: bool) -> str | None:
    reason = fa4.supports(problem, device)
    if reason is not None or device is None:
        return reason
    major = device.compute_capability[0]
    if deterministic and major == 12:
        return f"FlashAttention-4's backward does not give equal bits on {device.product}"
    served, who = (_ON_HOPPER, "") if major == 9 else (_SERVED, f" on {device.product}")
    return unsupported(problem.features, served, f"the backward of FlashAttention-4{who}")


def _run(inputs: BackwardInputs, config: Config, deterministic: bool) -> Gradients:
    from flash_attn.cute.interface import _flash_attn_bwd

    from flashmoe_science.ops.attention.call.backward import Gradients

    tensors, options, (out, lse, dout, dlse) = inputs.tensors, inputs.options, inputs.saved
    packed, lengths = inputs.problem.features.lengths == "packed", dict[str, Any]()
    rows = [one[0].transpose(0, 1) if packed else one.transpose(1, 2) for one in (*tensors[:3], out, dout)]
    if packed:
        lse, dlse = lse[0], None if dlse is None else dlse[0]
        lengths = {"cu_seqlens_q": tensors.cu_seqlens_q, "cu_seqlens_k": tensors.cu_seqlens_k}
        lengths |= {"max_seqlen_q": options.max_seqlen_q, "max_seqlen_k": options.max_seqlen_k}
        lengths["seqused_k"] = tensors.cache_seqlens
    made = _flash_attn_bwd(
        *rows,
        lse,
        softmax_scale=inputs.softmax_scale,
        causal=inputs.problem.causal,
        softcap=options.softcap,
        window_size_left=options.window_left,
        window_size_right=options.window_right,
        deterministic=deterministic,
        dlse=dlse,
        learnable_sink=tensors.sinks,
        **lengths,
    )
    dq, dk, dv = (one.transpose(0, 1)[None] if packed else one.transpose(1, 2) for one in made[:3])
    return Gradients(dq, dk, dv, made[3] if inputs.wanted.dsinks else None, None)


def _kernel(name: str, about: str, deterministic: bool) -> BackwardKernel:
    return Kernel(
        name=name,
        origin="peer",
        op="attention_backward",
        about=about,
        supports=partial(_supports, deterministic=deterministic),
        configs=one_config,
        run=partial(_run, deterministic=deterministic),
        launches=launches_of("flash_attn.*(bwd|backward)"),
        absent=fa4.absent,
        on_disk=fa4.ON_DISK,
        slow=deterministic,
    )


KERNELS: tuple[BackwardKernel, ...] = (
    _kernel("fa4_bwd", "the backward of FlashAttention-4 (flash-attn-4)", False),
    _kernel("fa4_bwd_deterministic", "the backward of FlashAttention-4, with equal bits in equal calls", True),
)
