"""Looking at call paths from another process: what it saw, what it died on, and that nothing else is lost with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest

from flashmoe_science.kernel import Config
from flashmoe_science.measure import paths
from flashmoe_science.measure.bench import Candidate
from flashmoe_science.measure.child import lines_from
from flashmoe_science.measure.paths import Seen, Todo, look
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.peers import PEERS

SDPA = Candidate(PEERS[0], Config())
TODO = [Todo(parse_problem(f"attn b1 h1 q{n} d8 bf16"), (SDPA,)) for n in (1, 2, 3)]


def child(monkeypatch: pytest.MonkeyPatch, deadly: set[str], before: str | None = None) -> list[list[str]]:
    """Stand in for the process: it sees each problem's call, and dies on the deadly ones. Returns what it was asked."""
    asked: list[list[str]] = []

    def lines(module: str, text: str, settings: Mapping[str, str]) -> Iterator[str]:
        problems = [problem for problem, _ in json.loads(text)["problems"]]
        asked.append(problems)
        if before:
            raise RuntimeError(before)
        for index, problem in enumerate(problems):
            yield json.dumps({"begun": index})
            if problem in deadly:
                raise RuntimeError("illegal memory access")
            yield Seen(problem=problem, kernel="sdpa", config="", planned=[], by_user=[]).model_dump_json()

    monkeypatch.setattr(paths, "lines_from", lines)
    return asked


def test_every_problem_is_seen_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = child(monkeypatch, deadly=set())
    told: list[int] = []
    seen = look(TODO, 42, lambda index, text: told.append(index))
    assert list(seen) == [(str(one.problem), "sdpa", "") for one in TODO]
    assert len(asked) == 1
    assert told == [0, 1, 2]


def test_a_problem_that_takes_the_process_down_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = child(monkeypatch, deadly={str(TODO[1].problem)})
    told: list[int] = []
    seen = look(TODO, 42, lambda index, text: told.append(index))
    assert {problem for problem, _, _ in seen} == {str(TODO[0].problem), str(TODO[2].problem)}
    assert asked[1] == [str(TODO[2].problem)]
    assert told == [0, 1, 2]


def test_a_process_that_cannot_begin_is_an_error_not_an_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = child(monkeypatch, deadly=set(), before="the profiler sees no kernels")
    with pytest.raises(RuntimeError, match="the profiler sees no kernels"):
        look(TODO, 42, lambda index, text: None)
    assert len(asked) == 1


@pytest.fixture
def module(tmp_path, monkeypatch: pytest.MonkeyPatch):
    def write(source: str) -> str:
        (tmp_path / "a_child.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "a_child"

    return write


def test_a_childs_lines_of_json_arrive_and_its_other_output_does_not(module) -> None:
    source = "import os, sys\nprint('loading')\nprint('{\"got\": \"' + sys.stdin.read() + os.environ['WORD'] + '\"}')\n"
    assert [json.loads(line) for line in lines_from(module(source), "hello ", {"WORD": "you"})] == [{"got": "hello you"}]


def test_a_child_that_talks_much_before_it_dies_is_heard_to_the_end(module) -> None:
    source = "import sys\nsys.stderr.write('warning\\n' * 100_000)\nraise SystemExit('no device')\n"
    with pytest.raises(RuntimeError, match="a_child ended with code 1: no device"):
        list(lines_from(module(source), "", {}))


def test_a_child_is_ended_when_nobody_listens_any_more(module) -> None:
    lines = lines_from(module("import time\nprint('{}', flush=True)\ntime.sleep(600)\n"), "", {})
    assert next(lines).strip() == "{}"
    lines.close()  # would wait ten minutes if the child were left alone
