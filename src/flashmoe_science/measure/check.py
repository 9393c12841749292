"""Correctness alone, in seconds: a function on a sweep of tiny problems, and the whole exam on one of them.

A function that raises on a problem does not serve it, which is no wrong answer. One that crashes gets a new process; one that
hangs is asked nothing more.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any, Literal, get_args, get_type_hints

from flashmoe_science.exit_codes import ExitCode
from flashmoe_science.kernel import Device
from flashmoe_science.measure.bench import Bench, bench_here
from flashmoe_science.measure.channel import Child, Died, Failed, Hung, Tampered, TooLittleMemory, Unusable, WorkerHost
from flashmoe_science.measure.correctness import Exam
from flashmoe_science.measure.finding import CALL_MODES, DISTRIBUTIONS, HARD_DISTRIBUTIONS, ON_A_STREAM, REPEATEDLY, Finding
from flashmoe_science.measure.oracle import ContractFailed, ContractOracle, oracle_of
from flashmoe_science.measure.request import Request, is_too_much_for_a_cpu
from flashmoe_science.measure.worker.loading import parse_spec
from flashmoe_science.measure.worker.worker import Opened
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem

Answer = Literal["right", "wrong", "not served", "not asked"]
ANSWERS: tuple[Answer, ...] = get_args(Answer)
EXAM = "the whole exam"  # in the place of a kind of inputs
_MORE_REPEATS_S = 0.1
_MAX_CRASHES = 3  # after which it is asked nothing more
# CUDA errors after which the context cannot be used any more.
_FATAL = re.compile("illegal (memory access|instruction)|misaligned address|device-side assert|unspecified launch failure")


@dataclass(frozen=True, slots=True)
class Checked:
    """The result on one problem. ``inputs`` is empty for ordinary inputs, else the kind of inputs or of check; ``codes`` name
    the faults for machines."""

    problem: Problem
    inputs: str
    answer: Answer
    reasons: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The reasons in one line, with the inputs where they are not ordinary."""
        return "; ".join(self.reasons) if self.inputs in ("", EXAM) else f"{self.answer} {self._how}: {'; '.join(self.reasons)}"

    @property
    def _how(self) -> str:
        if self.inputs in DISTRIBUTIONS.values():
            return f"on inputs that are {self.inputs}"
        return self.inputs if self.inputs in (*CALL_MODES.values(), ON_A_STREAM, REPEATEDLY) else f"with {self.inputs}"


def summary(checked: Sequence[Checked], stopped: str | None) -> str:
    """The number of results of each answer, as text."""
    counts = {answer: sum(one.answer == answer for one in checked) for answer in ANSWERS}
    words = ", ".join(f"{count} {answer}" for answer, count in counts.items() if count or answer == "right")
    return words if stopped is None else f"{words} ({stopped})"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The results of one function on every problem. ``stopped`` is why the remaining problems were not run, if they were
    not."""

    spec: str
    contract: str
    checked: tuple[Checked, ...]
    seconds: float
    stopped: str | None = None

    def of(self, answer: Answer) -> tuple[Checked, ...]:
        return tuple(one for one in self.checked if one.answer == answer)

    @property
    def passed(self) -> bool:
        """Whether something is right and nothing is wrong."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> ExitCode:
        """GOOD right wherever it serves, WRONG somewhere, COULD_NOT_RUN nothing could be checked."""
        return ExitCode.WRONG if self.of("wrong") else ExitCode.GOOD if self.of("right") else ExitCode.COULD_NOT_RUN

    @property
    def codes(self) -> tuple[str, ...]:
        """What is wrong, for machines."""
        return tuple(dict.fromkeys(code for one in self.checked for code in one.codes))

    def matrix(self) -> dict[str, dict[str, dict[Answer, int]]]:
        """Counts of each answer by feature and value, on ordinary inputs; then by the other kinds of inputs."""
        found: dict[str, dict[str, dict[Answer, int]]] = {}
        for one in self.checked:
            traits: Mapping[str, str] = {"inputs": one.inputs} if one.inputs else one.problem.traits()
            for name, value in traits.items():
                counts = found.setdefault(name, {}).setdefault(value, dict.fromkeys(ANSWERS, 0))
                counts[one.answer] += 1
        return found

    def not_covered(self) -> tuple[str, ...]:
        """Values that a feature may have and that no problem here has, for features whose values are a fixed list."""
        hints = get_type_hints(type(self.checked[0].problem)) if self.checked else {}
        lists = {name: [value for value in get_args(hint) if isinstance(value, str)] for name, hint in hints.items()}
        here = {name: {getattr(one.problem, name, None) for one in self.checked} for name in lists}
        return tuple(sorted(f"{name} {value}" for name in lists for value in lists[name] if value not in here[name]))

    def as_dict(self) -> dict[str, Any]:
        return {
            "function": self.spec,
            "contract": self.contract,
            "exit_code": self.exit_code,
            "counts": {answer: len(self.of(answer)) for answer in ANSWERS},
            "codes": list(self.codes),
            "seconds": round(self.seconds, 3),
            "stopped": self.stopped,
            "matrix": self.matrix(),
            "not_covered": list(self.not_covered()),
            "checked": [asdict(one) | {"problem": str(one.problem)} for one in self.checked],
        }


