"""Random problems of the backward, each with a config, a variant and inputs, all from a case's number; and, as a script with
TRITON_INTERPRET=1, what is wrong with those of some numbers in Triton's interpreter."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from tests.unit.ops.attention.backward.cases import PORTABLE, examine
from tests.unit.ops.attention.forward.random_features import OF_A_BUILD, Found

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.call.backward import BackwardKernel
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.attention.problem.features import Features
from flashmoe_science.ops.attention.proof.backward.contract import CONTRACT, AttentionBackwardContract


@dataclass(frozen=True)
class Most:
    """The largest sizes that are drawn."""

    batch: int = 3
    heads_kv: int = 2
    group: int = 4
    queries: int = 80
    keys: int = 100
    dims: tuple[int, ...] = (16, 16, 32, 40, 64, 1, 128)


TINY = Most()
LARGE = Most(5, 4, 8, 700, 900, (64, 64, 128, 128, 40, 80, 96, 192, 256, 1))


@dataclass(frozen=True)
class RandomCase:
    problem: AttentionBackwardProblem
    place: int  # of its config
    contract: AttentionBackwardContract
    distribution: str
    seed: int

    def config(self, kernel: BackwardKernel, gpu: Device) -> Config:
        configs = kernel.configs(self.problem, gpu)
        return configs[self.place % len(configs)]


def drawn(number: int, most: Most, of_a_build: int = 1) -> RandomCase:
    """The case of a number. Of ``of_a_build`` numbers in turn the cases differ in sizes and values alone."""
    chance = Random(number)
    build = chance if of_a_build == 1 else Random(f"build {number // of_a_build}")
    mask: Any = build.choice(("full", "causal", "causal", "causal-topleft"))
    dtype: Any = build.choice(("bf16", "bf16", "fp16", "fp32"))
    layout: Any = build.choice(("bhsd", "bshd"))
    heads_kv, head_dim = chance.randint(1, most.heads_kv), build.choice(most.dims)
    group = chance.choice([one for one in (1, 1, 2, 3, 4, 8) if one <= most.group])
    seqlen_q = chance.randint(1, most.queries)
    problem = AttentionBackwardProblem(
        batch=chance.randint(1, most.batch),
        heads=heads_kv * group,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_q if chance.random() < 0.4 else chance.randint(1, most.keys),
        head_dim=head_dim,
        head_dim_v=head_dim if build.random() < 0.7 else build.choice(most.dims),
        dtype=dtype,
        mask=mask,
        layout=layout,
        features=_features(build, mask),
    )
    contract = AttentionBackwardContract(chance.choice((1.0, 1.0, 1.5)), True, build.random() < 0.3, build.random() < 0.5)
    distribution = chance.choice(("normal", "normal", *CONTRACT.distributions))
    if dtype == "fp32" and distribution in ("opposed", "large"):
        distribution = "normal"  # by chance the plain version is right to the last bit
    return RandomCase(problem, build.randrange(100), contract, distribution, number)


def _features(chance: Random, mask: str) -> Features:
    def limit() -> int | None:
        return chance.choice((None, None, 0, chance.randint(1, 30), chance.randint(1, 300)))

    top_left = mask == "causal-topleft"
    lengths: Any = "equal" if top_left else chance.choice(("equal", "equal", "packed"))
    biases = ["none"] * 4 + ["alibi"] * (not top_left) + ["boolean", "additive"] * (lengths != "packed")
    return Features(
        window_left=limit() if not top_left else None,
        window_right=limit() if mask == "full" else None,
        softcap=chance.choice((0, 0, 0, 5, 50)),
        sinks=chance.random() < 0.3,
        bias=chance.choice(biases),  # type: ignore[arg-type]
        prefix=chance.choice((0, 0, 1, 40)) if mask != "full" else 0,
        lengths=lengths,
    )


def tried(kernels: Sequence[BackwardKernel], numbers: Iterable[int], gpu: Device, device: torch.device) -> Found:
    """What comes of the large cases of these numbers, by every one of the kernels that serves them."""
    found = Found()
    for number in numbers:
        case = drawn(number, LARGE, OF_A_BUILD)
        problem, able = case.problem, [one for one in kernels if one.cannot(case.problem, gpu) is None]
        for kernel in able:
            config = case.config(kernel, gpu)
            if reasons := examine(kernel, config, problem, case.contract, device, case.seed, case.distribution):
                found.wrong.append(f"{number}: {kernel.name}: {problem} {case.distribution}: {'; '.join(reasons)}")
            else:
                found.right[kernel.name] += 1
                found.features.update(problem.features.kinds() or ("plain",))
        found.cases += bool(able)
    return found


def main() -> None:
    """Arguments: the first number, and how many."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as a GPU's exponential does
    first, count = map(int, sys.argv[1:3])
    gpu, found = gpu_named("h200"), {}
    for number in range(first, first + count):
        case = drawn(number, TINY)
        for kernel in (one for one in PORTABLE if one.cannot(case.problem, gpu) is None):
            found[f"{kernel.name}: {number}: {case.problem} {case.distribution}"] = examine(
                kernel, case.config(kernel, gpu), case.problem, case.contract, torch.device("cpu"), case.seed, case.distribution
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
