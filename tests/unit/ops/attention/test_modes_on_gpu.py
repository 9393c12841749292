"""Random problems of all modes and their combinations on this GPU, each held as the exam holds it.

FLASHMOE_RANDOM_CASES is how many, FLASHMOE_RANDOM_SEED where they begin; both are printed (``pytest -s``), and a failure prints
its problem. A problem is made to be possible; what the kernel says it does not serve is left out.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from modes_cases import Changed, examine

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import Config
from flashmoe_science.operations import kernel_named
from flashmoe_science.ops.attention.contract import CONTRACT
from flashmoe_science.ops.attention.modes import Modes
from flashmoe_science.ops.attention.problem import AttentionProblem

pytestmark = pytest.mark.gpu
CASES = int(os.environ.get("FLASHMOE_RANDOM_CASES", "40"))
SEED = int(os.environ.get("FLASHMOE_RANDOM_SEED") or random.randrange(2**32))
VARIANTS = ("", "", *CONTRACT.variants, *CONTRACT.sweep_variants)


@st.composite
def modes(draw: DrawFn, mask: str, dtype: str) -> Modes:
    """Modes that go together under such a mask."""
    some = st.sampled_from([False, False, True])
    lengths = "equal" if mask == "causal-topleft" else draw(st.sampled_from(["equal", "ragged", "ragged", "packed"]))
    page = draw(st.sampled_from([0, 0, 1, 5, 8, 16, 32, 64, 128, 256])) if lengths != "equal" else 0
    cached = lengths == "ragged" or page > 0
    leftpad = cached and draw(some)
    biases = ["none", "none"] + (["alibi"] if mask != "causal-topleft" else [])
    biases += ["boolean", "additive"] if lengths != "packed" and not leftpad else []
    prefix = draw(st.sampled_from([0, 0, 1, 40, 500])) if mask != "full" and not leftpad else 0
    limit = st.none() | st.integers(0, 300)
    windowed = mask != "causal-topleft" and not prefix
    return Modes(
        window_left=draw(limit) if windowed else None,
        window_right=draw(limit) if windowed and mask == "full" else None,
        softcap=draw(st.sampled_from([0, 0, 5, 50])),
        sinks=draw(some),
        bias=draw(st.sampled_from(biases)),  # type: ignore[arg-type]
        prefix=prefix,
        lengths=lengths,  # type: ignore[arg-type]
        page=page,
        leftpad=leftpad,
        fp8_cache=dtype != "fp32" and draw(some),
    )


@st.composite
def problems(draw: DrawFn) -> AttentionProblem:
    mask = draw(st.sampled_from(["full", "causal", "causal", "causal-topleft"]))
    dtype = draw(st.sampled_from(["bf16", "bf16", "fp16", "fp32"]))
    heads_kv, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([64, 128, 128, 16, 40, 96, 192, 256, 1]))
    return AttentionProblem(
        batch=draw(st.integers(1, 5)),
        heads=heads_kv * draw(st.sampled_from([1, 2, 3, 4, 8, 16])),
        heads_kv=heads_kv,
        seqlen_q=draw(st.integers(1, 8) | st.integers(1, 300)),
        seqlen_k=draw(st.integers(1, 100) | st.integers(1, 3000)),
        head_dim=head_dim,
        head_dim_v=draw(st.sampled_from([head_dim, head_dim, head_dim, 64, 128])),
        dtype=dtype,  # type: ignore[arg-type]
        mask=mask,  # type: ignore[arg-type]
        layout=draw(st.sampled_from(["bhsd", "bshd"])),  # type: ignore[arg-type]
        modes=draw(modes(mask, dtype)),
    )


def test_random_problems_of_all_modes() -> None:
    kernel, gpu, cuda = kernel_named("split_triton"), current_gpu(), torch.device("cuda")
    print(f"{CASES} cases from seed {SEED}: FLASHMOE_RANDOM_CASES={CASES} FLASHMOE_RANDOM_SEED={SEED}")
    seen: dict[str, int] = {}

    @seed(SEED)
    @settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        problems(),
        st.integers(0, 99),
        st.sampled_from([0, 0, 1, 2, 7, 40]),
        st.sampled_from(VARIANTS),
        st.sampled_from(CONTRACT.distributions),
        st.integers(0, 2**31),
    )
    def check(problem: AttentionProblem, place: int, splits: int, variant: str, distribution: str, number: int) -> None:
        if kernel.supports(problem, gpu) is not None:
            return
        configs = kernel.configs(problem, gpu)
        config = Config(**{**configs[place % len(configs)], "num_splits": splits})
        contract = CONTRACT.variant(variant) if variant else CONTRACT
        changed = Changed(number, distribution, other_lengths=place % 2 == 1)
        reasons = examine(kernel, config, problem, contract, cuda, changed)
        assert reasons == [], f"{problem} ({config}, {variant or 'as usual'}, {changed})"
        for kind in problem.modes.kinds() or ("plain",):
            seen[kind] = seen.get(kind, 0) + 1

    check()
    print("right:", ", ".join(f"{kind} {count}" for kind, count in sorted(seen.items())))
