"""FlashInfer's peers: what they refuse, their view of a cache as pages, and what they ask FlashInfer for.

FlashInfer needs a GPU: in its place stand functions of the same arguments, computed by PyTorch's operators.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.unit.ops.attention.held import CPU, expected_of, inputs_of, reasons

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops.attention.call.kernel import AttentionInputs
from flashmoe_science.ops.attention.peers import flashinfer, flashinfer_fa2
from flashmoe_science.ops.attention.problem import parse
from flashmoe_science.ops.attention.proof.contract import CONTRACT
from flashmoe_science.serving import flash_attn_with_kvcache

H200 = gpu_named("h200")
PROCESSORS = 132


@pytest.mark.parametrize(
    ("text", "gpu", "reason"),
    [
        ("q1 k8192 d128 bf16", None, "FlashInfer's XQA needs a GPU"),
        ("q1 k8192 d128 bf16", "a100", "FlashInfer's XQA needs Hopper or newer; NVIDIA A100.* is sm_80"),
        ("q1 k8192 d128 fp32", "h200", "FlashInfer's XQA takes fp16 and bf16"),
        ("q2 k8192 d128 bf16 causal", "h200", "FlashInfer's XQA is measured with one query a sequence"),
        ("q1 k8192 d128 bf16 causal-topleft", "h200", "FlashInfer's XQA lets its query see every key"),
        ("q1 k8192 d128 dv64 bf16", "h200", "FlashInfer's XQA needs head_dim_v equal to head_dim"),
        ("q1 k8192 d72 bf16", "h200", "FlashInfer's XQA needs a head_dim that is a multiple of 16"),
        ("q1 k8192 d128 bf16 ragged page8", "h200", "FlashInfer's XQA takes pages of 16, 32, 64, 128 rows"),
        ("q1 k8200 d128 bf16", "h200", "FlashInfer's XQA reads pages, and 8200 keys do not fill whole pages of 16"),
        ("q1 k8192 d128 bf16 ragged fp8kv", "h200", ".* does not serve fp8 keys and values"),
        ("q1 k8192 d128 bf16 causal left99 sinks", "h200", ".* does not serve a sliding window, attention sinks"),
        ("q1 k8192 d128 bf16 packed page16", "h200", ".* does not serve packed sequences"),
    ],
)
def test_xqa_refuses_in_words(text: str, gpu: str | None, reason: str) -> None:
    said = flashinfer.KERNEL.supports(parse(f"attn b2 h8 hk2 {text}"), None if gpu is None else gpu_named(gpu))
    assert said is not None
    assert re.fullmatch(reason, said)


@pytest.mark.parametrize(("head_dim", "more"), [(64, (32, 64)), (80, (32, 64)), (128, (32, 64)), (256, (32,))])
def test_xqa_takes_the_numbers_of_shared_heads_that_it_compiles_for(head_dim: int, more: tuple[int, ...]) -> None:
    problems = [parse(f"attn b1 h{heads} hk1 q1 k64 d{head_dim} bf16") for heads in range(1, 130)]
    reasons = {problem.heads: flashinfer.KERNEL.supports(problem, H200) for problem in problems}
    assert [heads for heads, reason in reasons.items() if reason is None] == [*range(1, 17), *more]
    words = " or ".join(map(str, more))
    assert reasons[17] == f"FlashInfer's XQA takes up to 16 query heads a key head, or {words}, at head_dim {head_dim}"


@pytest.mark.parametrize(
    ("text", "gpu", "reason"),
    [
        ("q1 k8192 d128 bf16", None, "FlashInfer needs a GPU"),
        ("q1 k8192 d128 fp32", "h200", "FlashInfer takes fp16 and bf16"),
        ("q17 k8192 d128 bf16 causal", "h200", ".* is measured with up to 16 queries a sequence"),
        ("q2 k8192 d128 bf16", "h200", ".* gives several queries a causal mask, aligned bottom-right"),
        ("q2 k8192 d128 bf16 causal-topleft", "h200", ".* gives several queries a causal mask, aligned bottom-right"),
        ("q1 k8192 d128 bf16 causal-topleft", "h200", ".* lets its query see every key"),
        ("q8 k4 d128 bf16 causal", "h200", ".* needs a key for every query"),
        ("q1 k8192 d96 bf16", "h200", ".* takes head dimensions of 64, 128, 256, V's the same"),
        ("q1 k8192 d128 dv64 bf16", "h200", ".* takes head dimensions of 64, 128, 256, V's the same"),
        ("q1 k8200 d128 bf16", "h200", "FlashInfer reads pages, and 8200 keys do not fill whole pages of 16"),
        ("q1 k8192 d128 bf16 softcap5", "h200", ".* does not serve a soft cap"),
    ],
)
def test_the_wrapper_refuses_in_words(text: str, gpu: str | None, reason: str) -> None:
    said = flashinfer_fa2.KERNEL.supports(parse(f"attn b2 h8 hk2 {text}"), None if gpu is None else gpu_named(gpu))
    assert said is not None
    assert re.fullmatch(reason, said)


def test_the_wrapper_needs_the_tensor_cores_of_compute_capability_8() -> None:
    problem, older = parse("attn b2 h8 hk2 q1 k8192 d128 bf16"), replace(gpu_named("a100"), compute_capability=(7, 5))
    assert flashinfer_fa2.KERNEL.supports(problem, gpu_named("a100")) is None
    assert (
        flashinfer_fa2.KERNEL.supports(problem, older) == "FlashInfer's decoding on tensor cores needs compute capability 8.0"
    )


@pytest.mark.parametrize(
    "text",
    [
        "attn b1 h32 hk8 q1 k131072 d128 bf16",
        "attn b16 h32 q1 k4096 d128 bf16 bshd ragged",
        "attn b128 h64 hk8 q1 k4096 d128 bf16 bshd ragged page16",
        "attn b64 h16 hk1 q1 k8192 d128 bf16 causal bshd ragged page64",
        "attn b32 h32 hk8 q1 k2048 d64 fp16",
    ],
)
def test_decoding_is_served_on_an_h200(text: str) -> None:
    assert [kernel.supports(parse(text), H200) for kernel in (flashinfer.KERNEL, flashinfer_fa2.KERNEL)] == [None, None]


def test_they_say_so_where_flashinfer_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as find_spec has a module that is not there
    assert flashinfer.KERNEL.absent() == flashinfer_fa2.KERNEL.absent() == "flashinfer-python is not installed"


@pytest.mark.parametrize(
    ("text", "rounds"),
    [
        ("attn b1 h32 hk8 q1 k1024 d128 bf16", [1]),  # four splits of 256 keys
        ("attn b1 h32 hk8 q1 k8192 d128 bf16", [1, 2]),  # 16, and 32 of 256 keys
        ("attn b1 h32 hk8 q1 k131072 d128 bf16", [1, 2, 4, 8]),
        ("attn b32 h32 hk8 q1 k8192 d128 bf16 ragged", [1, 4, 8]),  # 256 blocks unsplit
        ("attn b128 h64 hk8 q1 k4096 d128 bf16", [1]),  # more blocks than 8 for each processor
    ],
)
def test_xqa_is_tried_with_each_number_of_splits_once(text: str, rounds: list[int]) -> None:
    assert [config["rounds"] for config in flashinfer.KERNEL.configs(parse(text), H200)] == rounds


CONTIGUOUS = (
    "attn b3 h4 hk2 q1 k128 d16 fp32",
    "attn b3 h4 hk2 q1 k128 d16 fp32 bshd",
    "attn b3 h4 hk2 q1 k48 d16 fp32 bshd",
    "attn b1 h4 hk1 q1 k16 d16 fp32",
    "attn b3 h4 q1 k192 d16 fp32 ragged",
    "attn b3 h4 hk2 q1 k192 d16 fp32 causal bshd ragged",
)
PAGED = ("attn b3 h4 hk2 q1 k90 d16 fp32 bshd ragged page16", "attn b3 h4 hk2 q1 k190 d16 fp32 causal ragged page64")


def sequence_of(pages: flashinfer.Pages, which: str, batch: int) -> torch.Tensor:
    """[heads_kv, keys, head_dim] of one sequence, through its table."""
    rows = getattr(pages, which)[pages.table[batch].long()].flatten(0, 1)
    return rows[: int(pages.lengths[batch])].transpose(0, 1)


@pytest.mark.parametrize("text", CONTIGUOUS)
def test_a_contiguous_cache_is_pages_where_it_lies(text: str) -> None:
    inputs = inputs_of(text)
    pages, problem = flashinfer.pages_of(inputs), inputs.problem
    assert pages.k.shape[1:] == (64 if problem.seqlen_k % 64 == 0 else 16, problem.heads_kv, problem.head_dim)
    assert (pages.table.dtype, pages.lengths.dtype) == (torch.int32, torch.int32)
    assert pages.table.is_contiguous()
    for batch, one in enumerate(problem.sequence_lengths()):
        for which, held in (("k", inputs.k), ("v", inputs.v)):
            assert torch.equal(sequence_of(pages, which, batch), held[batch, :, : one.keys])
    for view, held in ((pages.k, inputs.k), (pages.v, inputs.v)):
        assert view.data_ptr() == held.data_ptr()
    assert flashinfer.pages_of(inputs).table is pages.table


def test_pages_are_taken_as_they_are() -> None:
    inputs = inputs_of(PAGED[0])
    pages = flashinfer.pages_of(inputs)
    assert pages.k.shape == (inputs.k.shape[0], 16, 2, 16)
    assert (pages.k.data_ptr(), pages.v.data_ptr()) == (inputs.k.data_ptr(), inputs.v.data_ptr())
    assert pages.table is inputs.tensors.page_table
    assert pages.lengths is inputs.tensors.cache_seqlens


def test_caches_that_are_no_pages_are_refused() -> None:
    inputs = inputs_of("attn b3 h4 hk2 q1 k128 d16 fp32")
    by_rows = inputs.v.transpose(1, 2).contiguous().transpose(1, 2)
    apart = torch.randn(3, 2 * 128 * 16 + 16)[:, :-16].unflatten(1, (2, 128, 16))
    narrow = torch.randn(3, 2, 128, 24)[..., :16]
    sliced = CONTRACT.variant("slices of larger tensors")
    ragged = parse("attn b3 h4 hk2 q1 k128 d16 fp32 ragged")
    by_index = sliced.for_kernel(ragged, sliced.inputs(ragged, CPU, torch.Generator().manual_seed(1)))
    for refused, words in (
        (changed(inputs, v=by_rows), "in both alike"),
        (changed(inputs, k=narrow, v=narrow), "whole heads apart"),
        (changed(inputs, k=apart, v=apart), "not whole pages apart"),
        (
            replace(inputs, tensors=inputs.tensors._replace(k=inputs.k[:, :, :40], v=inputs.v[:, :, :40])),
            "40 rows does not fill whole pages of 16",
        ),
        (by_index, "no index of cache rows"),
    ):
        with pytest.raises(CannotServe, match=words):
            flashinfer.pages_of(refused)


def changed(inputs: AttentionInputs, **tensors: torch.Tensor) -> AttentionInputs:
    return replace(inputs, tensors=inputs.tensors._replace(**tensors))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of [batch, queries, heads, head_dim] on pages. Entries past a length are of no page."""
    used = torch.arange(table.shape[1])[None] * k.shape[1] < lengths[:, None]
    return flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, page_table=torch.where(used, table, 0), softmax_scale=scale, causal=True
    )  # type: ignore[return-value]  # no log-sum-exp is asked for


