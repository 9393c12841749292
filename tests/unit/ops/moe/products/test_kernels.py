"""The mixture-of-experts kernels in Triton's interpreter, and the tables that their rows are sorted by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.unit.interpreter import Interpreter
from tests.unit.ops.moe.cases import CASES, FORMAT_CASES

from flashmoe_science.dispatch.select import select
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import AnyKernel, CannotServe, Config
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.ops.moe.call import SWIGLU, Tensors, inputs_of
from flashmoe_science.ops.moe.front.kernels import FALLBACK, ours
from flashmoe_science.ops.moe.problem import parse
from flashmoe_science.ops.moe.rows import RowCounts
from flashmoe_science.problem import DTYPE_BYTES

H200 = gpu_named("h200")


def test_every_case_is_right_with_every_kernel_that_can_be_interpreted(interpreted: Interpreter) -> None:
    """One test, as the script takes a while and each of pytest's workers would run it anew."""
    found = interpreted("ops/moe/cases.py")
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert {name.rpartition(": ")[2] for name in found} == {kernel.name for kernel in ours() if kernel.interpretable}
    assert {name.rpartition(": ")[0] for name in found} == set(map(str, (*CASES, *FORMAT_CASES)))


def test_the_numbers_of_formats_are_right_in_the_interpreter(interpreted: Interpreter) -> None:
    found = interpreted("ops/moe/products/format_cases.py")
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len(found) > 10


def test_rows_and_tiles_are_those_of_a_stable_sort(interpreted: Interpreter) -> None:
    found = interpreted("ops/moe/row_tables.py")
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len(found) > 15


def test_rows_of_other_ranks_are_combined_in_the_order_of_the_choices(interpreted: Interpreter) -> None:
    found = interpreted("ops/moe/combined_rows.py")
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("kernel", ours(), ids=lambda kernel: kernel.name)
def test_a_kernel_keeps_rows_or_refuses_to(kernel: AnyKernel) -> None:
    """Those of the grouped kernels are held to one process's results with virtual ranks."""
    if kernel.name in ("moe_grouped_gluon_sm90", "moe_grouped_triton"):
        return
    x, weights, ids = torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int32)
    tensors = Tensors(x, x.new_zeros(1, 32, 16), x.new_zeros(1, 16, 16), weights, ids)
    with pytest.raises(CannotServe, match="it keeps no row of each pair"):
        kernel.plan(replace(inputs_of(tensors, SWIGLU), sums=False), Config())