def check_function(
    spec: str,
    problems: Sequence[Problem] = (),
    seed: int = 42,
    watchdog_s: float = 60.0,
    on_progress: Callable[[str], None] = lambda text: None,
) -> CheckResult:
    """Check the function that ``spec`` names on its contract's sweep and on ``problems``. Raises ValueError: there is no such
    function, an option is not allowed, or the function cannot be asked for a problem here. Raises Unusable: it cannot be
    loaded, or its contract fails."""
    (spec,) = Request((parse_spec(spec).text,), seed=seed, watchdog_s=watchdog_s).functions
    began, bench = time.monotonic(), bench_here()
    with closing(WorkerHost(spec, "", watchdog_s)) as host:
        try:
            opened = host.open()
            swept = problems_of(opened.sweep, "sweep") if opened.sweep or not problems else []
            with bench.single_threaded(), oracle_of(opened, spec, bench.device, watchdog_s) as oracle:
                for problem in problems:
                    if (reason := cannot_be_asked(oracle, problem, bench.gpu)) is not None:
                        raise ValueError(f"problem '{problem}' cannot be asked of {spec}: {reason}")
                sweep = Sweep(bench, host.child, oracle, opened, seed, on_progress)
                sweep.go([*swept, *(one for one in problems if one not in swept)])
        except (ContractFailed, Tampered) as error:
            raise Unusable(str(error)) from error
        return CheckResult(spec, opened.contract, tuple(sweep.checked), time.monotonic() - began, sweep.stopped)


def problems_of(texts: Sequence[str], what: str) -> list[Problem]:
    """The ``sweep`` or default ``problems`` of a contract, parsed. Raises ContractFailed where there is none, or a text
    is no problem."""
    if not texts:
        raise ContractFailed(f"its contract's {what} names no problem; name one")
    try:
        return list(dict.fromkeys(map(parse_problem, texts)))
    except ValueError as error:
        raise ContractFailed(f"its contract's {what}: {error}") from error


def cannot_be_asked(oracle: ContractOracle, problem: Problem, gpu: Device) -> str | None:
    """Begin a problem in the oracle. Returns why a function cannot be run on it here, or None. Raises ContractFailed."""
    if gpu is None and is_too_much_for_a_cpu(problem):  # before its inputs are made
        return "too much for a CPU, and there is no GPU here"
    try:
        cannot = oracle.ask("problem", text=str(problem))["cannot"]
    except TooLittleMemory as error:
        return str(error)
    return None if cannot is None else str(cannot)


