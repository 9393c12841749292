"""A script of tools/ as a module, and a run of others' tests by a plugin of tools/."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.fixture(scope="session")
def tool_named() -> Callable[[str], ModuleType]:
    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where its dataclasses look for their module
        spec.loader.exec_module(module)
        return module

    return load


def run_theirs(folder: Path, theirs: str, plugin: str, *options: object) -> tuple[list[Any], subprocess.CompletedProcess[str]]:
    """The lines of --counts of a file of tests that is run by a plugin, with the folder on the path; and what was printed."""
    file, counts = folder / "test_theirs.py", folder / "counts.jsonl"
    file.write_text(theirs)
    fixed = ["-p", plugin, "-c", os.devnull, "-p", "no:cacheprovider", "--counts", str(counts)]
    command = [sys.executable, "-m", "pytest", *fixed, *map(str, options), str(file)]
    path = os.pathsep.join((str(TOOLS), str(folder), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert counts.exists(), done.stdout + done.stderr
    return [json.loads(line) for line in counts.read_text().splitlines()], done
