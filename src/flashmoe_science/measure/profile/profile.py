"""A run of kind "profile": the machine's ceilings, then of each kernel on each problem its launches, times and counters.

Kernels run in a child. Times here are of a kernel paired with itself: enough to compare it with the ceilings and to separate
host from device time; ``flashmoe prove`` decides which kernel is faster.
"""

from __future__ import annotations

import json
import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

from flashmoe_science.hardware.gpus import MIB
from flashmoe_science.measure.bench import Bench, one_line
from flashmoe_science.measure.channel import Died, Failed, TooLittleMemory, WorkerHost
from flashmoe_science.measure.clocks import eager_sampler
from flashmoe_science.measure.compare import Comparer, Timed
from flashmoe_science.measure.inputs import InputSets
from flashmoe_science.measure.on_problem import Launches, OnProblem, ProfilerUnavailable, profile_launches
from flashmoe_science.measure.profile.ncu import MODULE as CALL_ONCE
from flashmoe_science.measure.profile.ncu import Profile, count
from flashmoe_science.measure.request import Entry, of_kernel
from flashmoe_science.measure.session import Session
from flashmoe_science.measure.worker.loading import parse_spec
from flashmoe_science.operations import kernel_named
from flashmoe_science.problem import Problem
from flashmoe_science.records import CeilingName, CeilingRow, CeilingUnit, Clock, ProfileRow

SAMPLES = 12
_SAMPLE_NS = 3_000_000
_DRAM_L2S = 16  # a stream of that many times the L2 is not served by it
_MIN_STREAM = 512 * MIB
_MATRIX = 8192
_CPU_BYTES = 256 * MIB  # above the caches of most machines
_CPU_MATRIX = 512


