"""The attention contract: ``fn(q, k, v, causal=False, softmax_scale=None)`` on [B, H, S, D], exact, any strides.

``causal`` is FlashAttention's mask, the last query sees the last key; it is what ``causal=True`` says of a problem with the
word "causal". K and V may have fewer heads than Q. Of a tuple that a function returns only the first part is judged; kernels of
the package are held to their log-sum-exp too.

The cap is derived. Attention's weights are positive and sum to one, so perturbing each weight, or the output, by a relative
``e`` moves the output by at most ``e max|V|``. A kernel may round four times to the input dtype (``u`` is 2^-8 for bf16, 2^-11
for fp16, 2^-24 for fp32): a scaled operand, a score, a weight, the output; a score as far as that moves its weight by ``u``, so
that large scores must stay in fp32. Its scores, accumulated in fp32 over D products, err by
``s = 4 sqrt(D) 2^-24 scale max||q|| max||k||`` (Higham and Mary 2019, with lambda = 4), and so its weights by a relative
``2 s``; the sums over Sk keys add ``4 sqrt(Sk) 2^-24``. Together: ``(4 u + 2 s + 4 sqrt(Sk) 2^-24) max|V|``. RMS and mean are
held to half of it, relative to the RMS of V.

Features add roundings to the four: one for a capped score (a cap moves scores towards each other, so that it enlarges no error
but its own; ``tanh.approx`` is off by 2^-11 of it), one for a score with a bias, two for keys and values that are dequantised.
Only keys that a call may use count in ``max||k||`` and ``max|V|``.

The log-sum-exp is fp32 for every input dtype: its plain version is done in fp32, and ``s`` is added to its floor, because
tensor cores sum in an order, and with a truncation, of their own. Where that floor is all there is, it is also the cap. A soft
cap adds ``8 * 2^-24`` of itself, as a hyperbolic tangent in fp32 is off by, and a bias half as much of its largest element.

Problems with features: a candidate gets what FlashAttention has an argument for (``call``). Kernels of the package get all as
``Tensors``; the inputs hold each tensor of them by name (inputs.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, ClassVar, Self

import torch

from flashmoe_science.contract import DISTRIBUTIONS, Contract, Errors, Mistake, Output, arguments_of, unit_roundoff
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionKernel, AttentionOutput, planned
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.attention.proof import inputs as features_inputs
from flashmoe_science.ops.attention.proof import memory, suites
from flashmoe_science.ops.attention.proof.mistakes import mistakes
from flashmoe_science.ops.attention.proof.oracle import attention_oracle, attention_plain, extents
from flashmoe_science.ops.attention.proof.public_calls import public_call
from flashmoe_science.ops.gradients import AFTER_ANOTHER, AFTER_CHANGE, ONE_BY_ONE

Inputs = Mapping[str, torch.Tensor]
Placed = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]

BY_WINDOW = "a causal mask that the window gives"
HIDDEN_KEYS = "a mask that hides the first keys"
FAR = "K and V that reach over 2^31 elements"
_PLACED: Mapping[str, Placed] = {
    "views of one projection": memory.one_projection,
    "K and V in two memory orders": memory.two_orders,
    "V as the first columns of K": memory.values_of_keys,
    "strides of 0 (expanded Q, K and V)": memory.expanded,
    "tensors that begin at odd addresses": memory.at_odd_addresses,
    "rows before batches in memory": memory.rows_before_batches,
    "one key that is an outlier": memory.with_an_outlier,
    HIDDEN_KEYS: memory.with_hidden_keys,
    FAR: memory.beyond_32_bits,
    "a gradient of stride 0 (of a sum)": memory.expanded_gradient,
    "a gradient in another memory order": memory.reordered_gradient,
}
_VARIANTS: Mapping[str, dict[str, Any]] = {
    "another softmax scale": {"stretch": 1.5},
    "the softmax scale left to its default": {"explicit": False},
    "a softmax scale of 0": {"stretch": 0.0},
    "a negative softmax scale": {"stretch": -1.0},
    "slices of larger tensors": {"sliced": True},
    "a gradient into the log-sum-exp too": {"of_lse": True},
    **{asked: {"asked": asked} for asked in (ONE_BY_ONE, AFTER_ANOTHER, AFTER_CHANGE)},
    BY_WINDOW: {"by_window": True},
    **{name: {"placed": placed} for name, placed in _PLACED.items()},
}
IN_MEMORY = ("slices of larger tensors", *tuple(_PLACED)[:6])
_FP32 = 2.0**-24
_NO_CAP = Errors(math.inf, math.inf, math.inf)
_ARGUMENTS = ("window", "softcap", "sinks", "alibi", "boolmask", "bias")  # features that a candidate can be called with
_E4M3 = torch.float8_e4m3fn


class SharedContract(Contract):
    """What the contracts of the forward and of the backward share. ``stretch`` multiplies the usual scale, D to the -1/2; with
    ``explicit`` False the scale is not passed; with ``sliced`` Q, K, V and a mask are slices of tensors twice as wide;
    ``placed`` puts the inputs elsewhere in memory; with ``by_window`` a window's right end of 0 says what ``causal`` does."""

    lists: ClassVar[Any]  # the module of its problems
    # "opposed": Q and K point away from each other, so that every score is far below zero.
    distributions: ClassVar[tuple[str, ...]] = (*DISTRIBUTIONS, "opposed")
    variants: ClassVar[tuple[str, ...]] = ("another softmax scale", "the softmax scale left to its default")
    everywhere: ClassVar[tuple[str, ...]] = ("another softmax scale",)
    families: ClassVar[Mapping[str, str]] = {
        "PyTorch's FlashAttention-2": "pytorch_flash::",
        "cuDNN": "cudnn.*(sdpa|attention|flash)",
        "PyTorch's memory-efficient attention": "fmha_cutlass",
        "FlashAttention-3": "flash::.*FlashAttnFwd",
        "FlashAttention-4": "flash_attncute",
        "FlashInfer": r"flashinfer::|\bkernel_mha\(",
        "FlexAttention": "triton_.*flex_(attention|decoding)",
        "this project": "^flashmoe_",
    }

    def __init__(
        self,
        stretch: float = 1.0,
        explicit: bool = True,
        sliced: bool = False,
        by_window: bool = False,
        placed: Placed = memory.as_made,
    ) -> None:
        self._stretch, self._explicit, self._sliced, self._placed = stretch, explicit, sliced, placed
        self._by_window = by_window

    def variant(self, name: str) -> Self:
        return type(self)(**_VARIANTS[name])

    def default_problems(self) -> Sequence[str]:
        return tuple(self.lists.COMMON if torch.cuda.is_available() else self.lists.COMMON_CPU)

    def suites(self) -> Mapping[str, Sequence[str]]:
        return dict(self.lists.SUITES)

    def draw(self, near: AttentionProblem, chance: Random) -> AttentionProblem:
        return suites.drawn(near, chance)

    def smoke(self, device: Device) -> str:
        return str(self.lists.SMOKE_CPU if device is None else self.lists.SMOKE)

    def build_problems(self) -> Sequence[str]:
        return tuple(self.lists.BUILD)

    def small_problems(self) -> Sequence[str]:
        return tuple(self.lists.small())

    def sweep(self) -> Sequence[str]:
        return tuple(self.lists.sweep())

    def sweep_of(self, fn: Callable[..., Any]) -> Sequence[str]:
        """The sweep, with a problem of each feature that ``fn`` has an argument for."""
        *plain, last = self.sweep()
        return (*plain, *self.lists.sweep_of(arguments_of(fn)), last)

    def _scale(self, problem: AttentionProblem) -> float:
        return problem.softmax_scale * self._stretch


