"""The steps by which the environment is made, for each machine it may be made on."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def venv(tool_named: Callable[[str], ModuleType]) -> ModuleType:
    return tool_named("venv")


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


@pytest.mark.parametrize(
    ("system", "torch"), [({}, ["torch>=2.11"]), ({"torch": "2.11.0+cu130", "triton": "3.6.0"}, [])], ids=["bare", "with torch"]
)
def test_with_a_gpu_torch_brings_its_own_triton_and_is_left_alone_if_there(
    venv: ModuleType, system: dict[str, str], torch: list[str]
) -> None:
    asked = arguments(venv._steps(PROJECT, gpu=True, system=system))
    assert [argument for argument in asked if argument.startswith(("torch", "triton"))] == torch
    assert any(argument.startswith("pytest") for argument in asked)


def test_every_dependency_is_installed_somewhere(venv: ModuleType) -> None:
    asked = {venv._name(argument) for argument in arguments(venv._steps(PROJECT, False, {})) if argument[0].isalpha()}
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["dev"]]
    assert {venv._name(requirement) for requirement in wanted} <= asked
