"""``flashmoe diagnose``: from the records, for real on a CPU, and what a change gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashmoe_science.cli.main import main
from flashmoe_science.measure.profile import profile as ceilings
from flashmoe_science.records import (
    CallPathRow,
    CeilingRow,
    CorrectnessRow,
    EndRow,
    Environment,
    ErrorStats,
    ProfileRow,
    RunRow,
    SeenLaunch,
    TimingRow,
)
from flashmoe_science.store import RunWriter, read_run

PROBLEM = "attn b1 h1 q512 d64 fp16"
CPU_PROBLEM = "attn b1 h2 q64 d32 fp32"
ON_H200 = Environment(
    gpu="NVIDIA H200", sm_count=132, cpu="a CPU", cpu_count=16, platform="Linux", python="3.12", torch="2.11", triton="3.6.0"
)


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """One run of a kernel on an H200: four blocks, 20 us on the device, 50 for a caller."""
    folder = tmp_path / "evidence"
    with RunWriter(folder / "runs" / "h200" / "r1.jsonl") as writer:
        writer.append(
            RunRow(
                run="r1", started="2026-01-01T00:00:00+00:00", suite="custom", command=["x"], commit=None, source_digest="0",
                seed=42, environment=ON_H200,
            )
        )  # fmt: skip
        launch = SeenLaunch(name="k", grid=(4, 1, 1), block=(128, 1, 1), shared_bytes=0, registers=64)
        writer.append(CallPathRow(run="r1", problem=PROBLEM, kernel="k", config="", launches=[launch], broken_promises=[]))
        for clock, time_ns in (("graph", 20_000), ("eager", 50_000)):
            writer.append(
                TimingRow(
                    run="r1", problem=PROBLEM, op="attention", kernel="k", origin="candidate", config="", rival="k",
                    rival_origin="candidate", rival_config="", clock=clock, cache="cold", calls=1, input_sets=1,
                    a=[time_ns] * 6, b=[time_ns] * 6,
                )
            )  # fmt: skip
        writer.append(EndRow(run="r1", ended="2026-01-01T00:01:00+00:00", wall_seconds=1, device_seconds=1, exit_code=0))
    return folder


def test_a_diagnosis_by_the_records_alone(evidence: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "diagnose", PROBLEM, "--kernel", "k", "--recorded", "--evidence", evidence)
    assert (code, err) == (0, "")
    assert "20 us on the graph clock; 50 us on the eager clock; 4 blocks of 128 threads" in out
    assert "no counters: it was not profiled" in out
    assert "supported  the grid is smaller than the GPU: 4 blocks" in out
    assert "cause: launch or host bound" in out
    assert "\x1b" not in out


def test_json_holds_every_hypothesis_with_its_numbers(evidence: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(
        capsys, "diagnose", PROBLEM, "--kernel", "k", "--recorded", "--gpu", "H200", "--evidence", evidence, "--json"
    )
    (found,) = json.loads(out)
    by = {one["key"]: one for one in found["hypotheses"]}
    assert by["small-grid"]["evidence"].startswith("4 blocks on 132 SMs")
    assert {one["status"] for one in by.values()} == {"supported", "ruled out", "untested"}
    assert found["roofline"]["needs"][0]["ceiling"]["measured"] is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([PROBLEM, "--recorded"], "from the records, a diagnosis needs --kernel"),
        ([PROBLEM, "--kernel", "q", "--recorded"], "no record speaks of kernel 'q'"),
        ([PROBLEM, "--kernel", "k", "--recorded", "--gpu", "h2000"], "gpu is 'h2000'; it must be one of"),
        ([PROBLEM, "--measure", "--gpu", "h200"], "--gpu is 'h200' with --measure"),
        (["attn b1", "--measure"], "lacks"),
        ([CPU_PROBLEM, "--kernel", "sdpaa", "--measure"], "kernel is 'sdpaa'; it must be one of"),
        ([CPU_PROBLEM, "--config", "a=1", "--measure"], "it needs one --kernel"),
        ([CPU_PROBLEM, "--kernel", "nowhere.py:fn", "--measure"], "there is no file 'nowhere.py'"),
        (["op softmax rows8 fp32 flops8 bytes8", "--measure"], "name the function to look at"),
    ],
)
def test_what_cannot_be_is_one_line(
    evidence: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], said: str
) -> None:
    code, out, err = call(capsys, "diagnose", *arguments, "--evidence", evidence, "--out", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


@pytest.fixture
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_CPU_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "_CPU_MATRIX", 64)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ceilings")
def test_a_cpu_is_diagnosed_by_times_and_ceilings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """For real, in processes of their own: PyTorch's attention, a user's, and one that ends the process."""
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef slow(q, k, v, causal=False, softmax_scale=None):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)\n"
    )
    (tmp_path / "dies.py").write_text("import os\n\ndef fn(q, k, v, causal=False, softmax_scale=None):\n    os._exit(7)\n")
    out = tmp_path / "out"
    kernels = [word for name in ("sdpa", f"{tmp_path}/mine.py:slow", f"{tmp_path}/dies.py:fn") for word in ("--kernel", name)]
    code, said, _ = call(
        capsys, "diagnose", CPU_PROBLEM, "--measure", *kernels, "--out", out, "--evidence", tmp_path / "none", "--json"
    )
    assert code == 1  # one does not run
    sdpa, mine, dies = json.loads(said)
    assert [one["gpu"] for one in (sdpa, mine, dies)] == ["cpu"] * 3
    assert {one["status"] for one in sdpa["hypotheses"]} <= {"supported", "ruled out", "untested"}
    assert sdpa["counters_absent"] == "there is no GPU here, and counters are a GPU's"
    assert mine["time_ns"] > 0
    assert dies["time_ns"] is None
    assert dies["cause"].startswith(
        "it was refused: timing: it does not run on the eager clock: it ended the process with code 7"
    )
    rows = read_run(out / "run-profile.jsonl").rows
    assert {row.name for row in rows if isinstance(row, CeilingRow)} == {"dram copy", "matmul fp32", "matmul bf16"}
    assert len([row for row in rows if isinstance(row, ProfileRow)]) == 2  # who dies has no call to look at


def test_a_diagnosis_of_a_gpu_that_is_not_here_is_refused_for_ours(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    code, _, err = call(capsys, "diagnose", CPU_PROBLEM, "--measure", "--kernel", "fwd_triton", "--out", tmp_path / "out")
    assert code == 2
    assert err.startswith(f"flashmoe: kernel 'fwd_triton' cannot serve '{CPU_PROBLEM}' here: ")


def record(folder: Path, run: str, started: str, microseconds: int, digest: str, blocks: int) -> None:
    """A full run: fwd_triton beside fa3, proved and believed."""
    header = RunRow(
        run=run, started=started, suite="custom", command=["x"], commit=None, source_digest=digest, seed=42,
        environment=ON_H200,
    )  # fmt: skip
    error = ErrorStats(max=1e-4, rms=1e-5, mean=1e-5, worst=[0], bound_max=1e-3, bound_rms=1e-3, bound_mean=1e-3, nonfinite=0)
    with RunWriter(folder / "runs" / "h200" / f"{run}.jsonl") as writer:
        writer.append(header)
        for kernel, origin in (("fwd_triton", "ours"), ("fa3", "peer")):
            launch = SeenLaunch(name=kernel, grid=(blocks, 1, 1), block=(128, 1, 1), shared_bytes=0, registers=64)
            writer.append(
                CallPathRow(run=run, problem=PROBLEM, kernel=kernel, config="", launches=[launch], broken_promises=[])
            )
            writer.append(
                CorrectnessRow(run=run, problem=PROBLEM, kernel=kernel, origin=origin, config="", passed=True, out=error)
            )
        for rival, origin, b in (("fwd_triton", "ours", microseconds), ("fa3", "peer", 30)):
            writer.append(
                TimingRow(
                    run=run, problem=PROBLEM, op="attention", kernel="fwd_triton", origin="ours", config="", rival=rival,
                    rival_origin=origin, rival_config="", clock="graph", cache="cold", calls=100, input_sets=1000,
                    a=[microseconds * 1000 + index % 3 for index in range(20)], b=[b * 1000 + index % 3 for index in range(20)],
                )
            )  # fmt: skip
        writer.append(EndRow(run=run, ended=started, wall_seconds=1, device_seconds=1, exit_code=0))


@pytest.fixture
def history(tmp_path: Path) -> Path:
    folder = tmp_path / "evidence"
    record(folder, "r1", "2026-01-01T00:00:00+00:00", 40, "before", blocks=8)
    return folder


def test_a_plan_names_changes_with_the_most_they_give(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = (PROBLEM, "--kernel", "fwd_triton", "--recorded", "--evidence", history)
    code, out, _ = call(capsys, "diagnose", *about)
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("  serial-loop"))
    assert "4.00x" in line  # 8 blocks of 64 rows make 32 of 16; 132 SMs have room for four times as many
    _, out, _ = call(capsys, "diagnose", *about, "--json")
    made = json.loads(out)[0]["plan"]
    assert made["steps"][0]["most_gain"] == 4.0
    assert made["limit"] == "launch: 850 ns for an empty launch (specified)"


def test_what_a_change_gave_stands_below_the_plan(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(history, "r2", "2026-02-01T00:00:00+00:00", 20, "after", blocks=132)
    about = (PROBLEM, "--kernel", "fwd_triton", "--recorded", "--evidence", history)
    code, out, _ = call(capsys, "diagnose", *about)
    assert (code, "What changed since run r1, measured in run r2 (each beside fa3 in its own run)" in out) == (0, True)
    _, out, _ = call(capsys, "diagnose", *about, "--json")
    (found,) = json.loads(out)
    gave = {one["hypothesis"]: one["gain"] for one in found["outcomes"]}
    assert gave["serial-loop"] == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([PROBLEM, "--kernel", "fwd_triton", "--gpu", "l4"], "on l4"),
        (["attn b1", "--kernel", "fwd_triton", "--recorded"], "lacks"),
    ],
)
def test_a_diagnosis_that_cannot_be_is_one_line(
    history: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code, out, err = call(capsys, "diagnose", *arguments, "--evidence", history)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