class AttentionContract(SharedContract):
    """Softmax(Q K^T * scale + mask) V; see the module."""

    name: ClassVar[str] = "attention"
    lists: ClassVar[Any] = suites
    outputs: ClassVar[tuple[Output, ...]] = (Output("out"), Output("lse", optional=True))
    sweep_variants: ClassVar[tuple[str, ...]] = (*IN_MEMORY, "one key that is an outlier", HIDDEN_KEYS, BY_WINDOW)
    calls: ClassVar[tuple[str, ...]] = (*Contract.calls, "autocast")
    # PyTorch's own attention on a CPU gives NaN for them under a causal mask that hides a key.
    edge_variants: ClassVar[tuple[str, ...]] = ("a softmax scale of 0", "a negative softmax scale", FAR)

    def cannot(self, problem: Any) -> str | None:
        return super().cannot(problem) or self.cannot_call(problem)

    def cannot_call(self, problem: AttentionProblem) -> str | None:
        """Why ``call`` has no words for a problem; None if it has."""
        if problem.mask == "causal-topleft":
            return "the contract has no top-left causal mask; with causal=True the last query sees the last key"
        return unsupported(problem.features, _ARGUMENTS, "a function on [B, H, S, D] tensors")

    def inputs(self, problem: AttentionProblem, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return self._placed(features_inputs.make_tensors(problem, self.dtype(problem), device, generator, self._sliced))

    def poisoned(self, problem: AttentionProblem, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        features_inputs.fill_unused(inputs, math.nan, leftpad=True)
        return inputs

    def vary(self, distribution: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if distribution == "normal":
            return inputs
        if distribution == "opposed":  # scores around -160 at the usual scale; exp(-104) is zero in fp32
            reach = 16.0 * inputs["q"].shape[-1] ** -0.25
            changed = inputs | {"q": inputs["q"].abs_().mul_(reach), "k": _negative(inputs["k"], reach)}
        else:  # of e4m3 keys and values the scales change
            floats = {name: one for name, one in inputs.items() if one.dtype != _E4M3}
            changed = inputs | super().vary(distribution, floats)
            if distribution == "tiny" and inputs["q"].dtype != torch.float16:
                for one in filter(torch.is_floating_point, floats.values()):
                    one.mul_(2.0**-20)  # of which fp16 would hold nothing
            if distribution == "constant" and "v" in floats:
                changed["v"].mul_(32.0)  # whose sum over some thousand keys fp16 does not hold
        features_inputs.fill_unused(changed, features_inputs.GARBAGE)
        return changed

    def call(self, fn: Callable[..., Any], problem: AttentionProblem, inputs: Inputs) -> Any:
        """The first that ``returned`` gives."""
        result = self.returned(fn, problem, inputs)
        return result[0] if isinstance(result, tuple) and result else result

    def returned(self, fn: Callable[..., Any], problem: AttentionProblem, inputs: Inputs) -> Any:
        """What ``fn`` returns, called with FlashAttention's arguments, and ``sinks`` and ``attn_mask`` where given."""
        scale = {"softmax_scale": self._scale(problem)} if self._explicit else {}
        named = {"causal": problem.causal, **scale, **_arguments(problem, inputs)}
        if self._by_window and problem.causal and "window_size" in arguments_of(fn):
            left, _ = named.get("window_size", (-1, -1))
            named |= {"causal": False, "window_size": (left, 0)}
        return fn(inputs["q"], inputs["k"], inputs["v"], **named)

    def reference(self, problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        return attention_oracle(self.for_kernel(problem, inputs))

    def mistakes(self, problem: AttentionProblem, inputs: Inputs) -> Iterator[Mistake]:
        return mistakes(self.for_kernel(problem, inputs))

    def plain(self, problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        return attention_plain(self.for_kernel(problem, inputs))

    def cap(self, problem: AttentionProblem, inputs: Inputs, reference: tuple[torch.Tensor, ...]) -> tuple[Errors, ...]:
        features = problem.features
        count = 4 + (features.softcap > 0) + (features.bias in ("alibi", "additive")) + 2 * features.fp8_cache
        roundings = count * unit_roundoff(inputs["q"].dtype) + 2 * self.score_rounding(problem, inputs, self._scale(problem))
        relative = roundings + 4 * math.sqrt(problem.seqlen_k) * _FP32
        _, largest, rms = extents(self.for_kernel(problem, inputs))
        typical = 0.5 * relative * rms
        return (Errors(relative * largest, typical, typical), _NO_CAP)

    def rounding(self, problem: AttentionProblem, inputs: Inputs) -> tuple[float, ...]:
        return (0.0, self.score_rounding(problem, inputs, self._scale(problem)))

    def score_rounding(self, problem: AttentionProblem, inputs: Inputs, scale: float) -> float:
        """What scores accumulated in fp32 err by; see the module."""
        query = torch.linalg.vector_norm(inputs["q"].float(), dim=-1).max().item()
        key, _, _ = extents(self.for_kernel(problem, inputs))
        more = 2.0 * problem.features.softcap
        if problem.features.bias == "additive":
            more += inputs["bias"].masked_fill(inputs["bias"].isinf(), 0.0).abs().max().item()  # -inf hides a key
        return float(4 * _FP32 * (math.sqrt(problem.head_dim) * abs(scale) * query * key + more))

    def for_kernel(self, problem: AttentionProblem, inputs: Inputs) -> AttentionInputs:
        return AttentionInputs(problem, *features_inputs.call_of(problem, inputs), self._scale(problem))

    def from_kernel(self, result: AttentionOutput) -> tuple[torch.Tensor, ...]:
        return (result.out,) if result.lse is None else (result.out, result.lse)

    def timed_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        return replace(inputs, options=inputs.options._replace(return_lse=False))

    def planned(
        self, kernel: AttentionKernel, config: Config, like: AttentionInputs
    ) -> Callable[[AttentionInputs], AttentionOutput]:
        return super().planned(kernel, config, like) if kernel.plan is None else planned(kernel.plan, config, like)

    def user_call(
        self, kernel: AttentionKernel, config: Config, problem: AttentionProblem, device: Device
    ) -> Callable[[AttentionInputs], AttentionOutput] | None:
        """The public function, where it would run this config. None has a bottom-right mask for [B, H, S, D] views."""
        from flashmoe_science.ops.choose import would_run

        return public_call(problem, kernel.name) if would_run(kernel, config, problem, device) else None


def _negative(keys: torch.Tensor, reach: float) -> torch.Tensor:
    """Keys with every element made negative, and ``reach`` times as large unless they are e4m3."""
    if keys.dtype != _E4M3:
        return keys.abs_().mul_(-reach)
    keys.view(torch.uint8).bitwise_or_(0x80)
    return keys


def _arguments(problem: AttentionProblem, inputs: Inputs) -> dict[str, Any]:
    """What a problem's features are called in a candidate's arguments."""
    features = problem.features
    named: dict[str, Any] = {}
    if features.window:
        sides = features.window_left, features.window_right
        named["window_size"] = tuple(-1 if one is None else one for one in sides)
    if features.softcap:
        named["softcap"] = float(features.softcap)
    renamed = {"sinks": "sinks", "alibi_slopes": "alibi_slopes", "bias": "attn_mask"}
    return named | {argument: inputs[name] for name, argument in renamed.items() if name in inputs}


CONTRACT = AttentionContract()
