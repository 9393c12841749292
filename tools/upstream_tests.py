"""A plugin for pytest that runs a sample of somebody else's tests, with a limit of time, and counts what comes of them.

Plugins that put this package's functions under the names that the tests import load it: flash_attention_tests, expert_tests.
"""

from __future__ import annotations

import json
import random
import re
import signal
from collections import Counter
from collections.abc import Generator
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import flashmoe_science

_OURS = str(Path(flashmoe_science.__file__).parent), str(Path(__file__).parent)
_FIRST_LINES = 25  # of failures and of reasons


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tests of others")
    group.addoption("--cases", type=int, default=20, help="at most so many of each test function")
    group.addoption("--seed", type=int, default=0, help="of the sample")
    group.addoption("--limit", type=int, default=60, help="seconds a case may take")
    group.addoption("--counts", type=Path, help="a JSON file to write")


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Shuffle the cases, so that a run that is cut off is a sample too."""
    random.Random(config.getoption("--seed")).shuffle(items)


# A sample of the cases -------------------------------------------------------------------------------------------------------


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
    """A limit of time."""
    limit = item.config.getoption("--limit")

    def stop(*_: object) -> None:
        raise TimeoutError(f"{limit} seconds have passed")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        torch.cuda.empty_cache()  # other processes share the memory


# What comes of them ----------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The report, with the kind of a failure and one line about it."""
    report = yield
    if report.failed and call.excinfo is not None:
        report.user_properties.append(_kind(call.excinfo))
    return report


def _kind(failure: pytest.ExceptionInfo[BaseException]) -> tuple[str, str]:
    line = next(iter(failure.exconly().splitlines()), "")
    refuses = failure.errisinstance((TypeError, ValueError, NotImplementedError))
    private = failure.errisinstance(ImportError) or "_OpNamespace" in line  # a name that users do not import
    if private or (refuses and str(failure.traceback[-1].path).startswith(_OURS)):
        return "not served", re.sub(r"\d[\d.]*", "N", line)  # one reason for all sizes
    if failure.errisinstance(torch.OutOfMemoryError):
        return "out of memory", "torch.OutOfMemoryError"
    return ("out of time" if failure.errisinstance(TimeoutError) else "failed"), line


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the counts, the reasons of what is not served and the first failures; write them as JSON where asked to."""
    counts, reasons, failures = Counter[str](), Counter[str](), []
    for outcome in ("passed", "skipped", "xfailed"):
        counts[outcome] = len(terminalreporter.getreports(outcome))
    for outcome in ("failed", "error"):
        for report in terminalreporter.getreports(outcome):
            kind, line = report.user_properties[-1] if report.user_properties else ("failed", "the process ended")
            counts[kind] += 1
            if kind == "not served":
                reasons[line] += 1
            else:
                failures.append((report.nodeid, line))
    seed, say = config.getoption("--seed"), terminalreporter.write_line
    say(f"{Path(config.args[0]).name}, seed {seed}: {json.dumps(counts)}")
    for line, count in reasons.most_common(_FIRST_LINES):
        say(f"not served {count}: {line}")
    for name, line in failures[:_FIRST_LINES]:
        say(f"{name.split('::')[-1]}: {line}")
    if path := config.getoption("--counts"):
        path.write_text(json.dumps({"seed": seed, "counts": counts, "not served": reasons, "failures": failures}, indent=1))
