"""triton_kernels, OpenAI's products of mxfp4 in Triton as vLLM's wheel carries them (matmul_ogs), for gpt-oss's experts.

Weights are put into its layouts for Hopper at load. Its router gives what its products take, so that it is measured from router
logits. vLLM splits no sum (split_k 1); its own choice does, for few rows. The package of that name on PyPI is another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.moe.call import MoEInputs
from flashmoe_science.ops.moe.peers import peer_kernel
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.peer import launches_of, not_installed

NAME = "triton_kernels"
_WARPS = 8  # of the programs that the layout of scales is for
_BLOCK = 32  # columns of a scale
_NAMES = (("w1", "gate_up_scale", "gate_up_bias"), ("w2", "down_scale", "down_bias"))


def absent() -> str | None:
    return not_installed("triton_kernels (of vLLM's wheel)", "triton_kernels.matmul_ogs")


def supports(problem: MoEProblem, device: Device) -> str | None:
    if device is None:
        return "triton_kernels needs a GPU"
    if device.compute_capability != (9, 0):
        return f"triton_kernels is called here on Hopper; {device.product} is {device.arch}"
    if problem.dtype != "bf16" or problem.weight_format != "mxfp4":
        return "triton_kernels is called with bf16 and weights in mxfp4"
    if problem.activation != "clamped_silu" or not problem.interleaved:
        return "triton_kernels activates as gpt-oss does: clamped, gates and ups interleaved"
    if problem.routing == "ids":
        return "triton_kernels is measured from router logits: its products take what its router gives"
    if problem.top_k & (problem.top_k - 1):
        return f"top_k is {problem.top_k}; triton_kernels' router takes a power of two"
    return None


def configs(problem: MoEProblem, device: Device) -> tuple[Config, ...]:
    return Config(split_k=1), Config(split_k=0)


def load(problem: MoEProblem, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor

    made, (of_values, of_scales) = dict(inputs), _layouts()
    for weights, scale, bias in _NAMES:
        codes = wrap_torch_tensor(inputs[weights].view(torch.uint8).mT, dtype=FP4)  # [E, K, N], of K one after another
        made[weights] = convert_layout(codes, of_values, mx_axis=1).storage.data
        exponents = wrap_torch_tensor(inputs[scale].view(torch.uint8).mT)
        made[scale] = convert_layout(exponents, of_scales, mx_axis=1, num_warps=_WARPS).storage.data
        made |= {bias: inputs[bias].float()} if bias in inputs else {}
    return made


def _layouts() -> tuple[Any, Any]:
    from triton_kernels.tensor_details.layout import HopperMXScaleLayout, HopperMXValueLayout

    return HopperMXValueLayout, HopperMXScaleLayout


def route(logits: torch.Tensor, top_k: int) -> tuple[Any, Any]:
    """What its products take in place of weights and ids: rows by expert with their weights, and from where they come."""
    from triton_kernels.routing import routing

    rows, gather, scatter = routing(logits, top_k)
    return rows, (gather, scatter)


def run(inputs: MoEInputs, config: Config) -> torch.Tensor:
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, matmul_ogs
    from triton_kernels.matmul_ogs_details.opt_flags import update_opt_flags_constraints
    from triton_kernels.swiglu import swiglu_fn

    update_opt_flags_constraints({"split_k": config["split_k"] or None})
    p, a, x = inputs.problem, inputs.activation, inputs.tensors.x
    rows: Any = inputs.tensors.topk_weights  # as ``route`` gave them
    gather, scatter = inputs.tensors.topk_ids
    swiglu = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (a.alpha, a.limit), 2)
    first, second = _product(inputs, 0, p.dim, p.rows_of_w1()), _product(inputs, 1, p.hidden, p.dim)
    active = matmul_ogs(x, *first[:2], rows, gather_indx=gather, precision_config=first[2], fused_activation=swiglu)
    out: torch.Tensor = matmul_ogs(
        active, *second[:2], rows, scatter_indx=scatter, precision_config=second[2], gammas=rows.gate_scal
    )
    return out


def _product(inputs: MoEInputs, nth: int, depth: int, width: int) -> tuple[Any, Any, Any]:
    """The weights, the bias and the scales of a product, as it describes them."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from triton_kernels.numerics import InFlexData
    from triton_kernels.tensor import FP4, Storage, Tensor

    weights, scale, bias = (getattr(inputs.tensors, name) for name in _NAMES[nth])
    experts, (of_values, of_scales) = inputs.problem.experts, _layouts()
    stored = Storage(weights, of_values([experts, depth // 2, width], mx_axis=1))
    of_blocks = [experts, depth // _BLOCK, width]
    powers = Tensor(Storage(scale, of_scales(of_blocks, mx_axis=1, num_warps=_WARPS)), dtype=torch.uint8, shape=of_blocks)
    precision = PrecisionConfig(weight_scale=powers, flex_ctx=FlexCtx(rhs_data=InFlexData()))
    return Tensor(stored, dtype=FP4, shape=[experts, depth, width]), bias, precision


KERNEL = peer_kernel(
    name=NAME,
    about="triton_kernels (of vLLM's wheel): mxfp4 in Triton, put into layouts for Hopper at load",
    supports=supports,
    configs=configs,
    run=run,
    launches=launches_of("matmul_ogs"),
    load=load,
    slow=True,
    absent=absent,
)
