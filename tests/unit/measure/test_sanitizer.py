"""compute-sanitizer as it answers: with nothing found, with errors, without a summary, too late, or not at all."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashmoe_science.measure import sanitizer
from flashmoe_science.measure.external_tool import find_tool
from flashmoe_science.measure.sanitizer import CHECKS, sanitize
from flashmoe_science.operations import parse_problem

PROBLEM = parse_problem("attn b1 h1 q100 d64 fp16")
CLEAN = {
    "memcheck": "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n",
    "racecheck": "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
    "initcheck": "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n",
}
WRITES = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at _kernel+0x1a0 in mine.py:12
=========     by thread (3,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 12 errors
"""
RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at 0xd0 in races and Read access at 0x140 in races [124 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
WARNS = """========= COMPUTE-SANITIZER
========= Warning: Race reported between Write access at 0xd0 in races and Write access at 0xd0 in races [3 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)
"""
# The candidate prints a summary of its own; only the log counts.
SCRIPT = """#!{python}
import json, sys, time
from pathlib import Path
logs = {logs!r}
check, log = (sys.argv[sys.argv.index(name) + 1] for name in ("--tool", "--log-file"))
asked = json.loads(sys.argv[-1])
assert asked["who"] == "mine.py:attention" and asked["problem"] == {problem!r}
print("========= ERROR SUMMARY: 0 errors")
if logs[check] == "hang":
    time.sleep(60)
if not logs[check].startswith("crash"):
    Path(log).write_text(logs[check])
    Path(asked["called"]).touch()
else:
    print("RuntimeError: no kernel image")
    sys.exit(1)
"""


FOUND = "compute-sanitizer memcheck found 12 errors: Invalid __global__ write of size 2 bytes at _kernel+0x1a0 in mine.py:12"
RACED = "compute-sanitizer racecheck found 1 error: Error: Race reported between Write access"
Tool = Callable[..., tuple[list[str], list[str]]]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Plants a tool that writes these logs, and looks with it."""

    def look(**logs: str) -> tuple[list[str], list[str]]:
        path = tmp_path / "compute-sanitizer"
        path.write_text(SCRIPT.format(python=sys.executable, logs=CLEAN | logs, problem=str(PROBLEM)))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return sanitize("mine.py:attention", PROBLEM, 42, lambda text: None)

    return look


def clean(*checks: str) -> str:
    return f"compute-sanitizer found nothing in one call: {', '.join(checks)}"


def test_what_is_found_is_named_with_its_place(tool: Tool) -> None:
    (wrote, raced), remarks = tool(memcheck=WRITES, racecheck=RACES)
    assert wrote == f"{FOUND} (in one call on {PROBLEM})"
    assert raced.startswith(RACED)
    assert remarks == [clean("initcheck")]


@pytest.mark.parametrize(
    ("logs", "remarks"),
    [
        ({}, [clean(*CHECKS)]),
        ({"racecheck": WARNS}, [clean(*CHECKS)]),  # a hazard that is only a warning is no error
        (
            {"memcheck": "========= COMPUTE-SANITIZER\n", "initcheck": "crash"},
            [
                "compute-sanitizer memcheck gave no result: ========= COMPUTE-SANITIZER",
                "compute-sanitizer initcheck gave no result: RuntimeError: no kernel image",
                clean("racecheck"),
            ],
        ),
        ({"memcheck": "hang"}, ["compute-sanitizer memcheck was stopped after 1 s", clean("racecheck", "initcheck")]),
    ],
)
def test_what_proves_nothing_is_told(
    tool: Tool, monkeypatch: pytest.MonkeyPatch, logs: dict[str, str], remarks: list[str]
) -> None:
    monkeypatch.setattr(sanitizer, "_MOST_S", 1.0)
    assert tool(**logs) == ([], remarks)


def test_without_the_tool_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitizer, "PLACES", ())
    words = "compute-sanitizer was not run: it is not installed, or not on PATH"
    assert sanitize("mine.py:attention", PROBLEM, 42, lambda text: None) == ([], [words])


RACY = '''
import torch
from flashmoe_science.contract import Contract, contract

SOURCE = """
extern "C" __global__ void races(const float* x, float* y, int n) {
    __shared__ float row[256];
    row[threadIdx.x] = x[threadIdx.x];
    BARRIER
    y[threadIdx.x] = row[(threadIdx.x + 33) % n];
}
"""

class Turned(Contract):
    name = "turned"

    def default_problems(self):
        return [self.problem("fp32", cols=256)]

    def inputs(self, problem, device, generator):
        return {"x": torch.randn(problem["cols"], device=device, generator=generator)}

    def reference(self, problem, inputs):
        return inputs["x"].roll(-33)

    def flops(self, problem):
        return 1

    def min_bytes(self, problem):
        return 8 * problem["cols"]

def turn(x, barrier):
    kernel = torch.cuda._compile_kernel(SOURCE.replace("BARRIER", barrier), "races")
    y = torch.empty_like(x)
    kernel(grid=(1, 1, 1), block=(256, 1, 1), args=[x, y, 256])
    return y

@contract(Turned())
def racy(x):
    return turn(x, "")

@contract(Turned())
def waits(x):
    return turn(x, "__syncthreads();")
'''


@pytest.mark.gpu
@pytest.mark.skipif(find_tool(sanitizer.TOOL, sanitizer.PLACES) is None, reason="compute-sanitizer is not installed")
def test_a_race_in_shared_memory_is_found_on_a_gpu(tmp_path: Path) -> None:
    assert torch.cuda.is_available()
    file = tmp_path / "mine.py"
    file.write_text(RACY)
    problem = parse_problem("op turned cols256 fp32 flops1 bytes2048")
    (wrong,), _ = sanitize(f"{file}:racy", problem, 42, lambda text: None)
    assert "racecheck found" in wrong
    assert "Race reported" in wrong
    assert sanitize(f"{file}:waits", problem, 42, lambda text: None) == ([], [clean(*CHECKS)])
