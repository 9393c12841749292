"""The attention contract: ``fn(q, k, v, causal=False, softmax_scale=None)`` on [B, H, S, D], exact, any strides.

``causal`` is FlashAttention's mask, the last query sees the last key; it is what ``causal=True`` says of a problem with the
word "causal". K and V may have fewer heads than Q. Of a tuple that a function returns only the first part is judged; kernels of
the package are held to their log-sum-exp too.

The cap is derived. Attention's weights are positive and sum to one, so perturbing each weight, or the output, by a relative
``e`` moves the output by at most ``e max|V|``. A kernel may round four times to the input dtype (``u`` is 2^-8 for bf16, 2^-11
for fp16, 2^-24 for fp32): a scaled operand, a score, a weight, the output. Its scores, accumulated in fp32 over D products, err
by ``s = 4 sqrt(D) 2^-24 scale max||q|| max||k||`` (Higham and Mary 2019, with lambda = 4), and so its weights by a relative
``2 s``; the sums over Sk keys add ``4 sqrt(Sk) 2^-24``. Together: ``(4 u + 2 s + 4 sqrt(Sk) 2^-24) max|V|``. RMS and mean are
held to half of it, relative to the RMS of V.

The log-sum-exp is fp32 for every input dtype: its plain version is done in fp32, and ``s`` is added to its floor, because
tensor cores sum in an order, and with a truncation, of their own. Where that floor is all there is, it is also the cap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import torch

from flashmoe_science.contract import DISTRIBUTIONS, Contract, Errors, Mistake, Output, unit_roundoff
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention import suites
from flashmoe_science.ops.attention.inputs import (
    AttentionInputs,
    AttentionKernel,
    AttentionOutput,
    allocate_output,
    output_strides,
)
from flashmoe_science.ops.attention.mistakes import mistakes
from flashmoe_science.ops.attention.oracle import attention_oracle, attention_plain
from flashmoe_science.ops.attention.problem import AttentionProblem

Inputs = Mapping[str, torch.Tensor]

_ANOTHER, _DEFAULT = "another softmax scale", "the softmax scale left to its default"
_ZERO, _NEGATIVE, _SLICED = "a softmax scale of 0", "a negative softmax scale", "slices of larger tensors"
_FP32 = 2.0**-24
_NO_CAP = Errors(math.inf, math.inf, math.inf)


class AttentionContract(Contract):
    """Softmax(Q K^T * scale + mask) V; see the module. ``stretch`` multiplies the usual scale, D to the -1/2; with ``explicit``
    False the scale is not passed; with ``sliced`` Q, K and V are the first columns of tensors that are twice as wide."""

    name: ClassVar[str] = "attention"
    outputs: ClassVar[tuple[Output, ...]] = (Output("out"), Output("lse", optional=True))
    # "opposed": Q and K point away from each other, so that every score is far below zero.
    distributions: ClassVar[tuple[str, ...]] = (*DISTRIBUTIONS, "opposed")
    variants: ClassVar[tuple[str, ...]] = (_ANOTHER, _DEFAULT)
    sweep_variants: ClassVar[tuple[str, ...]] = (_ZERO, _NEGATIVE, _SLICED)
    families: ClassVar[Mapping[str, str]] = {
        "PyTorch's FlashAttention-2": "pytorch_flash::",
        "cuDNN": "cudnn.*(sdpa|attention|flash)",
        "PyTorch's memory-efficient attention": "fmha_cutlass",
        "FlashAttention-3": "flash::.*FlashAttnFwd",
        "FlashAttention-4": "flash_attncute",
        "FlexAttention": "triton_.*flex_(attention|decoding)",
        "this project": "^flashmoe_",
    }

    def __init__(self, stretch: float = 1.0, explicit: bool = True, sliced: bool = False) -> None:
        self._stretch, self._explicit, self._sliced = stretch, explicit, sliced

    def variant(self, name: str) -> AttentionContract:
        return {
            _ANOTHER: AttentionContract(stretch=1.5),
            _DEFAULT: AttentionContract(explicit=False),
            _ZERO: AttentionContract(stretch=0.0),
            _NEGATIVE: AttentionContract(stretch=-1.0),
            _SLICED: AttentionContract(sliced=True),
        }[name]

    def default_problems(self) -> Sequence[str]:
        return suites.COMMON if torch.cuda.is_available() else suites.COMMON_CPU

    def suites(self) -> Mapping[str, Sequence[str]]:
        return suites.SUITES

    def draw(self, near: AttentionProblem, chance: Random) -> AttentionProblem:
        return suites.drawn(near, chance)

    def smoke(self, device: Device) -> str:
        return suites.SMOKE_CPU if device is None else suites.SMOKE

    def build_problems(self) -> Sequence[str]:
        return suites.BUILD

    def small_problems(self) -> Sequence[str]:
        return suites.small()

    def sweep(self) -> Sequence[str]:
        return suites.sweep()

    def cannot(self, problem: Any) -> str | None:
        reason = super().cannot(problem)
        if reason is None and problem.mask == "causal-topleft":
            return "causal=True says that the last query sees the last key; the contract has no word for another mask"
        return reason

    def inputs(self, problem: AttentionProblem, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
        shapes = {
            "q": (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim),
            "k": (problem.batch, problem.heads_kv, problem.seqlen_k, problem.head_dim),
            "v": (problem.batch, problem.heads_kv, problem.seqlen_k, problem.head_dim_v),
        }
        made = {}
        for name, (batch, heads, rows, width) in shapes.items():
            first = (rows, heads) if problem.layout == "bshd" else (heads, rows)
            flat = torch.empty((batch, *first, width), dtype=self.dtype(problem), device=device).normal_(generator=generator)
            if self._sliced:
                flat = torch.cat((flat, flat), dim=-1)[..., :width]
            made[name] = flat.transpose(1, 2) if problem.layout == "bshd" else flat
        return made

    def vary(self, distribution: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if distribution == "opposed":  # scores around -160 at the usual scale; exp(-104) is zero in fp32
            reach = 16.0 * inputs["q"].shape[-1] ** -0.25
            return inputs | {"q": inputs["q"].abs_().mul_(reach), "k": inputs["k"].abs_().mul_(-reach)}
        return super().vary(distribution, inputs)

    def call(self, fn: Callable[..., Any], problem: AttentionProblem, inputs: Inputs) -> Any:
        scale = {"softmax_scale": problem.softmax_scale * self._stretch} if self._explicit else {}
        result = fn(inputs["q"], inputs["k"], inputs["v"], causal=problem.causal, **scale)
        return result[0] if isinstance(result, tuple) and result else result

    def reference(self, problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        return attention_oracle(self.for_kernel(problem, inputs))

    def mistakes(self, problem: AttentionProblem, inputs: Inputs) -> Iterator[Mistake]:
        return mistakes(self.for_kernel(problem, inputs))

    def plain(self, problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        return attention_plain(self.for_kernel(problem, inputs))

    def cap(self, problem: AttentionProblem, inputs: Inputs, reference: tuple[torch.Tensor, ...]) -> tuple[Errors, ...]:
        roundings = 4 * unit_roundoff(inputs["q"].dtype) + 2 * self._score_rounding(problem, inputs)
        relative = roundings + 4 * math.sqrt(problem.seqlen_k) * _FP32
        values = inputs["v"].float()
        typical = 0.5 * relative * values.square().mean().sqrt().item()
        return (Errors(relative * values.abs().max().item(), typical, typical), _NO_CAP)

    def rounding(self, problem: AttentionProblem, inputs: Inputs) -> tuple[float, ...]:
        return (0.0, self._score_rounding(problem, inputs))

    def _score_rounding(self, problem: AttentionProblem, inputs: Inputs) -> float:
        norms = [torch.linalg.vector_norm(inputs[name].float(), dim=-1).max().item() for name in ("q", "k")]
        scale = abs(problem.softmax_scale * self._stretch)
        return float(4 * math.sqrt(problem.head_dim) * _FP32 * scale * norms[0] * norms[1])

    def for_kernel(self, problem: AttentionProblem, inputs: Inputs) -> AttentionInputs:
        scale = problem.softmax_scale * self._stretch
        return AttentionInputs(problem, inputs["q"], inputs["k"], inputs["v"], scale, return_lse=True)

    def from_kernel(self, result: AttentionOutput) -> tuple[torch.Tensor, ...]:
        return (result.out,) if result.lse is None else (result.out, result.lse)

    def timed_inputs(self, taken: AttentionInputs) -> AttentionInputs:
        return replace(taken, return_lse=False)

    def planned(
        self, kernel: AttentionKernel, config: Config, like: AttentionInputs
    ) -> Callable[[AttentionInputs], AttentionOutput]:
        if kernel.plan is None:
            return lambda inputs: kernel.run(inputs, config)
        tensors = (like.q, like.k, like.v)
        strides = (*(one.stride() for one in tensors), output_strides(like.q, like.problem.head_dim_v))
        launch = kernel.plan(like, config).bind(tuple(one.shape for one in tensors), strides)

        def call(inputs: AttentionInputs) -> AttentionOutput:
            result = allocate_output(inputs)
            launch(inputs.q, inputs.k, inputs.v, result.out, result.lse, inputs.softmax_scale)
            return result

        return call

    def user_call(
        self, kernel: AttentionKernel, config: Config, problem: AttentionProblem, device: Device
    ) -> Callable[[AttentionInputs], AttentionOutput] | None:
        """``scaled_dot_product_attention``, where it would run this config. It has no bottom-right mask."""
        from flashmoe_science.dispatch.select import select
        from flashmoe_science.dispatch.table import committed_table

        if device is None or kernel.origin != "ours" or (problem.mask == "causal" and problem.seqlen_q != problem.seqlen_k):
            return None
        if select(problem, device, committed_table(), [kernel], None, requested=kernel).config != config:
            return None
        from flashmoe_science.attention import scaled_dot_product_attention

        name, causal, grouped = kernel.name, problem.causal, problem.heads != problem.heads_kv

        def call(inputs: AttentionInputs) -> AttentionOutput:
            return AttentionOutput(
                scaled_dot_product_attention(
                    inputs.q, inputs.k, inputs.v, is_causal=causal, scale=inputs.softmax_scale, enable_gqa=grouped, kernel=name
                )
            )

        return call


CONTRACT = AttentionContract()
