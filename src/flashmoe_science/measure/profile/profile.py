"""A run of kind "profile": the machine's ceilings, then of each kernel on each problem its launches, times and counters.

All that runs a kernel does so in a process of its own. Times here are of a kernel beside itself: enough to place it under the
ceilings and to tell the host from the device; who is faster is for ``flashmoe prove``.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Kernel
from flashmoe_science.measure.bench import Bench, conditions, one_line
from flashmoe_science.measure.callpath import broken_promises
from flashmoe_science.measure.choice import ON_CPU
from flashmoe_science.measure.inputs import MAX_SETS
from flashmoe_science.measure.ledger import GOOD, Ledger, Sink
from flashmoe_science.measure.profile.ceilings import measure_ceilings
from flashmoe_science.measure.profile.ncu import Profile, count
from flashmoe_science.measure.session import Progress, begin, end, new_run_id
from flashmoe_science.measure.timing import FEW, paired
from flashmoe_science.measure.trial.cases import Case
from flashmoe_science.measure.trial.rivals import Rival
from flashmoe_science.measure.trial.warden import Died, Failed, Ward
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.records import CallPathRow, Clock, ProfileRow, RefusalRow, SeenLaunch, TimingRow

SUITE = "profile"
_HOST = "flashmoe_science.measure.trial.host"
_ONE_CALL = "flashmoe_science.measure.profile.one_call"
_WATCHDOG_S = 300.0  # a first call may compile for minutes
_GPU_CLOCKS: tuple[Clock, ...] = ("graph", "eager")
_CPU_CLOCKS: tuple[Clock, ...] = ("eager",)
_A_PROBLEM = "attn b4 h16 q4096 d128 bf16 causal bshd"
_A_CPU_PROBLEM = "attn b1 h8 q512 d64 fp32 causal"
NO_GPU = "there is no GPU here, and counters are a GPU's"


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel on a problem: of the registry with a config, or a candidate by module:function."""

    rival: Rival
    problem: Problem
    config: str

    @property
    def who(self) -> str:
        return self.rival.who

    @property
    def kernel(self) -> Kernel | None:
        return self.rival.kernel

    def __str__(self) -> str:
        return f"{self.who} on {self.problem}"


def subject(who: str, problem: Problem, config: str | None, bench: Bench) -> Subject:
    """The kernel of that name, or the candidate module:function, on a problem.

    Raises:
        ValueError: an unknown kernel, one that cannot serve the problem here, a config that is none.
    """
    if ":" in who:
        from flashmoe_science.measure.trial.loading import parse_spec

        parse_spec(who)
        if config:
            raise ValueError(f"--config is {config!r}, and {who!r} is a candidate, which has none")
        return Subject(Rival(who), problem, "")
    from flashmoe_science.operations import kernel_named

    rival = Rival(who, kernel_named(who))
    reason = rival.cannot(problem, bench.gpu)
    if reason is not None:
        raise ValueError(f"kernel {who!r} cannot serve '{problem}' here: {reason}")
    return Subject(rival, problem, str(Config.parse(config)) if config else rival.config(problem, bench.gpu))


def default_problems(who: str | None, bench: Bench) -> tuple[Problem, ...]:
    """What is looked at when no problem is named: a candidate's own default problems, else one of attention.

    Raises:
        ValueError: the candidate cannot be loaded, or names none.
    """
    if who is None or ":" not in who:
        return (parse_problem(_A_PROBLEM if bench.gpu is not None else _A_CPU_PROBLEM),)
    try:
        with Ward(_HOST, _WATCHDOG_S) as ward:
            said = ward.ask("open", spec=who, contract="")
    except (Failed, Died) as error:
        raise ValueError(f"kernel {who!r} cannot be loaded: {error}") from None
    return tuple(parse_problem(text) for text in said["problems"])


