"""Experts with adapters by our kernels for Hopper: on the CPU, as Python runs their source, and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.interpreter import Interpreter
from tests.unit.ops.moe.adapted.cases import CASES, Case, adapters_for, by_fused_moe, compute, put
from tests.unit.ops.moe.cases import inputs_of

from flashmoe_science import explain
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume, current_gpu
from flashmoe_science.moe import fused_moe
from flashmoe_science.ops.moe.adapted import backward as adapted_backward
from flashmoe_science.ops.moe.adapted import forward as adapted_forward
from flashmoe_science.ops.moe.call.adapters import parts_of
from flashmoe_science.ops.moe.call.backward import ALL, BackwardTensors
from flashmoe_science.ops.moe.front import adapted_sm90
from flashmoe_science.ops.moe.front.adapted_sm90 import NAME
from flashmoe_science.ops.moe.products.gluon_sm90.config import supports

LARGER = (
    Case("moe t512 e16 k4 d1024 f768 bf16", ranks=(16, 16)),
    Case("moe t1000 e8 k2 d520 f328 bf16 clamped", ranks=(32, 64), routing="foreign64"),
    Case("moe t700 e4 k2 d264 f200 fp16 gelu", ranks=(128, 8), routing="twice"),
    Case("moe t700 e4 k2 d264 f200 bf16", ranks=(8, 128), routing="crowded"),
    Case("moe t700 e4 k2 d264 f200 bf16", ranks=(200, 0)),
)


@pytest.mark.slow  # its source is run by Python: no PyTorch or Triton changes it
def test_the_kernels_are_right_on_the_cpu(interpreted: Interpreter) -> None:
    found = interpreted("ops/moe/adapted/cases.py")
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len(found) == len(CASES) + 1


@pytest.mark.parametrize(
    ("words", "change", "reason"),
    [
        ("bf16", {"recompute": True}, "recompute is True, and it keeps the pre-activations"),
        ("bf16", {"adapters": (None, None)}, "neither adapter is given"),
        ("fp32", {}, "serves fp16 and bf16, not fp32"),
        ("bf16 bias", {}, "there are biases; it adds none"),
        ("bf16 ungated", {}, "the activation is not gated"),
    ],
)
def test_what_they_do_not_serve_is_refused_by_name(words: str, change: dict[str, Any], reason: str) -> None:
    with assume(gpu_named("h200")), pytest.raises(ValueError, match=f"^kernel '{NAME}' cannot serve this call: .*{reason}"):
        called(Case(f"moe t9 e4 k2 d16 f8 {words}"), "cpu", **change)


def test_on_the_cpu_and_on_other_gpus_they_are_refused_too() -> None:
    with pytest.raises(ValueError, match="need a GPU"):
        called(CASES[0], "cpu")
    with assume(gpu_named("a100")), pytest.raises(ValueError, match="compute capability 9"):
        called(CASES[0], "cpu")


@pytest.mark.parametrize(
    ("tokens", "gpu", "serves"), [(96, "h200", NAME), (95, "h200", "grouped_mm"), (96, "a100", "grouped_mm")]
)
def test_they_are_the_default_on_hopper_where_an_expert_has_many_rows(tokens: int, gpu: str, serves: str) -> None:
    with assume(gpu_named(gpu)):
        assert called(Case(f"moe t{tokens} e4 k2 d16 f8 bf16"), "cpu", kernel=None).kernel == serves


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_what_compiles_and_what_launches_does_so_on_the_device_of_the_call(
    passes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are sorted by a kernel that is built when a launch is bound."""
    inside, seen = [False], []

    def guard(call: Any) -> Any:
        def guarded(*args: Any) -> Any:
            inside.append(True)
            made = call(*args)
            inside.pop()
            return made

        return guarded

    def recorded(step: str, following: Any) -> Any:
        def call(*args: Any) -> Any:
            seen.append((step, inside[-1]))
            return following

        return call

    module = adapted_forward if passes == "forward" else adapted_backward
    monkeypatch.setattr(module, "plan", recorded("plan", recorded("bind", recorded("launch", None))))
    monkeypatch.setattr(adapted_sm90, "device_guard", lambda index: guard)
    case = Case("moe t11 e4 k2 d16 f8 bf16")
    inputs = inputs_of(case, "cpu")
    t, adapters = inputs.tensors, adapters_for(case, inputs)
    with assume(gpu_named("h200")):
        if passes == "forward":
            adapted_sm90._forward(t, inputs.activation, adapters, saves_z=False)
        else:
            tensors = BackwardTensors(*t, t.x.new_empty(22, 16), t.x)
            adapted_sm90._backward(tensors, inputs.activation, adapters, (None, None), ALL)
    assert seen == [("plan", True), ("bind", True), ("launch", True)]


def called(case: Case, device: str, **change: Any) -> Any:
    """What serves a call of a case, which is asked for by name."""
    inputs = inputs_of(case, device)
    x, w1, w2, weights, ids, bias1, bias2, *_ = inputs.tensors
    options = {"adapters": adapters_for(case, inputs), "kernel": NAME, "gate_up_bias": bias1, "down_bias": bias2} | change
    return explain(fused_moe, x, w1, w2, weights, ids, **options)


@pytest.fixture
def hopper() -> None:
    """Skips elsewhere."""
    if reason := supports(inputs_of(CASES[0], "cpu").problem, current_gpu(torch.device("cuda"))):
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", [*CASES, *LARGER], ids=str)
def test_a_case_is_right_and_fused_moe_gives_its_bits(case: Case) -> None:
    assert put(case, "cuda") == []
    if "clamped" not in case.problem:  # whose numbers are options of the call
        assert by_fused_moe(case, "cuda") == []
    assert called(case, "cuda").kernel == NAME


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_thousand_calls_on_two_streams_give_the_same_bits() -> None:
    """In memory that other calls left full of what is no number."""
    case = Case("moe t2000 e30 k4 d264 f200 bf16", ranks=(16, 72))
    inputs = inputs_of(case, "cuda")
    adapters, dout = adapters_for(case, inputs), torch.randn_like(inputs.tensors.x)
    first = compute(inputs, adapters, dout)
    torch.cuda.synchronize()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    differ = torch.zeros(len(first), dtype=torch.int64, device="cuda")
    for turn in range(1000):
        with torch.cuda.stream(streams[turn % 2]):
            full = [torch.full((2**size,), torch.nan, device="cuda") for size in (12, 16, 20, 23)]
            del full
            got = compute(inputs, adapters, dout)
            differ += torch.stack([(one != other).sum() for one, other in zip(got, first, strict=True)])  # type: ignore[operator,union-attr]
            torch.cuda.current_stream().synchronize()
    assert not differ.any()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_nothing_waits_and_a_graph_replays_with_another_routing() -> None:
    case = Case("moe t1024 e8 k2 d256 f128 bf16", ranks=(16, 16))
    inputs = inputs_of(case, "cuda")
    x, w1, w2, weights, ids, *_ = inputs.tensors
    adapters, dout = adapters_for(case, inputs), torch.randn_like(x)
    leaves = [one.requires_grad_() for one in (x, weights, *parts_of(adapters)) if one is not None]

    def gradients() -> tuple[torch.Tensor, ...]:
        out = fused_moe(x, w1, w2, weights, ids, adapters=adapters, kernel=NAME)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients()
    side.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    ids.copy_(ids.flip(0))
    graph.replay()
    assert all(map(torch.equal, captured, gradients()))
