"""Random problems of all features and their combinations, with a config, a variant and inputs: all from a case's number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from tests.unit.ops.attention.forward.features_cases import Changed, examine

from flashmoe_science.kernel import CannotServe, Config, Device
from flashmoe_science.ops.attention.call.kernel import AttentionKernel
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.features import Features
from flashmoe_science.ops.attention.proof.contract import CONTRACT

OF_A_BUILD = 8  # numbers in turn whose cases differ in sizes and values alone, so that kernels are built once for them
_VARIANTS = ("", "", *CONTRACT.variants, *CONTRACT.edge_variants, "slices of larger tensors")
_DISTRIBUTIONS = ("normal",) * 4 + CONTRACT.distributions


@dataclass(frozen=True)
class Most:
    """The largest sizes that are drawn."""

    batch: int = 5
    heads_kv: int = 3
    group: int = 16
    queries: int = 300
    keys: int = 3000
    dims: tuple[int, ...] = (64, 128, 128, 16, 40, 96, 192, 256, 1)


@dataclass(frozen=True)
class RandomCase:
    problem: AttentionProblem
    place: int  # of its config
    splits: int
    variant: str
    changed: Changed

    def __str__(self) -> str:
        return f"{self.problem} (config {self.place}, splits {self.splits}, {self.variant or 'as usual'}, {self.changed})"


def drawn(number: int) -> RandomCase:
    """The case of a number."""
    build, chance = Random(number // OF_A_BUILD), Random(f"sizes {number}")
    problem = _problem(build, chance, Most())
    distribution = chance.choice(_DISTRIBUTIONS)
    if problem.dtype == "fp32" and distribution in ("opposed", "large"):
        distribution = "normal"  # scores of 160 in fp32: by chance its plain version is right to the last bit, and no other is
    return RandomCase(
        problem,
        build.randrange(100),
        chance.choice((0, 0, 1, 2, 7, 40)),
        build.choice(_VARIANTS),
        Changed(number % 2**31, distribution, chance.random() < 0.5),
    )


def _problem(build: Random, chance: Random, most: Most) -> AttentionProblem:
    mask: Any = build.choice(("full", "causal", "causal", "causal-topleft"))
    dtype: Any = build.choice(("bf16", "bf16", "fp16", "fp32"))
    layout: Any = build.choice(("bhsd", "bshd"))
    heads_kv, head_dim = chance.randint(1, most.heads_kv), build.choice(most.dims)
    group = build.choice([group for group in (1, 2, 3, 4, 8, 16) if group <= most.group])
    return AttentionProblem(
        batch=chance.randint(1, most.batch),
        heads=heads_kv * group,
        heads_kv=heads_kv,
        seqlen_q=chance.randint(1, chance.choice((1, 8, most.queries))),
        seqlen_k=chance.randint(1, chance.choice((100, most.keys))),
        head_dim=head_dim,
        head_dim_v=head_dim if build.random() < 0.7 else build.choice(most.dims),
        dtype=dtype,
        mask=mask,
        layout=layout,
        features=_modes(build, mask, dtype),
    )


def _modes(chance: Random, mask: str, dtype: str) -> Features:
    """Features that go together under such a mask."""

    def limit() -> int | None:
        return chance.choice((None, 0, chance.randint(1, 30), chance.randint(1, 300)))

    top_left = mask == "causal-topleft"
    lengths: Any = "equal" if top_left else chance.choice(("equal", "ragged", "ragged", "packed"))
    page = chance.choice((0, 0, 1, 5, 8, 16, 32, 64, 128, 256)) if lengths != "equal" else 0
    leftpad = (lengths == "ragged" or page > 0) and chance.random() < 0.25
    biases = ["none"] * 4 + ["alibi"] * (not top_left) + ["boolean", "additive"] * (lengths != "packed")
    bias: Any = chance.choice(biases)
    prefix = chance.choice((0, 0, 1, 40, 500)) if mask != "full" else 0
    return Features(
        window_left=limit() if not top_left else None,
        window_right=limit() if mask == "full" else None,
        softcap=chance.choice((0, 0, 0, 5, 50)),
        sinks=chance.random() < 0.3,
        bias=bias,
        prefix=prefix,
        lengths=lengths,
        page=page,
        leftpad=leftpad,
        fp8_cache=dtype != "fp32" and chance.random() < 0.2,
    )


def judged(kernel: AttentionKernel, case: RandomCase, gpu: Device, device: torch.device) -> list[str] | None:
    """Why the kernel's results are refused, empty where they are right; None where it says that it cannot serve it."""
    if kernel.supports(case.problem, gpu) is not None:
        return None
    configs = kernel.configs(case.problem, gpu)
    config = configs[case.place % len(configs)]
    if "num_splits" in config:
        config = Config(**{**config, "num_splits": case.splits})
    contract = CONTRACT.variant(case.variant) if case.variant else CONTRACT
    try:
        return examine(kernel, config, case.problem, contract, device, case.changed)
    except CannotServe:  # in words, before anything is launched
        return None


@dataclass
class Found:
    """What came of cases: how many were served, how many right by kernel and by mode, and each that was wrong in words."""

    cases: int = 0
    right: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def tried(kernels: Sequence[AttentionKernel], numbers: Iterable[int], gpu: Device, device: torch.device) -> Found:
    """What comes of the cases of these numbers, by every one of the kernels that serves them."""
    found = Found()
    for number in numbers:
        case, served = drawn(number), False
        for kernel in kernels:
            reasons = judged(kernel, case, gpu, device)
            served = served or reasons is not None
            if reasons:
                found.wrong.append(f"{number}: {kernel.name}: {case}: {'; '.join(reasons)}")
            elif reasons is not None:
                found.right[kernel.name] += 1
                found.features.update(case.problem.features.kinds() or ("plain",))
        found.cases += served
    return found