@dataclass(slots=True)
class Sweep:
    """Checks the function on one problem after another, in a child that ``child`` returns, restarted where it has ended."""

    bench: Bench
    child: Callable[[], Child]
    oracle: ContractOracle
    opened: Opened
    seed: int
    on_progress: Callable[[str], None]
    deadline: float = math.inf  # on time.monotonic's clock; what is left then is not asked
    checked: list[Checked] = field(default_factory=list)
    stopped: str | None = None
    _crashes: int = 0

    def go(self, problems: Iterable[Problem]) -> None:
        """Check every problem once. Then the first right one gets the full exam and every other kind of inputs, and a few other
        right ones the exam and other ways to call. Where none is right, the exam of the first may find the reason. Raises
        ContractFailed: the contract's own code failed."""
        problems = list(problems)
        for index, problem in enumerate(problems):
            self.on_progress(f"{index + 1} of {len(problems)}: {problem}")
            self._add(problem, "", partial(_ordinary, opened=self.opened))
        ran = [one for one in self.checked if one.answer in ("right", "wrong")]
        if self.stopped is not None or not ran:
            return
        first = min(ran, key=lambda one: one.answer)  # "right" before "wrong"
        right, deterministic = first.problem, self.opened.promises.deterministic
        self.on_progress(f"{EXAM}: {right}")
        self._add(right, EXAM, lambda exam: exam.full((), (), deterministic))
        if first.answer == "right":
            served = [one.problem for one in ran if one.answer == "right"]
            of_dtypes = {one.traits().get("dtype"): one for one in reversed(served)}
            on = list(product(reversed(of_dtypes.values()), (one for one in self.opened.distributions if one in DISTRIBUTIONS)))
            if "constant" in self.opened.distributions:
                on += [(problem, "constant") for problem in _largest(served) if problem != right]
            for problem, name in on:
                self._add(problem, DISTRIBUTIONS[name], partial(Exam.one_call, distribution=name))
            for problem, name in product(_plainest(served), self.opened.edge_variants):
                self._add(problem, name, partial(_with_variant, variant=name))
            for problem in _representative(served):
                self.on_progress(f"other inputs and calls: {problem}")
                self._variants_and_modes(problem)
                if problem != right:
                    self._add(problem, EXAM, lambda exam: exam.full((), (), deterministic))

    def _variants_and_modes(self, right: Problem) -> None:
        """Check other ways to give the inputs of a problem and to call."""
        for name in dict.fromkeys((*self.opened.variants, *self.opened.everywhere, *self.opened.sweep_variants)):
            self._add(right, name, partial(_with_variant, variant=name))
        of_16_bits = right.traits().get("dtype") in ("fp16", "bf16")
        for under in (one for one in self.opened.calls if of_16_bits or one not in ("autocast", "default")):
            self._add(right, CALL_MODES[under], partial(Exam.one_call, under=under))
        if self.bench.gpu is not None:
            self._add(right, ON_A_STREAM, Exam.on_other_stream)
        self._add(right, REPEATEDLY, Exam.memory_growth)

    def _add(self, problem: Problem, inputs: str, examine: Callable[[Exam], Finding]) -> None:
        if self.stopped is None and time.monotonic() > self.deadline:
            self.stopped = "the time for the sweep is over"
        begun = bool(self.checked) and self.checked[-1].problem == problem and self.checked[-1].answer != "not asked"
        cannot = self.stopped or (None if begun else cannot_be_asked(self.oracle, problem, self.bench.gpu))
        one = Checked(problem, inputs, "not asked", (cannot,)) if cannot else self._asked(problem, inputs, examine)
        self.checked.append(one)

    def _asked(self, problem: Problem, inputs: str, examine: Callable[[Exam], Finding]) -> Checked:
        child: Child | None = None
        try:
            child = self.child()
            child.ask("problem", text=str(problem))
            exam = Exam(child, self.oracle, "", "", self.seed, self.bench.gpu is not None, more_s=_MORE_REPEATS_S)
            found = examine(exam)
        except TooLittleMemory as error:
            return Checked(problem, inputs, "not asked", (str(error),))
        except (Failed, Died) as error:
            if child is not None and (isinstance(error, Died) or "CUDA" in str(error)):
                child.close()
            return self._failed(problem, inputs, error)
        answer: Answer = "wrong" if found.reasons else "right"
        return Checked(problem, inputs, answer, tuple(found.reasons), tuple(found.codes), tuple(found.notes))

    def _failed(self, problem: Problem, inputs: str, error: Failed | Died) -> Checked:
        """An exception means not served, except for CUDA errors that end the context; ending the process is wrong."""
        if isinstance(error, Failed) and not _FATAL.search(str(error)):
            return Checked(problem, inputs, "not served", (str(error),))
        self._crashes += 1
        if self._crashes == _MAX_CRASHES:
            self.stopped = f"not asked: it crashed on {_MAX_CRASHES} problems"
        if isinstance(error, Hung):
            self.stopped = f"not asked: it hung on '{problem}'"
        if isinstance(error, Tampered):
            self.stopped = f"not asked: {error}"
        return Checked(problem, inputs, "wrong", (str(error),), (getattr(error, "code", Died.code),))


