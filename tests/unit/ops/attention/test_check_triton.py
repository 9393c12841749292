"""FLASHMOE_CHECK=1: lengths and pages on a GPU are refused in words, by one launch and one read, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from tests.unit.interpreter import Interpreter

FOLDER = "ops/attention"


def test_the_kernel_refuses_what_the_cpu_refuses(interpreted: Interpreter) -> None:
    found = interpreted(f"{FOLDER}/checked_lengths.py", "0", "300")
    assert found["differ"] == []
    assert 60 < found["refused"] < 240


@pytest.mark.slow
@pytest.mark.parametrize("first", ["1000", *(pytest.param(one, marks=pytest.mark.redundant) for one in ("2000", "3000"))])
def test_it_refuses_more_that_the_cpu_refuses(first: str, interpreted: Interpreter) -> None:
    assert interpreted(f"{FOLDER}/checked_lengths.py", first, "1000")["differ"] == []


def test_calls_are_checked_each_time_and_only_where_asked_for(interpreted: Interpreter) -> None:
    by_case = interpreted(f"{FOLDER}/checked_calls.py")
    assert len(by_case) > 8
    for case, found in by_case.items():
        assert found["served"] == [True, True], case
        assert found["without"] == "", case
        assert all(words.startswith(found["expected"]) for words in found["refused"]), (case, found)
        assert found["launches"] == [1, 1, 1], case  # of the kernel that checks: right, wrong, wrong


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none here")
def test_the_kernel_refuses_on_a_gpu_what_the_cpu_refuses() -> None:
    from tests.unit.ops.attention.checked_lengths import draw, refusal

    from flashmoe_science.ops.attention.device.check_triton import is_wrong

    for seed in range(200):
        assert is_wrong(draw(seed, "cuda")) is bool(refusal(draw(seed))), seed
