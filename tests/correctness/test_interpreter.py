"""Our kernels in Triton's interpreter against the fp64 oracle; the interpreter needs a process of its own."""

from __future__ import annotations

import pytest
from flashmoe_science.dispatch.registry import OURS

from flashmoe_science.measure.interpret import Case, cases, default_problems, interpret
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import CorrectnessRow, RefusalRow


def test_the_cases_cover_every_dtype_mask_and_kind_of_shape() -> None:
    problems = default_problems(quick=False)
    assert {problem.dtype for problem in problems} == {"fp16", "bf16", "fp32"}
    assert {problem.mask for problem in problems} == {"full", "causal", "causal-topleft"}
    assert any(problem.heads != problem.heads_kv for problem in problems)
    assert any(problem.head_dim != problem.head_dim_v for problem in problems)
    assert any(problem.causal and problem.seqlen_q > problem.seqlen_k for problem in problems)  # rows that see no key
    assert any(problem.head_dim % 8 for problem in problems)
    assert {problem.dtype for problem in default_problems(quick=True)} == {"fp16", "bf16", "fp32"}


def test_every_interpretable_kernel_has_cases_with_each_of_its_configs() -> None:
    found = cases(OURS, default_problems(quick=False))
    assert {case.kernel for case in found} == {kernel.name for kernel in OURS if kernel.interpretable}
    assert len(found) == len(set(found))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [kernel for kernel in OURS if kernel.interpretable], ids=lambda kernel: kernel.name)
def test_every_case_passes(kernel) -> None:
    todo = cases([kernel], default_problems(quick=False))
    rows = list(interpret("run", 42, todo))
    assert [row.reason for row in rows if isinstance(row, RefusalRow)] == []
    assert sum(isinstance(row, CorrectnessRow) and row.passed for row in rows) == len(todo) > 0


def test_a_few_odd_cases_pass() -> None:
    texts = (
        "attn b1 h2 hk1 q33 k40 d24 dv16 bf16 causal bshd",
        "attn b1 h1 q20 k9 d16 fp16 causal",
        "attn b1 h1 q3 k70 d8 fp32",
    )
    todo = cases(OURS, [parse_problem(text) for text in texts])
    rows = list(interpret("run", 7, todo))
    assert [row.reason for row in rows if isinstance(row, RefusalRow)] == []
    assert {row.problem for row in rows} == set(texts)
    assert {row.run for row in rows} == {"run"}


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="ended with code 1: ValueError: kernel is 'no_such'"):
        list(interpret("run", 7, [Case("no_such", "", "attn b1 h1 q3 d8 fp32")]))
