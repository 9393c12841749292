"""Our kernels on this GPU, every config of each, against the fp64 oracle under the one tolerance rule."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.attention.forward.cases import LARGE, SMALL, Case, examine, problem_of

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops.attention.call.kernel import AttentionKernel
from flashmoe_science.ops.attention.front.kernels import ours

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=str)
@pytest.mark.parametrize("kernel", ours(), ids=lambda kernel: kernel.name)
def test_a_kernel_is_right_wherever_it_says_it_serves(kernel: AttentionKernel, case: Case) -> None:
    problem, gpu = problem_of(case), current_gpu()
    reason = kernel.supports(problem, gpu)
    if reason is not None:
        pytest.skip(reason)
    configs = kernel.configs(problem, gpu)
    place = len(str(case)) % len(configs)  # of the small cases each takes one config, for compilation is what takes the time
    for config in configs if case in LARGE else configs[place : place + 1]:
        try:
            assert examine(kernel, config, case, torch.device("cuda")) == [], config
        except CannotServe as refusal:  # in words, before anything is launched
            if case.memory == "dense" and (case.scale is None or case.scale > 0.0):
                raise
            pytest.skip(str(refusal))


def test_a_launch_is_what_its_plan_was_made_for_and_not_what_came_before() -> None:
    """One launcher, tensors of other lengths, batches and strides between two calls on the same ones."""
    case = Case("attn b2 h4 q300 k333 d64 bf16 causal")
    for kernel in ours():
        if kernel.supports(problem_of(case), current_gpu()) is None:
            config = kernel.configs(problem_of(case), current_gpu())[0]
            for text in (case.problem, "attn b1 h4 q17 k999 d64 bf16 causal", case.problem):
                if kernel.supports(problem_of(Case(text)), current_gpu()) is None:
                    assert examine(kernel, config, Case(text), torch.device("cuda")) == []
