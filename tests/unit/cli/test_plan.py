"""``flashmoe plan``: what to change, a prediction written down, and what it came to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashmoe_science.cli.main import main
from flashmoe_science.records import (
    CallPathRow,
    CorrectnessRow,
    EndRow,
    Environment,
    ErrorStats,
    PredictionRow,
    RunRow,
    SeenLaunch,
    TimingRow,
)
from flashmoe_science.store import RunWriter, read_run

PROBLEM = "attn b1 h1 q512 d64 fp16"


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def record(folder: Path, run: str, started: str, microseconds: int, digest: str, blocks: int) -> None:
    """A full run: fwd_triton beside fa3, proved and believed."""
    environment = Environment(
        gpu="NVIDIA H200",
        sm_count=132,
        cpu="a CPU",
        cpu_count=16,
        platform="Linux",
        python="3.12",
        torch="2.11",
        triton="3.6.0",
    )
    header = RunRow(
        run=run, started=started, suite="custom", command=["x"], commit=None, source_digest=digest, seed=42,
        environment=environment,
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
def evidence(tmp_path: Path) -> Path:
    folder = tmp_path / "evidence"
    record(folder, "r1", "2026-01-01T00:00:00+00:00", 40, "before", blocks=8)
    return folder


def test_a_plan_names_changes_with_the_most_they_give(evidence: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "plan", PROBLEM, "--kernel", "fwd_triton", "--evidence", evidence)
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("split the keys"))
    assert "serial-loop" in line
    assert "4.00x" in line  # 8 blocks of 64 rows make 32 of 16; 132 SMs have room for four times as many
    _, out, _ = call(capsys, "plan", PROBLEM, "--kernel", "fwd_triton", "--evidence", evidence, "--json")
    made = json.loads(out)
    assert made["steps"][0]["most_gain"] == 4.0
    assert made["limit"] == "launch: 850 ns for an empty launch (specified)"


def test_a_prediction_is_recorded_then_measured(evidence: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = (PROBLEM, "--kernel", "fwd_triton", "--evidence", evidence, "--record", "--change", "serial-loop")
    code, _, err = call(capsys, "plan", *about)
    assert code == 0
    path = Path(err.removeprefix("recorded in ").strip())
    assert path.parent == evidence / "runs" / "h200"
    (row,) = (row for row in read_run(path).rows if isinstance(row, PredictionRow))
    assert (row.hypothesis, row.before_run, row.before_ns, row.clock) == ("serial-loop", "r1", 40_001.0, "graph")
    assert (row.part, row.speedup, row.made_in) == (1.0, 4.0, None)

    code, out, _ = call(capsys, "plan", "--evidence", evidence)
    assert (code, "not measured yet" in out) == (0, True)
    _, out, _ = call(capsys, "plan", "--outcomes", "--kernel", "fa3", "--evidence", evidence)
    assert out == "of the predictions on record (1) none is of that; flashmoe plan shows them all\n"

    record(evidence, "r2", "2999-01-01T00:00:00+00:00", 20, "after", blocks=64)
    _, out, _ = call(capsys, "plan", "--outcomes", "--evidence", evidence)
    assert "missed by 2.00x (run r2, each beside" in out
    _, out, _ = call(capsys, "plan", "--evidence", evidence, "--json")
    (found,) = json.loads(out)
    assert (found["outcome"]["said"], found["outcome"]["run"], found["most_gain"]) == ("missed", "r2", 4.0)
    assert found["outcome"]["gain"] == pytest.approx(2.0, rel=1e-3)


def test_no_predictions_is_said(evidence: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "plan", "--evidence", evidence)[:2] == (
        0,
        "no predictions are on record; flashmoe plan PROBLEM --kernel KERNEL --record makes some\n",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([PROBLEM], "--kernel is not given"),
        (["--record"], "--record, --change and --in need a problem"),
        ([PROBLEM, "--kernel", "fwd_triton", "--in", "mine.py:v2"], "--in is given without --record"),
        ([PROBLEM, "--kernel", "fwd_triton", "--record", "--in", "fwd_triton"], "it must name another kernel than --kernel"),
        ([PROBLEM, "--kernel", "fwd_triton", "--record", "--in", " "], "--in is ' '; it must name another kernel"),
        (
            [PROBLEM, "--kernel", "fwd_triton", "--change", "spills"],
            "--change is 'spills'; the plan has small-grid, serial-loop",
        ),
        ([PROBLEM, "--kernel", "fwd_triton", "--gpu", "l4"], "on l4"),
        (["attn b1", "--kernel", "fwd_triton"], "lacks"),
        (["--evidence", "nowhere"], "'nowhere', which is not a folder"),
    ],
)
def test_what_cannot_be_is_one_line(
    evidence: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code, out, err = call(capsys, "plan", *arguments, "--evidence", evidence)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
