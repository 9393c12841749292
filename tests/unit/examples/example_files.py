"""Examples are files of a user's, not modules of the package: they are loaded by path, and held to their contracts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

from flashmoe_science.contract import contract_of
from flashmoe_science.measure.inputs import as_tuple
from flashmoe_science.measure.tolerance import check_output, expected
from flashmoe_science.operations import parse_problem

EXAMPLES = Path(__file__).parents[3] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def faults(fn: object, text: str, distribution: str = "normal") -> list[str]:
    """Why a candidate's result on a problem is not right; empty where it is."""
    held, problem = contract_of(fn), parse_problem(text)
    assert held.cannot(problem) is None
    made = held.inputs(problem, torch.device("cpu"), torch.Generator().manual_seed(1))
    given = held.vary(distribution, made)
    exact = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in given.items()}
    references, plains = as_tuple(held.reference(problem, exact)), as_tuple(held.plain(problem, given))
    one = expected(references, plains, *held.bounds(problem, given, references))[0]
    got = held.call(fn, problem, given)
    assert isinstance(got, torch.Tensor)
    wrong = [] if got.dtype == one.dtype else [f"it is {got.dtype}, not {one.dtype}"]
    return [*wrong, *check_output("out", got, one)[1]]
