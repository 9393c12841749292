"""The judge condemns no honest kernel: 200 whole runs, of which ``make honest`` makes 10,000."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.harness.honest import Judge, main
from tests.harness.honest_kernels import ATTENTION, by_broadcasting, in_order


@pytest.mark.slow
def test_no_honest_kernel_is_condemned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(200) == 0, capsys.readouterr().out


@pytest.mark.parametrize(("operation", "kernel", "problem", "seed"), [
    ("attention", by_broadcasting, "attn b2 h12 hk1 q3 k40 d256 fp32", 0),
    ("moe", in_order, "moe t20 e4 k2 d1040 f24 fp32", 0),
    ("attention_backward", ATTENTION["blocks of 64"], "attnbwd b2 h1 hk1 q180 k180 d8 fp32", 424),
])  # fmt: skip
def test_sums_of_one_product_after_another_are_honest(
    operation: str, kernel: Callable[..., Any], problem: str, seed: int
) -> None:
    """Libraries of CPUs add up lanes apart, which errs less by more than a factor of two; many equal terms err alike."""
    assert Judge(operation).run(kernel, problem, seed) == []
