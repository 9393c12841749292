"""A run of kernels as it goes on a GPU, the device's part (profiler, clocks, memory) stood in for, down to the verdicts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.harness.planted_kernels import kernel

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import Telemetry
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.kernel import Config, Kernel
from flashmoe_science.measure import kernels_run as module
from flashmoe_science.measure import l2_cache
from flashmoe_science.measure import session as recorder
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.correctness import Exam
from flashmoe_science.measure.kernels_run import KernelsRun
from flashmoe_science.measure.request import Group, Request
from flashmoe_science.measure.session import BudgetSpent, Outcome, Session
from flashmoe_science.measure.worker.calls import Calls
from flashmoe_science.measure.worker.clocks import Clocks
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.front import kernels
from flashmoe_science.ops.attention.proof.contract import AttentionContract
from flashmoe_science.problem import Problem
from flashmoe_science.records import DoneRow, Environment, NoteRow, RefusalRow, SeenLaunch, TimingRow
from flashmoe_science.store import Run, RunWriter, read_run

H200 = gpu_named("h200")
PROBLEM = parse_problem("attn b2 h4 q64 d16 bf16")
SPEED_NS = {"ours_a": 20_000, "ours_b": 30_000, "sdpa": 40_000, "fa": 25_000, "slow": 90_000}


TILES = (Config(tile=1), Config(tile=2))
OURS = tuple(kernel(name, "ours", configs=lambda problem, device: TILES) for name in ("ours_a", "ours_b"))
PEERS = tuple(kernel(name, "peer", configs=lambda problem, device: (Config(),)) for name in ("sdpa", "fa", "slow"))

ENVIRONMENT = Environment(
    gpu="NVIDIA H200", cpu="x", cpu_count=1, platform="p", python="3", torch="2", triton="3", driver="580", cuda="13"
)


class Device:
    """What the stand-in device does; a test may change it."""

    def __init__(self) -> None:
        self.telemetry = Telemetry(sm_clock_mhz=1980, power_w=600.0)
        self.routed: dict[str, str] = {}  # whose kernel a user's call launches instead
        self.chosen = True  # whether the public function would run the very config
        self._noise, self._slots = random.Random(1), dict[int, tuple[float, str]]()
        self._made: dict[int, Any] = {}

    def prepare(self, clocks: Clocks, who: str, config: str, clock: str, sets: int, cache: str, seed: int) -> dict[str, Any]:
        clocks._make_sets(min(sets, 2), seed)
        tile = Config.parse(config).get("tile", 1)
        slot = len(self._slots)
        self._slots[slot] = (SPEED_NS[who] * tile * (3 if clock == "eager" else 1), who)
        self._made[slot] = clocks._caller(who, config).bind(clocks._sets[0], "graph"), clocks._caller(who, config)
        return {"slot": slot, "calls": 100}

    def sample(self, clocks: Clocks, slot: int, cut_at: float | None = None, path: str = "") -> dict[str, Any]:
        if cut_at is None:
            return {"ns": self._slots[slot][0] * (1 + self._noise.gauss(0, 0.002))}
        call, caller = self._made[slot]
        clocks._handover.put(path, outputs := caller.outputs(call()))
        return {"set": 0, "plain": True, "count": len(outputs)}

    def profile_launches(
        self, spec: None, op: str, todo: Sequence[Any], seed: int, wait_s: float, step: Callable[[str], None], processes: int
    ) -> Any:
        launch = {name: SeenLaunch(name=name, grid=(1, 1, 1), block=(128, 1, 1), shared_bytes=0) for name in SPEED_NS}
        seen = {}
        for problem, who in todo:
            step(f"call path of {problem}")
            for name, config in who:
                seen[str(problem), name, config] = [[launch[name]], [launch[self.routed.get(name, name)]]]
        return seen


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    does = Device()
    init_exam = Exam.__init__

    def examine(self: Exam, worker: Any, oracle: Any, who: str, config: str, seed: int, on_gpu: bool, *more: Any) -> None:
        init_exam(self, worker, oracle, who, config, seed, False, *more)  # its outputs lie on the CPU

    def user_call(self: AttentionContract, kernel: Kernel, config: Config, problem: Problem, gpu: object) -> Any:
        return (lambda inputs: kernel.run(inputs, config)) if does.chosen and kernel.origin == "ours" else None

    monkeypatch.setattr(Clocks, "prepare", lambda self, **what: does.prepare(self, **what))
    monkeypatch.setattr(Clocks, "sample", lambda self, **what: does.sample(self, **what))
    monkeypatch.setattr(Calls, "memory", lambda self, **what: {"peak": OUTPUT_BYTES, "results": OUTPUT_BYTES})
    monkeypatch.setattr(AttentionContract, "user_call", user_call)
    monkeypatch.setattr(Exam, "__init__", examine)
    monkeypatch.setattr(module, "profile_launches", does.profile_launches)
    monkeypatch.setattr(module, "prebuild", lambda *given: None)
    monkeypatch.setattr(module, "room_for", lambda *given: 1)
    monkeypatch.setattr(recorder, "environment", lambda bench: ENVIRONMENT)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(Bench, "synchronize", lambda self: None)
    monkeypatch.setattr(Bench, "telemetry", lambda self: does.telemetry)
    monkeypatch.setattr(kernels, "ours", lambda: OURS)
    monkeypatch.setattr(kernels, "PEERS", PEERS)
    monkeypatch.setattr(l2_cache, "release", lambda: 0)
    monkeypatch.setattr(l2_cache, "set_aside_bytes", lambda: 0)
    return does


OUTPUT_BYTES = 2 * 4 * 64 * (16 * 2 + 4)


def measure(tmp_path: Path, problems: tuple[Problem, ...] = (PROBLEM,), **asked: Any) -> tuple[Outcome, Run]:
    with RunWriter(tmp_path / "run.jsonl") as writer:
        request = Request(against=("all",), command=("flashmoe",), **asked)
        group = Group("custom", "attention", problems)
        outcome = KernelsRun(Session(Bench(torch.device("cpu"), H200), writer, request, lambda *step: None), group).run()
    return outcome, read_run(tmp_path / "run.jsonl")


def test_the_pairs_that_a_round_takes_are_judged_as_they_were_meant(device: Device, tmp_path: Path) -> None:
    outcome, run = measure(tmp_path)
    pairs = [(row.clock, row.kernel, row.config, row.rival) for row in run.rows if isinstance(row, TimingRow)]
    assert pairs == [
        ("graph", "ours_a", "tile=1", "ours_a"), ("graph", "ours_a", "tile=1", "fa"), ("graph", "ours_a", "tile=1", "sdpa"),
        ("graph", "ours_a", "tile=1", "slow"), ("graph", "ours_b", "tile=1", "fa"), ("graph", "ours_b", "tile=1", "sdpa"),
        ("eager", "ours_a", "tile=1", "ours_a"), ("eager", "ours_a", "tile=1", "fa"), ("eager", "ours_a", "tile=1", "sdpa"),
    ]  # fmt: skip
    assert (outcome.exit_code, [row for row in run.rows if isinstance(row, RefusalRow)]) == (0, [])

    said = {(one.clock, one.kernel): one for one in JudgedRun(run).verdicts}
    best = said["graph", "ours_a"]
    assert (best.verdict, best.rival, best.gpu) == ("faster", "fa", "h200")
    assert best.ratio == pytest.approx(1.25, rel=0.01)
    assert (said["graph", "ours_b"].verdict, said["graph", "ours_b"].rival) == ("slower", "fa")
    assert {name for clock, name in said if clock == "graph"} == set(SPEED_NS)
    assert said["eager", "sdpa"].verdict == "slower"
    assert all(one.verdict != "refused" for one in said.values())


def test_heat_refuses_the_numbers(device: Device, tmp_path: Path) -> None:
    device.telemetry = Telemetry(sm_clock_mhz=900, throttle=("thermal (hardware)",))
    _, run = measure(tmp_path)
    assert {one.verdict for one in JudgedRun(run).verdicts} == {"refused"}


def test_a_public_function_that_routes_to_another_kernel_is_caught(device: Device, tmp_path: Path) -> None:
    device.routed = {"ours_a": "sdpa"}
    outcome, run = measure(tmp_path)
    (reason, *_) = {row.reason for row in run.rows if isinstance(row, RefusalRow) and row.kernel == "ours_a"}
    assert "called by a user: promised a kernel named '^ours_a$'; saw 'sdpa'" in reason
    assert outcome.exit_code == 1
    assert {row.kernel for row in run.rows if isinstance(row, TimingRow)} == {"ours_b"}


def test_an_eager_number_that_is_not_the_public_functions_says_so(device: Device, tmp_path: Path) -> None:
    device.chosen = False
    _, run = measure(tmp_path)
    notes = [row.text for row in run.rows if isinstance(row, NoteRow)]
    assert any("the public function would not choose this config here" in text for text in notes)


def test_a_part_of_the_l2_that_is_set_aside_refuses_the_numbers(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter([0, *[1 << 20] * 100])  # nothing when the first pair begins; something when it ends, for good
    monkeypatch.setattr("flashmoe_science.measure.l2_cache.release", lambda: next(asked))
    monkeypatch.setattr("flashmoe_science.measure.l2_cache.set_aside_bytes", lambda: 1 << 20)
    outcome, run = measure(tmp_path)
    reasons = [row.reason for row in run.rows if isinstance(row, RefusalRow) and row.stage == "sanity"]
    assert reasons[0] == "1048576 bytes of the L2 are set aside for lines that stay"
    assert not any(isinstance(row, TimingRow) for row in run.rows)
    assert outcome.exit_code == 3


def test_with_a_budget_the_first_problems_are_measured_before_the_next_are_built(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds and call paths of a whole suite may take longer than the budget, which then times nothing."""

    def spent_on_the_second(spec: None, op: str, todo: Sequence[Any], *more: Any) -> Any:
        if any(problem is not PROBLEM for problem, _ in todo):
            raise BudgetSpent
        return device.profile_launches(spec, op, todo, *more)

    monkeypatch.setattr(module, "AT_A_TIME", 1)
    monkeypatch.setattr(module, "profile_launches", spent_on_the_second)
    _, run = measure(tmp_path, (PROBLEM, parse_problem("attn b2 h4 q80 d16 bf16")), budget_s=1000.0)
    assert [row.problem for row in run.rows if isinstance(row, DoneRow)] == [str(PROBLEM)]
