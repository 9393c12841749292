"""The public mixture-of-experts functions.

``route`` chooses the experts of each token and their weights; ``fused_moe`` computes them, in the weight layouts of models;
``grouped_moe`` takes rows that are sorted by expert. All are differentiable. PyTorch's operators serve tensors on the CPU.
``flashmoe_science.nn`` has the layer.
"""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.ops.moe.front.adapted import experts_adapted
from flashmoe_science.ops.moe.front.formats import Layout, in_format, out_of_format, out_of_layout
from flashmoe_science.ops.moe.front.grouped import routing_of_rows
from flashmoe_science.ops.moe.front.operator import experts_adding, experts_forward, experts_of_pair
from flashmoe_science.ops.moe.route.losses import balance_loss, expert_load, z_loss
from flashmoe_science.ops.moe.route.route import route
from flashmoe_science.printable import shown

__all__ = [
    "balance_loss", "dequantize_experts", "expert_load", "fused_moe", "grouped_moe", "quantize_experts",
    "repack_experts", "route", "z_loss",
]  # fmt: skip

Adapter = tuple[torch.Tensor, torch.Tensor, float]


def fused_moe(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    down_proj: torch.Tensor,
    top_k_weights: torch.Tensor,
    top_k_ids: torch.Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float | None = None,
    limit: float = 7,
    kernel: str | None = None,
    recompute: bool = False,
    weight_grads: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
    adapters: tuple[Adapter | None, Adapter | None] | None = None,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    gate_up_zero_point: torch.Tensor | None = None,
    down_zero_point: torch.Tensor | None = None,
    gate_up_input_scale: torch.Tensor | None = None,
    down_input_scale: torch.Tensor | None = None,
    weight_format: str | None = None,
) -> torch.Tensor:
    """The sum over a token's experts of its routing weight times ``down(act(gate x) * up x)``.

    Sums are fp32 and in a fixed order: equal inputs give equal results. The last bit of a token's result may depend on the
    number of tokens of the call, which decides the kernel and its tiles. Nothing waits for the host. Weights are copied only if
    torch.autocast casts them. A CUDA graph can capture a call and replay it with another routing.

    Args:
        hidden_states: [..., H], fp16, bf16, fp32, or fp64, which PyTorch's operators serve; any number of tokens from 0.
        gate_up_proj: [E, 2I, H], the rows of all gates, then of all ups; [E, I, H] for experts without a gate. Any strides.
            Or the pair (gates, ups), each [E, I, H], as torchtitan's w1 and w3. Kernels take one tensor: a view if each
            expert's ups follow its gates in memory, else a copy in each call and another in its backward.
        down_proj: [E, H, I].
        top_k_weights: [..., K], floating.
        top_k_ids: [..., K], int32 or int64. An id below 0 or at least E adds nothing (experts of other ranks); an id given
            twice adds twice.
        activation: "silu", "gelu" (by erf), "gelu_tanh", "relu", "relu2" (its square), or "clamped_silu", gpt-oss's:
            ``(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)`` with ``g = min(gate, limit)``.
        gate_up_bias, down_bias: [E, 2I] (or [E, I]) and [E, H]; added before the activation and before the routing weight.
        transposed: the weights are [E, H, 2I] and [E, I, H], as in gpt-oss.
        interleaved: gates and ups alternate, as in gpt-oss.
        alpha, limit: of "clamped_silu"; ``alpha`` is 1.702 by default.
        kernel: serve by this kernel, of the forward or of the backward, or raise; by default the best for the problem.
        recompute: recompute the pre-activations, [T * K, 2I], in the backward instead of keeping them.
        weight_grads: tensors shaped as ``gate_up_proj`` (a pair joined) and ``down_proj``, fp32 or of their dtype, such as
            Megatron's ``main_grad``: the backward adds the weights' gradients to them and gives none to autograd.
        adapters: LoRA for ``gate_up_proj`` and ``down_proj``, which are frozen: (a [E, rank, in], b [E, out, rank], scaling)
            adds scaling * b @ a to weights [E, out, in], also to ``transposed`` ones. Neither that sum nor a gradient of the
            weights is formed; a and b have gradients. Served by "moe_grouped_gluon_sm90" on Hopper and by PyTorch's grouped
            products.
        weight_format: None for weights of the dtype of ``hidden_states``; else the format of the weights, which are the
            checkpoint's tensors, [N, K] an expert. They have no gradients; PyTorch's operators compute the other gradients from
            dequantised weights, and take the quantisation of states for the identity.
            "mxfp4": bytes [E, N, K / 2] or [E, N, K / 32, 16] (the low four bits are the even column); scales [E, N, K / 32],
            e8m0 or its bytes.
            "fp8_block": float8_e4m3fn [E, N, K]; scales [E, ceil(N / 128), ceil(K / 128)], fp32, bf16, fp16, e8m0 or its bytes.
            Gates and ups may have separate blocks, [E, 2 ceil(I / 128), ceil(H / 128)]; if both shapes are equal and 128 does
            not divide I, they are assumed to.
            "fp8_block_w8a8": the same weights; the call quantises ``hidden_states`` and the activations to e4m3 with an fp32
            scale for 128 columns, as DeepSeek-V3. That changes a result by some 4% of the RMS.
            "fp8_channel": float8_e4m3fn [E, N, K]; scales fp32, bf16 or fp16: one a row [E, N] or [E, N, 1], one a matrix [E],
            [E, 1] or [E, 1, 1], or one for gates and one for ups [E, 2] or [E, 2, 1].
            "fp8_channel_w8a8": the same weights; states and activations quantised as in "fp8_block_w8a8".
            "fp8_channel_static": the same weights; states and activations are quantised by the given input scales, as in
            checkpoints of ModelOpt and compressed-tensors: magnitudes above 448 times the scale are clamped.
            "int4_g32", "int4_g128": int32 [E, N, K / 8], each of eight integers plus 8, the first in the lowest four bits;
            scales bf16, fp16 or fp32 [E, N, K / 32] or [E, N, K / 128]: compressed-tensors' weight_packed without g_idx. A
            weight is rounded to the dtype.
            "int4_g32_zero", "int4_g128_zero": the same with zero points. ``repack_experts`` converts GPTQ's and AWQ's layouts
            to int4.
        gate_up_scale, down_scale: the scales of such weights.
        gate_up_zero_point, down_zero_point: int32 [E, N / 8, K / 32] or [E, N / 8, K / 128], each of eight rows, the first in
            the lowest four bits, as compressed-tensors' weight_zero_point; subtracted from a weight's bits.
        gate_up_input_scale, down_input_scale: for "fp8_channel_static", of ``hidden_states`` and of the activations: above 0,
            fp32, bf16 or fp16, one for each expert [E] or [E, 1], or one for all [1] or [].

    Returns:
        [..., H] in the dtype of ``hidden_states``, under torch.autocast in autocast's.

    Raises:
        TypeError, ValueError: an argument that is not allowed, or a ``kernel`` that cannot serve the call, in one line.
    """
    # In the order of Tensors and Options, which a cached call does not make.
    of_format = gate_up_scale, down_scale, gate_up_zero_point, down_zero_point, gate_up_input_scale, down_input_scale
    tensors = (hidden_states, gate_up_proj, down_proj, top_k_weights, top_k_ids, gate_up_bias, down_bias, *of_format)
    options = (activation, transposed, interleaved, alpha, limit, kernel, recompute, weight_format)
    if adapters is not None:
        return experts_adapted(tensors, options, adapters, weight_grads)
    if isinstance(gate_up_proj, tuple | list):
        return experts_of_pair(tensors, options, weight_grads)
    return experts_forward(tensors, options) if weight_grads is None else experts_adding(tensors, options, weight_grads)


