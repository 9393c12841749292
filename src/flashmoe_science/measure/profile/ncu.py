"""Nsight Compute as a subprocess: one call of a kernel profiled into a report file, the report read back as numbers.

The tool itself exports the report as CSV: a header of metrics, a row of units, then one row a launch. Whatever keeps counters
from being read is reported as text and is no error. ``python -m`` of this module is the profiled process.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from flashmoe_science.hardware.counters import LAUNCH, METRICS, QUANTITIES
from flashmoe_science.measure.bench import bench_here
from flashmoe_science.measure.child import die_with_parent
from flashmoe_science.measure.inputs import Case, Memory, make
from flashmoe_science.measure.worker.worker import Worker
from flashmoe_science.operations import parse_problem
from flashmoe_science.processes import end_with_parent
from flashmoe_science.records import Extents, SeenLaunch

TOOL = "ncu"
PLACES = ("usr/local/cuda/bin/ncu", "opt/nvidia/nsight-compute/*/ncu")
# Each version knows which metrics of these its chips have; METRICS are requested in addition.
_SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables", "LaunchStats",
    "Occupancy", "SchedulerStats", "WarpStateStats", "InstructionStats",
)  # fmt: skip
_MAX_LAUNCHES = 32  # of one call
_READ_S = 60.0
_BLOCKED = "ERR_NVGPUCTRPERM"
_BLOCKED_WORDS = (
    f"{_BLOCKED}: the driver lets only administrators read performance counters; NVreg_RestrictProfilingToAdminUsers=0 lets all"
)


class Counted(NamedTuple):
    """One launch and what was counted of it, by the tool's names, in base units; times in ns."""

    launch: SeenLaunch
    metrics: Mapping[str, float]

    @property
    def time_ns(self) -> float | None:
        return self.metrics.get(QUANTITIES["time_ns"][0])


class Profile(NamedTuple):
    """``absent`` is why nothing was counted, None where something was; ``tool`` names the tool with its version."""

    launches: tuple[Counted, ...] = ()
    tool: str | None = None
    absent: str | None = None


def count(command: Sequence[str], report: Path, timeout_s: float) -> Profile:
    """Profile what ``command`` launches between cudaProfilerStart and Stop; keep the report at ``report`` (*.ncu-rep).

    Every launch is replayed as often as the counters need, with caches flushed before and clocks left as they are. A version
    that does not know some of METRICS is asked again without those, at last for its own sections alone.
    """
    tool = find_tool()
    if tool is None:
        return Profile(absent="Nsight Compute (ncu) is not installed, or not on PATH")
    found = re.search(r"Version (\d+(?:\.\d+)+)", run_tool([tool, "--version"], _READ_S)[0])
    version = f"{TOOL} {found[1]}" if found else TOOL
    wanted, reason = METRICS, ""
    for _ in range(3):
        report.unlink(missing_ok=True)
        printed, timed_out = run_tool([tool, *_options(wanted, report), *command], timeout_s)
        if timed_out:
            return Profile(tool=version, absent=f"{TOOL} was stopped after {timeout_s:g} s")
        if report.is_file():
            reading = [tool, "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]
            if launches := parse_raw(run_tool(reading, _READ_S)[0]):
                return Profile(tuple(launches), version)
        reason = _reason(printed)
        if _BLOCKED in reason or "metric" not in printed.lower() or not wanted:
            break
        supported = tuple(name for name in wanted if name not in printed)
        wanted = supported if supported != wanted else ()
    return Profile(tool=version, absent=reason)


def _options(metrics: Sequence[str], report: Path) -> list[str]:
    sections = [word for section in _SECTIONS for word in ("--section", section)]
    return [
        "--clock-control", "none", "--profile-from-start", "off", "--launch-count", str(_MAX_LAUNCHES), "--force-overwrite",
        "--export", str(report), *sections, *(["--metrics", ",".join(metrics)] if metrics else []),
    ]  # fmt: skip


def _reason(printed: str) -> str:
    """Why there are no counters: the tool's own error, or its last line of output."""
    if _BLOCKED in printed:
        return _BLOCKED_WORDS
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")]
    own = [line for line in lines if not line.startswith("==")]
    return f"{TOOL} read no counters: {'; '.join(errors[:1] + own[-1:])[:300] or 'it did not say why'}"


def parse_raw(text: str) -> list[Counted]:
    """Read ``--csv --page raw`` in base units. Lines before the header (the tool's own messages) and the row of units are
    skipped, as are values that are no numbers; nothing but the metrics of ``hardware.counters`` is kept."""
    _, header, table = text.partition('"ID"')
    rows = list(csv.DictReader((header + table).splitlines()))
    return [_counted(row) for row in rows[1:] if None not in row and None not in row.values()]


def _counted(row: Mapping[str, str]) -> Counted:
    metrics = {name: value for name in METRICS if (value := _number(row.get(name, ""))) is not None}

    def launched(what: str) -> int:
        return round(metrics.get(LAUNCH[what], 0.0))

    x, y, z = (launched(f"cluster_{axis}") for axis in "xyz")  # zeros where there are no clusters
    launch = SeenLaunch(
        name=row.get("Kernel Name", ""),
        grid=_triple(row.get("Grid Size", "")),
        block=_triple(row.get("Block Size", "")),
        shared_bytes=launched("shared_static") + launched("shared_dynamic"),
        cluster=(x, y, z) if x * y * z > 1 else None,
        registers=launched("registers") if LAUNCH["registers"] in metrics else None,
    )
    return Counted(launch, metrics)


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _triple(text: str) -> Extents:
    """``(128, 1, 1)``, with missing numbers as 1; zeros where there is none."""
    numbers = [int(number) for number in re.findall(r"\d+", text)][:3]
    x, y, z = [*numbers, 1, 1][:3] if numbers else (0, 0, 0)
    return x, y, z


def find_tool() -> str | None:
    """The tool's path: on PATH, else where its installers put it (patterns under /), the newest first."""
    found = [str(path) for place in PLACES for path in sorted(Path("/").glob(place), reverse=True)]
    return shutil.which(TOOL) or next(iter(found), None)


def run_tool(command: Sequence[str], timeout_s: float) -> tuple[str, bool]:
    """The output of a command on both streams, and whether it timed out; then the command and its children are killed."""
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"LC_ALL": "C"},  # C: decimal points
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),  # a run that is killed leaves nothing on the device
    )
    try:
        return process.communicate(timeout=timeout_s)[0], False
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return printed, True
        raise


MODULE = "flashmoe_science.measure.profile.ncu"
_WARM_UP = 3  # calls, so that nothing is compiled, loaded or tuned in the one that is profiled


def main(who: str, config: str, problem: str, seed: int) -> None:
    """Call a kernel of the package, or the function module:function, on a problem: a few times, then once marked for a
    profiler (Nsight Compute)."""
    worker, asked = Worker(bench_here(), Memory(), trusted=True), parse_problem(problem)
    is_function = ":" in who
    worker.open(who if is_function else None, "" if is_function else asked.op)
    worker.problem(problem)
    assert worker.contract is not None
    made = make(worker.contract, asked, worker.bench.device, Case(seed))
    call = worker.caller("" if is_function else who, config).bind(made, "graph")
    for _ in range(_WARM_UP):
        call()
    worker.bench.synchronize()
    torch.cuda.profiler.start()
    call()
    worker.bench.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    end_with_parent()  # the tool around it
    main(**json.loads(sys.argv[1]))
