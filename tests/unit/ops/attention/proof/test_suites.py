"""The suites hold what the documents and the issue ask for; problems drawn around them differ and parse."""

from __future__ import annotations

from random import Random

import pytest

from flashmoe_science.operations import OPERATIONS, operation, parse_problem
from flashmoe_science.ops.attention.problem.features import KINDS
from flashmoe_science.problem import Problem

SUITES = [(op.name, name) for op in OPERATIONS for name in op.contract().suites()]


def suite(name: str, op: str = "attention") -> list[Problem]:
    return [parse_problem(text) for text in operation(op).contract().suites()[name]]


@pytest.mark.parametrize(("op", "name"), SUITES)
def test_a_suite_holds_problems_none_twice_each_printing_as_it_parses(op: str, name: str) -> None:
    problems = suite(name, op)
    assert len(problems) == len({str(problem) for problem in problems}) > 0
    assert {problem.op for problem in problems} == {op}
    assert all(parse_problem(str(problem)) == problem for problem in problems)


def test_long_is_the_forward_matrix() -> None:
    problems = suite("long")
    assert len(problems) == 36
    assert {problem.batch * problem.seqlen_q for problem in problems} == {16384}
    assert {problem.heads * problem.head_dim for problem in problems} == {2048}
    assert {(problem.dtype, problem.layout) for problem in problems} == {("bf16", "bshd")}
    assert {problem.seqlen_q for problem in problems} == {512, 1024, 2048, 4096, 8192, 16384}


def test_documents_hold_the_seeds_configurations() -> None:
    texts = {str(problem) for problem in suite("documents")}
    assert {f"attn b1 h1 q{s} d64 fp16" for s in (64, 65, 128, 192, 256, 512)} <= texts
    assert {"attn b1 h1 q4 d4 fp16", "attn b1 h1 q32 d32 fp16", "attn b8 h8 q128 d64 fp16"} <= texts
    assert {f"attn b{b} h{h} q{s} d64 bf16" for b, h, s in ((1, 1, 128), (8, 4, 128), (32, 8, 128), (32, 8, 256))} <= texts


@pytest.mark.parametrize("on_gpu", [False, True])
def test_default_problems_are_those_that_any_attention_kernel_serves(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shared heads, equal lengths and head dimensions: a function that raises on those is not wrong by default."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_gpu)
    problems = [parse_problem(text) for text in operation("attention").contract().default_problems()]
    assert len(problems) >= 5
    for problem in problems:
        assert problem.heads == problem.heads_kv
        assert problem.seqlen_q == problem.seqlen_k
        assert problem.head_dim == problem.head_dim_v
    assert {problem.causal for problem in problems} == {True, False}


def test_drawn_problems_differ_and_parse() -> None:
    contract, chance = operation("attention").contract(), Random(1)
    near = suite("long")[7]
    drawn = {contract.draw(near, chance) for _ in range(40)}
    assert len(drawn) > 30
    assert all(parse_problem(str(problem)) == problem for problem in drawn)
    assert len({problem.head_dim for problem in drawn}) > 4
    assert any(problem.heads != problem.heads_kv for problem in drawn)


SERVING = ("decode", "decode-paged", "chunked", "serving")


def test_decode_is_what_the_issue_asks_for() -> None:
    problems = [*suite("decode"), *suite("decode-paged")]
    assert 30 <= len(problems) <= 36
    assert {problem.batch for problem in problems} >= {1, 128}
    assert {problem.heads // problem.heads_kv for problem in problems} >= {1, 4, 8, 16}
    assert all(1 <= problem.seqlen_q <= 8 and 1024 <= problem.seqlen_k <= 131072 for problem in problems)
    assert {problem.features.page for problem in problems} == {0, 16, 64}
    assert {problem.head_dim for problem in problems} == {64, 128}
    assert {problem.dtype for name in SERVING for problem in suite(name)} == {"bf16"}


def test_chunked_has_16_to_512_queries_against_8k_to_128k_keys() -> None:
    problems = suite("chunked")
    assert {problem.seqlen_q for problem in problems} >= {16, 64, 128, 256, 512}
    assert all(16 <= problem.seqlen_q <= 512 and 8192 <= problem.seqlen_k <= 131072 for problem in problems)


def test_serving_and_small_leave_out_no_mode() -> None:
    small = [parse_problem(text) for text in operation("attention").contract().small_problems()]
    for problems in (suite("serving"), small):
        assert {kind for problem in problems for kind in problem.features.kinds()} == set(KINDS)


@pytest.mark.parametrize("name", SERVING)
def test_serving_problems_fit_beside_their_fp64_copy(name: str) -> None:
    for problem in suite(name):
        assert problem.input_bytes() < 2.3e9, str(problem)
        assert problem.flops() < 1.2e12, str(problem)


@pytest.mark.parametrize("name", SERVING)
def test_problems_drawn_around_serving_keep_their_modes(name: str) -> None:
    contract, chance = operation("attention").contract(), Random(1)
    for near in suite(name):
        for _ in range(4):
            drawn = contract.draw(near, chance)
            assert drawn.features.kinds() == near.features.kinds()
            assert drawn.mask == near.mask
            assert drawn.seqlen_q <= drawn.seqlen_k
            assert drawn.seqlen_q == 1 or near.seqlen_q > 1
            assert parse_problem(str(drawn)) == drawn
            assert drawn.input_bytes() < 9 * near.input_bytes() + 2**24  # a bias grows with both lengths and with heads
