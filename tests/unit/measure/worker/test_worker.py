"""A worker that goes from problem to problem."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.inputs import Case, Memory
from flashmoe_science.measure.worker import callers, clocks
from flashmoe_science.measure.worker.worker import Worker
from flashmoe_science.operations import kernel_named
from flashmoe_science.problem import Problem


def test_what_a_problem_held_is_freed_when_the_next_begins() -> None:
    """Weights of one large problem and of the next do not fit a GPU together."""
    worker = Worker(Bench(torch.device("cpu"), None), Memory(), trusted=True)
    worker.command("open")(None, "attention")
    worker.command("problem")("attn b1 h1 q8 d16 fp32")
    how = {"who": "sdpa", "config": "", "case": Case(0)}
    worker.command("call")(**how, path="out", most=10**6)
    held = weakref.ref(worker.command("call").__self__._live["q"])
    gc.disable()
    try:
        worker.command("problem")("attn b1 h1 q9 d16 fp32")
        assert held() is None
    finally:
        gc.enable()


def test_a_function_is_not_called_on_a_problem_of_another_contract() -> None:
    """Else ``flashmoe diagnose`` told of an AttributeError in the contract."""
    worker = Worker(Bench(torch.device("cpu"), None), Memory(), trusted=True)
    worker.command("open")("examples/cpu_attention.py:attention", "")
    with pytest.raises(ValueError, match="held to the contract of attention, not of moe"):
        worker.command("problem")("moe t4 e2 k1 d8 f8 fp32")


def test_values_of_large_input_sets_are_made_again_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (2**34, 0):
        monkeypatch.setattr(clocks, "_COPIED_BYTES", most)
        worker = Worker(Bench(torch.device("cpu"), None), Memory(), trusted=True)
        worker.command("open")(None, "attention")
        worker.command("problem")("attn b1 h1 q8 d16 fp32")
        worker.command("prepare")("sdpa", "", "eager", sets=2, cache="warm", seed=5)
        made = worker.command("prepare").__self__
        worker.command("refresh")(1.0)
        made._sets[1]["q"].zero_()
        worker.command("refresh")(0.5)
        found.append([tensor.clone() for one in made._sets for tensor in one.values()])
        assert bool(made._base) == bool(most)
    assert all(map(torch.equal, *found))


def test_what_a_backward_is_given_of_its_forward_is_computed_anew_on_new_values() -> None:
    """Else every backward is refused for a wrong result, in the first sample on other values than the exam's."""
    worker = Worker(Bench(torch.device("cpu"), None), Memory(), trusted=True)
    worker.command("open")(None, "attention_backward")
    worker.command("problem")("attnbwd b1 h1 q8 d16 fp32")
    worker.command("prepare")("sdpa_bwd", "", "eager", sets=2, cache="warm", seed=5)
    made = worker.command("prepare").__self__
    for scale in (0.5, 1.0):
        worker.command("refresh")(scale)
        for index, inputs in enumerate(made._sets):
            (_, given), right = made._given[index, None], made.contract.for_kernel(made.problem, inputs).saved
            assert torch.equal(given.saved.lse, right.lse)
            assert torch.equal(given.saved.out, right.out)


def test_a_function_and_its_rival_keep_as_many_results_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a function's slot alone kept 64 of them, from its first look on, it was 3% slower than itself."""
    monkeypatch.setattr(gc, "set_threshold", lambda *_: None)
    monkeypatch.setattr(clocks, "_CPU_SAMPLE_NS", 2_000_000)
    worker = Worker(Bench(torch.device("cpu"), None), Memory(), trusted=False)
    worker.command("open")("flashmoe_science:flash_attention_science", "")
    worker.command("problem")("attn b1 h1 q8 d16 fp32")
    how = {"config": "", "clock": "eager", "sets": 2, "cache": "warm", "seed": 5}
    own, rival = (worker.command("prepare")(who, **how) for who in ("", "sdpa"))
    looks = []
    for _ in range(2):
        for one in (own, rival):
            worker.command("sample")(one["slot"])
        looks.append([worker.command("show")(one["slot"], which=0.0, path="")["kept"] for one in (own, rival)])
    most = [min(64, one["calls"]) for one in (own, rival)]
    assert looks == [most, most]


def test_only_the_inputs_of_the_last_call_are_held_on_to() -> None:
    worker = Worker(Bench(torch.device("cpu"), None), Memory(), trusted=True)
    worker.command("open")(None, "attention")
    worker.command("problem")("attn b1 h1 q8 d16 fp32")
    calls = worker.command("call").__self__
    for _ in range(3):
        worker.command("repeat")("sdpa", "", Case(0), times=1, more_s=0.0, path="out", most=10**6)
    assert sum(isinstance(one, dict) for one in calls._previous) == 1


def test_work_at_load_is_outside_a_peer_s_calls_and_done_anew_on_new_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are written without a new version, so that a peer which kept its own by tensor would compute on old ones."""
    peer, loads = kernel_named("dequantised_at_load", "moe"), []

    def load(problem: Problem, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        loads.append(problem)
        assert peer.load is not None
        return peer.load(problem, inputs)

    listed = SimpleNamespace(peers=lambda: (replace(peer, load=load),), ours=tuple)
    monkeypatch.setattr(callers, "operation", lambda name: listed)
    worker = Worker(Bench(torch.device("cpu"), None), Memory(), trusted=True)
    worker.command("open")(None, "moe")
    worker.command("problem")("moe t5 e4 k2 d128 f128 bf16 w:fp8_block")
    slot = worker.command("prepare")(peer.name, "", "eager", sets=2, cache="warm", seed=5)["slot"]
    made = worker.command("prepare").__self__
    for scale in (0.5, 1.0):
        worker.command("refresh")(scale)
        before = len(loads)
        worker.command("sample")(slot)
        assert len(loads) == before
        for index, inputs in enumerate(made._sets):
            ((_, given),) = (one for (at, _), one in made._given.items() if at == index)
            assert torch.equal(given.tensors.w1, load(made.problem, inputs)["w1"])