def default_kernel(problem: Problem, bench: Bench) -> str:
    """What the library would run; on a CPU, PyTorch's attention.

    Raises:
        ValueError: nothing of the registry serves the problem.
    """
    from flashmoe_science.dispatch.select import select
    from flashmoe_science.dispatch.table import committed_table
    from flashmoe_science.operations import OURS

    if problem.op != "attention":
        raise ValueError(f"--kernel is not given, and '{problem}' is not attention; name the kernel to look at")
    return ON_CPU[0] if bench.gpu is None else select(problem, bench.gpu, committed_table(), OURS).kernel


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What to look at. Reports go to ``folder``; Nsight Compute may take ``timeout_s`` for each call."""

    subjects: tuple[Subject, ...]
    command: tuple[str, ...]
    folder: Path
    with_ceilings: bool = True
    timeout_s: float = 300.0
    seed: int = 42


def run_profile(bench: Bench, sink: Sink, options: ProfileOptions, watch: Callable[[Progress], None]) -> None:
    """Write the run. What a kernel does wrong is a refusal in it; what the disk raises is raised."""
    ledger, began = Ledger(new_run_id(), sink), time.monotonic()
    begin(ledger, bench, SUITE, options.command, options.seed)
    total = len(options.subjects)
    with bench.alone():
        if options.with_ceilings:
            for row in measure_ceilings(ledger.run, bench, lambda text: watch(Progress(0, total, text))):
                ledger.add(row)
        for index, one in enumerate(options.subjects):

            def tell(stage: str, index: int = index, one: Subject = one) -> None:
                watch(Progress(index, total, f"{one}: {stage}"))

            _Look(bench, ledger, options, one, tell).go()
    end(ledger, began, GOOD)


class _Look:
    """One subject."""

    def __init__(
        self, bench: Bench, ledger: Ledger, options: ProfileOptions, one: Subject, tell: Callable[[str], None]
    ) -> None:
        self.bench, self.ledger, self.options, self.one, self.tell = bench, ledger, options, one, tell

    def go(self) -> None:
        try:
            if self.bench.gpu is not None:
                self.tell("launches")
                self._launches(self.bench.gpu)
            with self._open() as ward:  # not the one that has profiled
                for clock in _CPU_CLOCKS if self.bench.gpu is None else _GPU_CLOCKS:
                    self.tell(f"{clock} clock")
                    self._time(ward, clock)
        except (Failed, Died) as error:
            self._refuse(f"it does not run: {error}")
            return
        self.tell("counters")
        self._count()

    def _open(self) -> Ward:
        ward = Ward(_HOST, _WATCHDOG_S)
        try:
            candidate = self.one.kernel is None
            ward.ask("open", spec=self.one.who if candidate else None, contract=self.one.problem.op)
            ward.ask("problem", text=str(self.one.problem))
        except BaseException:
            ward.close()
            raise
        return ward

    @property
    def _called(self) -> str:
        """What the host knows it by: the candidate that it opened has no name."""
        return "" if self.one.kernel is None else self.one.who

    def _launches(self, gpu: Gpu) -> None:
        with self._open() as ward:
            said = ward.ask("launches", who=[(self._called, self.one.config)], case=Case(self.options.seed).as_dict())
        if "blind" in said:
            self.ledger.note(f"launches were not seen: {said['blind']}", self.one.problem, self.one.who)
            return
        seen = [SeenLaunch.model_validate_json(json.dumps(launch)) for launch in said["launches"].get(self._called, [])]
        kernel = self.one.kernel
        promised = () if kernel is None else kernel.launches(self.one.problem, Config.parse(self.one.config), gpu)
        self.ledger.add(
            CallPathRow(
                run=self.ledger.run,
                problem=str(self.one.problem),
                kernel=self.one.who,
                config=self.one.config,
                launches=seen,
                broken_promises=broken_promises(promised, seen, self.one.rival.origin),
            )
        )

    def _time(self, ward: Ward, clock: Clock) -> None:
        """A pair of the subject with itself, on inputs that leave the L2 cold where there can be so many."""
        sets, cold = _sets(self.one.problem, self.bench.gpu)
        before, began = self.bench.telemetry(), time.monotonic()
        cache = "cold" if cold else "warm"
        asked = {"who": self._called, "config": self.one.config, "clock": clock, "sets": sets, "cache": cache}
        slots = [ward.ask("prepare", **asked, seed=self.options.seed) for _ in range(2)]
        cannot = [slot["cannot"] for slot in slots if "cannot" in slot]
        if cannot:
            self._refuse(f"{cannot[0]} ({clock} clock)")
            return
        a, b = (lambda slot=slot: float(ward.ask("sample", slot=slot["slot"])["ns"]) for slot in slots)
        a_ns, b_ns = paired(a, b, FEW)
        after = self.bench.telemetry()
        self.ledger.add(
            TimingRow(
                run=self.ledger.run,
                problem=str(self.one.problem),
                op=self.one.problem.op,
                kernel=self.one.who,
                origin=self.one.rival.origin,
                config=self.one.config,
                rival=self.one.who,
                rival_origin=self.one.rival.origin,
                rival_config=self.one.config,
                clock=clock,
                cache="cold" if cold else "warm",
                calls=slots[0]["calls"],
                input_sets=sets,
                a=a_ns,
                b=b_ns,
                **conditions(before, after),
                device_seconds=round(time.monotonic() - began, 4),
                quick=True,
            )
        )

    def _count(self) -> None:
        if self.bench.gpu is None:
            self._rows(Profile(absent=NO_GPU))
            return
        asked = {
            "who": self.one.who,
            "config": self.one.config,
            "problem": str(self.one.problem),
            "seed": self.options.seed,
        }
        command = [sys.executable, "-P", "-m", _ONE_CALL, json.dumps(asked)]
        report = (self.options.folder / f"{_file_name(self.one)}.ncu-rep").resolve()
        try:
            self._rows(count(command, report, self.options.timeout_s))
        except OSError as error:  # the tool is there and cannot be started
            self._rows(Profile(absent=f"ncu cannot be started: {one_line(error)}"))

    def _rows(self, profile: Profile) -> None:
        """A row a launch; where nothing was counted, one that says why."""

        def row(launch: SeenLaunch | None, time_ns: float | None, metrics: dict[str, float]) -> ProfileRow:
            return ProfileRow(
                run=self.ledger.run,
                problem=str(self.one.problem),
                kernel=self.one.who,
                config=self.one.config,
                launch=launch,
                time_ns=time_ns,
                metrics=metrics,
                tool=profile.tool,
                absent=profile.absent,
            )

        rows = [row(one.launch, one.time_ns, dict(one.metrics)) for one in profile.launches]
        for made in rows or [row(None, None, {})]:
            self.ledger.add(made)

    def _refuse(self, reason: str) -> None:
        self.ledger.add(
            RefusalRow(
                run=self.ledger.run,
                stage="profile",
                problem=str(self.one.problem),
                kernel=self.one.who,
                config=self.one.config,
                reason=reason,
            )
        )


def _sets(problem: Problem, gpu: Gpu | None) -> tuple[int, bool]:
    """How many sets of inputs leave the L2 cold, and whether so many can be had."""
    if gpu is None:
        return 1, False
    wanted = 3 * gpu.l2_bytes // max(problem.min_bytes(), 1) + 2  # of which the output is a third at the most
    return (wanted, True) if wanted <= MAX_SETS else (1, False)


def _file_name(one: Subject) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", f"{Path(one.who).name} {one.problem}").strip("-")
