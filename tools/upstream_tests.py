"""A plugin for pytest that runs a sample of somebody else's tests, with a limit of time, and counts what comes of them.

Plugins that put this package's functions under the names that the tests import load it: flash_attention_tests, torch_tests,
expert_tests. A line of ``--counts`` is written as each test ends, so that a run that is cut off has counts too:

    python tools/upstream_tests.py FILE...    prints them as tables
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import flashmoe_science
from flashmoe_science.operations import OPERATIONS
from flashmoe_science.ops.attention.front import operator as attention
from flashmoe_science.ops.attention.front.backward import choose as attention_choice
from flashmoe_science.ops.attention.front.backward import operator as attention_backward
from flashmoe_science.ops.calls import LAUNCHES
from flashmoe_science.ops.moe.front import choose as experts
from flashmoe_science.ops.moe.front.backward import choose as experts_choice
from flashmoe_science.ops.moe.front.backward import operator as experts_backward

_OURS = str(Path(flashmoe_science.__file__).parent), str(Path(__file__).parent)
_FIRST_LINES = 25  # of failures and of reasons
_KINDS = "passed", "failed", "not served", "skipped", "xfailed", "out of memory", "out of time"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tests of others")
    group.addoption("--cases", type=int, default=20, help="at most so many of each test function")
    group.addoption("--seed", type=int, default=0, help="of the sample")
    group.addoption("--limit", type=int, default=60, help="seconds a case may take")
    group.addoption("--counts", type=Path, help="a file to write, a JSON line for a test")
    group.addoption("--ours", action="store_true", help="differentiate by our kernels wherever one can, whatever records say")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--ours"):
        attention_choice.asked_by_switch = experts_choice.asked_by_switch = lambda: "--ours is given"  # type: ignore[attr-defined]
    _note(attention, "plan_call", lambda result, *_: result[0].decision)
    _note(attention_backward, "_bound", lambda _, *arguments: arguments[-1])
    _note(experts, "plan_of", lambda result, *_: result.decision)
    _note(experts_backward, "choose_backward", lambda result, *_: result)
    if (counts := config.getoption("--counts")) and not hasattr(config, "workerinput"):
        counts.write_text("")


# A sample of the cases -------------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Shuffle the cases, so that a run that is cut off is a sample too, and keep the first of each function: classes of
    unittest have parameters that pytest does not know of."""
    random.Random(config.getoption("--seed")).shuffle(items)
    seen = Counter[tuple[object, str]]()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        function = item.parent, item.function.__name__ if isinstance(item, pytest.Function) else item.name
        seen[function] += 1
        (kept if seen[function] <= config.getoption("--cases") else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize by a sample, before pytest would by all: a file has hundreds of thousands of cases."""
    marks = [mark for mark in metafunc.definition.own_markers if mark.name == "parametrize"]
    total, most = prod(len(mark.args[1]) for mark in marks), metafunc.config.getoption("--cases")
    if total <= most:
        return
    metafunc.definition.own_markers[:] = [mark for mark in metafunc.definition.own_markers if mark not in marks]
    names = [re.split(r"\s*,\s*", mark.args[0]) for mark in marks]
    rows = [[one if len(of) > 1 else (one,) for one in mark.args[1]] for mark, of in zip(marks, names, strict=True)]
    draw = random.Random(f"{metafunc.config.getoption('--seed')} {metafunc.function.__name__}")
    cases = []
    for case in draw.sample(range(total), most):
        values: list[Any] = []
        for row in rows:
            case, place = divmod(case, len(row))
            values += row[place]
        cases.append(values)
    metafunc.parametrize([*chain(*names)], cases)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A limit of time, and a list of the kernels that serve the test."""
    limit = item.config.getoption("--limit")

    def stop(*_: object) -> None:
        raise TimeoutError(f"{limit} seconds have passed")

    LAUNCHES.clear()  # else calls like those of an earlier test are not chosen for again
    _served.clear()
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        item.user_properties.append(("served by", sorted(_served)))
        torch.cuda.empty_cache()  # other processes share the memory


_served: set[str] = set()


def _note(module: Any, name: str, decision: Callable[..., Any]) -> None:
    """Have a function of ours note which kernel was decided for."""
    function = getattr(module, name)

    def noting(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        _served.add(decision(result, *arguments).kernel)
        return result

    setattr(module, name, noting)


# What comes of them ----------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The report, with the kind of a failure and one line about it."""
    report = yield
    if report.failed and call.excinfo is not None:
        report.user_properties.append(("failure", _kind(call.excinfo)))
    return report


def _kind(failure: pytest.ExceptionInfo[BaseException]) -> tuple[str, str]:
    line = next(iter(failure.exconly().splitlines()), "")
    refuses = failure.errisinstance((TypeError, ValueError, NotImplementedError))
    # Names that users do not import.
    private = failure.errisinstance(ImportError) or re.search("_OpNamespace|compile_cache", line)
    if private or (refuses and str(failure.traceback[-1].path).startswith(_OURS)):
        return "not served", re.sub(r"\d[\d.]*", "N", line)  # one reason for all sizes
    if failure.errisinstance(torch.OutOfMemoryError):
        return "out of memory", "torch.OutOfMemoryError"
    return ("out of time" if failure.errisinstance(TimeoutError) else "failed"), line


def _row(report: pytest.TestReport) -> dict[str, Any] | None:
    """What --counts keeps of a report; None of a step before or after a test that did not fail."""
    if report.when != "call" and report.passed:
        return None
    found: dict[str, Any] = dict(report.user_properties)
    kind, line = found.get("failure", ("failed", "the process ended") if report.failed else (report.outcome, ""))
    if report.skipped:
        kind = "xfailed" if hasattr(report, "wasxfail") else "skipped"
    return {"test": report.nodeid, "kind": kind, "line": line, "served by": found.get("served by", []), "s": report.duration}


class _Counts:
    """Writes a line of --counts as a test ends, in the process that hears of all of them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (row := _row(report)) is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def pytest_sessionstart(session: pytest.Session) -> None:
    if (counts := session.config.getoption("--counts")) and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Counts(counts))


def main(paths: Iterable[Path]) -> None:
    """Print the counts of files that --counts wrote, then for each the reasons of what is not served and the failures."""
    rows = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in paths}
    backwards = {kernel.name for one in OPERATIONS if one.part == "backward" for kernel in one.ours()}
    print("| tests |", " | ".join(_KINDS), "| by a backward of ours |\n|" + "---|" * (len(_KINDS) + 2))
    for name, tests in rows.items():
        kinds = Counter(one["kind"] for one in tests)
        ours = sum(not backwards.isdisjoint(one["served by"]) for one in tests)
        print(f"| {name} |", " | ".join(str(kinds[kind]) for kind in _KINDS), f"| {ours} |")
    for name, tests in rows.items():
        print(f"\n{name}: served by {dict(Counter(kernel for one in tests for kernel in one['served by']).most_common())}")
        lines = Counter((one["kind"], one["line"]) for one in tests if one["kind"] not in ("passed", "skipped", "xfailed"))
        for (kind, line), count in lines.most_common(_FIRST_LINES):
            first = next(one["test"] for one in tests if (one["kind"], one["line"]) == (kind, line))
            print(f"  {kind} {count}: {line}\n    {first.split('::', 1)[-1]}")


if __name__ == "__main__":
    main(map(Path, sys.argv[1:]))
