"""Merges by our kernel against the fp64 oracle, in Triton's interpreter and on a GPU: sizes, memory, log-sum-exps far apart.

Run as a script with TRITON_INTERPRET=1 it prints, by case, what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from tests.unit.interpreter import Interpreter
from torch.utils._python_dispatch import TorchDispatchMode

import flashmoe_science as fm
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.measure.tolerance import expected
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.ops.attention.call.merge import MergeInputs
from flashmoe_science.ops.attention.front.merge import choose

pytest.importorskip("triton", reason="Triton is not installed here")

from flashmoe_science.ops.attention.forward import merge_parts_triton
from flashmoe_science.ops.launch import collect_builds

MERGE = operation("attention_merge")
NAME = merge_parts_triton.KERNEL.name
Parts = Sequence[torch.Tensor]


class Case(NamedTuple):
    """A problem of each of so many batches, 0 for parts without that dimension; how parts lie in memory; the sizes of lses."""

    problem: str
    memory: str = "dense"
    lses: str | None = None
    batch: int = 0


FAR, _, APART = MERGE.contract().sweep_variants[:3]
SIZES = ("p1 t1 h1 d1 fp32", "p2 t3 h5 d7 fp16", "p32 t9 h3 d16 bf16", "p3 t70 h3 d40 bf16", "p4 t1 h40 d128 fp16",
         "p2 t19 h1 d192 bf16", "p5 t9 h2 d256 fp32", "p2 t3 h2 d512 bf16")  # fmt: skip
MEMORY = ("stacked", "wider rows", "heads first", "every other", "expanded heads", "expanded columns", "one off", "far")
CASES = (
    *(Case(f"attnmerge {sizes}") for sizes in SIZES),
    *(Case("attnmerge p3 t17 h3 d64 bf16", memory, batch=batch) for memory in MEMORY for batch in (0, 2)),
    *(Case(f"attnmerge p{parts} t20 h2 d48 fp32", lses=lses) for parts in (2, 9) for lses in (FAR, APART)),
)


def laid_out(out: torch.Tensor, memory: str) -> torch.Tensor:
    """A tensor like ``out`` in memory of that kind; expanded ones repeat what is first."""
    if memory == "expanded heads":
        return out[..., :1, :].contiguous().expand(out.shape)
    if memory == "expanded columns":
        return out[..., :1].contiguous().expand(out.shape)
    width, rows, heads = out.shape[-1], out.shape[-3], out.shape[-2]
    if memory == "wider rows":
        view = out.new_full((*out.shape[:-1], width + 24), torch.nan)[..., 8 : width + 8]
    elif memory == "heads first":
        view = out.new_empty(*out.shape[:-3], heads, rows, width).transpose(-2, -3)
    elif memory == "every other":
        view = out.new_full((*out.shape, 2), torch.nan)[..., 0]
    elif memory == "one off":
        view = out.new_empty(out.numel() + 1)[1:].view(out.shape)
    else:  # past 2^31 elements, of which few are touched
        step = 2**31 // (rows - 1) // 16 * 16 + 16
        memory_of_all = out.new_empty(2**31 + 16 * rows + out.numel())
        view = memory_of_all.as_strided(out.shape, (*(heads * width for _ in out.shape[:-3]), step, width, 1))
    return view.copy_(out)


def parts_of(case: Case, device: str) -> tuple[torch.Tensor | Parts, torch.Tensor | Parts]:
    """Parts with NaN in rows without keys."""
    contract = MERGE.contract() if case.lses is None else MERGE.contract().variant(case.lses)
    problem = parse_problem(case.problem)
    every = [
        contract.poisoned(problem, contract.inputs(problem, torch.device(device), torch.Generator(device).manual_seed(seed)))
        for seed in range(max(1, case.batch))
    ]
    outs, lses = (torch.stack([one[name] for one in every], 1) if case.batch else every[0][name] for name in ("outs", "lses"))
    if case.memory == "stacked":
        return outs, lses
    if "expanded" in case.memory:
        outs = outs.nan_to_num(0.0)
    return [one.clone() if case.memory == "dense" else laid_out(one, case.memory) for one in outs], [*lses]


def wrong(case: Case, device: str) -> list[str]:
    """What is wrong in a call and in one like it, which are served by the kernel."""
    outs, lses = parts_of(case, device)
    found = [] if fm.explain(fm.merge_attention, outs, lses).kernel == NAME else ["another kernel serves it"]
    calls = [fm.merge_attention(outs, lses) for _ in range(2)]
    problem, contract = parse_problem(case.problem), MERGE.contract()
    every_out, every_lse = torch.stack([*outs]), torch.stack([*lses])
    for n in range(max(1, case.batch)):
        at: Any = (slice(None), n) if case.batch else slice(None)
        inputs = {"outs": every_out[at], "lses": every_lse[at]}
        right = contract.reference(problem, contract.widened(inputs))
        bounds = expected(right, contract.plain(problem, inputs), *contract.bounds(problem, inputs, right))
        for call in calls:
            for name, got, like, one in zip(("out", "lse"), call, (outs[0], lses[0]), bounds, strict=True):
                if (got.shape, got.dtype) != (like.shape, like.dtype):
                    found.append(f"{name} is {got.dtype} {tuple(got.shape)}")
                mine = got[n] if case.batch else got
                off = torch.where(mine == one.value, 0.0, mine.double() - one.value).abs().max().item()
                if not off <= one.bound.max:  # as it is of NaN
                    found.append(f"{name} is off by {off}, of {one.bound.max} allowed")
    return found


def test_every_case_is_right_in_the_interpreter(interpreted: Interpreter) -> None:
    found = interpreted("ops/attention/forward/test_merge_parts_triton.py")
    assert {case: reasons for case, reasons in found.items() if reasons} == {}
    assert len(found) == len(CASES)


@pytest.mark.parametrize(
    ("outs", "lses", "why"),
    [
        (torch.zeros(2, 3, 4, 8, requires_grad=True), torch.zeros(2, 4, 3), "an input requires gradients"),
        (torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 3, dtype=torch.float64), "a part has dtype torch.float64"),
        (torch.zeros(2, 0, 4, 8), torch.zeros(2, 4, 0), r"the kernel takes from 1 to 2147483647 rows"),
        (torch.zeros(33, 3, 4, 8), torch.zeros(33, 4, 3), "parts is 33; the kernel takes at most 32"),
        (torch.zeros(2, 3, 4, 513), torch.zeros(2, 4, 3), "head_dim is 513; the kernel takes at most 512"),
        (torch.zeros(2, 1, 1, 3, 4, 8), torch.zeros(2, 1, 1, 4, 3), r"outs\[0\] has 5 dimensions; the kernel takes at most 4"),
        ([torch.zeros(3, 4, 8), torch.zeros(4, 3, 8).transpose(0, 1)], torch.zeros(2, 4, 3), "outs differ in strides"),
    ],
)
def test_pytorchs_operators_serve_the_rest(outs: Any, lses: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "gpu_of", lambda tensor: gpu_named("h200"))
    decision = fm.explain(fm.merge_attention, outs, lses)
    assert decision.kernel == MERGE.fallback()
    assert why.replace("\\", "") in str(decision)
    out, lse = fm.merge_attention(outs, lses)
    assert (out.shape, lse.shape) == (outs[0].shape, lses[0].shape)


class NoTensors(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is called")


def test_a_plan_makes_no_tensor_also_on_one_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode of the harness fills what is made in a call with NaN, as a meta tensor cannot be: each call was refused."""
    monkeypatch.setattr(merge_parts_triton, "device_guard", lambda index: lambda call: lambda *args: call(*args))
    gpu, problem = gpu_named("h200"), parse_problem("attnmerge p2 t3 h4 d8 bf16")
    inputs = MERGE.contract().inputs(problem, torch.device("meta"), torch.Generator())
    like = MergeInputs([*inputs["outs"]], [*inputs["lses"]])
    with collect_builds(gpu) as jobs, NoTensors():
        merge_parts_triton.plan(like, merge_parts_triton.configs(problem, gpu)[0])
    assert len(jobs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, Case("attnmerge p4 t4096 h32 d128 bf16"), Case("attnmerge p32 t64 h64 d64 bf16")])
