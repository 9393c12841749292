"""Which kernels a run puts on trial, against whom, on what: the command line's words made definite, or an error in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashmoe_science.kernel import Device, Kernel
from flashmoe_science.kernels.peers import PEERS
from flashmoe_science.measure.suites import SUITES, problems_named, suite
from flashmoe_science.operations import KERNELS, OURS, kernel_named, parse_problem
from flashmoe_science.problem import Problem

ALL = "all"
ON_CPU = ("sdpa", "sdpa_math")  # the subject and its rival where no kernel of ours can be timed
SLOW = ("sdpa_math", "flex")  # the plain maths, and one compilation a shape: measured when asked for
MOST_CPU_FLOPS = 2e10  # a problem that a CPU core does in seconds


@dataclass(frozen=True, slots=True)
class Group:
    """Problems that make one run, under the suite's name or "custom"."""

    name: str
    problems: tuple[Problem, ...]


def groups(words: Sequence[str], device: Device, only: Sequence[str] = ()) -> tuple[Group, ...]:
    """One group a suite named, and one of all problems given as text; by default the suite for this machine. With ``only``,
    these problems of the suites and no others, for a suite that is to be measured again in part.

    Raises:
        SuiteError, ProblemError: as ``suites.problems_named``.
        ValueError: a problem that is too much for a CPU, where there is no GPU.
    """
    if not words:
        name = "cpu" if device is None else "quick"
        words = (name,)
    texts = [word for word in words if word not in SUITES]
    found = [Group(word, suite(word)) for word in dict.fromkeys(words) if word in SUITES]
    if texts:
        found.append(Group("custom", problems_named(texts)[1]))
    if only:
        found = _narrowed(found, only)
    if device is None:
        for group in found:
            for problem in group.problems:
                if problem.flops() > MOST_CPU_FLOPS:
                    what = f"suite {group.name!r}" if group.name in SUITES else "problem"
                    raise ValueError(f"{what} needs a GPU, and there is none here: {problem} is too much for a CPU")
    return tuple(found)


def _narrowed(found: Sequence[Group], only: Sequence[str]) -> list[Group]:
    wanted = [parse_problem(text) for text in only]
    for problem in wanted:
        if not any(problem in group.problems for group in found):
            raise ValueError(f"--only is {str(problem)!r}, which is not in {', '.join(group.name for group in found)}")
    narrowed = [Group(group.name, tuple(problem for problem in group.problems if problem in wanted)) for group in found]
    return [group for group in narrowed if group.problems]


def subjects(name: str | None, problems: Sequence[Problem], device: Device) -> tuple[Kernel, ...]:
    """The kernels on trial: the one named, else all of ours (on a CPU, PyTorch's attention).

    Raises:
        ValueError: an unknown kernel, one that is absent, or one that can serve none of the problems here.
    """
    if name is None:
        return OURS if device is not None else (kernel_named(ON_CPU[0]),)
    kernel = kernel_named(name)
    _refuse_absent(kernel)
    reasons = [kernel.supports(problem, device) for problem in problems]
    if reasons and all(reasons):
        raise ValueError(f"kernel {name!r} can serve none of the problems here; {problems[0]}: {reasons[0]}")
    return (kernel,)


def rivals(names: Sequence[str], every: bool, on_trial: Sequence[Kernel], device: Device) -> tuple[Kernel, ...]:
    """Whom the subjects are compared with: those named ("all" for every peer), else the peers that are worth their time.

    Raises:
        ValueError: an unknown kernel, or one named that is absent.
    """
    if names and ALL not in names:
        chosen = tuple(kernel_named(name) for name in dict.fromkeys(names))
        for kernel in chosen:
            _refuse_absent(kernel)
    elif device is None:
        chosen = tuple(kernel_named(name) for name in ON_CPU)
    else:
        chosen = tuple(kernel for kernel in PEERS if every or names or kernel.name not in SLOW)
    return tuple(kernel for kernel in chosen if kernel not in on_trial)


def left_out(chosen: Sequence[Kernel], on_trial: Sequence[Kernel], device: Device) -> tuple[str, ...]:
    """Names of the peers that a default choice leaves unmeasured, for a note in the record."""
    if device is None:
        return ()
    return tuple(kernel.name for kernel in PEERS if kernel not in chosen and kernel not in on_trial)


def buildable(name: str | None) -> tuple[Kernel, ...]:
    """Ours that can be built without a GPU: the one named, or all."""
    return tuple(kernel for kernel in KERNELS if kernel.compile_job is not None and name in (None, kernel.name))


def _refuse_absent(kernel: Kernel) -> None:
    reason = kernel.absent()
    if reason is not None:
        raise ValueError(f"kernel {kernel.name!r} cannot be measured here: {reason}")