@pytest.mark.parametrize("pairs", [1, 2, 100, 512, 513, 5000, 40000])
@pytest.mark.parametrize("experts", [1, 7, 256])
@pytest.mark.parametrize("block_m", [16, 128])
def test_there_is_room_for_every_tile_whatever_the_routing(pairs: int, experts: int, block_m: int) -> None:
    touched = min(pairs, experts)
    worst = sum(-(-rows // block_m) for rows in [*[1] * (touched - 1), pairs - touched + 1])
    assert worst <= RowCounts(pairs, experts, block_m).tiles <= pairs


@pytest.mark.parametrize("sizes", ["t1 e128 k8 d2048 f768 bf16", "t64 e8 k2 d64 f48 fp32", "t4096 e8 k2 d512 f512 fp16"])
@pytest.mark.parametrize("kernel", ours(), ids=lambda kernel: kernel.name)
def test_a_call_takes_what_stands_between_the_products_and_small_tables(kernel: AnyKernel, sizes: str) -> None:
    problem = parse(f"moe {sizes}")
    if kernel.cannot(problem, H200):
        pytest.skip("it does not take so many tokens")
    pairs, size = problem.pairs(), DTYPE_BYTES[problem.dtype]
    tables = 4 * RowCounts(pairs, problem.experts, 16).length
    for config in kernel.configs(problem, H200):
        assert 0 < kernel.workspace(problem, config) <= pairs * (2 * problem.hidden + problem.dim) * size + tables


@pytest.mark.parametrize("kernel", ours(), ids=lambda kernel: kernel.name)
def test_from_logits_the_router_is_launched_first_and_what_it_chooses_is_promised(kernel: AnyKernel) -> None:
    forms = {"moe_mxfp4_gluon_sm90": " w:mxfp4", "moe_weights_gluon_sm90": " w:fp8_block"}
    forms |= {"moe_fp8_gluon_sm90": " w:fp8_block_w8a8", "moe_gemv_gluon": " w:mxfp4"}
    form = forms.get(kernel.name, "")
    ids, logits = (parse(f"moe t4 e8 k2 d64 f96 bf16{form}{word}") for word in ("", " logits"))
    assert H200 is not None
    config = kernel.configs(logits, H200)[0]
    assert config == kernel.configs(ids, H200)[0]
    first, *rest = kernel.launches(logits, config, H200)
    assert (first.name, first.grid, first.threads) == ("^flashmoe_moe_route$", (1, 1, 1), 128)
    assert tuple(rest) == kernel.launches(ids, config, H200)
    assert kernel.workspace(logits, config) - kernel.workspace(ids, config) == ids.pairs() * (4 + 4)
    many = kernel.cannot(parse_problem(f"moe t4 e5000 k2 d64 f96 bf16{form} logits"), H200)
    assert many is not None
    assert "at most 4096" in many


@pytest.mark.parametrize("gpu", ["l4", "a100", "h200", "b200"])
def test_each_gpu_has_a_config_for_every_problem_of_the_suites(gpu: str) -> None:
    by_pytorch = {*((gpu, "fp8_block_w8a8") for gpu in ("l4", "a100", "b200")), ("b200", "int4_g128")}
    for texts in operation("moe").contract().suites().values():
        for problem in map(parse_problem, texts):
            able = [kernel for kernel in ours() if kernel.cannot(problem, gpu_named(gpu)) is None]
            assert able or (gpu, problem.weight_format) in by_pytorch, problem
            assert all(kernel.configs(problem, gpu_named(gpu)) for kernel in able)


def test_explain_and_a_call_of_gpt_oss_s_experts_have_one_answer() -> None:
    """What a kernel does not take is seen from the problem: no record makes it the choice, and the reason is in words."""
    for tokens in (1, 16, 1024, 16384):
        problem = parse_problem(f"moe t{tokens} e32 k4 d2880 f2880 bf16 bias clamped interleaved transposed")
        decision = select(problem, H200, committed_table(), ours(), FALLBACK)
        reasons = dict(decision.others)
        assert decision.kernel == "moe_grouped_triton"
        assert "gates and ups are interleaved" in reasons["moe_grouped_gluon_sm90"]
        assert ("transposed" if tokens == 1 else "tokens is") in reasons["moe_gemv_triton"]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ("t40000000 e8 k2 d64 f64 bf16", "tokens times top_k is 80000000; it sorts at most 67108864"),
        ("t4 e5000 k2 d64 f64 bf16", "experts is 5000; it sorts by at most 4096"),
    ],
)
def test_what_the_tables_cannot_hold_is_refused(sizes: str, reason: str) -> None:
    problem = parse_problem(f"moe {sizes}")
    grouped = [kernel for kernel in ours() if "grouped" in kernel.name]
    assert [kernel.cannot(problem, H200) for kernel in grouped] == [reason, reason]


@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_weights_in_a_format_are_served_by_kernels_of_theirs(gpu: str) -> None:
    for form in ("mxfp4", "fp8_block", "fp8_channel", "int4_g32", "int4_g32_zero"):
        problem = parse_problem(f"moe t16 e32 k4 d2880 f2880 bf16 w:{form} bias clamped interleaved")
        decision = select(problem, gpu_named(gpu), committed_table(), ours(), FALLBACK)
        of_hopper = "moe_mxfp4_gluon_sm90" if form == "mxfp4" else "moe_weights_gluon_sm90"
        assert decision.kernel == (of_hopper if gpu == "h200" else "moe_grouped_triton")
        assert dict(decision.others)["moe_gemv_triton"] == f"its weights are bf16, and the problem's {form}"
    for gpu_of_static, words, serving in (
        ("h200", "", "moe_fp8_gluon_sm90"), ("h200", " bias", "moe_grouped_triton"), ("a100", "", "moe_grouped_triton")
    ):  # fmt: skip
        problem = parse_problem(f"moe t16 e32 k4 d2880 f2880 bf16 w:fp8_channel_static{words}")
        assert select(problem, gpu_named(gpu_of_static), committed_table(), ours(), FALLBACK).kernel == serving
    halves = select(
        parse_problem("moe t16 e32 k4 d64 f64 bf16 w:fp8_channel"), gpu_named("b200"), committed_table(), ours(), FALLBACK
    )
    assert "separate gates and ups of fp8_channel" in dict(halves.others)["moe_grouped_triton"]
    fp16 = select(parse_problem("moe t16 e32 k4 d64 f64 fp16 w:mxfp4"), gpu_named(gpu), committed_table(), ours(), FALLBACK)
    assert fp16.kernel == FALLBACK
    assert dict(fp16.others)["moe_grouped_triton"] == "weights in mxfp4 are multiplied as bf16, and the problem is fp16"