def measure_ceilings(run: str, bench: Bench, on_progress: Callable[[str], None]) -> Iterator[CeilingRow]:
    """Measure the peak rates that the bench reaches, a row for each. ``on_progress`` is called with the name of each."""

    def row(name: CeilingName, unit: CeilingUnit, work: int, call: Callable[[], object], how: str) -> CeilingRow:
        on_progress(f"ceiling: {name}")
        one = eager_sampler(bench, operator.call, InputSets((call,), "warm"), _SAMPLE_NS)
        samples = [max(1, round(one.sample())) for _ in range(SAMPLES)]
        return CeilingRow(run=run, name=name, unit=unit, work=work, samples=samples, how=how)

    def product(name: CeilingName, dtype: torch.dtype, size: int) -> CeilingRow:
        left, right = (torch.randn(size, size, device=bench.device).to(dtype) for _ in range(2))
        out = torch.empty(size, size, dtype=dtype, device=bench.device)
        how = f"torch.mm of {size} x {size}, random values"
        return row(name, "FLOP/s", 2 * size**3, lambda: torch.mm(left, right, out=out), how)

    stream_bytes = _CPU_BYTES if bench.gpu is None else max(_DRAM_L2S * bench.gpu.l2_bytes, _MIN_STREAM)
    source = torch.ones(stream_bytes // 4, device=bench.device)
    target = torch.empty_like(source)
    how = f"torch copy of {stream_bytes} bytes, both ways counted"
    yield row("dram copy", "B/s", 2 * stream_bytes, lambda: target.copy_(source), how)
    if bench.gpu is None:
        yield product("matmul fp32", torch.float32, _CPU_MATRIX)
        yield product("matmul bf16", torch.bfloat16, _CPU_MATRIX)
        return
    total = torch.empty((), device=bench.device)
    how = f"torch sum of {stream_bytes} bytes"
    yield row("dram read", "B/s", stream_bytes, lambda: torch.sum(source, dim=0, out=total), how)
    yield product("tensor bf16", torch.bfloat16, _MATRIX)
    yield product("tensor fp16", torch.float16, _MATRIX)


SUITE = "profile"
NO_GPU = "there is no GPU here, and counters are a GPU's"
_WATCHDOG_S = 300.0  # a first call may compile for minutes


class Subject(NamedTuple):
    """A kernel with a config, or a function, on a problem."""

    entry: Entry
    problem: Problem

    def __str__(self) -> str:
        return f"{self.entry.name} on {self.problem}"


def subject(who: str, problem: Problem, bench: Bench) -> Subject:
    """The kernel of that name, or the function module:function, on a problem. Raises ValueError: an unknown kernel, or one that
    cannot serve the problem here."""
    if ":" in who:
        parse_spec(who)
        return Subject(Entry(who, ""), problem)
    one = of_kernel(kernel_named(who, problem.op))
    reason = one.cannot(problem, bench.gpu)
    if reason is not None:
        raise ValueError(f"kernel {who!r} cannot serve '{problem}' here: {reason}")
    return Subject(one.chosen(problem, bench.gpu), problem)


def run_profile(session: Session, subjects: Sequence[Subject], folder: Path) -> None:
    """Write the run. Reports go to ``folder``. What a kernel does wrong is a refusal in the run; what the disk raises is
    raised."""
    session.begin(SUITE)
    session.total = len(subjects)
    with session.bench.single_threaded():
        for row in measure_ceilings(session.run, session.bench, session.show_progress):
            session.add(row)
        if session.bench.gpu is not None:
            torch.cuda.empty_cache()  # kernels are run in other processes, which want the memory
        for one in subjects:
            if _runs(session, one):  # a subject that ran on no clock was refused, and has no call to count
                session.show_progress(f"{one}: counters")
                _count(session, one, folder)
            session.done += 1
    session.end(timed=False)


def _runs(session: Session, one: Subject) -> bool:
    """Whether the subject runs on a clock. Its launches are compared with its promises, and it is paired with itself on every
    clock, on inputs that leave the L2 cold where they can."""
    entry, problem, gpu = one.entry, one.problem, session.bench.gpu
    spec = None if entry.who else entry.name
    launches: Launches | None = None
    if gpu is not None:
        try:
            todo = [(problem, [(entry.who, entry.config)])]
            launches = profile_launches(spec, problem.op, todo, session.request.seed, _WATCHDOG_S, session.show_progress)
        except ProfilerUnavailable as error:
            session.note(f"launches were not seen: {error}", problem, entry.name)
    clocks: tuple[Clock, ...] = ("eager",) if gpu is None else ("graph", "eager")
    timed: list[Timed] = []
    try:
        with closing(WorkerHost(spec, problem.op, _WATCHDOG_S)) as host:  # not the process that has profiled
            child, size = host.at(problem), problem.input_bytes() or problem.min_bytes() // 2
            on = OnProblem(session, problem, child, child, child, size, launches or {}, str(one))
            if launches is not None:
                on.keeps_its_promise(entry)
            for clock in clocks:
                comparer = Comparer(on)
                for each in comparer.ranked([entry], clock):
                    comparer.pair(each, None)
                    timed.append(each)
    except (Failed, Died, TooLittleMemory) as error:
        session.refuse("profile", f"it does not run: {error}", problem, entry)
        return False
    return bool(timed)


def _count(session: Session, one: Subject, folder: Path) -> None:
    """Record the counters of one call: a row a launch; where nothing was counted, one row with the reason."""
    found = Profile(absent=NO_GPU)
    if session.bench.gpu is not None:
        asked = {"who": one.entry.name, "config": one.entry.config, "problem": str(one.problem), "seed": session.request.seed}
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(one)).strip("-")[:150]
        try:
            command = [sys.executable, "-P", "-m", CALL_ONCE, json.dumps(asked)]
            found = count(command, (folder / f"{name}.ncu-rep").resolve(), _WATCHDOG_S)
        except OSError as error:  # the tool is there and cannot be started
            found = Profile(absent=f"ncu cannot be started: {one_line(error)}")
    counted = [{"launch": each.launch, "time_ns": each.time_ns, "metrics": dict(each.metrics)} for each in found.launches]
    for fields in counted or [{}]:
        session.record(ProfileRow, one.problem, one.entry, tool=found.tool, absent=found.absent, **fields)