@pytest.fixture
def xqa_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for FlashInfer's function; the arguments by name of each call."""
    calls: list[dict[str, Any]] = []

    def xqa(
        q: Any,
        k: Any,
        v: Any,
        table: Any,
        lengths: Any,
        out: Any,
        scratch: Any,
        semaphores: Any,
        heads: int,
        rows: int,
        **named: Any,
    ) -> None:
        calls.append(named)
        assert q.is_contiguous()
        assert out.is_contiguous()
        assert (k.shape[1], k.shape[2]) == (rows, heads)
        assert (lengths.dtype, lengths.shape) == (torch.uint32, (len(q), 1))
        assert (scratch.dtype, semaphores.dtype, int(semaphores.view(torch.int32).sum())) == (torch.uint8, torch.uint32, 0)
        scale = named["q_scale"] / math.sqrt(q.shape[-1])
        out.copy_(attend(q, k, v, table, lengths.view(torch.int32)[:, 0], scale))

    stand_in = ModuleType("flashinfer.xqa")
    stand_in.xqa = xqa  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.xqa", stand_in)
    monkeypatch.setattr(flashinfer, "gpu_of", lambda tensor: H200)
    return calls


class Wrapper:
    """A stand-in for FlashInfer's wrapper."""

    planned = 0

    def __init__(self, workspace: torch.Tensor, layout: str, *, use_tensor_cores: bool, backend: str) -> None:
        assert (layout, use_tensor_cores, backend) == ("NHD", True, "fa2")
        self.sizes: tuple[int, ...] = ()

    def workspace_size(self, *args: Any, **named: Any) -> tuple[int, int]:
        return 0, 1000

    def reset_workspace_buffer(self, floats: torch.Tensor, integers: torch.Tensor) -> None:
        self.sizes = (floats.nbytes, integers.nbytes)

    def plan(
        self, first: Any, pages: Any, last: Any, heads: int, heads_kv: int, head_dim: int, rows: int, **named: Any
    ) -> None:
        type(self).planned += 1
        assert self.sizes == (256, 1000)
        self.first, self.pages, self.last, self.rows, self.named = first, pages, last, rows, named

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        (k, v), batch = caches, len(self.last)
        assert k.shape[1] == self.rows
        counts = self.first.diff()
        table = torch.zeros((batch, int(counts.max())), dtype=torch.int32)
        for row, begin, count in zip(table, self.first.tolist(), counts.tolist(), strict=False):
            row[:count] = self.pages[begin : begin + count]
        lengths = (counts - 1) * self.rows + self.last
        out = attend(q.unflatten(0, (batch, self.named["q_len_per_req"])), k, v, table, lengths, self.named["sm_scale"])
        return out.flatten(0, 1)


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> type[Wrapper]:
    stand_in = ModuleType("flashinfer")
    stand_in.BatchDecodeWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.setattr(Wrapper, "planned", 0)
    flashinfer_fa2._plans().clear()
    return Wrapper


