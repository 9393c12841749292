"""``compute-sanitizer`` around one call of a kernel: memory that it may not touch, races in shared memory, memory that was
never written.

The tool sees what guards around tensors cannot: what a kernel allocates for itself, and every read. It slows a kernel a
hundredfold, so one call on the smallest problem is what it gets, and only where it is asked for. Its own log is read, which the
kernel's output cannot be taken for.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmoe_science.measure.external_tool import run_tool
from flashmoe_science.measure.run_once import MODULE
from flashmoe_science.problem import Problem

TOOL = "compute-sanitizer"
CHECKS = ("memcheck", "racecheck", "initcheck")
_PLACES = ("usr/local/cuda*/bin/compute-sanitizer", "usr/local/cuda*/compute-sanitizer/compute-sanitizer")
_MOST_S = 300.0  # one check; a kernel that tunes itself runs every one of its configs under it
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (?:\d+ hazards? displayed \((\d+) errors?|(\d+) errors?)")
# Where each check shows what it found; PyTorch's own calls fail now and then on purpose, which memcheck would report.
_OPTIONS = {"memcheck": ("--report-api-errors", "no")}
# An allocation of its own for every tensor: in a pool, what lies past one tensor is another's.
_SETTINGS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@dataclass(frozen=True, slots=True)
class Looked:
    """What a check said of one call: how many errors and the first of them, or why it said nothing."""

    check: str
    errors: int = 0
    first: str = ""
    absent: str | None = None

    @property
    def fault(self) -> str | None:
        if not self.errors:
            return None
        return f"{TOOL} {self.check} found {self.errors} error{'s' * (self.errors != 1)}: {self.first}"


def find_sanitizer() -> str | None:
    """The tool's path: on PATH, else where CUDA's installer puts it, the newest first."""
    found = shutil.which(TOOL)
    if found:
        return found
    places = [path for place in _PLACES for path in sorted(Path("/").glob(place), reverse=True)]
    return str(places[0]) if places else None


def sanitize(spec: str, config: str, problem: Problem, seed: int, step: Callable[[str], None]) -> list[Looked]:
    """Look at one call of the kernel on the problem with every check, each in a process of its own."""
    tool = find_sanitizer()
    if tool is None:
        return [Looked("", absent=f"{TOOL} was not run: it is not installed, or not on PATH")]
    looked = []
    for check in CHECKS:
        step(f"{TOOL} {check}")
        looked.append(_look(tool, check, spec, config, problem, seed))
    return looked


def remarks_on(looked: Sequence[Looked]) -> list[str]:
    """What a reader should know of checks that found nothing, or did not run."""
    clean = ", ".join(one.check for one in looked if one.absent is None and one.fault is None)
    absent = [one.absent for one in looked if one.absent is not None]
    return [*absent, *([f"{TOOL} found nothing in one call: {clean}"] if clean else [])]


def _look(tool: str, check: str, spec: str, config: str, problem: Problem, seed: int) -> Looked:
    with tempfile.TemporaryDirectory(prefix="flashmoe-") as folder:
        log, called = Path(folder, "log"), Path(folder, "called")
        asked = json.dumps({"who": spec, "config": config, "problem": str(problem), "seed": seed, "called": str(called)})
        # What a kernel compiles with is a process of its own, which the log is not about.
        watched = [tool, "--tool", check, "--log-file", str(log), "--target-processes", "application-only"]
        command = [*watched, *_OPTIONS.get(check, ()), sys.executable, "-P", "-m", MODULE, asked]
        said, timed_out = run_tool(command, _MOST_S, _SETTINGS)
        text = log.read_text(errors="replace") if log.is_file() else ""
        errors = _errors(text)
        if errors:
            return Looked(check, errors, _first(text))
        if timed_out:
            return Looked(check, absent=f"{TOOL} {check} was stopped after {_MOST_S:g} s")
        if errors is None or not called.is_file():
            last = [line.strip() for line in (*said.splitlines(), *text.splitlines()) if line.strip(" =\t")][-1:]
            return Looked(check, absent=f"{TOOL} {check} gave no result: {(last or ['it did not say why'])[0][:300]}")
        return Looked(check)


def _errors(text: str) -> int | None:
    """The count in the last summary of a log; None where there is none. A race's warnings are no errors."""
    found = _SUMMARY.findall(text)
    return int(found[-1][0] or found[-1][1]) if found else None


def _first(text: str) -> str:
    """The first thing that a log complains of, with where it was."""
    lines = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    lines = [line for line in lines if line and line != "COMPUTE-SANITIZER" and "SUMMARY" not in line]
    where = next((line for line in lines[1:3] if line.startswith("at ")), "")
    return f"{lines[0]} {where}".strip()[:300] if lines else "it did not say which"
