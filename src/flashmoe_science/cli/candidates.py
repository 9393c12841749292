"""``flashmoe prove my_module:fn``: candidates among the words of the command line, and the run that puts them on trial."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashmoe_science.cli.asked import Request
from flashmoe_science.cli.resume import open_run
from flashmoe_science.measure import choice
from flashmoe_science.measure.bench import bench_here
from flashmoe_science.measure.session import Outcome, recalled
from flashmoe_science.measure.trial.loading import parse_spec
from flashmoe_science.measure.trial.trials import Options, Trials, finished, not_wrong
from flashmoe_science.store import RunWriter

if TYPE_CHECKING:
    from flashmoe_science.cli.progress import Screen

_REPEATS, _REPEATS_QUICK = 10, 3


def candidates_among(words: Sequence[str]) -> tuple[str, ...]:
    """The words that name candidates: those with a colon that are no problem's text. None twice.

    Raises:
        ValueError: one that names no function, or a file that is not there.
    """
    found = [word for word in words if ":" in word and not set(word.split()[:1]) & set(FIRST_WORDS)]
    return tuple(dict.fromkeys(parse_spec(word).text for word in found))


class Brought:
    """A request with candidates made definite; ``cli.asked.Asked`` is the one for our own kernels.

    Making it raises ValueError, in one line, for whatever cannot be done.
    """

    def __init__(self, request: Request, specs: Sequence[str], going_on: bool) -> None:
        if request.kernel is not None:
            raise ValueError("--kernel names a kernel of the package beside a candidate; name it with --against")
        if request.warm:
            raise ValueError("--warm times kernels of the package; a candidate's cache is as its record says")
        if not request.watchdog_s > 0:
            raise ValueError(f"--watchdog is {request.watchdog_s:g}; it must be more than 0 seconds")
        for word in request.against:
            if ":" in word:
                parse_spec(word)
        self.request, self.specs, self.going_on, self.bench = request, tuple(specs), going_on, bench_here()
        self.repeats = request.repeats if request.repeats is not None else _REPEATS_QUICK if request.quick else _REPEATS
        self.began = time.monotonic()
        self.words = [word for word in request.targets if word not in specs]
        groups = choice.groups(self.words, self.bench.gpu, request.only) if self.words or request.only else ()
        self.problems = tuple(dict.fromkeys(problem for group in groups for problem in group.problems)) or None
        self.suite = groups[0].name if len(groups) == 1 else "custom"

    def run(self, folder: Path, screen: Screen, beside: str | None) -> list[Outcome]:
        """The trials, into one file."""
        request = self.request
        options = Options(
            suite=self.suite,
            specs=self.specs,
            problems=self.problems,
            against=request.against,
            every=request.full,
            command=request.command,
            quick=request.quick,
            seed=request.seed,
            repeats=self.repeats,
            watchdog_s=request.watchdog_s,
            budget_s=request.budget_left(self.began),
            sanitize=request.sanitize,
            beside=beside,
        )
        path = folder / "run-candidates.jsonl"
        writer, earlier = open_run(path) if self.going_on else (RunWriter(path), None)
        with writer:
            if earlier is not None and finished(earlier, options):
                return [recalled(earlier, not_wrong(earlier, self.specs))]
            return [Trials(self.bench, writer, options, screen.watch, earlier).run()]