def test_it_is_right_on_a_gpu(case: Case) -> None:
    full = [torch.full((2**size,), torch.nan, device="cuda") for size in (8, 12, 16, 20, 24)]
    del full
    assert wrong(case, "cuda") == []


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["attnmerge p4 t1000 h32 d128 bf16", "attnmerge p9 t65 h5 d80 fp16"])
def test_bits_are_equal_a_thousand_times_and_in_a_graph(text: str) -> None:
    outs, lses = parts_of(Case(text), "cuda")
    first = fm.merge_attention(outs, lses)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fm.merge_attention(outs, lses)
    for _ in range(1000):
        graph.replay()
        for one, *others in zip(first, fm.merge_attention(outs, lses), captured, strict=True):
            differ += sum((one != other).sum() for other in others)
    assert differ.item() == 0


@pytest.mark.gpu
def test_gradients_and_compiled_calls_are_those_of_pytorchs_operators() -> None:
    outs, lses = ([one.nan_to_num(0.0) for one in parts] for parts in parts_of(Case("attnmerge p3 t70 h4 d64 fp32"), "cuda"))
    served = fm.merge_attention(outs, lses)
    for got, right in zip(torch.compile(fm.merge_attention)(outs, lses), served, strict=True):
        torch.testing.assert_close(got, right)
    leaves = [one.requires_grad_() for one in (*outs, *lses)]
    out, lse = fm.merge_attention(outs, lses)
    torch.testing.assert_close(out, served[0])
    weights = torch.exp(torch.stack(lses) - lse)
    for gradient, weight in zip(torch.autograd.grad(out.sum(), leaves)[:3], weights, strict=True):
        torch.testing.assert_close(gradient, weight.mT.unsqueeze(-1).expand_as(gradient))


def main() -> None:
    def full_of_nan(on_gpu: bool) -> Any:
        return lambda shape, strides, dtype: torch.full(shape, torch.nan, dtype=dtype)

    choose.gpu_of = lambda tensor: gpu_named("h200")  # whose configs are interpreted; the tensors are on the CPU
    merge_parts_triton.allocator = full_of_nan
    print(json.dumps({str(case): wrong(case, "cpu") for case in CASES}))


if __name__ == "__main__":
    main()
