"""The words of a request become problems, kernels and functions, or one line that says what is wrong."""

from __future__ import annotations

import math

import pytest

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.measure.request import Group, Request, groups, of_kernel, rivals_of, subjects
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.problem import ProblemError

H200 = gpu_named("h200")
TINY = "attn b1 h1 q8 d8 bf16"
SUITES = operation("attention").contract().suites()


def group(*texts: str, op: str = "attention") -> Group:
    return Group("custom", op, tuple(map(parse_problem, texts)))


def rivals(*named: str, of: str | None = None, device: object = H200) -> list[str]:
    taken = [] if of is None else [of_kernel(subjects(Request(kernel=of), group(TINY), H200)[0])]
    return [one.name for one in rivals_of("attention", (), named, False, device, taken)]  # type: ignore[arg-type]


def test_suites_become_runs_of_their_own_and_problems_one_for_each_operation() -> None:
    words = ("documents", "attn b1 h1 q8 d8 bf16", "long", "attn b1 h1 q9 d8 bf16", "moe t4 e2 k1 d8 f8 fp32")
    found = groups(Request(targets=words), H200)
    assert [(one.name, one.op, len(one.problems)) for one in found] == [
        ("documents", "attention", len(SUITES["documents"])),
        ("long", "attention", 36),
        ("custom", "attention", 2),
        ("custom", "moe", 1),
    ]


def test_by_default_the_machines_own_suite() -> None:
    assert {one.name for one in groups(Request(), H200)} == {"quick"}
    assert {one.name for one in groups(Request(), None)} == {"cpu"}
    assert groups(Request(targets=("torch:softmax",)), H200) == ()


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["dokuments"], ValueError, "'dokuments' is neither a problem .* nor a suite \\(documents, long, quick, cpu"),
        (["attn b1"], ProblemError, "lacks"),
        (["long"], ValueError, "suite 'long' needs a GPU"),
        (["attn b1 h16 q16384 d128 bf16"], ValueError, "problem needs a GPU"),
    ],
)
def test_a_word_that_is_neither_or_too_much_is_one_line(words: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        groups(Request(targets=tuple(words)), None)


def test_problems_are_drawn_around_a_suite_the_same_from_one_seed() -> None:
    (one,), (again,), (other,) = (groups(Request(targets=("long",), draw=12, seed=seed), H200) for seed in (1, 1, 2))
    assert (one.name, len(one.problems)) == ("long-draw", 12)
    assert one == again
    assert one.problems != other.problems
    with pytest.raises(ValueError, match="--draw samples around a suite, and none is named"):
        groups(Request(targets=(TINY,), draw=3), H200)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quick": True, "full": True}, "--quick and --full are both given"),
        ({"seed": -1}, "--seed is -1; it must be from 0 to"),
        ({"seed": 2**63}, "--seed is 9223372036854775808; it must be from 0 to"),
        ({"watchdog_s": 0.0}, "--watchdog is 0; it must be more than 0 and at most 86400 seconds"),
        ({"watchdog_s": math.inf}, "--watchdog is inf; it must be more than 0"),
        ({"watchdog_s": math.nan}, "--watchdog is nan; it must be more than 0"),
        ({"draw": 0}, "--draw is 0; it must be from 1 to 1000"),
        ({"targets": ("torch:softmax",), "kernel": "sdpa"}, "--kernel names a kernel of the package beside a function"),
        ({"against": ("nowhere.py:fn",)}, "there is no file 'nowhere.py'"),
        ({"targets": ("nowhere.py:fn",)}, "there is no file 'nowhere.py'"),
    ],
)
def test_what_is_not_allowed_is_one_line(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(**given)  # type: ignore[arg-type]


def test_what_is_measured_against_what() -> None:
    (sdpa,) = subjects(Request(), group(TINY), None)
    assert sdpa.name == "sdpa"  # ours need a GPU: the framework's own shows the method
    assert rivals(of="sdpa", device=None) == ["sdpa_math"]
    assert {kernel.origin for kernel in subjects(Request(), group(TINY), H200)} == {"ours"}
    assert {"sdpa", "sdpa_flash", "sdpa_cudnn", "fa3", "fa4"} <= set(rivals())
    assert "flex" not in rivals()
    assert "flex" in rivals("all")


def test_without_a_kernel_of_ours_the_frameworks_own_is_the_subject() -> None:
    moe = group("moe t4 e2 k1 d8 f8 fp32", op="moe")
    (kernel,) = subjects(Request(), moe, None)
    assert kernel.name == operation("moe").fallback()


@pytest.mark.parametrize(
    ("kernel", "against", "message"),
    [
        ("fwd", (), "kernel is 'fwd'; it must be one of"),
        ("sdpa", ("fa3",), "kernel 'fa3' cannot be measured here: fa3-fwd is not installed"),
        ("sdpa", ("nobody",), "--against is 'nobody'; for attention it must be one of"),
        ("sdpa_cudnn", (), f"kernel 'sdpa_cudnn' can serve none of the problems here; {TINY}: cuDNN needs a GPU"),
    ],
)
def test_a_kernel_asked_for_by_name_that_cannot_be_had_is_an_error(kernel: str, against: tuple[str, ...], message: str) -> None:
    request = Request(kernel=kernel, against=against)
    with pytest.raises(ValueError, match=message):
        rivals_of("attention", (), against, False, None, [*map(of_kernel, subjects(request, group(TINY), None))])
