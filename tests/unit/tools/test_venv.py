"""The steps by which the environment is made, for each machine it may be made on."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def venv() -> ModuleType:
    spec = importlib.util.spec_from_file_location("venv_tool", ROOT / "tools" / "venv.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(steps: list[tuple[str, list[str]]]) -> list[str]:
    return [argument for _, step in steps for argument in step]


def test_without_a_gpu_the_compiler_of_the_evidence_goes_last_and_alone(venv: ModuleType) -> None:
    steps = venv._steps(PROJECT, gpu=False, system={})
    asked = [step for _, step in steps]
    assert "torch==2.13.0" in asked[0]
    assert "numpy<2.4" in asked[0]
    assert not [argument for argument in asked[0] if argument.startswith("triton")]
    assert asked[1] == ["--no-deps", "triton==3.6.0"]
    assert asked[2][:2] == ["--no-deps", "--editable"]


def test_with_a_gpu_torch_brings_its_own_triton(venv: ModuleType) -> None:
    asked = arguments(venv._steps(PROJECT, gpu=True, system={}))
    assert "torch>=2.11" in asked
    assert not [argument for argument in asked if argument.startswith("triton")]


def test_the_torch_of_a_gpu_machine_is_left_alone(venv: ModuleType) -> None:
    asked = arguments(venv._steps(PROJECT, gpu=True, system={"torch": "2.11.0+cu130", "triton": "3.6.0"}))
    assert not [argument for argument in asked if argument.startswith(("torch", "triton"))]
    assert any(argument.startswith("pytest") for argument in asked)


def test_every_dependency_is_installed_somewhere(venv: ModuleType) -> None:
    asked = {venv._name(argument) for argument in arguments(venv._steps(PROJECT, False, {})) if argument[0].isalpha()}
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["dev"]]
    assert {venv._name(requirement) for requirement in wanted} <= asked
