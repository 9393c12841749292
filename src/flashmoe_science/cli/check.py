"""``flashmoe check``: is a function right? In seconds, on a sweep of tiny problems; nothing is timed or recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flashmoe_science.cli.progress import Screen
from flashmoe_science.cli.sheet import console, print_wrapped
from flashmoe_science.exit_codes import ExitCode
from flashmoe_science.operations import parse_problem

if TYPE_CHECKING:
    from flashmoe_science.measure.check import Answer, Checked, CheckResult

_SHOWN = 6  # kinds of wrong answers, and reasons not to serve, that are printed


def check(
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help="module:function or file.py:function.")],
    problem: Annotated[
        list[str] | None, typer.Option("--problem", metavar="PROBLEM", help="One more problem, as text; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the inputs.")] = 42,
    watchdog: Annotated[float, typer.Option("--watchdog", help="Seconds that one step of the function may take.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result on every problem as JSON, with codes.")] = False,
) -> int:
    """Check that a function is right, in seconds.

    The function is called on a sweep of tiny problems that covers every feature of its contract (dtypes, sizes, masks, memory
    orders), every pair of these, and every feature that it has an argument for, on ordinary and on large inputs. Each result is
    compared with an fp64 oracle. One problem then gets the full set of checks that flashmoe prove makes, and a few are called
    in other ways: other distributions, slices, strides of 0, odd addresses, inference_mode, autocast, another default dtype,
    another thread or stream, and repeatedly while memory is watched. A problem on which the function raises is "not served",
    which is not wrong. A crash or a hang ends only the function's own process.

    Prints for each feature the values that are right, wrong and not served; then the first wrong results.

    Exit code: 0 right wherever it serves, 1 wrong somewhere, 2 it could not be loaded or serves nothing.

    \b
    Examples:
      flashmoe check my_module:my_attention
      flashmoe check my_file.py:fn --problem "attn b1 h2 q1000 d72 fp32 causal"
      flashmoe check examples/row_softmax.py:row_softmax --json
    """
    from flashmoe_science.measure.channel import Unusable
    from flashmoe_science.measure.check import check_function

    problems = [parse_problem(text) for text in problem or ()]
    try:
        with Screen() as screen:
            result = check_function(function, problems, seed, watchdog, screen.watch)
    except Unusable as error:
        if as_json:
            typer.echo(json.dumps({"function": function, "exit_code": ExitCode.COULD_NOT_RUN, "stopped": str(error)}, indent=2))
        else:
            typer.echo(f"{function} could not be checked: {error}")
        return ExitCode.COULD_NOT_RUN
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        print_result(result)
    return result.exit_code


def print_result(result: CheckResult) -> None:
    """Print the matrix of features, what was not covered, the first wrong answers, and the summary."""
    from flashmoe_science.measure.check import summary

    out = console()
    print_wrapped(out, f"{result.spec}, held to the contract {result.contract!r}")
    matrix = result.matrix()
    width = max(map(len, matrix), default=0)
    for name, values in matrix.items():
        _print_feature(out, name.ljust(width), values)
    missing = result.not_covered()
    if missing:
        print_wrapped(out, f"not covered: {', '.join(missing)}")
    _print_reasons(out, result)
    notes = dict.fromkeys(note for one in result.checked for note in one.notes)
    for note in notes:
        print_wrapped(out, f"note: {note}")
    words = {0: "right", 1: "wrong", 2: "nothing could be checked"}[result.exit_code]
    print_wrapped(out, f"{words}: {summary(result.checked, result.stopped)}, in {result.seconds:.1f} s")


def _print_feature(out: Console, name: str, values: Mapping[str, Mapping[Answer, int]]) -> None:
    """Print one feature: its values by answer, with counts where not all problems had the same answer."""
    from flashmoe_science.measure.check import ANSWERS

    parts = []
    for answer in ANSWERS:
        shown = []
        for value in sorted(values, key=_leading_number):
            count, total = values[value][answer], sum(values[value].values())
            if count and (answer != "right" or count == total):
                shown.append(value if count == total else f"{value} ({count} of {total})")
        if shown:
            parts.append(f"{answer}: {', '.join(shown)}")
    print_wrapped(out, "; ".join(parts), lead=f"  {name}  ")


def _leading_number(value: str) -> int:
    """The number that a value begins with, as "2 (all)" does; words come before numbers, in the order of the sweep."""
    digits = re.match(r"[0-9]*", value)
    return int(digits[0]) if digits and digits[0] else -1


def _print_reasons(out: Console, result: CheckResult) -> None:
    """Print the first problem of each kind of wrong answer, and of each reason not to serve, with the number of its kind."""
    kinds: dict[object, list[Checked]] = {}
    for one in (*result.of("wrong"), *result.of("not served")):
        kind = one.codes if one.answer == "wrong" else re.sub(r"\d+", "", one.words)
        kinds.setdefault((one.answer, kind), []).append(one)
    for alike in list(kinds.values())[:_SHOWN]:
        first, more = alike[0], f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        print_wrapped(out, f"{first.answer}: '{first.problem}'{more}: {first.words}")
    if len(kinds) > _SHOWN:
        print_wrapped(out, f"and {len(kinds) - _SHOWN} other reasons (--json has them all)")
