"""A round as it goes on a GPU, the device's part (profiler, samplers, memory counters) stood in for, down to the verdicts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import Telemetry
from flashmoe_science.judge.verdicts import verdicts_of
from flashmoe_science.kernel import Config, Kernel, Launch
from flashmoe_science.measure import oracle, session
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.paths import Seen
from flashmoe_science.measure.round import Entrant, Round
from flashmoe_science.measure.session import Options, Outcome, Session
from flashmoe_science.measure.timing import Sampler
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.inputs import AttentionInputs, AttentionOutput
from flashmoe_science.ops.attention.oracle import attention_oracle
from flashmoe_science.records import NoteRow, RefusalRow, SeenLaunch, TimingRow
from flashmoe_science.store import Run, RunWriter, read_run

H200 = gpu_named("h200")
PROBLEM = parse_problem("attn b2 h4 q64 d16 bf16")
SPEED_NS = {"ours_a": 20_000, "ours_b": 30_000, "sdpa": 40_000, "fa": 25_000, "slow": 90_000}


def run_oracle(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    out, lse = attention_oracle(inputs)
    out = out.to(inputs.q.dtype)
    return AttentionOutput(out if inputs.out is None else inputs.out.copy_(out), lse.float() if inputs.return_lse else None)


def kernel(name: str, origin: str) -> Kernel:
    return Kernel(
        name=name,
        origin=origin,
        op="attention",
        about=name,
        supports=lambda problem, device: None,
        configs=lambda problem, device: (Config(tile=1), Config(tile=2)) if origin == "ours" else (Config(),),
        run=run_oracle,
        launches=lambda problem, config, gpu: (Launch(f"^{name}$"),),
    )


OURS = (kernel("ours_a", "ours"), kernel("ours_b", "ours"))
PEERS = (kernel("sdpa", "peer"), kernel("fa", "peer"), kernel("slow", "peer"))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the stand-in device does; a test may change it."""
    does: dict[str, object] = {"telemetry": Telemetry(sm_clock_mhz=1980, power_w=600.0), "bias": 1.0, "extra": 0}
    noise = random.Random(1)
    prepared: dict[tuple[str, str], int] = {}

    def sampler(self: Round, entrant: Entrant, clock: str, inputs: object) -> Sampler:
        name, tile = entrant.candidate.name, entrant.candidate.config.get("tile", 1)
        prepared[name, clock] = prepared.get((name, clock), 0) + 1
        second = does["bias"] if name == "ours_a" and tile == 1 and prepared[name, clock] > 2 else 1.0
        time = SPEED_NS[name] * tile * second * (3 if clock == "eager" else 1)
        return Sampler(clock, 100, lambda: time * (1 + noise.gauss(0, 0.002)))

    def look(todo, seed, on_problem):
        named = [(str(one.problem), candidate) for one in todo for candidate in one.candidates]
        launch = {name: SeenLaunch(name=name, grid=(1, 1, 1), block=(128, 1, 1), shared_bytes=0) for name in SPEED_NS}
        return {
            (text, one.name, str(one.config)): Seen(
                problem=text,
                kernel=one.name,
                config=str(one.config),
                planned=[launch[one.name]],
                by_user=[launch[does.get("routed", {}).get(one.name, one.name)]],
            )
            for text, one in named
        }

    monkeypatch.setattr(Round, "_sampler", sampler)
    monkeypatch.setattr(session, "look", look)
    monkeypatch.setattr(session, "environment", lambda bench: _environment())
    monkeypatch.setattr(Bench, "synchronize", lambda self: None)
    monkeypatch.setattr(Bench, "telemetry", lambda self: does["telemetry"])
    monkeypatch.setattr("flashmoe_science.measure.round.user_call", lambda candidate, call, problem, gpu: call)
    monkeypatch.setattr(oracle, "_peak_extra_bytes", lambda bench, candidate, inputs: PROBLEM_OUTPUT_BYTES + does["extra"])
    return does


PROBLEM_OUTPUT_BYTES = 2 * 4 * 64 * (16 * 2 + 4)


def _environment():
    from flashmoe_science.records import Environment

    return Environment(
        gpu="NVIDIA H200", cpu="x", cpu_count=1, platform="p", python="3", torch="2", triton="3", driver="580", cuda="13"
    )


def measure(tmp_path: Path, **asked: object) -> tuple[Outcome, Run]:
    with RunWriter(tmp_path / "run.jsonl") as writer:
        options = Options("custom", (PROBLEM,), OURS, PEERS, ("flashmoe",), **asked)
        outcome = Session(Bench(torch.device("cpu"), H200), writer, options, lambda step: None).run()
    return outcome, read_run(tmp_path / "run.jsonl")


def test_the_pairs_that_a_round_takes(device, tmp_path: Path) -> None:
    outcome, run = measure(tmp_path)
    pairs = [(row.clock, row.kernel, row.config, row.rival) for row in run.rows if isinstance(row, TimingRow)]
    assert pairs == [
        ("graph", "ours_a", "tile=1", "ours_a"),
        ("graph", "ours_a", "tile=1", "fa"),
        ("graph", "ours_a", "tile=1", "sdpa"),
        ("graph", "ours_a", "tile=1", "slow"),
        ("graph", "ours_b", "tile=1", "fa"),
        ("graph", "ours_b", "tile=1", "sdpa"),
        ("eager", "ours_a", "tile=1", "ours_a"),
        ("eager", "ours_a", "tile=1", "fa"),
        ("eager", "ours_a", "tile=1", "sdpa"),
    ]
    assert outcome.exit_code == 0
    assert [row for row in run.rows if isinstance(row, RefusalRow)] == []


