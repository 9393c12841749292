"""The outcome of a run by its verdicts: exit code and summary lines. Pure, as verdicts are."""

from __future__ import annotations

from collections.abc import Sequence

from flashmoe_science.exit_codes import ExitCode, worst
from flashmoe_science.judge.formats import microseconds, times, within
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.judge.summary import Candidate, Group, candidates, counts_in_words, groups, in_question
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.records import STAGES, NoteRow, TimingRow
from flashmoe_science.store import Run

_WRONG, _CANNOT = ("correctness:", "callpath:", "wrong:", "call path:"), ("preflight:",)
_CAUGHT = "sanity:"  # another measurement would be refused for the same reason


def code_of(verdicts: Sequence[Verdict]) -> ExitCode:
    """The worst exit code of the kernels in question (users' kernels, else ours, else all). GOOD without any verdict: whether
    something was to be timed is known to the caller, which measured."""
    asked = in_question(verdicts)
    nothing = bool(asked) and all(row.ratio is None for row in asked)
    return worst([*map(_code, asked), *([ExitCode.NO_NUMBER] if nothing else [])])


def _code(row: Verdict) -> ExitCode:
    reason = (row.reason or "") if row.verdict == "refused" else None
    if reason is None:
        return ExitCode.NO_NUMBER if row.promise == "broken" else ExitCode.GOOD
    if reason.startswith(_WRONG) and row.origin != "peer":
        return ExitCode.WRONG
    return ExitCode.COULD_NOT_RUN if reason.startswith(_CANNOT) else ExitCode.NO_NUMBER


def first_lines(runs: Sequence[Run], verdicts: Sequence[Verdict]) -> list[str]:
    """A line for each kernel that a user brought, else for each GPU, suite and clock: its verdict and number, or the reason why
    there is none and what to do. Empty where nothing was judged."""
    brought = candidates(runs, verdicts)
    if brought:
        return [_of_candidate(one, [row for row in verdicts if row.kernel == one.name]) for one in brought]
    return [_of_group(group) for group in groups(verdicts)]


def left_out(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Kernel -> the notes on problems that it was not timed on: why it was left out."""
    timed = {(row.problem, name) for run in runs for row in run.of(TimingRow) for name in (row.kernel, row.rival)}
    notes = (row for run in runs for row in run.of(NoteRow) if row.problem and (row.problem, row.kernel) not in timed)
    by_kernel = grouped(notes, lambda row: row.kernel)
    return {kernel: [f"{kernel} on {row.problem}: {row.text}" for row in rows] for kernel, rows in by_kernel.items() if kernel}


def _of_candidate(one: Candidate, own: Sequence[Verdict]) -> str:
    lost = sorted((row for row in own if row.verdict == "refused"), key=lambda row: _code(row) != ExitCode.WRONG)
    problems = dict.fromkeys(row.problem for row in own if row.ratio is not None)
    if not own:
        return one.headline
    lead, _, found = one.headline.partition(": ")
    result = f"{found}, on {f'{len(problems)} problems' if len(problems) > 1 else ''.join(problems)}"
    if len(problems) == 1 and len({row.clock for row in own}) == 1:
        time = next(row.time_ns for row in own if row.ratio is not None)
        result = f"{microseconds(time)} us a call, {result}"
    if one.verdict == "undecided":
        result += f"; {_advice(own[0])}"
    if not lost:
        return f"{lead}: {one.name}: {result}"
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    why = f"{_code(lost[0]).word}: {_reason(lost[0])} ({one.name} on {lost[0].problem}{more})"
    return f"{why}; otherwise {lead}: {result}" if problems else why


def _of_group(group: Group) -> str:
    mean = f": {times(group.mean.ratio)} ({within(group.mean.low, group.mean.high)})" if group.mean else ""
    lost = [row for row in in_question(group.rows) if row.verdict == "refused"]
    why = f"; {_reason(lost[0])} ({lost[0].kernel} on {lost[0].problem})" if lost else ""
    return f"{counts_in_words(group.counts)}: {group.title}{mean}{why}"


def _reason(row: Verdict) -> str:
    """Why there is no number, and what to do where measuring again may give one."""
    reason = row.reason or "nothing that can be believed was timed"
    stage, _, rest = reason.partition(": ")
    words = rest if stage in STAGES else reason
    return words if reason.startswith((*_WRONG, *_CANNOT, _CAUGHT)) else f"{words}; {_advice(row)}"


def _advice(row: Verdict) -> str:
    samples = ", and without --quick, which takes few samples" if row.quick else ""
    return f"measure again with less other work on this machine{samples}"