def quantize_experts(
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    weight_format: str,
    *,
    interleaved: bool = False,
    powers: bool = False,
) -> dict[str, Any]:
    """The keyword arguments of ``fused_moe`` for these weights in a format, as in a checkpoint.

    Codes are the nearest, ties to even. The scales of mxfp4 are OCP's, 2^(floor(log2 of a block's largest magnitude) - 2);
    those of fp8 blocks and channels the largest magnitude / 448 in fp32; those of int4 the largest magnitude / 7.5 in bf16, as
    in compressed-tensors, with zero points a fifteenth of the range of a block's weights and 0.

    Args:
        gate_up_proj, down_proj: [E, 2I, H] (or [E, I, H]) and [E, H, I], fp32, bf16 or fp16.
        weight_format, interleaved: as ``fused_moe``.
        powers: scales of fp8 blocks are the next powers of two, as e8m0.

    Raises:
        TypeError, ValueError: an argument that is not allowed.
    """
    return in_format(gate_up_proj, down_proj, weight_format, interleaved, powers)


def dequantize_experts(
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_scale: torch.Tensor,
    weight_format: str,
    *,
    gate_up_zero_point: torch.Tensor | None = None,
    down_zero_point: torch.Tensor | None = None,
    interleaved: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights [E, 2I, H] (or [E, I, H]) and [E, H, I] that ``fused_moe``'s quantised arguments stand for.

    Raises:
        TypeError, ValueError: an argument that is not allowed.
    """
    of_weights = {
        "gate_up_scale": gate_up_scale, "down_scale": down_scale, "gate_up_zero_point": gate_up_zero_point,
        "down_zero_point": down_zero_point,
    }  # fmt: skip
    return out_of_format(gate_up_proj, down_proj, of_weights, weight_format, interleaved, dtype)


def repack_experts(
    layout: Layout,
    gate_up_qweight: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_qzeros: torch.Tensor,
    down_qweight: torch.Tensor,
    down_scales: torch.Tensor,
    down_qzeros: torch.Tensor,
    *,
    gate_up_g_idx: torch.Tensor | None = None,
    down_g_idx: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The keyword arguments of ``fused_moe`` for int4 experts of GPTQ or AWQ, whose weights are copied once. Zero points are
    left out if all are 8, as in symmetric checkpoints; checking that waits for the GPU.

    Args:
        layout: "gptq", "gptq_v2" (whose zero points are not stored minus one) or "awq".
        gate_up_qweight, down_qweight: int32, for GPTQ [E, H / 8, 2I] and [E, I / 8, H], for AWQ [E, H, 2I / 8] and [E, I, H /
            8]: the checkpoint's, experts stacked; the columns of all gates, then of all ups.
        gate_up_scales, down_scales: [E, H / group, 2I] and [E, I / group, H]. A group is a multiple of 32 rows, or all. One
            that is not 32 or 128 is split, each part with its scale.
        gate_up_qzeros, down_qzeros: int32, an eighth as wide. "gptq" is converted to "gptq_v2" as by GPTQModel: 0x11111111 is
            added to each word of eight.
        gate_up_g_idx, down_g_idx: for GPTQ [E, H] and [E, I], the group of each row; reordered rows are refused.

    Raises:
        TypeError, ValueError: an argument that is not allowed.
    """
    first = gate_up_qweight, gate_up_scales, gate_up_qzeros, gate_up_g_idx
    return out_of_layout(layout, first, (down_qweight, down_scales, down_qzeros, down_g_idx))


def grouped_moe(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    down_proj: torch.Tensor,
    offsets: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """``down(act(gate x) * up x)`` of rows already sorted by expert, such as the tokens that expert parallelism sent to a rank.
    Differentiable and served as ``fused_moe``.

    Args:
        hidden_states: [rows, H].
        gate_up_proj, down_proj: as ``fused_moe``.
        offsets: [E] int32 or int64, the row after each expert's last, as ``torch.nn.functional.grouped_mm`` takes them.
        options: the keyword arguments of ``fused_moe``.

    Returns:
        [rows, H]; zeros in rows past the last expert's.

    Raises:
        TypeError, ValueError: as ``fused_moe``; offsets that are not integers, or not one an expert; on the CPU, offsets that
            fall or pass the last row.
    """
    first = gate_up_proj[0] if isinstance(gate_up_proj, tuple | list) and gate_up_proj else gate_up_proj
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"gate_up_proj is {shown(gate_up_proj)}; it must be a torch.Tensor, or a pair of them")
    experts = first.shape[0] if first.dim() else 0
    return fused_moe(hidden_states, gate_up_proj, down_proj, *routing_of_rows(hidden_states, offsets, experts), **options)
