"""SonicMoE (``sonic-moe``): CuTe DSL products that gather rows in their loads, tuned at the first call of each shape.

Weights are passed as views: gate rows, then up rows, are what it calls the concatenated layout. Its tuning takes some 15 s a
number of tokens, a minute for a step of training, where it is not found on disk (``flashmoe prove`` keeps it there).
"""

from __future__ import annotations

import torch

from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.moe.call import Activation, MoEInputs, Tensors
from flashmoe_science.ops.moe.peers import peer_kernel
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.peer import launches_of, not_installed

_MAX_TOP_K, _MAX_EXPERTS = 16, 4096  # of its own top-k
_MIN_DIM = 512
ON_DISK = "QUACK_CACHE_AUTOTUNING"


def absent() -> str | None:
    return not_installed("sonic-moe", "sonicmoe")


def supports(problem: MoEProblem, device: Device) -> str | None:
    if device is None:
        return "SonicMoE needs a GPU"
    if device.compute_capability < (9, 0):
        return f"SonicMoE needs Hopper or newer; {device.product} is {device.arch}"
    if problem.dtype == "fp32":
        return "SonicMoE takes fp16 and bf16"
    if problem.words():
        words = ", ".join(problem.words())
        return f"SonicMoE is called for SwiGLU without biases in the default layout; the problem has {words}"
    for name, size in (("dim", problem.dim), ("hidden", problem.hidden)):
        if size % 64:
            return f"{name} is {size}; SonicMoE needs a multiple of 64"
    if problem.dim < _MIN_DIM:
        return f"dim is {problem.dim}; SonicMoE needs {_MIN_DIM} or more"
    if problem.top_k > _MAX_TOP_K or problem.experts > _MAX_EXPERTS or problem.experts % 8:
        words = f"up to {_MAX_TOP_K} experts a token, of up to {_MAX_EXPERTS} in eights"
        return f"SonicMoE's top-k takes {words}; the problem has {problem.top_k} of {problem.experts}"
    return None


def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights [T, K] fp32, ids [T, K] int32) by its own top-k, the softmax over the chosen logits. It writes an expert's index
    into the low bits of its score, so that scores that differ in those alone are equal."""
    from sonicmoe.functional import TC_Softmax_Topk_Router_Function

    routed: tuple[torch.Tensor, torch.Tensor] = TC_Softmax_Topk_Router_Function.apply(
        logits, logits.shape[1], top_k, True, False
    )
    return routed


def run(inputs: MoEInputs, config: Config) -> torch.Tensor:
    return _experts(inputs.tensors, inference=True)


def train(tensors: Tensors, activation: Activation) -> torch.Tensor:
    """SwiGLU experts that keep what its backward needs."""
    return _experts(tensors, inference=False)


def _experts(tensors: Tensors, inference: bool) -> torch.Tensor:
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import TC_topk_router_metadata_triton, _DownProjection, _UpProjection

    x, w1, w2, weights, ids, *_ = tensors
    (tokens, top_k), experts, pairs = ids.shape, w1.shape[0], ids.numel()

    def indices(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=x.device)

    counts, offsets = indices(experts), indices(experts + 1)
    token_of_row, pair_of_row, row_of_pair = indices(pairs), indices(pairs), indices(pairs)
    TC_topk_router_metadata_triton(ids, experts, counts, offsets, token_of_row, pair_of_row, row_of_pair)
    swiglu, concatenated, counted = ActivationType.SWIGLU, True, False
    active, before = _UpProjection.apply(
        x, w1.permute(1, 2, 0), None, offsets, pairs, top_k, token_of_row, pair_of_row, row_of_pair, None, counted,
        swiglu, inference, concatenated,
    )  # fmt: skip
    out: torch.Tensor = _DownProjection.apply(
        active, before, w2.permute(1, 2, 0), None, weights, offsets, tokens, top_k, token_of_row,
        pair_of_row, row_of_pair, None, counted, swiglu,
    )  # fmt: skip
    return out


launches = launches_of("quack", "^token_gather_sum_kernel")
KERNEL = peer_kernel(
    name="sonicmoe",
    about="SonicMoE (sonic-moe): CuTe DSL, rows gathered in the loads, Hopper and Blackwell",
    supports=supports,
    run=run,
    launches=launches,
    slow=True,
    absent=absent,
    on_disk=ON_DISK,
)
