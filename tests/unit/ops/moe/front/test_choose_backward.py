"""Which backward serves experts on GPUs that are not here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashmoe_science as fm
from flashmoe_science.dispatch.table import Table
from flashmoe_science.dispatch.tuned import known_table
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.moe.call import Activation, Options, Tensors
from flashmoe_science.ops.moe.front.backward import choose as choice
from flashmoe_science.ops.moe.front.backward.choose import choose_backward
from flashmoe_science.ops.moe.front.choose import trains_by_pytorch


@pytest.mark.parametrize("switch", [False, True])
def test_pytorch_serves_both_passes_on_a_gpu_of_whose_architecture_there_is_no_record(switch: bool) -> None:
    """But where PyTorch's switch asks for deterministic algorithms: ours promise them."""
    x, w1, w2 = (
        torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((512, 64), (8, 96, 64), (8, 64, 48))
    )
    routing = torch.empty(512, 2), torch.zeros(512, 2, dtype=torch.int32)
    torch.use_deterministic_algorithms(switch)
    try:
        with assume(gpu_named("b200")):
            found = choose_backward(Tensors(x, w1, w2, *routing, None, None), Activation(), None)
            serves_both = None if switch else fm.explain(fm.fused_moe, x, w1, w2, *routing).reason
            # A kernel of ours that is asked for by name is given the pre-activations by a forward of ours.
            named = Options("silu", False, False, 1.702, 7.0, kernel="moe_bwd_triton")
            assert not trains_by_pytorch(Tensors(x, w1, w2, *routing, None, None), Activation(), named)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.kernel == ("moe_bwd_triton" if switch else "grouped_mm_bwd")
    if serves_both is not None:
        assert (
            "PyTorch's products serve both passes; an input requires gradients, its backward by grouped_mm_bwd" in serves_both
        )


@pytest.mark.parametrize(
    ("sizes", "dtype", "kernel", "words"),
    [
        ((300, 128, 8, 2048, 768), torch.bfloat16, "moe_bwd_gluon_sm90", "on the nearest measured problem"),
        ((512, 8, 2, 64, 48), torch.bfloat16, "moe_bwd_gluon_sm90", "no record on sm_90 has PyTorch's products faster than it"),
        ((3, 64, 2, 64, 48), torch.float16, "moe_bwd_gluon_sm90", "no record of a problem like it"),
        ((512, 8, 2, 64, 48), torch.float32, "grouped_mm_bwd", "no record has a backward of ours faster"),  # another of ours
    ],
)
def test_on_hopper_a_kernel_that_no_record_has_slower_serves(sizes: Any, dtype: torch.dtype, kernel: str, words: str) -> None:
    tokens, experts, top_k, dim, hidden = sizes
    shapes = (tokens, dim), (experts, 2 * hidden, dim), (experts, dim, hidden)
    of_states = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    routing = torch.empty(tokens, top_k, device="meta"), torch.empty(tokens, top_k, dtype=torch.int32, device="meta")
    with assume(gpu_named("h200")):
        found = choose_backward(Tensors(*of_states, *routing), Activation(), None)
    assert (found.kernel, found.basis) == (kernel, "modelled")
    assert words in found.reason


def test_a_record_of_an_architecture_that_has_pytorchs_products_faster_leaves_them_all_other_problems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [one for one in known_table().entries if one.kernel == "moe_bwd_gluon_sm90"]
    problem, gpu = parse_problem("moebwd t512 e8 k2 d64 f48 bf16"), gpu_named("h100")
    for ratio, kernel in ((1.0, "moe_bwd_gluon_sm90"), (0.99, "grouped_mm_bwd")):
        table = Table((*entries[1:], replace(entries[0], rival="grouped_mm_train", ratio=ratio)))
        monkeypatch.setattr(choice, "known_table", lambda table=table: table)
        assert choice._by_record(problem, gpu, None).kernel == kernel
