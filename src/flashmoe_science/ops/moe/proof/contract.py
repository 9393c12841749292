"""The contract of a mixture-of-experts kernel of a ``MoEProblem``: ``fn(x, w1, w2, topk_weights, topk_ids)``, and on problems
that start from router logits ``fn(x, w1, w2, router_logits, top_k)``. What differs from SwiGLU without biases comes by
keyword: ``gate_up_bias``, ``down_bias``, the scales and zero points of weights in a ``weight_format``, ``activation`` and
``interleaved``, as ``fused_moe`` has them.

There every implementation is a router, called before its experts: ours ``route``, SonicMoE and triton_kernels their own, the
others PyTorch's top-k (``peers/routers.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, ClassVar, Self

import torch

from flashmoe_science.contract import DISTRIBUTIONS, Contract, Errors, Mistake, arguments_of, unit_roundoff
from flashmoe_science.formats import FORMATS
from flashmoe_science.kernel import Config, Device
from flashmoe_science.operations import public
from flashmoe_science.ops.formats import packed, unpacked
from flashmoe_science.ops.moe.call import Activation, MoEInputs, MoEKernel, MoELaunch, Tensors, activation_of
from flashmoe_science.ops.moe.call.formats import OF_FORMAT, OF_WEIGHTS
from flashmoe_science.ops.moe.peers.routers import has_ours, router_of
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.proof import suites
from flashmoe_science.ops.moe.proof.inputs import alike, in_format, input_scale, router_logits, touching_every_expert
from flashmoe_science.ops.moe.proof.oracle import moe_oracle, moe_plain, moe_scheme, moe_single_level, routing_oracle
from flashmoe_science.ops.moe.proof.variants import (
    INPUT_SCALES,
    OF_IDS,
    SCALES,
    VARIANTS,
    ZERO_POINTS,
    Made,
    scales_between_two_of_bf16,
)
from flashmoe_science.ops.moe.route.route import bind_route
from flashmoe_science.ops.moe.route.spec import Options
from flashmoe_science.ops.moe.route.spec import Tensors as RouterTensors

Inputs = Mapping[str, torch.Tensor]

BIASES = ("gate_up_bias", "down_bias")
_TINY = 2.0**-5  # silu(g) u is then near 2^-11; the least normal number of fp16 is 2^-14


@dataclass(frozen=True, slots=True)
class RouterInputs:
    """One problem that starts from router logits; ``others``: its Tensors by name, but for the routing."""

    problem: MoEProblem
    router_logits: torch.Tensor
    others: Inputs
    activation: Activation

    def routed(self, from_ids: MoEProblem, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> MoEInputs:
        """The inputs of the experts when these have been chosen."""
        tensors = Tensors(topk_weights=topk_weights, topk_ids=topk_ids, **self.others)
        return MoEInputs(from_ids, tensors, self.activation)


KernelInputs = MoEInputs | RouterInputs


class SharedContract(Contract):
    """What the contracts of the experts and of their backward share: problems, inputs, variants, the call.

    Weights are drawn so that activations stay near 1 at any size, biases with a quarter of the variance. Logits are drawn so
    that no rounding changes the choice: those of a token are 1/8 to 1/2 apart, the largest near 0, and are multiples of 1/64.
    An id below 0 or past the last is no expert here and adds nothing, one that a token names twice adds twice.
    Besides the routing only ``x`` is varied, for "constant" experts too (``alike``), and "tiny" is less tiny here: an expert is
    quadratic in x, and all that its weights would add is results outside fp16's range, which test nothing.
    """

    lists: ClassVar[Any] = suites  # the module of its suites
    # "crowded": all tokens choose the same experts, and the others have none.
    distributions: ClassVar[tuple[str, ...]] = (*DISTRIBUTIONS, "crowded")
    families: ClassVar[Mapping[str, str]] = {
        "PyTorch's grouped products": "GroupProblemShape",
        "SonicMoE": "quack|^token_gather_sum_kernel",
        "humming": "humming|process_input_kernel",
        "triton_kernels": "matmul_ogs",
        "this project": "^flashmoe_",
    }
    sweep_variants: ClassVar[tuple[str, ...]] = tuple(VARIANTS)
    constants: ClassVar[frozenset[str]] = frozenset(OF_FORMAT)

    def __init__(self, changed: Callable[[Made], Made] | None = None) -> None:
        self._changed = changed

    def variant(self, name: str) -> Self:
        return type(self)(VARIANTS[name])

    def default_problems(self) -> Sequence[str]:
        return self.lists.DEFAULT  # type: ignore[no-any-return]

    def sweep(self) -> Sequence[str]:
        return self.lists.SWEEP  # type: ignore[no-any-return]

    def sweep_of(self, fn: Callable[..., Any]) -> Sequence[str]:
        """The sweep, then problems of what ``fn`` has arguments for, the one with most of them last; from logits where it has
        an argument ``router_logits``."""
        texts = (*self.sweep(), *self.lists.sweep_of(arguments_of(fn)))
        return tuple(f"{one} logits" for one in texts) if "router_logits" in arguments_of(fn) else texts

    def suites(self) -> Mapping[str, Sequence[str]]:
        return self.lists.SUITES  # type: ignore[no-any-return]

    def draw(self, near: Any, chance: Random) -> MoEProblem:
        return suites.drawn(near, chance)

    def smoke(self, device: Device) -> str | None:
        return None if device is None else self.lists.SMOKE

    def build_problems(self) -> Sequence[str]:
        return self.lists.BUILD  # type: ignore[no-any-return]

    def small_problems(self) -> Sequence[str]:
        return self.lists.SMALL  # type: ignore[no-any-return]

    def inputs(self, problem: Any, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
        def normal(*shape: int, width: int) -> torch.Tensor:
            # In the dtype itself: fp32 numbers on the way would take twice the memory of the weights.
            made = torch.empty(shape, dtype=self.dtype(problem), device=device)
            return made.normal_(generator=generator).mul_(width**-0.5)

        def weights_of(rows: int, width: int) -> torch.Tensor:
            if p.transposed:
                return normal(p.experts, width, rows, width=width).mT
            return normal(p.experts, rows, width, width=width)

        p, rows = problem, problem.rows_of_w1()
        if p.routing == "ids":
            logits = torch.randn(p.tokens, p.experts, device=device, generator=generator)
            weights, ids = routing_oracle(logits, p.top_k)
            if p.top_k == 1:  # which a router does not make one, as that of Llama 4
                weights = weights * torch.linspace(0.5, 0.9, p.tokens, device=device)[:, None]
            routing = {"topk_weights": weights.float(), "topk_ids": touching_every_expert(ids, p.experts)}
        else:
            routing = {"router_logits": router_logits(p, device, generator)}
        made = {
            "x": normal(p.tokens, p.dim, width=1),
            "w1": weights_of(rows, p.dim),
            "w2": weights_of(p.dim, p.hidden),
            **routing,
        }
        if p.bias:
            made |= {name: normal(p.experts, width, width=4) for name, width in zip(BIASES, (rows, p.dim), strict=True)}
        if p.weight_format is not None:
            made |= in_format(p, made["w1"], made["w2"], generator)
            if FORMATS[p.weight_format].static:
                made |= {name: input_scale(p, device, generator) for name in INPUT_SCALES}
        # Of sums that cancel, quantised rows are off by more than any rounding of scales.
        out_of_place = self._changed is scales_between_two_of_bf16 and activation_of(p).w8a8
        out_of_place |= self._changed in OF_IDS.values() and p.routing != "ids"
        return made if self._changed is None or out_of_place else self._changed(made)

    def call(self, fn: Callable[..., Any], problem: Any, inputs: Inputs) -> Any:
        named = {name: inputs[name] for name in (*BIASES, *OF_FORMAT) if name in inputs}
        tensors = [one for name, one in inputs.items() if name not in named]
        routing = () if problem.routing == "ids" else (problem.top_k,)
        return fn(*tensors, *routing, **named, **_options(problem))

    def widened(self, inputs: Inputs) -> Inputs:
        weights = {
            name: inputs[name] for name in ("w1", "w2", *OF_WEIGHTS) if name in inputs
        }  # an expert at a time: see the oracle
        rest = super().widened({name: one for name, one in inputs.items() if name not in weights})
        return {name: weights.get(name, rest.get(name)) for name in inputs}  # type: ignore[misc]  # one of the two has it

    def mistakes(self, problem: Any, inputs: Inputs) -> Iterator[Mistake]:
        """The results of problems that differ in one option: a kernel must not be right for them too."""
        if problem.activation != "silu":
            other = self.reference(replace(problem, activation="silu"), inputs)
            yield Mistake("activation-silu", "it is right for silu", other)
        if problem.gated:
            words = "gates that all come before the ups" if problem.interleaved else "gates and ups that alternate"
            other = self.reference(replace(problem, interleaved=not problem.interleaved), inputs)
            yield Mistake("interleaved", f"it is right for {words}", other)
        if problem.weight_format is not None:
            yield from self._mistakes_of_format(problem, inputs)

    def _mistakes_of_format(self, problem: Any, inputs: Inputs) -> Iterator[Mistake]:
        moved = {name: inputs[name].roll(1, -1) for name in SCALES}
        yield Mistake("scale-moved", "it is right for scales of the block before", self.reference(problem, {**inputs, **moved}))
        if FORMATS[problem.weight_format].bits == 4:
            halves = {name: inputs[name].view(torch.uint8) for name in ("w1", "w2")}
            swapped = {name: (one << 4 | one >> 4).view(inputs[name].dtype) for name, one in halves.items()}
            words = "it is right for codes whose even column is the high four bits"
            yield Mistake("nibbles-swapped", words, self.reference(problem, {**inputs, **swapped}))
        if INPUT_SCALES[0] in inputs:
            by = inputs[INPUT_SCALES[1]]
            moved = {SCALES[1]: inputs[SCALES[1]] * (by.roll(1) / by)[:, None]}
            words = "it is right for products times the input scale of another expert"
            yield Mistake("input-scale-moved", words, self.reference(problem, {**inputs, **moved}))
        if ZERO_POINTS[0] in inputs:
            yield from self._mistakes_of_zero_points(problem, inputs)
        elif "int4" in problem.weight_format:
            signed = {name: (one ^ 0x88).view(torch.int32) for name, one in halves.items()}
            words = "it is right for codes that are two's complement"
            yield Mistake("codes-signed", words, self.reference(problem, {**inputs, **signed}))
        elif problem.weight_format.startswith("fp8"):
            yield from self._mistakes_of_e4m3(problem, inputs)
        words = "it is right for sums of 14 bits, which tensor cores of 8 bits make of the whole depth at one level"
        tensors = oracle_tensors(problem, inputs, torch.float64)
        yield Mistake("single-level-sum", words, moe_single_level(tensors, activation_of(problem)))

    def _mistakes_of_e4m3(self, problem: Any, inputs: Inputs) -> Iterator[Mistake]:
        codes = {name: inputs[name].view(torch.uint8) for name in ("w1", "w2")}
        normal = {name: torch.where(one & 0x78 == 0, 0, one).view(torch.float8_e4m3fn) for name, one in codes.items()}
        words = "it is right for codes of which those that are subnormal are 0"
        yield Mistake("subnormals-flushed", words, self.reference(problem, {**inputs, **normal}))
        rounded = {name: inputs[name].bfloat16().float() for name in SCALES}
        words = "it is right for scales that are rounded to bf16"
        yield Mistake("scales-rounded", words, self.reference(problem, {**inputs, **rounded}))

    def _mistakes_of_zero_points(self, problem: Any, inputs: Inputs) -> Iterator[Mistake]:
        zeros = {name: unpacked(inputs[name]) for name in ZERO_POINTS}
        more = {name: packed(one + 1 & 15) for name, one in zeros.items()}
        words = "it is right for zero points that are one more, as where GPTQ's first version is read"
        yield Mistake("zero-points-more", words, self.reference(problem, {**inputs, **more}))
        none = {name: packed(torch.full_like(one, 8)) for name, one in zeros.items()}
        words = "it is right for zero points that are all 8"
        yield Mistake("zero-points-missing", words, self.reference(problem, {**inputs, **none}))

    def vary(self, distribution: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if distribution == "crowded" and "router_logits" in inputs:
            return inputs | {"router_logits": inputs["router_logits"].sort(-1, descending=True).values}
        if distribution == "crowded":
            ids = inputs["topk_ids"]
            return inputs | {
                "topk_ids": torch.arange(ids.shape[1], device=ids.device, dtype=ids.dtype).expand_as(ids).contiguous()
            }
        if distribution == "tiny":
            return inputs | {"x": inputs["x"].mul_(_TINY if inputs["x"].dtype == torch.float16 else _TINY**4)}
        if distribution == "constant":
            inputs = alike(inputs)
        changed = inputs | super().vary(distribution, {"x": inputs["x"]})
        if distribution == "large" and changed["x"].dtype != torch.float16:
            changed["x"].mul_(4.0)  # gates beyond 88, of which fp32 has no exponential
        return changed


class MoEContract(SharedContract):
    """Experts, of routed tokens or with their router."""

    name: ClassVar[str] = "moe"
    calls: ClassVar[tuple[str, ...]] = (*Contract.calls, "autocast")
    everywhere: ClassVar[tuple[str, ...]] = ("ids of -1 (no expert)",)

    def reference(self, problem: MoEProblem, inputs: Inputs) -> torch.Tensor:
        """The oracle on rows that are not quantised, also where products quantise them: codes near a rounding boundary vary."""
        return moe_oracle(oracle_tensors(problem, inputs, torch.float64), replace(activation_of(problem), w8a8=False))

    def plain(self, problem: MoEProblem, inputs: Inputs) -> torch.Tensor:
        return moe_plain(oracle_tensors(problem, inputs, torch.float32), activation_of(problem))

    def cap(self, problem: MoEProblem, inputs: Inputs, reference: tuple[torch.Tensor, ...]) -> tuple[Errors, ...]:
        """The general cap, and what sums of n terms in fp32 add to it, 4 sqrt(n) 2^-24 as in attention's: next to nothing in 16
        bits. In fp32 sixteen roundings alone are at times less than honest sums make. Where products quantise their rows, the
        scheme itself costs more: RMS and mean may be 1.1 of that, which the maximum has beside the rest."""
        cap = cap_of(reference[0], inputs["x"].dtype, problem.dim, problem.hidden, problem.top_k)
        if (activation := activation_of(problem)).w8a8:
            scheme = moe_scheme(oracle_tensors(problem, inputs, torch.float64), activation).to(inputs["x"].dtype)
            cost = Errors.of(scheme - reference[0])
            cap = Errors(cap.max + 1.1 * cost.max, 1.1 * cost.rms, 1.1 * cost.mean)
        return (cap,)

    def mistakes(self, problem: MoEProblem, inputs: Inputs) -> Iterator[Mistake]:
        """The result of weights that a router left as they were; without biases; of other activations, other layouts."""
        if problem.routing != "ids":
            given, words = dict(inputs), "it is right for a softmax over all experts, not renormalised over the chosen"
            of_all = routing_oracle(given.pop("router_logits"), problem.top_k, renormalise=False)
            given |= zip(("topk_weights", "topk_ids"), of_all, strict=True)
            yield Mistake("weights-not-renormalised", words, self.reference(problem.from_ids(), given))
        if problem.bias:
            yield Mistake("bias-missing", "it is right for no biases", self.reference(replace(problem, bias=False), inputs))
        yield from super().mistakes(problem, inputs)

    def for_kernel(self, problem: MoEProblem, inputs: Inputs) -> KernelInputs:
        activation = activation_of(problem)
        if problem.routing != "ids":
            others = {name: one for name, one in inputs.items() if name != "router_logits"}
            return RouterInputs(problem, inputs["router_logits"], others, activation)
        return MoEInputs(problem, Tensors(**inputs), activation)

    def planned(self, kernel: MoEKernel, config: Config, like: KernelInputs) -> Callable[[Any], torch.Tensor]:
        if isinstance(like, MoEInputs):
            return _experts(kernel, config, like)
        problem, logits = like.problem.from_ids(), like.router_logits
        top_k = problem.top_k
        if has_ours(kernel):
            shape = (problem.tokens, top_k)
            weights, ids = (torch.empty(shape, dtype=dtype, device=logits.device) for dtype in (torch.float32, torch.int32))
            experts = _experts(kernel, config, like.routed(problem, weights, ids))
            route = bind_route(RouterTensors(logits), Options(top_k, normalize="sum"))
            return lambda inputs: experts(inputs.routed(problem, *route(inputs.router_logits, None)))
        router = router_of(kernel.name, top_k)
        experts = _experts(kernel, config, like.routed(problem, *router(logits)))
        return lambda inputs: experts(inputs.routed(problem, *router(inputs.router_logits)))

    def user_call(
        self, kernel: MoEKernel, config: Config, problem: MoEProblem, device: Device
    ) -> Callable[[Any], torch.Tensor] | None:
        """``fused_moe``, after ``route`` where it starts from logits, if it would run this config."""
        from flashmoe_science.ops.choose import would_run

        if not would_run(kernel, config, problem.from_ids(), device):
            return None
        top_k, route = problem.top_k, public("flashmoe_science.moe:route")
        experts = partial(public("flashmoe_science.moe:fused_moe"), kernel=kernel.name, **_options(problem))

        def from_ids(one: MoEInputs) -> Any:
            return experts(*one.tensors[:5], **{name: getattr(one.tensors, name) for name in (*BIASES, *OF_FORMAT)})

        def from_logits(one: RouterInputs) -> Any:
            routing = route(one.router_logits, top_k, normalize="sum")
            named = dict(one.others)
            return experts(*(named.pop(name) for name in ("x", "w1", "w2")), *routing, **named)

        return from_ids if problem.routing == "ids" else from_logits


def cap_of(reference: torch.Tensor, dtype: torch.dtype, *terms: int) -> Errors:
    """The cap on a result of sums of so many ``terms``, one after another."""
    relative = 16 * unit_roundoff(dtype) + 4 * sum(map(math.sqrt, terms)) * 2.0**-24
    sizes = Errors.of(reference)
    return Errors(relative * sizes.max, relative * sizes.rms, relative * sizes.rms)


def _experts(kernel: MoEKernel, config: Config, like: MoEInputs) -> Callable[[MoEInputs], torch.Tensor]:
    """A call of the kernel's experts on inputs like these."""
    if kernel.plan is None:
        return lambda inputs: kernel.run(inputs, config)
    bound: MoELaunch = kernel.plan(like, config)(like, like.tensors.x.shape)
    return lambda inputs: bound(*inputs.tensors)


def _options(problem: MoEProblem) -> dict[str, Any]:
    """The arguments of ``fused_moe`` for an activation other than SwiGLU, and for interleaved weights."""
    options: dict[str, Any] = {} if problem.activation == "silu" else {"activation": problem.activation}
    options |= {"interleaved": True} if problem.interleaved else {}
    return options | ({"weight_format": problem.weight_format} if problem.weight_format else {})


def oracle_tensors(problem: MoEProblem, inputs: Inputs, dtype: torch.dtype) -> Tensors:
    """The inputs as the oracle takes them, with the experts that logits choose and their weights, computed in ``dtype``: a
    router is fp32 at least."""
    given = {name: one for name, one in inputs.items() if problem.bias or name not in BIASES}
    if problem.routing != "ids":
        logits = given.pop("router_logits")
        given["topk_weights"], given["topk_ids"] = routing_oracle(logits, problem.top_k, dtype=dtype)
    return Tensors(**given)


CONTRACT = MoEContract()