def test_its_rows_are_judged_as_they_were_meant(device, tmp_path: Path) -> None:
    _, run = measure(tmp_path)
    said = {(one.clock, one.kernel): one for one in verdicts_of(run)}
    best = said["graph", "ours_a"]
    assert (best.verdict, best.rival, best.gpu) == ("faster", "fa", "h200")
    assert best.ratio == pytest.approx(1.25, rel=0.01)
    assert (said["graph", "ours_b"].verdict, said["graph", "ours_b"].rival) == ("slower", "fa")
    assert {name for clock, name in said if clock == "graph"} == set(SPEED_NS)
    assert said["eager", "sdpa"].verdict == "slower"
    assert all(one.verdict != "refused" for one in said.values())


def test_a_kernel_that_differs_from_itself_discredits_the_problem(device, tmp_path: Path) -> None:
    device["bias"] = 1.1  # of the third preparation: on the graph clock, the control after both configs
    _, run = measure(tmp_path)
    on_graph = [one for one in verdicts_of(run) if one.clock == "graph"]
    assert {one.verdict for one in on_graph} == {"refused"}
    assert all("against itself" in one.reason for one in on_graph)


def test_a_power_cap_is_recorded_and_is_no_throttling(device, tmp_path: Path) -> None:
    device["telemetry"] = Telemetry(sm_clock_mhz=1500, throttle=("power cap",))
    _, run = measure(tmp_path)
    rows = [row for row in run.rows if isinstance(row, TimingRow)]
    assert all(row.power_capped and row.throttle == [] for row in rows)
    assert all(one.verdict != "refused" for one in verdicts_of(run))


def test_heat_refuses_the_numbers(device, tmp_path: Path) -> None:
    device["telemetry"] = Telemetry(sm_clock_mhz=900, throttle=("thermal (hardware)",))
    _, run = measure(tmp_path)
    assert {one.verdict for one in verdicts_of(run)} == {"refused"}


def test_a_public_function_that_routes_to_another_kernel_is_caught(device, tmp_path: Path) -> None:
    device["routed"] = {"ours_a": "sdpa"}
    outcome, run = measure(tmp_path)
    (reason, *_) = {row.reason for row in run.rows if isinstance(row, RefusalRow) and row.kernel == "ours_a"}
    assert "called by a user: promised a kernel named '^ours_a$'; saw 'sdpa'" in reason
    assert outcome.exit_code == 1
    assert {row.kernel for row in run.rows if isinstance(row, TimingRow)} == {"ours_b"}


def test_memory_beyond_the_output_and_lse_is_wrong(device, tmp_path: Path) -> None:
    device["extra"] = 64
    outcome, run = measure(tmp_path)
    assert outcome.exit_code == 1
    assert all("of device memory" in row.reason for row in run.rows if isinstance(row, RefusalRow))
    assert not any(isinstance(row, TimingRow) for row in run.rows)


def test_an_eager_number_that_is_not_the_public_functions_says_so(device, tmp_path: Path) -> None:
    _, run = measure(tmp_path)
    notes = [row.text for row in run.rows if isinstance(row, NoteRow)]
    assert any("the public function would not choose this config here" in text for text in notes)


def test_a_part_of_the_l2_that_is_set_aside_refuses_the_numbers(
    device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter([0, *[1 << 20] * 100])  # nothing when the first pair begins; something when it ends, for good
    monkeypatch.setattr("flashmoe_science.measure.l2.release", lambda: next(asked))
    monkeypatch.setattr("flashmoe_science.measure.l2.set_aside_bytes", lambda: 1 << 20)
    outcome, run = measure(tmp_path)
    reasons = [row.reason for row in run.rows if isinstance(row, RefusalRow) and row.stage == "sanity"]
    assert reasons[0] == "1048576 bytes of the L2 are set aside for lines that stay, against ours_a (tile=1)"
    assert not any(isinstance(row, TimingRow) for row in run.rows)
    assert outcome.exit_code == 3


def test_warm_rows_stand_beside_the_cold_ones_and_are_judged_by_themselves(device, tmp_path: Path) -> None:
    _, run = measure(tmp_path, warm=True)
    pairs = {
        cache: [
            (row.kernel, row.rival, row.input_sets == 1)
            for row in run.rows
            if isinstance(row, TimingRow) and row.clock == "graph" and row.cache == cache
        ]
        for cache in ("cold", "warm")
    }
    assert [pair[:2] for pair in pairs["warm"]] == [pair[:2] for pair in pairs["cold"]]
    assert {one_set for *_, one_set in pairs["warm"]} == {True}
    assert {one_set for *_, one_set in pairs["cold"]} == {False}
    said = {(one.cache, one.kernel): one.verdict for one in verdicts_of(run) if one.clock == "graph"}
    assert {said[cache, "ours_a"] for cache in ("cold", "warm")} == {"faster"}
    assert {cache for cache, _ in said} == {"cold", "warm"}


def test_a_budget_that_is_spent_on_call_paths_ends_the_run_there(
    device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "look", lambda todo, seed, on_problem: on_problem(0, str(todo[0].problem)))
    outcome, run = measure(tmp_path, budget_s=1e-9)
    assert (outcome.problems_left, outcome.stopped) == (1, None)
    assert [row.kind for row in run.rows] == ["note", "end"]
