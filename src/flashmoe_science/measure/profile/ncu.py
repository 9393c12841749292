"""Nsight Compute as a subprocess: one call of a kernel profiled into a report file, the report read back as numbers.

The report is exported as CSV by the tool itself, whose columns are metrics: after the header comes a row of units, then one row
a launch. Whatever keeps counters from being read is said in words, and is no error. ``python -m`` of this module with a JSON
object, the arguments of ``main``, is the process that the tool looks at.
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
from flashmoe_science.records import SeenLaunch

TOOL = "ncu"
PLACES = ("usr/local/cuda/bin/ncu", "opt/nvidia/nsight-compute/*/ncu")
# Each version knows which metrics of these its chips have; METRICS are asked for beside them.
_SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables", "LaunchStats",
    "Occupancy", "SchedulerStats", "WarpStateStats", "InstructionStats",
)  # fmt: skip
_MOST_LAUNCHES = 32  # of one call
_READING = ("--csv", "--page", "raw", "--print-units", "base")
_READ_S = 60.0
_BLOCKED = "ERR_NVGPUCTRPERM"
_BLOCKED_WORDS = (
    f"{_BLOCKED}: the driver lets only administrators read performance counters; NVreg_RestrictProfilingToAdminUsers=0 lets all"
)
_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIMES = {"ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}


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
    tool = find_tool(TOOL, PLACES)
    if tool is None:
        return Profile(absent="Nsight Compute (ncu) is not installed, or not on PATH")
    version = _version(tool)
    wanted, reason = METRICS, ""
    for _ in range(3):
        report.unlink(missing_ok=True)
        said, timed_out = run_tool([tool, *_asking(wanted, report), *command], timeout_s)
        if timed_out:
            return Profile(tool=version, absent=f"{TOOL} was stopped after {timeout_s:g} s")
        if report.is_file():
            launches = parse_raw(run_tool([tool, "--import", str(report), *_READING], _READ_S)[0])
            if launches:
                return Profile(tuple(launches), version)
        reason = _reason(said)
        if _BLOCKED in reason or "metric" not in said.lower() or not wanted:
            break
        unknown = [name for name in wanted if name in said]
        wanted = tuple(name for name in wanted if name not in unknown) if unknown else ()
    return Profile(tool=version, absent=reason)


def _asking(metrics: Sequence[str], report: Path) -> list[str]:
    sections = [word for section in _SECTIONS for word in ("--section", section)]
    asked = ["--metrics", ",".join(metrics)] if metrics else []
    return [
        "--clock-control", "none", "--profile-from-start", "off", "--launch-count", str(_MOST_LAUNCHES), "--force-overwrite",
        "--export", str(report), *sections, *asked,
    ]  # fmt: skip


def _version(tool: str) -> str:
    said, _ = run_tool([tool, "--version"], _READ_S)
    found = re.search(r"Version (\d+(?:\.\d+)+)", said)
    return f"{TOOL} {found[1]}" if found else TOOL


def _reason(said: str) -> str:
    """Why there are no counters: the tool's own error, or the last thing that was said."""
    if _BLOCKED in said:
        return _BLOCKED_WORDS
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")]
    warnings = [line.removeprefix("==WARNING==").strip() for line in lines if line.startswith("==WARNING==")]
    own = [line for line in lines if not line.startswith("==")]
    words = (errors[:1] or warnings[-1:]) + own[-1:]
    return f"{TOOL} read no counters: {'; '.join(words)[:300] or 'it did not say why'}"


def parse_raw(text: str) -> list[Counted]:
    """Read ``--csv --page raw``. Lines before the header (the tool's own messages) are skipped, as are values that are no
    numbers; nothing but the metrics of ``hardware.counters`` is kept."""
    lines = text.splitlines()
    first = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        return []
    rows = list(csv.reader(lines[first:]))
    if len(rows) < 3:
        return []
    header, units = rows[0], rows[1]
    return [_counted(dict(zip(header, row, strict=True)), dict(zip(header, units, strict=True)))
            for row in rows[2:] if len(row) == len(header) == len(units)]  # fmt: skip


def _counted(row: Mapping[str, str], units: Mapping[str, str]) -> Counted:
    metrics = {name: value for name in METRICS if (value := _number(row.get(name, ""), units.get(name, ""))) is not None}
    shared = [metrics.get(LAUNCH[part], 0.0) for part in ("shared_static", "shared_dynamic")]
    registers = metrics.get(LAUNCH["registers"])
    x, y, z = (round(metrics.get(LAUNCH[f"cluster_{axis}"], 0.0)) for axis in "xyz")  # zeros where there are no clusters
    launch = SeenLaunch(
        name=row.get("Kernel Name", ""),
        grid=_triple(row.get("Grid Size", "")),
        block=_triple(row.get("Block Size", "")),
        shared_bytes=round(sum(shared)),
        cluster=(x, y, z) if x * y * z > 1 else None,
        registers=None if registers is None else round(registers),
    )
    return Counted(launch, metrics)


def _number(text: str, unit: str) -> float | None:
    """A value in base units: bytes and counts as such, times in ns."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    what = unit.split("/")[0].strip()
    if what in _TIMES:
        return value * _TIMES[what]
    prefixed = re.fullmatch(r"([KMGT])(byte|inst|cycle|sector|request)s?", what)
    return value * _UNITS[prefixed[1]] if prefixed else value


def _triple(text: str) -> tuple[int, int, int]:
    """``(128, 1, 1)``, with missing numbers as 1; zeros where there is none."""
    numbers = [int(number) for number in re.findall(r"\d+", text)][:3]
    if not numbers:
        return 0, 0, 0
    x, y, z = [*numbers, 1, 1][:3]
    return x, y, z


def find_tool(name: str, places: Sequence[str]) -> str | None:
    """A tool's path: on PATH, else where its installers put it (patterns under /), the newest first."""
    found = [str(path) for place in places for path in sorted(Path("/").glob(place), reverse=True)]
    return shutil.which(name) or next(iter(found), None)


def run_tool(command: Sequence[str], timeout_s: float) -> tuple[str, bool]:
    """What a command printed on both its streams, and whether it ran past its time; then it and its children are ended."""
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
        printed, _ = process.communicate(timeout=timeout_s)
        return printed, False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        return printed, True
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
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