def inputs_with(text: str, variant: str) -> tuple[AttentionInputs, dict[str, torch.Tensor]]:
    """Inputs of a variant of the contract, as a kernel and as the contract have them."""
    contract, problem = CONTRACT.variant(variant), parse(text)
    tensors = contract.inputs(problem, CPU, torch.Generator().manual_seed(1))
    return contract.for_kernel(problem, tensors), tensors


def check(kernel: Any, text: str) -> list[str]:
    """Why the peer's result on the CPU is refused; empty where it is right."""
    inputs = inputs_of(text)
    tensors = CONTRACT.inputs(inputs.problem, CPU, torch.Generator().manual_seed(1))
    output = kernel.run(inputs, kernel.configs(inputs.problem, None)[0])
    assert output.out.shape == inputs.q.shape
    return reasons((output.out, output.lse), expected_of(inputs, tensors))


@pytest.mark.parametrize("text", [*CONTIGUOUS, *PAGED])
def test_xqa_is_asked_for_the_problem(text: str, xqa_calls: list[dict[str, Any]]) -> None:
    assert check(flashinfer.KERNEL, text) == []
    assert [call["sm_count"] for call in xqa_calls] == [PROCESSORS]


def test_xqa_gets_more_processors_and_a_dense_query(xqa_calls: list[dict[str, Any]]) -> None:
    inputs, _ = inputs_with("attn b3 h4 hk2 q1 k128 d16 fp32", "slices of larger tensors")
    whole = changed(inputs, q=inputs.q.contiguous())
    more = flashinfer.KERNEL.configs(parse("attn b1 h32 hk8 q1 k131072 d128 bf16"), H200)[-1]
    outs = [flashinfer.KERNEL.run(one, more).out for one in (inputs, whole)]
    assert torch.equal(*outs)
    assert [call["sm_count"] for call in xqa_calls] == [8 * PROCESSORS] * 2


