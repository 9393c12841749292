"""``compute-sanitizer`` around one call of a kernel: memory that it may not touch, races in shared memory, memory that was
never written.

The tool sees what guards around tensors cannot: what a kernel allocates for itself, and every read. It slows a kernel a
hundredfold, so one call on the smallest problem is what it gets, and only where it is asked for. Its own log is read, which the
kernel's output cannot be taken for.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from flashmoe_science.measure.external_tool import find_tool, run_tool
from flashmoe_science.measure.run_once import MODULE
from flashmoe_science.problem import Problem

TOOL = "compute-sanitizer"
CHECKS = ("memcheck", "racecheck", "initcheck")
PLACES = ("usr/local/cuda*/bin/compute-sanitizer", "usr/local/cuda*/compute-sanitizer/compute-sanitizer")
_MOST_S = 300.0  # one check; a kernel that tunes itself runs every one of its configs under it
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (?:\d+ hazards? displayed \((\d+) errors?|(\d+) errors?)")
# Where each check shows what it found; PyTorch's own calls fail now and then on purpose, which memcheck would report.
_OPTIONS = {"memcheck": ("--report-api-errors", "no")}
# An allocation of its own for every tensor: in a pool, what lies past one tensor is another's.
_SETTINGS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def sanitize(spec: str, problem: Problem, seed: int, step: Callable[[str], None]) -> tuple[list[str], list[str]]:
    """Look at one call of a function on the problem with every check, each in a process of its own. Returns faults, and what a
    reader should know of checks that found nothing or did not run, in words."""
    tool = find_tool(TOOL, PLACES)
    if tool is None:
        return [], [f"{TOOL} was not run: it is not installed, or not on PATH"]
    faults, remarks, clean = [], [], []
    for check in CHECKS:
        step(f"{TOOL} {check}")
        errors, words = _look(tool, check, spec, problem, seed)
        if errors:
            faults.append(f"{TOOL} {check} found {errors} error{'s' * (errors != 1)}: {words} (in one call on {problem})")
        elif words:
            remarks.append(f"{TOOL} {check} {words}")
        else:
            clean.append(check)
    if clean:
        remarks.append(f"{TOOL} found nothing in one call: {', '.join(clean)}")
    return faults, remarks


def _look(tool: str, check: str, spec: str, problem: Problem, seed: int) -> tuple[int, str]:
    """How many errors a check found in one call and the first of them, or why it said nothing; empty where all is well."""
    with tempfile.TemporaryDirectory(prefix="flashmoe-") as folder:
        log, called = Path(folder, "log"), Path(folder, "called")
        asked = json.dumps({"who": spec, "config": "", "problem": str(problem), "seed": seed, "called": str(called)})
        # What a kernel compiles with is a process of its own, which the log is not about.
        watched = [tool, "--tool", check, "--log-file", str(log), "--target-processes", "application-only"]
        command = [*watched, *_OPTIONS.get(check, ()), sys.executable, "-P", "-m", MODULE, asked]
        said, timed_out = run_tool(command, _MOST_S, _SETTINGS)
        text = log.read_text(errors="replace") if log.is_file() else ""
        errors = _errors(text)
        if errors:
            return errors, _first(text)
        if timed_out:
            return 0, f"was stopped after {_MOST_S:g} s"
        if errors is None or not called.is_file():
            last = [line.strip() for line in (*said.splitlines(), *text.splitlines()) if line.strip(" =\t")][-1:]
            return 0, f"gave no result: {(last or ['it did not say why'])[0][:300]}"
        return 0, ""


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