def _representative(problems: Sequence[Problem]) -> list[Problem]:
    """The first problem, which is the plainest, the first of one query or token, and for each dtype, and each word but for its
    numbers, the last problem with it."""
    of_word = {word.rstrip("0123456789"): one for one in problems for word in str(one).split()}
    of_word |= {one.traits().get("dtype", ""): one for one in problems}
    return list(dict.fromkeys((*_plainest(problems), *of_word.values())))


def _plainest(problems: Sequence[Problem]) -> list[Problem]:
    """The first problem, and the first of one query or token."""
    of_one = [one for one in problems if one.queries() == 1]
    return list(dict.fromkeys((problems[0], *of_one[:1])))


def _largest(problems: Sequence[Problem]) -> list[Problem]:
    """For each dtype of 16 bits and each kind of size in a problem's text, the first problem with the greatest: the most keys,
    queries, tokens, experts a token. A sum over these that is kept in 16 bits stops growing where inputs are all the same; on
    random inputs it is off by less than the rounding floor of a mean of many values."""
    of_16_bits = [(dtype, one) for one in problems if (dtype := one.traits().get("dtype")) in ("fp16", "bf16")]
    sizes = (
        (int(size), (dtype, name), one)
        for dtype, one in of_16_bits
        for name, size in re.findall(r"\b([a-z]+)([0-9]+)\b", str(one))
    )
    largest: dict[object, Problem] = {}
    for _, kind, one in sorted(sizes, key=itemgetter(0), reverse=True):
        largest.setdefault(kind, one)
    return list(dict.fromkeys(largest.values()))


def _with_variant(exam: Exam, variant: str) -> Finding:
    """Check a variant as it is made, with its tensors where they share memory or begin at odd places; then with NaN around."""
    found = exam.one_call(variant=variant)
    return found if found.reasons else exam.one_call(guard=True, variant=variant)


def _ordinary(exam: Exam, opened: Opened) -> Finding:
    """Check one call with NaN around its inputs; where it is wrong, check whether the NaN are the reason. Where it is right,
    check the hard distributions, and the variants that every problem has: one on which it raises is not served."""
    found = exam.one_call(guard=True)
    if found.reasons and not exam.one_call().reasons:
        outside = ("reads-outside", "it reads or writes beyond its tensors: with NaN around them,")
        code, words = ("wrong-at-times", "it is wrong now and then:") if exam.is_right_again() else outside
        found.codes.insert(0, code)
        found.reasons[0] = f"{words} {found.reasons[0]}"
    hard = [one for one in opened.distributions if one in HARD_DISTRIBUTIONS]
    calls = {f"on inputs that are {DISTRIBUTIONS[one]}": {"distribution": one} for one in hard}
    calls |= {f"with {one}": {"variant": one} for one in opened.everywhere}
    for words, how in calls.items():
        if not found.reasons:
            try:
                found.also(exam.one_call(**how))
            except Failed as error:
                if "variant" not in how or _FATAL.search(str(error)):
                    raise
            found.reasons[:1] = [f"wrong {words}: {one}" for one in found.reasons[:1]]
    return found
