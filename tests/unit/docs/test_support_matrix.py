"""The page that says what runs where: every kernel is asked at lengths that it serves."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("support_matrix")


def test_no_kernel_takes_nothing_on_every_gpu(matrix: ModuleType) -> None:
    for kernel in matrix.KERNELS:
        dtypes = [matrix._row(kernel, matrix.base_of(kernel), gpu)[:3] for gpu in matrix.GPUS.values()]
        assert any(cell != "-" for row in dtypes for cell in row), kernel.name


def test_a_kernel_that_no_base_problem_is_served_by_stops_the_page(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "BASES", matrix.BASES[:1])
    short = next(kernel for kernel in matrix.KERNELS if kernel.name == "short_gluon")
    with pytest.raises(ValueError, match="short_gluon takes no problem of BASES on any GPU"):
        matrix.base_of(short)
