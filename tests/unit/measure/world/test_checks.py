"""Implementations of a problem that are wrong, that differ from call to call or that are slow, on one rank of this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from flashmoe_science.measure.request import Request
from flashmoe_science.measure.session import Session
from flashmoe_science.measure.world.checks import Checks
from flashmoe_science.measure.world.ranks import World
from flashmoe_science.measure.world.timing import Timing
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.ops.distributed import Implementation, Results
from flashmoe_science.problem import DistributedProblem
from flashmoe_science.records import ONE_GPU, CorrectnessRow, NoteRow, RefusalRow, Row, TimingRow

Make = Callable[[torch.Tensor], Callable[[], Results]]  # of the right answer a call


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    yield World()
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def measured(world: World, monkeypatch: pytest.MonkeyPatch, makes: dict[str, Make], **options: object) -> list[Row]:
    """The rows of a problem that is computed by one GPU's call and by these implementations."""
    rows, module = list[Row](), operation("attention").module("proof", "ranks")
    problem, real = parse_problem("attn b1 h1 q8 d8 fp32 bshd cp2"), module.implementations
    assert isinstance(problem, DistributedProblem)

    def implementations(*given: object) -> list[Implementation]:
        one_gpu = next(one for one in real(*given) if one.name == ONE_GPU)
        answer = one_gpu.prepare()()[0]
        return [
            one_gpu,
            *(Implementation(name, "", "ours", lambda make=make: make(answer), **options) for name, make in makes.items()),
        ]  # type: ignore[misc]

    monkeypatch.setattr(module, "implementations", implementations)
    session = Session(world.bench, rows, Request(quick=True), lambda *words: None)
    with torch.no_grad():
        Timing(world, session, problem).time(Checks(world, session, problem).ready())
    return rows


def refused(rows: list[Row]) -> dict[str | None, RefusalRow]:
    return {row.kernel: row for row in rows if isinstance(row, RefusalRow)}


def test_an_implementation_that_is_wrong_or_fails_is_refused_and_one_that_is_absent_noted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(answer: torch.Tensor) -> Callable[[], Results]:
        raise ValueError("it is not installed")

    def fails(answer: torch.Tensor) -> Callable[[], Results]:
        return lambda: (torch.empty(3) @ torch.empty(4),)

    makes: dict[str, Make] = {
        "right": lambda answer: lambda: (answer.clone(),),
        "wrong": lambda answer: lambda: (answer * 1.01,),
        "absent": absent,
        "fails": fails,
    }
    rows = measured(world, monkeypatch, makes)
    assert "rank 0: out: maximum error" in refused(rows)["wrong"].reason
    assert refused(rows)["fails"].reason.startswith("it does not run: RuntimeError")
    assert set(refused(rows)) == {"wrong", "fails"}
    assert {row.kernel: row.passed for row in rows if isinstance(row, CorrectnessRow)} == {
        ONE_GPU: True, "right": True, "wrong": False
    }  # fmt: skip
    assert "by : it is not installed" not in (notes := [row.text for row in rows if isinstance(row, NoteRow)])
    assert "it is not installed" in notes
    assert "right has the bits of one GPU's call" in notes
    assert {row.kernel for row in rows if isinstance(row, TimingRow)} == {"right"}


def test_bits_that_are_promised_and_are_others_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    makes: dict[str, Make] = {"right": lambda answer: lambda: (answer.clone(),)}
    rows = measured(world, monkeypatch, makes, bits=lambda: (torch.zeros(2), torch.ones(2)))
    assert "other bits than one GPU's call" in refused(rows)["right"].reason


def test_a_call_with_other_bits_after_the_samples_voids_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def drifts(answer: torch.Tensor) -> Callable[[], Results]:
        calls = count()
        return lambda: (answer * (1.0 if next(calls) == 0 else 1 + 1e-6),)

    found = refused(measured(world, monkeypatch, {"drifts": drifts}))["drifts"]
    assert (found.voids, found.reason) == (True, "rank 0: a call on the eager clock has other bits")


def test_a_sample_is_the_time_of_a_call_however_many_it_holds(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(seconds: float) -> Make:
        def make(answer: torch.Tensor) -> Callable[[], Results]:
            return lambda: time.sleep(seconds) or (answer,)  # type: ignore[func-returns-value]

        return make

    rows = measured(world, monkeypatch, {"short": takes(0.004), "long": takes(0.022)})
    timed = {row.kernel: row for row in rows if isinstance(row, TimingRow) and row.rival == ONE_GPU}
    assert timed["short"].calls > timed["long"].calls == 1
    medians = [statistics.median(timed[name].a) / 1e6 for name in ("short", "long")]
    assert 4.0 <= medians[0] < 10.0
    assert 22.0 <= medians[1] < 40.0
    controls = [row for row in rows if isinstance(row, TimingRow) and row.rival == row.kernel]
    assert [(row.kernel, len(row.a)) for row in controls] == [("short", 6)]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("attn b1 h1 q8 k16 d8 fp32", "q is 8 and k 16; on several ranks they must be the same"),
        ("attn b1 h1 q8 d8 fp32 sinks", "'sinks' is not measured on several ranks"),
        ("moe t3 e4 k2 d16 f16 bf16", "tokens is 3; on 2 ranks it must be a multiple of 2"),
        ("moe t4 e5 k2 d16 f16 bf16", "experts is 5; on 2 ranks it must be a multiple of 2"),
    ],
)
def test_a_problem_that_ranks_cannot_share_is_refused(text: str, what: str) -> None:
    problem = parse_problem(text)
    with pytest.raises(ValueError, match=what):
        operation(problem.op).module("proof", "ranks").implementations(problem, {}, SimpleNamespace(size=lambda: 2))
