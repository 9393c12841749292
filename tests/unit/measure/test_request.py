"""The words of a request become problems, kernels and functions, or one line that says what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashmoe_science.exit_codes import ExitCode
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.measure import run
from flashmoe_science.measure.request import Entry, Request, groups, of_kernel, rivals_of, subjects_and_rivals
from flashmoe_science.measure.run import Plan
from flashmoe_science.operations import kernel_named, operation, parse_problem

H200 = gpu_named("h200")
TINY = "attn b1 h1 q8 d8 bf16"
SUITES = operation("attention").contract().suites()


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


@pytest.mark.parametrize(("name", "tried"), [("split_triton", 1), ("fa3", 2)])
def test_a_quick_run_tries_one_config_of_ours_and_every_one_of_a_peer(name: str, tried: int) -> None:
    problem = parse_problem("attn b1 h32 hk8 q1 k8192 d128 bf16")  # on which FlashAttention-3 is five times slower unsplit
    assert len(of_kernel(kernel_named(name)).with_configs(problem, H200, Request(quick=True))) == tried


def test_shards_have_each_problem_of_a_suite_once() -> None:
    (whole,) = groups(Request(targets=("train",)), H200)
    parts = [groups(Request(targets=("train",), shard=(part, 4)), H200)[0] for part in range(1, 5)]
    assert {one.name for one in parts} == {"train"}
    assert [problem for part in parts for problem in part.problems] == list(whole.problems)  # alike ones share what is compiled
    assert {len(part.problems) for part in parts} == {len(whole.problems) // 4}
    with pytest.raises(ValueError, match="--shard is 1/2, and there are fewer problems than shards"):
        groups(Request(targets=(TINY,), shard=(1, 2)), H200)


@pytest.mark.parametrize("suite", ["long", "merge"])
def test_without_a_gpu_a_suite_is_refused_that_takes_a_cpu_minutes(suite: str) -> None:
    """By its arithmetic, or by the bytes that it moves."""
    with pytest.raises(ValueError, match=f"suite '{suite}' needs a GPU, and there is none here: attn.* is too much for a CPU"):
        groups(Request(targets=(suite,)), None)


def test_problems_are_drawn_around_a_suite_the_same_from_one_seed() -> None:
    (one,), (again,), (other,) = (groups(Request(targets=("long",), draw=12, seed=seed), H200) for seed in (1, 1, 2))
    assert (one.name, len(one.problems)) == ("long-draw", 12)
    assert one == again
    assert one.problems != other.problems
    with pytest.raises(ValueError, match="--draw samples around a suite, and none is named"):
        groups(Request(targets=(TINY,), draw=3), H200)


def test_of_drawn_problems_only_the_automatic_choice_is_measured_unless_a_kernel_is_named() -> None:
    fwd, problem = of_kernel(kernel_named("fwd_triton")), parse_problem("attn b4 h16 q4096 d128 bf16 causal")
    drawn, named = Request(targets=("long",), draw=3), Request(targets=("long",), draw=3, kernel=("fwd_triton",))
    assert (drawn.as_dispatched, named.as_dispatched) == (True, False)
    assert fwd.with_configs(problem, H200, drawn) == [fwd.chosen(problem, H200)]
    assert len(fwd.with_configs(problem, H200, named)) > 1


# What it is compared with


def names(op: str, own: tuple[str, ...] = (), named: tuple[str, ...] = (), every: bool = False, gpu: bool = False) -> list[str]:
    request = Request(against=named, full=every)
    return [one.who for one in rivals_of(op, own, request, H200 if gpu else None, [Entry("x.py:fn", "")])]


def test_by_default_the_peers_that_are_worth_their_time() -> None:
    assert names("attention") == ["sdpa", "sdpa_math"]
    on_gpu = names("attention", gpu=True)
    assert {"sdpa", "sdpa_flash", "fa3"} <= set(on_gpu)
    assert not {"sdpa_math", "flex", "fwd_triton"} & set(on_gpu)
    assert {"sdpa_math", "flex"} <= set(names("attention", every=True, gpu=True))


def test_an_operation_of_ones_own_has_its_own_rivals_or_the_plain_maths() -> None:
    assert names("row_softmax", ("torch",)) == ["torch"]
    assert names("row_softmax") == ["plain"]


def test_named_rivals_may_be_ours_or_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "y.py").touch()
    monkeypatch.chdir(tmp_path)
    found = rivals_of("attention", (), Request(against=("fwd_triton", "y.py:fn")), H200, [])
    assert [one.origin for one in found] == ["ours", "candidate"]
    assert found[0].chosen(parse_problem("attn b1 h16 q4096 d128 bf16 causal"), H200).config
    assert found[1].chosen(parse_problem("attn b1 h16 q4096 d128 bf16 causal"), H200) == found[1]


def test_several_kernels_of_ours_are_subjects_by_their_names() -> None:
    named = ("fwd_triton", "fwd_gluon_sm90", "fwd_triton")
    problem = "attn b1 h16 q4096 d128 bf16"
    request = Request(targets=(problem,), kernel=named, against=("sdpa",))
    group = groups(request, H200)[0]
    assert [one.name for one in subjects_and_rivals(request, group, H200)[0]] == ["fwd_triton", "fwd_gluon_sm90"]
    with pytest.raises(ValueError, match="'short_gluon' can serve none of the problems here"):
        subjects_and_rivals(replace(request, kernel=("fwd_triton", "short_gluon")), group, H200)


def test_a_name_of_no_kernel_is_refused_beside_one_that_is_built() -> None:
    with pytest.raises(ValueError, match="nope"):
        Plan(Request(kernel=("fwd_triton", "nope")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and nothing is built for others")
def test_the_budget_begins_after_the_builds_of_a_machine_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take minutes of it else, and nothing is timed."""
    now, deadlines = iter((10.0, 500.0, 500.0, 500.0)), []
    good = SimpleNamespace(exit_code=ExitCode.GOOD)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(run, "OfflineRun", lambda *given: SimpleNamespace(run=lambda: good, found=[]))
    monkeypatch.setattr(
        run, "KernelsRun", lambda session, group: SimpleNamespace(run=lambda: deadlines.append(session.deadline) or good)
    )
    Plan(Request(targets=(TINY,), budget_s=60.0)).run(tmp_path, lambda *progress: None)
    assert deadlines == [560.0]
