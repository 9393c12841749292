"""Experts' weights in formats on a GPU: the formats' own numbers, checkpoints' layouts."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from tests.unit.ops.moe.backward.traps import apart
from tests.unit.ops.moe.cases import FORMAT_CASES, Case, changed, inputs_of, off
from tests.unit.ops.moe.products.format_cases import DEPTHS, named, of_every_format, on, saved, z_wrong

import flashmoe_science as fm
from flashmoe_science.formats import FORMATS
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import AnyKernel
from flashmoe_science.ops.moe.call import MoEInputs
from flashmoe_science.ops.moe.call.formats import OF_FORMAT, OF_WEIGHTS
from flashmoe_science.ops.moe.front.kernels import ours
from flashmoe_science.ops.moe.products.gemv_gluon.launch import NAME as GEMV_IN_FORMAT
from flashmoe_science.ops.moe.products.weights_sm90.config import NAME as MXFP4
from flashmoe_science.ops.moe.products.weights_sm90.config import NAME_OF_OTHERS

pytestmark = pytest.mark.gpu

KERNELS = pytest.mark.parametrize("kernel", ours(), ids=lambda kernel: kernel.name)


def called(one: MoEInputs) -> torch.Tensor:
    x, w1, w2, weights, ids, of_up, of_down, *of_format = one.tensors
    return fm.fused_moe(
        x, w1, w2, weights, ids, activation=one.activation.function, gate_up_bias=of_up, down_bias=of_down,
        interleaved=one.activation.interleaved, weight_format=one.problem.weight_format,
        **dict(zip(OF_FORMAT, of_format, strict=True)),
    )  # fmt: skip


@KERNELS
def test_the_numbers_of_formats_are_right_with_every_config(kernel: AnyKernel) -> None:
    gpu, found, done = current_gpu(torch.device("cuda")), {}, 0
    for name, inputs in chain(named(), of_every_format()):
        # Those save no z: their tests have such numbers.
        if kernel.cannot(inputs.problem, gpu) is None and kernel.name not in (GEMV_IN_FORMAT, MXFP4, NAME_OF_OTHERS):
            done += 1
            moved = on(inputs, "cuda")
            for config in kernel.configs(inputs.problem, gpu):
                if wrong := z_wrong(saved(kernel, config, moved), moved):
                    found[f"{name} {config}"] = wrong
    assert found == {}
    if not done:
        pytest.skip("the kernel takes no format")


@pytest.mark.parametrize("case", FORMAT_CASES, ids=str)
def test_it_is_served_by_ours_repeats_and_can_be_captured(case: Case) -> None:
    one = inputs_of(case, "cuda")
    if one.problem.gated is False:
        pytest.skip("fused_moe is called with gates here")
    first = called(one)
    assert off(first, one) is None
    assert all(torch.equal(called(one), first) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = called(one)
    graph.replay()
    assert torch.equal(out, first)


@pytest.mark.parametrize("tokens", [1, 200, 3000])
@pytest.mark.parametrize("form", FORMATS)
def test_a_thousand_calls_give_the_same_bits(form: str, tokens: int) -> None:
    """In memory that other calls left full of what is no number. Wider tiles gave other bits now and then (moe-formats.md)."""
    one = inputs_of(Case(f"moe t{tokens} e16 k4 d1024 f768 bf16 w:{form}"), "cuda")
    first, differ = called(one), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(999):
        full = [torch.full((2**size,), torch.nan, device="cuda") for size in (12, 16, 20, 22)]
        del full
        differ += (called(one) != first).sum()
    assert differ.item() == 0


def test_blocks_of_a_checkpoint_and_views_of_larger_tensors_are_served_as_they_lie() -> None:
    one = inputs_of(Case("moe t9 e4 k2 d1920 f1920 bf16 w:mxfp4 bias clamped interleaved"), "cuda")  # 15 MB of gates and ups
    right, (_, w1, w2, *_), (of_w1, of_w2) = called(one), one.tensors, one.tensors[7:9]
    assert of_w1 is not None
    assert of_w2 is not None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    blocks = changed(one, w1=w1.unflatten(2, (-1, 16)), w2=w2.unflatten(2, (-1, 16)))
    assert torch.equal(called(blocks), right)
    powers = changed(one, gate_up_scale=of_w1.view(torch.float8_e8m0fnu), down_scale=of_w2.view(torch.float8_e8m0fnu))
    assert torch.equal(called(powers), right)
    assert torch.cuda.max_memory_allocated() - before < 2**22
    wide = [torch.cat((part, part), -1)[..., : part.shape[-1]] for part in (w1, w2, of_w1, of_w2)]
    assert torch.equal(called(changed(one, w1=wide[0], w2=wide[1], gate_up_scale=wide[2], down_scale=wide[3])), right)
    odd = torch.cat((w1.flatten(), w1.flatten()[:1]))[1:].view_as(w1)
    moved = changed(one, w1=odd.copy_(w1))
    assert off(called(moved), one) is None  # by PyTorch's operators: no codes begin at odd addresses


@pytest.mark.parametrize("form", DEPTHS)
def test_experts_past_the_reach_of_32_bits(form: str) -> None:
    """Of tensors that are moved to a GPU it would be lost."""
    one = inputs_of(Case(f"moe t9 e4 k2 d384 f128 bf16 w:{form}"), "cuda")
    far = {name: apart(value) for name in ("w1", "w2", *OF_WEIGHTS) if (value := getattr(one.tensors, name)) is not None}
    assert torch.equal(called(changed(one, **far)), called(one))


@pytest.mark.parametrize("form", ["mxfp4", "fp8_block", "fp8_channel", "int4_g32", "int4_g32_zero"])
def test_gradients_of_all_but_the_weights(form: str) -> None:
    one = inputs_of(Case(f"moe t9 e4 k2 d96 f64 bf16 w:{form}"), "cuda")
    x, weights = one.tensors.x.clone().requires_grad_(), one.tensors.topk_weights.clone().requires_grad_()
    called(changed(one, x=x, topk_weights=weights)).float().sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert x.grad.isfinite().all()
    assert weights.grad.abs().max() > 0
