"""An operation of one's own, a folder and a line of ``OPERATIONS``, through every command with no other file touched."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashmoe_science import operations
from flashmoe_science.cli.main import main
from flashmoe_science.operations import OPERATIONS, Operation
from flashmoe_science.records import CorrectnessRow, DoneRow, RefusalRow, TimingRow
from flashmoe_science.store import Run, read_run

PROBLEM = """
from dataclasses import dataclass

from flashmoe_science.problem import DTYPE_BYTES, Dtype, Problem, check_dtype, check_extent, read_words, require

GRAMMAR = "rowmax r<rows> c<columns> fp32|fp16|bf16"


@dataclass(frozen=True, slots=True)
class RowSoftmaxProblem(Problem):
    rows: int
    columns: int
    dtype: Dtype
    op = "row_softmax"

    def __post_init__(self):
        check_extent("rows", self.rows)
        check_extent("columns", self.columns)
        check_dtype(self.dtype)

    def flops(self):
        return 4 * self.rows * self.columns

    def min_bytes(self):
        return 2 * self.rows * self.columns * DTYPE_BYTES[self.dtype]

    def __str__(self):
        return f"rowmax r{self.rows} c{self.columns} {self.dtype}"


def parse(text):
    sizes, flags = read_words(text, GRAMMAR, ("r", "c"), {"dtype": tuple(DTYPE_BYTES)})
    require(text, GRAMMAR, sizes, ("r", "c"))
    return RowSoftmaxProblem(sizes["r"], sizes["c"], flags["dtype"])
"""
KERNELS = """
import torch

from flashmoe_science.kernel import Config, Kernel

FALLBACK = "torch_softmax"


def in_two_passes(x, config):
    assert config["block"] == 64
    most = x.float().amax(-1, keepdim=True)
    weights = torch.exp(x.float() - most)
    total = weights.sum(-1, keepdim=True)
    return (weights / total).to(x.dtype), most, total


def kernel(name, origin, run, configs, **more):
    return Kernel(
        name=name,
        origin=origin,
        op="row_softmax",
        about=name,
        supports=lambda problem, device: None if problem.columns <= 4096 else "it takes rows of at most 4096 columns",
        configs=lambda problem, device: configs,
        run=run,
        launches=lambda problem, config, gpu: (),
        **more,
    )


OURS = kernel("two_pass", "ours", in_two_passes, (Config(block=64),))
PEERS = (kernel("torch_softmax", "peer", lambda x, config: torch.softmax(x, -1), (Config(),), on_cpu=True),)


def ours():
    return (OURS,)
"""
CONTRACT = """
import torch

from flashmoe_science.contract import Contract, Output


class RowSoftmax(Contract):
    name = "row_softmax"
    outputs = (Output("y"), Output("most", optional=True), Output("total", optional=True))

    def default_problems(self):
        return self.suites()["cpu"]

    def suites(self):
        return {"cpu": ("rowmax r32 c70 fp32", "rowmax r5 c33 bf16")}

    def inputs(self, problem, device, generator):
        shape = (problem.rows, problem.columns)
        return {"x": torch.randn(shape, device=device, generator=generator).to(self.dtype(problem))}

    def reference(self, problem, inputs):
        most = inputs["x"].to(torch.promote_types(inputs["x"].dtype, torch.float32)).amax(-1, keepdim=True)
        return torch.softmax(inputs["x"], -1), most, (inputs["x"] - most).exp().sum(-1, keepdim=True)

    def for_kernel(self, problem, inputs):
        return inputs["x"]


CONTRACT = RowSoftmax()
"""
SOURCE = Path(operations.__file__).parent
TINY, OTHER = "rowmax r32 c70 fp32", "rowmax r5 c33 bf16"

# Modules that import the list by its name, as whoever adds a line to it would find them.
HOLD_THE_LIST = sorted(
    path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".")
    for path in SOURCE.rglob("*.py")
    if re.search(r"^from flashmoe_science.operations import .*\bOPERATIONS\b", path.read_text(encoding="utf-8"), re.MULTILINE)
)

Flashmoe = Callable[..., str]


@pytest.fixture
def flashmoe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Flashmoe:
    """The command line, with the operation beside the package's own. Returns what it printed; ``code`` is its exit code."""
    folder = tmp_path / "own_softmax"
    for name, text in (("problem", PROBLEM), ("front/kernels", KERNELS), ("proof/contract", CONTRACT)):
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    line = Operation("row_softmax", "rowmax", "own_softmax")
    for module in (operations, *(importlib.import_module(f"flashmoe_science.{name}") for name in HOLD_THE_LIST)):
        monkeypatch.setattr(module, "OPERATIONS", (*OPERATIONS, line))
    operations.parse_problem.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "evidence" / "runs").mkdir(parents=True)

    def run(*words: str, codes: tuple[int, ...] = (0,)) -> str:
        monkeypatch.setattr(sys, "argv", ["flashmoe", *words])
        with pytest.raises(SystemExit) as stopped:
            main(list(words))
        said = capsys.readouterr()
        assert stopped.value.code in codes, said.err + said.out
        return said.out + said.err

    yield run
    for name in [name for name in sys.modules if name.split(".")[0] == "own_softmax"]:
        del sys.modules[name]
    operations.parse_problem.cache_clear()


def proved(flashmoe: Flashmoe, *words: str, codes: tuple[int, ...] = (0, 3)) -> tuple[Run, str]:
    """3: this machine's other work disturbed every pair."""
    said = flashmoe("prove", *words, "--quick", "--out", "proof", codes=codes)
    return read_run(Path("proof") / "run-custom.jsonl"), said


def test_explain_says_which_kernel_would_run(flashmoe: Flashmoe) -> None:
    said = flashmoe("explain", TINY, "--gpu", "h200")
    assert "two_pass" in said
    refused = flashmoe("explain", "rowmax r5 c5000 fp32", "--gpu", "h200")
    assert "torch_softmax" in refused or "it takes rows of at most 4096 columns" in refused


def test_it_goes_from_prove_to_verdicts_and_a_report(flashmoe: Flashmoe) -> None:
    run, said = proved(flashmoe, TINY, OTHER)
    assert [row.problem for row in run.rows if isinstance(row, DoneRow)] == [TINY, OTHER]
    assert not any(isinstance(row, RefusalRow) and row.stage == "correctness" for row in run.rows)
    passed = {(row.kernel, row.passed, *row.outputs) for row in run.rows if isinstance(row, CorrectnessRow)}
    assert passed == {("two_pass", True, "y", "most", "total"), ("torch_softmax", True, "y")}
    rows = [row for row in run.rows if isinstance(row, TimingRow)]
    assert {row.op for row in rows} <= {"row_softmax"}
    assert {row.origin for row in rows} <= {"ours"}
    assert "two_pass" in said

    verdicts = flashmoe("verdicts", "--evidence", "proof")
    assert TINY in verdicts
    assert "two_pass" in verdicts
    flashmoe("report", "--evidence", "proof", "--out", "page")
    page = Path("page/report.html").read_text(encoding="utf-8")
    assert TINY in page
    assert "two_pass" in page
    assert "torch_softmax" in Path("page/report.md").read_text(encoding="utf-8")


def test_its_suite_is_the_machines_own_where_nothing_is_named(flashmoe: Flashmoe) -> None:
    assert "rowmax" in flashmoe("prove", "rowmax r5", codes=(2,))  # the grammar
    said = flashmoe("prove", "nothing", codes=(2,))
    assert "'attn' or 'attnbwd' or 'attnmerge' or 'moe' or 'moebwd' or 'rowmax' or 'op'" in said
