"""Whether a function is right, and how fast it is, from Python: what `flashmoe check` and `flashmoe prove` print, as objects::

    from flashmoe_science import proof

    result = proof.check("my_module:my_attention")
    assert result.passed, result.codes                # such as ("wrong-result", "mask-top-left")

    proved = proof.prove("my_module:my_attention", "attn b1 h16 q4096 d128 bf16 causal", against="sdpa")
    print(proved.verdicts[0].verdict, proved.verdicts[0].ratio, proved.folder)

A function runs in other processes, so it is named as text, ``module:function`` or ``file.py:function``; a function object will
do if its module and name lead back to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from flashmoe_science.exit_codes import ExitCode, worst

if TYPE_CHECKING:
    from flashmoe_science.judge.verdicts import Verdict
    from flashmoe_science.measure.check import CheckResult
    from flashmoe_science.measure.session import Outcome
    from flashmoe_science.problem import Problem

Function = str | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ProveResult:
    """One run: its verdicts, the folder of its record and report, and how it ended."""

    verdicts: tuple[Verdict, ...]
    folder: Path
    outcome: Outcome

    @property
    def exit_code(self) -> ExitCode:
        """The exit code that ``flashmoe prove`` would end with."""
        from flashmoe_science.judge.ending import code_of

        return worst((self.outcome.exit_code, code_of(self.verdicts)))

    @property
    def passed(self) -> bool:
        """Whether it is right everywhere, was timed, and has no refused number; a slower function passes."""
        return self.exit_code == ExitCode.GOOD


def check(
    function: Function, problems: Problem | str | Sequence[Problem | str] = (), *, seed: int = 42, watchdog_s: float = 60.0
) -> CheckResult:
    """Whether a function is right, in seconds: on its contract's sweep of tiny problems, and on ``problems``.

    Args:
        function: "module:function", "file.py:function", or a function that its module and name lead back to.
        problems: one more problem or several, as problems or texts.
        seed: of the inputs. watchdog_s: seconds that the function may take over one step.

    Returns:
        The result on every problem; ``passed``, ``codes``, ``matrix()``.

    Raises:
        ValueError: no such function or file, a problem that does not parse.
        Unusable (flashmoe_science.measure.channel): it cannot be loaded, or its contract fails.
    """
    from flashmoe_science.measure.check import check_function
    from flashmoe_science.operations import parse_problem

    return check_function(spec_of(function), [parse_problem(str(one)) for one in _several(problems)], seed, watchdog_s)


def prove(
    function: Function,
    problems: Problem | str | Sequence[Problem | str] = (),
    *,
    against: Function | Sequence[Function] = (),
    quick: bool = False,
    out: Path | str | None = None,
    seed: int = 42,
    watchdog_s: float = 60.0,
    budget_s: float | None = None,
) -> ProveResult:
    """Check a function, time it against its rivals, and judge the run. Takes minutes on a GPU.

    Args:
        function: as ``check`` takes it. against: a rival or several, by name or as functions; by default the peers of its
            contract.
        problems: one or several, or their texts; by default those of its contract.
        quick: fewer samples and cases. out: the folder for the record and the report (reports/<time>-<id>).
        budget_s: seconds after which it stops with what there is.

    Raises:
        ValueError: an option that is not allowed, in one line.
        StoreError: the record cannot be written.
    """
    from flashmoe_science.judge.report.write import write_report
    from flashmoe_science.judge.standing import JudgedRun, standing
    from flashmoe_science.measure.request import Request
    from flashmoe_science.measure.run import Plan
    from flashmoe_science.store import read_runs

    targets = (spec_of(function), *map(str, _several(problems)))
    rivals = tuple(one if isinstance(one, str) else spec_of(one) for one in _several(against))
    words = [*targets, *(f"--against={one}" for one in rivals), f"--seed={seed}", f"--watchdog={watchdog_s}"]
    plan = Plan(
        Request(
            targets,
            against=rivals,
            quick=quick,
            seed=seed,
            watchdog_s=watchdog_s,
            budget_s=budget_s,
            command=("flashmoe", "prove", *words, *(["--quick"] if quick else [])),  # which --resume reads
        )
    )
    folder = Path(out) if out is not None else Path("reports") / f"{datetime.now():%Y%m%d-%H%M%S}-{token_hex(3)}"
    (outcome,) = plan.run(folder, lambda text, done, total: None)
    judged = [JudgedRun(run) for run in read_runs(folder) if run.header.run == outcome.run]
    write_report(judged, folder)
    return ProveResult(tuple(standing(judged)), folder, outcome)


def _several(given: Any) -> Sequence[Any]:
    """One thing, or a sequence of them, as a sequence; a text is one thing."""
    return given if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def spec_of(function: Function) -> str:
    """The text that names a function in another process.

    Raises:
        ValueError: its module and name do not lead back to it: a lambda, a function made in another, or by a notebook.
    """
    from flashmoe_science.measure.worker.loading import parse_spec

    if isinstance(function, str):
        return parse_spec(function).text
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    file = getattr(module, "__file__", None)
    if module is None or file is None or found is not function:
        raise ValueError(
            f"{name or repr(function)} cannot be found from another process; write it at the top of a file and pass "
            f"'path/to/file.py:{name.rpartition('.')[2] or 'name'}'"
        )
    # A file that is no part of a package may be in a folder that is not on another process's path.
    return parse_spec(f"{module.__name__ if getattr(module, '__package__', None) else file}:{name}").text
