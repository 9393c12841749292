"""What a mixture-of-experts kernel is held to: ``fn(x, w1, w2, topk_weights, topk_ids)``, shaped as ``MoEProblem`` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import ClassVar

import torch

from flashmoe_science.contract import DISTRIBUTIONS, Contract
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.moe import suites
from flashmoe_science.ops.moe.inputs import MoEInputs, MoEKernel
from flashmoe_science.ops.moe.oracle import moe_oracle, moe_plain, routing_oracle
from flashmoe_science.ops.moe.problem import MoEProblem

_TINY = 2.0**-5  # silu(g) u is then near 2^-11; the least normal number of fp16 is 2^-14
_SIZES = (
    "t40 e8 k2 d64 f48",
    "t1 e8 k2 d64 f48",
    "t2 e8 k1 d64 f48",
    "t37 e8 k8 d64 f48",
    "t37 e16 k3 d96 f160",
    "t64 e1 k1 d64 f64",
    "t33 e64 k4 d32 f16",
    "t129 e4 k2 d100 f36",
    "t7 e5 k5 d17 f9",
    "t256 e8 k2 d16 f128",
)
# One token, one expert, all experts, more experts than tokens, sizes that no tile divides; each in every dtype.
SWEEP = tuple(f"moe {sizes} {dtype}" for sizes in _SIZES for dtype in ("bf16", "fp16", "fp32"))


class MoEContract(Contract):
    """Gated experts on routed tokens; the router is not part of it.

    Weights are drawn so that activations stay near 1 at any size. Besides the routing only ``x`` is varied, and "tiny" is less
    tiny here: an expert is quadratic in x, and all that its weights would add is results outside fp16's range, which say
    nothing of a kernel.
    """

    name: ClassVar[str] = "moe"
    # "crowded": all tokens choose the same experts, and the others have none.
    distributions: ClassVar[tuple[str, ...]] = (*DISTRIBUTIONS, "crowded")

    def default_problems(self) -> Sequence[str]:
        return (
            "moe t1 e8 k2 d512 f1024 bf16",  # one token: weights are all there is to read
            "moe t256 e8 k2 d512 f1024 bf16",
            "moe t37 e16 k3 d96 f160 fp32",  # sizes that no tile divides
            "moe t2048 e32 k4 d256 f256 bf16",
        )

    def sweep(self) -> Sequence[str]:
        return SWEEP

    def suites(self) -> Mapping[str, Sequence[str]]:
        return suites.SUITES

    def draw(self, near: MoEProblem, chance: Random) -> MoEProblem:
        return suites.drawn(near, chance)

    def smoke(self, device: Device) -> str | None:
        return None if device is None else suites.SMOKE

    def build_problems(self) -> Sequence[str]:
        return suites.BUILD

    def small_problems(self) -> Sequence[str]:
        return suites.SMALL

    def inputs(self, problem: MoEProblem, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
        def normal(*shape: int, width: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator).mul_(width**-0.5).to(self.dtype(problem))

        p = problem
        logits = torch.randn(p.tokens, p.experts, device=device, generator=generator)
        weights, ids = routing_oracle(logits, p.top_k)
        return {
            "x": normal(p.tokens, p.dim, width=1),
            "w1": normal(p.experts, 2 * p.hidden, p.dim, width=p.dim),
            "w2": normal(p.experts, p.dim, p.hidden, width=p.hidden),
            "topk_weights": weights.float(),
            "topk_ids": _touching_every_expert(ids, p.experts),
        }

    def reference(self, problem: MoEProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return moe_oracle(**inputs)

    def plain(self, problem: MoEProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return moe_plain(**inputs)

    def for_kernel(self, problem: MoEProblem, inputs: Mapping[str, torch.Tensor]) -> MoEInputs:
        routing = inputs["topk_weights"], inputs["topk_ids"]
        return MoEInputs(problem, inputs["x"], inputs["w1"], inputs["w2"], *routing)

    def planned(self, kernel: MoEKernel, config: Config, like: MoEInputs) -> Callable[[MoEInputs], torch.Tensor]:
        if kernel.plan is None:
            return lambda inputs: kernel.run(inputs, config)
        launcher: Callable[[MoEInputs], torch.Tensor] = kernel.plan(like, config)
        return launcher

    def user_call(
        self, kernel: MoEKernel, config: Config, problem: MoEProblem, device: Device
    ) -> Callable[[MoEInputs], torch.Tensor] | None:
        """``fused_moe``, where it would run this config."""
        from flashmoe_science.dispatch.select import select
        from flashmoe_science.dispatch.table import committed_table

        if device is None or kernel.origin != "ours":
            return None
        if select(problem, device, committed_table(), [kernel], None, requested=kernel).config != config:
            return None
        from flashmoe_science.moe import fused_moe

        return lambda one: fused_moe(one.x, one.w1, one.w2, one.topk_weights, one.topk_ids, kernel=kernel.name)

    def vary(self, distribution: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if distribution == "crowded":
            ids = inputs["topk_ids"]
            return inputs | {
                "topk_ids": torch.arange(ids.shape[1], device=ids.device, dtype=ids.dtype).expand_as(ids).contiguous()
            }
        if distribution == "tiny":
            return inputs | {"x": inputs["x"].mul_(_TINY)}
        return inputs | super().vary(distribution, {"x": inputs["x"]})


def _touching_every_expert(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """The routing with its first tokens dealt in turn to all experts: as many are read as ``MoEProblem.min_bytes`` counts."""
    tokens, top_k = ids.shape
    dealt = min(tokens, -(-experts // top_k))
    turns = torch.arange(dealt * top_k, device=ids.device, dtype=ids.dtype) % experts
    return torch.cat([turns.view(dealt, top_k), ids[dealt:]])


CONTRACT = MoEContract()
