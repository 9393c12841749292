"""Random problems of all features and their combinations on this GPU, each held as the exam holds it.

FLASHMOE_RANDOM_CASES is how many, FLASHMOE_RANDOM_SEED the number of the first; both are printed (``pytest -s``), and a failure
prints its number and its problem.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from tests.unit.ops.attention.forward.random_features import tried

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.operations import kernel_named

pytestmark = pytest.mark.gpu
CASES = int(os.environ.get("FLASHMOE_RANDOM_CASES", "40"))
FIRST = int(os.environ.get("FLASHMOE_RANDOM_SEED") or random.randrange(2**31))
# fp32 of one query and few keys, of heads from 64 to 256: 1.03 to 2 times their bounds while scores were one chain of sums.
OF_LONG_SUMS = (500004, 500068, 500395, 500397, 500398, 500399, 500617, 500844)


@pytest.mark.parametrize("name", ["split_triton", "chunk_gluon_sm90", "fwd_gluon_sm90"])
def test_random_problems_of_all_modes(name: str) -> None:
    kernel, gpu, cuda = kernel_named(name), current_gpu(), torch.device("cuda")
    print(f"FLASHMOE_RANDOM_CASES={CASES} FLASHMOE_RANDOM_SEED={FIRST}")
    found = tried([kernel], range(FIRST, FIRST + CASES), gpu, cuda)
    print("right:", ", ".join(f"{kind} {count}" for kind, count in sorted(found.features.items())))
    assert not found.wrong, "\n".join(found.wrong[:20])


def test_scores_of_fp32_are_sums_of_short_chains() -> None:
    found = tried([kernel_named("split_triton")], OF_LONG_SUMS, current_gpu(), torch.device("cuda"))
    assert not found.wrong, "\n".join(found.wrong)
    assert found.right["split_triton"] == len(OF_LONG_SUMS)
