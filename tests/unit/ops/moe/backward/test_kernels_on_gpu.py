"""The backward of a mixture of experts on a GPU: each case with each config, equal bits, rows that end about a tile's end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.unit.ops.moe.backward.cases import CASES, KERNELS, backward_inputs, off, poisoned, put, reference
from tests.unit.ops.moe.cases import Case, inputs_of, saved_z

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.ops.moe.backward.grouped_triton.kernel import KERNEL as PORTABLE
from flashmoe_science.ops.moe.call import MoEInputs
from flashmoe_science.ops.moe.call.backward import BackwardInputs, BackwardKernel, BackwardTensors, Gradients

pytestmark = pytest.mark.gpu

LARGER = (
    Case("moe t256 e32 k8 d1024 f768 bf16"),
    Case("moe t3000 e60 k4 d136 f96 fp16 bias", routing="foreign"),
    Case("moe t700 e4 k2 d264 f200 bf16", routing="crowded"),
    Case("moe t700 e4 k2 d264 f200 fp16 gelu", routing="twice"),
    Case("moe t700 e4 k2 d520 f328 bf16 clamped", routing="foreign64"),
    Case("moe t400 e3 k2 d1032 f1032 bf16 bias clamped interleaved transposed"),
    Case("moe t500 e4 k2 d320 f448 bf16"),  # multiples of 64, and not of 128
    Case("moe t500 e4 k2 d320 f192 fp16 transposed"),
    Case("moe t50 e20 k4 d264 f136 fp32"),
)


def served(kernel: BackwardKernel, inputs: BackwardInputs) -> None:
    if reason := kernel.supports(inputs.problem, current_gpu(torch.device("cuda"))):
        pytest.skip(reason)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("case", [*CASES, *LARGER], ids=str)
def test_a_case_is_right_with_every_config(case: Case, kernel: BackwardKernel) -> None:
    inputs = backward_inputs(case, "cuda")
    served(kernel, inputs)
    for number, config in enumerate(kernel.configs(inputs.problem, current_gpu(torch.device("cuda")))):
        assert put(inputs, kernel, config, only_all=number > 0) == [], config


def with_rows(counts: tuple[int, ...], sizes: str) -> BackwardInputs:
    """Inputs whose experts have so many rows, in a random order."""
    rows = sum(counts)
    inputs = inputs_of(Case(f"moe t{rows} e{len(counts)} k1 {sizes}"), "cuda")
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[torch.randperm(rows)]
    tensors = inputs.tensors._replace(topk_ids=ids[:, None].int().cuda(), x=inputs.tensors.x / 3)
    z = saved_z(replace(inputs, tensors=tensors)).to(tensors.x.dtype)
    return BackwardInputs(inputs.problem, BackwardTensors(*tensors, z, torch.randn_like(tensors.x)), inputs.activation)


ABOUT_16 = (0, 1, 15, 16, 17, 0, 31, 32, 33, 63, 64, 65, 0, 127, 128, 129, 255, 256, 257, 0)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("counts", [(191, 192, 193, 0), (0, 0, 64, 65), (384, 383, 577, 7), ABOUT_16], ids=str)
def test_experts_whose_rows_end_about_a_tile_s_end(counts: tuple[int, ...], kernel: BackwardKernel) -> None:
    inputs = with_rows(counts, "d264 f136 bf16")
    served(kernel, inputs)
    for config in kernel.configs(inputs.problem, current_gpu(torch.device("cuda"))):
        assert put(inputs, kernel, config, only_all=True) == [], config


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("tokens", [40, 2000])
def test_a_thousand_calls_on_two_streams_give_the_same_bits(tokens: int, kernel: BackwardKernel) -> None:
    """In memory that other calls left full of what is no number."""
    inputs = backward_inputs(Case(f"moe t{tokens} e30 k4 d264 f200 bf16"), "cuda")
    launch = kernel.plan(inputs, kernel.configs(inputs.problem, current_gpu(torch.device("cuda")))[0])(inputs)  # type: ignore[misc]
    first = launch(inputs.tensors)
    assert off(first, inputs, reference(inputs)) == []
    torch.cuda.synchronize()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    differ = torch.zeros(4, dtype=torch.int64, device="cuda")
    for turn in range(1000):
        with torch.cuda.stream(streams[turn % 2]):
            full = [torch.full((2**size,), torch.nan, device="cuda") for size in (12, 16, 20, 23)]
            del full
            got = launch(inputs.tensors)
            differ += torch.stack([(one != other).sum() for one, other in zip(got[:4], first[:4], strict=True)])  # type: ignore[operator,union-attr]
            torch.cuda.current_stream().synchronize()
    assert differ.tolist() == [0, 0, 0, 0]


def test_what_a_forward_saves_is_what_a_backward_takes() -> None:
    """The saved z in place of one of a reference, and gradients to which an expanded dout leads."""
    from flashmoe_science.ops.moe.front.kernels import ours

    case = Case("moe t700 e8 k2 d264 f200 bf16")
    forward, gpu = inputs_of(case, "cuda"), current_gpu(torch.device("cuda"))
    for kernel in (one for one in ours() if "grouped" in one.name):
        with poisoned():
            saves = MoEInputs(forward.problem, forward.tensors, forward.activation, saves_z=True)
            out, z = kernel.run(saves, kernel.configs(forward.problem, gpu)[0])  # type: ignore[misc]
        dout = torch.ones((), dtype=out.dtype, device="cuda").expand(out.shape)
        inputs = BackwardInputs(forward.problem, BackwardTensors(*forward.tensors, z, dout), forward.activation)
        got = PORTABLE.run(inputs, PORTABLE.configs(forward.problem, gpu)[0])
        assert off(got, inputs, reference(inputs)) == [], kernel.name


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_rows_beyond_2_to_the_31_elements(kernel: BackwardKernel) -> None:
    """Gradients of the last expert's weights, whose rows begin past the reach of 32 bits, and of its pairs' weights."""
    tokens, top_k, dim, width, experts = 132_000, 8, 128, 1032, 8
    x = torch.randn(tokens, dim, dtype=torch.bfloat16, device="cuda")
    w1 = (torch.randn(experts, 2 * width, dim, device="cuda") * dim**-0.5).bfloat16()
    w2 = (torch.randn(experts, dim, width, device="cuda") * width**-0.5).bfloat16()
    ids = torch.arange(experts, device="cuda").int().expand(tokens, top_k).contiguous()  # rows of the last: a token each
    weights, dout = torch.rand(tokens, top_k, device="cuda"), torch.randn_like(x)
    z = torch.empty(tokens * top_k, 2 * width, dtype=x.dtype, device="cuda").normal_()
    assert tokens * top_k * 2 * width > 2**31
    problem = inputs_of(Case(f"moe t8 e{experts} k{top_k} d{dim} f{width} bf16"), "cpu").problem
    inputs = BackwardInputs(replace(problem, tokens=tokens), BackwardTensors(x, w1, w2, weights, ids, *8 * [None], z, dout))
    got = kernel.run(inputs, kernel.configs(inputs.problem, current_gpu(torch.device("cuda")))[0])
    last, scale = slice((experts - 1) * tokens, None), weights[:, -1:]
    of_a = dout.float() @ w2[-1].float()
    gate, up = z[last].float().chunk(2, 1)
    share = torch.sigmoid(gate)
    active = gate * share * up
    dz = torch.cat([of_a * scale * up * (share + gate * share * (1 - share)), of_a * scale * gate * share], 1)
    right = Gradients(None, dz.T @ x.float(), dout.float().T @ (scale * active), (of_a * active).sum(1), None, None)
    assert got.dw1 is not None
    assert got.dw2 is not None
    assert got.dtopk_weights is not None
    assert got.dx is not None
    for one, expected in zip((got.dw1[-1], got.dw2[-1], got.dtopk_weights[:, -1]), right[1:4], strict=True):
        assert (one.float() - expected).abs().max() < 6 * 2.0**-8 * expected.abs().max()  # type: ignore[union-attr]
    assert got.dx.isfinite().all()
