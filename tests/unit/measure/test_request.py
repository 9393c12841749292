"""The suites hold what the documents and the issue ask for."""

from __future__ import annotations

import pytest

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.measure.choice import groups, rivals, subjects
from flashmoe_science.measure.suites import SUITES, SuiteError, problems_named, suite
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import ProblemError


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_holds_problems_none_twice_each_printing_as_it_parses(name: str) -> None:
    problems = suite(name)
    assert len(problems) == len({str(problem) for problem in problems}) > 0
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


def test_words_become_problems() -> None:
    label, problems = problems_named(["attn b1 h1 q8 d8 fp32", "cpu"])
    assert (label, problems[0]) == ("custom", parse_problem("attn b1 h1 q8 d8 fp32"))
    assert problems_named(["cpu"]) == ("cpu", suite("cpu"))


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["dokuments"], SuiteError, "'dokuments' is neither a problem .* nor a suite \\(documents, long, quick, cpu\\)"),
        (["attn b1"], ProblemError, "lacks"),
    ],
)
def test_a_word_that_is_neither_is_one_line(words: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        problems_named(words)


def test_an_unknown_suite_lists_the_names() -> None:
    with pytest.raises(SuiteError, match="suite 'x' is unknown; it must be one of documents, long, quick, cpu"):
        suite("x")


def test_suites_become_runs_of_their_own() -> None:
    found = groups(["documents", "attn b1 h1 q8 d8 bf16", "long", "attn b1 h1 q9 d8 bf16"], gpu_named("h200"))
    assert [(group.name, len(group.problems)) for group in found] == [
        ("documents", len(suite("documents"))),
        ("long", 36),
        ("custom", 2),
    ]


def test_a_cpu_is_not_given_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="suite 'long' needs a GPU"):
        groups(["long"], None)


def test_who_is_on_trial_against_whom() -> None:
    h200 = gpu_named("h200")
    (sdpa,) = subjects(None, [], None)
    assert sdpa.name == "sdpa"
    assert [kernel.name for kernel in rivals([], False, (sdpa,), None)] == ["sdpa_math"]
    assert {kernel.origin for kernel in subjects(None, [], h200)} == {"ours"}
    named = {kernel.name for kernel in rivals([], False, (), h200)}
    assert {"sdpa", "sdpa_flash", "sdpa_cudnn", "fa3", "fa4"} <= named
    assert "flex" not in named
    assert "flex" in {kernel.name for kernel in rivals(["all"], False, (), h200)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: subjects("fwd", [], None), "kernel is 'fwd'; it must be one of"),
        (lambda: rivals(["fa3"], False, (), None), "kernel 'fa3' cannot be measured here: fa3-fwd is not installed"),
        (
            lambda: subjects("sdpa_cudnn", [parse_problem("attn b1 h1 q8 d8 bf16")], None),
            "kernel 'sdpa_cudnn' can serve none of the problems here; attn b1 h1 q8 d8 bf16: cuDNN needs a GPU",
        ),
    ],
)
def test_a_kernel_asked_for_by_name_that_cannot_be_had_is_an_error(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_suite_may_be_measured_again_in_part() -> None:
    text = "attn b1 h1 q192 d64 fp16"
    (group,) = groups(["documents", "long"], gpu_named("h200"), [text])
    assert (group.name, [str(problem) for problem in group.problems]) == ("documents", [text])
    with pytest.raises(ValueError, match="--only is 'attn b1 h1 q193 d64 fp16', which is not in documents"):
        groups(["documents"], gpu_named("h200"), ["attn b1 h1 q193 d64 fp16"])