def test_a_given_output_is_written(xqa_calls: list[dict[str, Any]]) -> None:
    inputs = inputs_of(CONTIGUOUS[0])
    given = torch.full_like(inputs.q, torch.nan)
    result = flashinfer.KERNEL.run(replace(inputs, out=given), flashinfer.KERNEL.configs(inputs.problem, None)[0])
    assert result.out is given
    assert torch.isfinite(given).all()


SEVERAL = (
    "attn b3 h4 hk2 q5 k128 d16 fp32 causal",
    "attn b3 h4 hk2 q5 k128 d16 fp32 causal bshd ragged",
    "attn b3 h4 hk2 q4 k90 d16 fp32 causal bshd ragged page16",
)


@pytest.mark.parametrize("text", [*CONTIGUOUS, *PAGED, *SEVERAL])
def test_the_wrapper_is_asked_for_the_problem(text: str, wrapper: type[Wrapper]) -> None:
    assert check(flashinfer_fa2.KERNEL, text) == []


def test_the_wrapper_is_planned_once_a_table_a_problem_and_a_scale(wrapper: type[Wrapper]) -> None:
    kernel, planned = flashinfer_fa2.KERNEL, []
    first, other, scaled = (inputs_of(PAGED[0]), inputs_of(PAGED[0], seed=2), replace(inputs_of(PAGED[0]), softmax_scale=0.5))
    for inputs in (first, first, other, first, scaled, scaled, other):
        kernel.run(inputs, kernel.configs(inputs.problem, None)[0])
        planned.append(wrapper.planned)
    assert planned == [1, 1, 2, 2, 3, 3, 3]
    contiguous = inputs_of(CONTIGUOUS[1]), inputs_of(CONTIGUOUS[1], seed=2)  # one table for both
    for inputs in contiguous:
        kernel.run(inputs, kernel.configs(inputs.problem, None)[0])
    assert wrapper.planned == 4
    assert len(flashinfer_fa2._plans()) == 4
    del first, other, scaled, inputs
    assert len(flashinfer_fa2._plans()) == 1


def test_a_plan_lists_the_pages_of_each_sequence() -> None:
    table = torch.tensor([[7, 2, -1], [5, 2**30, -1], [0, 1, 3]], dtype=torch.int32)
    k = torch.empty(8, 16, 1, 1)
    first, listed, last = flashinfer_fa2.host_plan(flashinfer.Pages(k, k, table, torch.tensor([17, 16, 48])), (17, 16, 48))
    assert (first.tolist(), listed.tolist(), last.tolist()) == ([0, 2, 3, 6], [7, 2, 5, 0, 1, 3], [1, 16, 16])
    assert {one.dtype for one in (first, listed, last)} == {torch.int32}
