"""Make the project's virtual environment: ``python tools/venv.py .venv``. Only the standard library is needed. With
``--only-pip`` nothing is installed yet: the pip of an environment can already install into other folders.

Without an NVIDIA GPU the versions are those behind the committed evidence: torch 2.13.0 and Triton 3.6.0, whose interpreter
needs NumPy below 2.4. With a GPU, the torch and Triton that are there serve, else the Triton that torch itself pins.

A second run does nothing while the dependencies in pyproject.toml, this file and the Python stay the same.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PINNED = {"torch": "2.13.0", "triton": "3.6.0"}
OLDEST = {"torch": (2, 11), "triton": (3, 6)}
NUMPY_LIMIT = "numpy<2.4"
STAMP = ".installed"


class SetupError(Exception):
    """The environment could not be made, said in words."""


def main(venv: Path, only_pip: bool) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    gpu = _succeeds("nvidia-smi")
    system = _system_versions() if gpu else {}
    wanted = _digest(project, gpu, system)
    stamp = venv / STAMP
    python = venv / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == wanted and _succeeds(python, "-c", "import torch, flashmoe_science"):
        stamp.touch()
        return
    started = time.monotonic()
    if not _succeeds(python, "-c", "import pip"):
        _say(f"making {venv} with Python {sys.version.split()[0]}")
        _run([sys.executable, "-m", "venv", "--clear", str(venv)], f"Python could not make {venv}")
        if system:
            _inherit(venv)
    if only_pip:
        return
    for what, arguments in _steps(project, gpu, system):
        _say(f"installing {what}")
        # Errors only: a line a package, and a warning a mirror, is a wall on a first install. No bytecode: what is imported is
        # compiled then, once; all of torch and transformers takes longer than installing them.
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile"]
        _run([*pip, *arguments], f"pip could not install {what}")
    stamp.write_text(wanted)
    _say(f"{venv} is ready ({time.monotonic() - started:.0f} s)")


def _steps(project: dict[str, Any], gpu: bool, system: dict[str, str]) -> list[tuple[str, list[str]]]:
    """What pip is asked for, in order. Torch from the default index pins a Triton of its own, torch's CPU build none: Triton
    therefore goes last, alone and without its dependencies, so that one order serves both."""
    core = project["project"]["dependencies"]
    development = project["project"]["optional-dependencies"]["dev"]
    others = [*(line for line in core if _name(line) not in PINNED), *development, NUMPY_LIMIT]
    package = ("flashmoe-science", ["--no-deps", "--editable", str(ROOT)])
    if system:
        return [(f"what runs with the torch {system['torch']} already here", others), package]
    if gpu:
        torch = [line for line in core if _name(line) == "torch"]
        return [("torch with its own Triton, and the rest (some minutes the first time)", [*torch, *others]), package]
    return [
        (f"torch {PINNED['torch']} and the rest (some minutes the first time)", [f"torch=={PINNED['torch']}", *others]),
        (f"Triton {PINNED['triton']}", ["--no-deps", f"triton=={PINNED['triton']}"]),
        package,
    ]


def _inherit(venv: Path) -> None:
    """Let the environment see what this Python has. ``--system-site-packages`` would not do where this Python is itself that of
    an environment, as in many GPU images: it shows the base Python's packages only."""
    seen = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    (folder,) = venv.glob("lib/python3*/site-packages")
    (folder / "inherited.pth").write_text("".join(f"{entry}\n" for entry in seen))


def _system_versions() -> dict[str, str]:
    """Versions of the torch and Triton that this Python already has; empty unless it has both, new enough for us."""
    code = "import json, torch, triton; print(json.dumps({'torch': torch.__version__, 'triton': triton.__version__}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        return {}
    versions: dict[str, str] = json.loads(done.stdout)
    for name, oldest in OLDEST.items():
        if tuple(int(part) for part in re.findall(r"\d+", versions[name])[:2]) < oldest:
            _say(f"{name} {versions[name]} is here, older than {'.'.join(map(str, oldest))}: installing another next to it")
            return {}
    return versions


def _digest(project: dict[str, Any], gpu: bool, system: dict[str, str]) -> str:
    parts = [project["build-system"], project["project"], gpu, system, sys.version, str(ROOT), Path(__file__).read_text()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise SetupError(f"pyproject.toml has the dependency {requirement!r}, which has no name")
    return match[0].lower()


def _succeeds(*command: str | Path) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def _run(command: list[str], failure: str) -> None:
    if subprocess.run(command).returncode != 0:
        raise SetupError(f"{failure}; the reason is above")


def _say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[2:] not in ([], ["--only-pip"]):
        sys.exit("usage: python tools/venv.py FOLDER [--only-pip]")
    try:
        main(Path(sys.argv[1]), only_pip=len(sys.argv) == 3)
    except SetupError as error:
        sys.exit(f"setup: {error}")
