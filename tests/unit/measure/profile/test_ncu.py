"""Nsight Compute as it answers: with a report, without permission, without a metric, too late, or not at all."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flashmoe_science.hardware.counters import METRICS, Counters
from flashmoe_science.measure.profile import ncu
from flashmoe_science.measure.profile.ncu import count, parse_raw

# As the tool writes it: its own messages first, a row of units under the header, thousands separated.
RAW = """==PROF== Connected to process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","dram__bytes_read.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum","launch__registers_per_thread","launch__shared_mem_per_block_dynamic","launch__shared_mem_per_block_static","launch__shared_mem_per_block_driver","launch__cluster_dim_x","launch__cluster_dim_y","launch__cluster_dim_z","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","a_metric.nobody_asked_for","smsp__inst_executed_op_local_ld.sum"
"","","","","","","","","","","","byte","%","ns","register/thread","byte/block","byte/block","byte/block","","","","%","",""
"0","4711","python3","host","flashmoe_fwd_triton","1","7","(128, 1, 1)","(64, 32, 1)","0","9.0","4,194,304","12.50","105,600","168","49,152","1,024","1,024","0","0","0","61.2","5","n/a"
"1","4711","python3","host","reduce<float, 4>(float*)","1","7","(256, 1, 1)","(8, 1, 1)","0","9.0","1,024","0.10","2,016","32","0","0","1,024","2","1","1","0","5","0"
"""  # noqa: E501

SCRIPT = """#!{python}
import json, os, sys
from pathlib import Path
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if "--version" in sys.argv:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 36398880) (public-release)")
elif "--import" in sys.argv:
    print({raw!r})
else:
    report = Path(sys.argv[sys.argv.index("--export") + 1])
{profiling}
"""

Fake = Callable[..., Path]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put an ``ncu`` on PATH that profiles as told (Python, with ``report`` at hand). Returns the log of its arguments."""

    def put(profiling: str = "report.write_bytes(b'x')", raw: str = RAW) -> Path:
        folder, log = tmp_path / "bin", tmp_path / "log"
        folder.mkdir()
        indented = "\n".join(f"    {line}" for line in profiling.splitlines())
        script = folder / "ncu"
        script.write_text(SCRIPT.format(python=sys.executable, log=str(log), raw=raw, profiling=indented))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return log

    return put


def asked(log: Path) -> list[list[str]]:
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    return [call for call in calls if "--export" in call]


def test_a_report_gives_each_launch_its_counters(fake: Fake, tmp_path: Path) -> None:
    log, report = fake(), tmp_path / "kernel.ncu-rep"
    found = count(["python", "-m", "x"], report, 30.0)
    assert (found.absent, found.tool, report.is_file()) == (None, "ncu 2025.3.1.0", True)
    first, second = found.launches
    assert (first.launch.name, first.launch.grid, first.launch.block) == ("flashmoe_fwd_triton", (64, 32, 1), (128, 1, 1))
    assert (first.launch.registers, first.launch.shared_bytes, first.launch.cluster) == (168, 50176, None)
    assert (second.launch.name, second.launch.cluster) == ("reduce<float, 4>(float*)", (2, 1, 1))
    assert (first.time_ns, first.metrics["dram__bytes_read.sum"]) == (105_600.0, 4_194_304.0)
    counters = Counters(first.metrics)
    assert (counters["tensor"], counters["dram"]) == (0.612, 0.125)
    (command,) = asked(log)
    assert command[-3:] == ["python", "-m", "x"]
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[command.index("--profile-from-start") + 1] == "off"


def test_what_is_no_number_is_not_counted_and_what_nobody_reads_not_kept(fake: Fake) -> None:
    first, second = parse_raw(RAW)
    assert "smsp__inst_executed_op_local_ld.sum" not in first.metrics
    assert second.metrics["smsp__inst_executed_op_local_ld.sum"] == 0.0
    assert "a_metric.nobody_asked_for" not in first.metrics
    assert Counters(first.metrics)["local_loads"] is None


BLOCKED = """print("==PROF== Connected to process 4711")
print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target "
      "device 0. For instructions on enabling permissions and to get more information see a page")
sys.exit(1)"""


def test_blocked_counters_are_said_with_what_would_help(fake: Fake, tmp_path: Path) -> None:
    log = fake(BLOCKED)
    found = count(["x"], tmp_path / "r.ncu-rep", 30.0)
    assert found.launches == ()
    assert found.absent.startswith("ERR_NVGPUCTRPERM: the driver lets only administrators")
    assert "NVreg_RestrictProfilingToAdminUsers=0" in found.absent
    assert len(asked(log)) == 1  # asking again would not help


def test_without_the_tool_that_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu, "PLACES", ())
    assert count(["x"], tmp_path / "r.ncu-rep", 30.0).absent == "Nsight Compute (ncu) is not installed, or not on PATH"


def test_a_metric_that_this_version_lacks_is_left_out(fake: Fake, tmp_path: Path) -> None:
    missing = METRICS[3]
    log = fake(
        f"""if any({missing!r} in word for word in sys.argv):
    print("==ERROR== Failed to find metric {missing}")
    sys.exit(1)
report.write_bytes(b"x")"""
    )
    found = count(["x"], tmp_path / "r.ncu-rep", 30.0)
    assert len(found.launches) == 2
    first, second = (call[call.index("--metrics") + 1].split(",") for call in asked(log))
    assert set(first) - set(second) == {missing}


def test_a_counter_below_zero_was_not_counted() -> None:
    assert Counters({"smsp__inst_executed.sum": -1.0, "sm__inst_executed.sum": 7.0})["instructions"] == 7.0
    assert Counters({"smsp__inst_executed.sum": -1.0})["instructions"] is None
