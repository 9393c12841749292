"""What ``flashmoe prove`` was asked for: as given, as recorded by a run that is gone on with, and made definite."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flashmoe_science.cli.budget import price_or_default, seconds_of_budget
from flashmoe_science.cli.resume import open_run, options_of, recorded, set_aside
from flashmoe_science.measure import choice
from flashmoe_science.measure.bench import bench_here
from flashmoe_science.measure.ledger import COULD_NOT_RUN, WRONG
from flashmoe_science.measure.session import Options, Outcome, Session, recalled
from flashmoe_science.measure.without_gpu import prove_without_gpu
from flashmoe_science.store import RunWriter

if TYPE_CHECKING:
    from flashmoe_science.cli.progress import Screen
    from flashmoe_science.measure.choice import Group

_BESIDE_RESUME = ("resume", "budget", "price", "share", "as_json")


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for. Raises ValueError, in one line, for options that do not go together."""

    targets: tuple[str, ...]
    kernel: str | None
    against: tuple[str, ...]
    quick: bool
    full: bool
    configs: int | None
    budget: float | None
    seed: int
    warm: bool
    only: tuple[str, ...]
    command: tuple[str, ...]
    repeats: int | None = None
    watchdog_s: float = 60.0
    sanitize: bool = False

    def __post_init__(self) -> None:
        if self.quick and self.full:
            raise ValueError("--quick and --full are both given; give one or the other")

    def budget_left(self, began: float) -> float | None:
        """Seconds that are left of the budget since ``began`` (on time.monotonic's clock), none below 0; None without one."""
        return None if self.budget is None else max(0.0, self.budget - (time.monotonic() - began))


def resumed(context: typer.Context, place: Path, budget: float | None) -> tuple[Path, Request]:
    """The folder of a run and the request that it was made by; its budget counts anew, or is the one given now.

    Raises:
        ValueError: another option is given beside --resume, or there is no such run.
    """
    given = [name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    others = [name for name in given if name not in _BESIDE_RESUME]
    if others:
        raise ValueError(f"--resume takes the options that the run was given; leave out {', '.join(others)}")
    folder, command = recorded(place)
    was = options_of(command)
    request = Request(
        targets=tuple(was["targets"] or ()),
        kernel=was["kernel"],
        against=tuple(was["against"] or ()),
        quick=was["quick"],
        full=was["full"],
        configs=was["configs"],
        budget=None if was["budget"] is None else seconds_of_budget(was["budget"], price_or_default(was["price"])),
        seed=was["seed"],
        warm=was["warm"],
        only=tuple(was["only"] or ()),
        command=command,
        repeats=was["repeats"],
        watchdog_s=was["watchdog"],
        sanitize=was["sanitize"],
    )
    return folder, request if budget is None else replace(request, budget=budget)


class Asked:
    """The request made definite. Making it raises ValueError, in one line, for whatever cannot be done."""

    def __init__(self, request: Request, going_on: bool) -> None:
        self.request, self.going_on, self.bench = request, going_on, bench_here()
        self.began = time.monotonic()
        if request.warm and self.bench.gpu is None:
            raise ValueError("--warm needs a GPU, and there is none here: a CPU's caches are not emptied, so every row is warm")
        if request.sanitize:
            raise ValueError(
                "--sanitize looks at candidates, and none is named; one of the package's kernels is a candidate as well: "
                "flashmoe_science:flash_attention_science"
            )
        quick, full, kernel, configs = request.quick, request.full, request.kernel, request.configs
        self.configs = configs if configs is not None else 1 if quick else sys.maxsize if full else 4
        self.groups: tuple[Group, ...] = choice.groups(request.targets, self.bench.gpu, request.only)
        problems = [problem for group in self.groups for problem in group.problems]
        self.named_problems = tuple(problems) if request.targets else None
        self.built = choice.buildable(kernel) if self.bench.gpu is None else ()
        timed_name = None if self.built and kernel is not None else kernel  # ours, named, cannot be timed on a CPU
        self.subjects = choice.subjects(timed_name, problems, self.bench.gpu)
        self.rivals = choice.rivals(request.against, full, self.subjects, self.bench.gpu)
        self.left_out = choice.left_out(self.rivals, self.subjects, self.bench.gpu)
        if not self.rivals and not self.built:
            raise ValueError(f"--against leaves no rival for {', '.join(one.name for one in self.subjects)}; name another")

    def run(self, folder: Path, screen: Screen, beside: str | None) -> list[Outcome]:
        """Every stage in order; after one that fails, none further. ``beside`` says who else timed on the device."""
        outcomes: list[Outcome] = []
        if self.built:
            outcomes.append(self._without_gpu(folder, screen))
        for group in self.groups:
            if outcomes and outcomes[-1].exit_code in (WRONG, COULD_NOT_RUN):
                break
            outcomes.append(self._measure(group, folder, screen, beside))
        return outcomes

    def _without_gpu(self, folder: Path, screen: Screen) -> Outcome:
        """What needs no clock. Going on, it is taken from its record where that is whole, and else begun again."""
        path, request = folder / "run-no-gpu.jsonl", self.request
        writer, earlier = open_run(path) if self.going_on else (RunWriter(path), None)
        if earlier is not None:
            writer.close()
            if earlier.complete:
                return recalled(earlier, ())
            set_aside(path)
            writer = RunWriter(path)
        with writer:
            return prove_without_gpu(
                self.bench,
                writer,
                self.built,
                self.named_problems,
                request.command,
                screen.watch,
                request.quick,
                request.seed,
            )

    def _measure(self, group: Group, folder: Path, screen: Screen, beside: str | None) -> Outcome:
        request = self.request
        options = Options(
            suite=group.name,
            problems=group.problems,
            subjects=self.subjects,
            rivals=self.rivals,
            command=request.command,
            quick=request.quick,
            configs=self.configs,
            budget_s=request.budget_left(self.began),
            seed=request.seed,
            left_out=self.left_out,
            warm=request.warm,
            beside=beside,
        )
        path = folder / f"run-{group.name}.jsonl"
        writer, earlier = open_run(path) if self.going_on else (RunWriter(path), None)
        with writer:
            if earlier is not None and earlier.complete and earlier.done >= {str(problem) for problem in group.problems}:
                return recalled(earlier, self._peers())
            return Session(self.bench, writer, options, screen.watch, earlier).run()

    def _peers(self) -> list[str]:
        return [kernel.name for kernel in (*self.subjects, *self.rivals) if kernel.origin == "peer"]
