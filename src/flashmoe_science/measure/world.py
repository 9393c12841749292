"""A run on several ranks, each a process with a GPU of its own, or on the CPU: ``torchrun ... -m flashmoe_science prove``.

Every rank makes the same inputs and goes the same way; rank 0 writes the rows. A sample begins on all ranks at once and is the
time of the slowest. The samples of all ways to compute a problem alternate. Each rank's part of each answer is held to the
oracle, of a sample of the elements, and to one GPU's call.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flashmoe_science.contract import built_in
from flashmoe_science.measure.bench import Bench, bench_here, conditions, one_line
from flashmoe_science.measure.finding import Finding
from flashmoe_science.measure.inputs import Case, make
from flashmoe_science.measure.launches.trace import profile, profiler_works
from flashmoe_science.measure.on_problem import by_name
from flashmoe_science.measure.request import MAX_CPU_FLOPS, Entry, Request
from flashmoe_science.measure.session import NOTHING_EARLIER, Earlier, Outcome, Session, Watch
from flashmoe_science.measure.tolerance import check_output, expected
from flashmoe_science.operations import OPERATIONS, operation, parse_problem
from flashmoe_science.ops.on_ranks import Results, Sample, Way
from flashmoe_science.problem import OnRanks, ProblemError
from flashmoe_science.records import ALONE, CallPathRow, Clock, Origin, Row, TimingRow
from flashmoe_science.store import RunWriter

T = TypeVar("T")

_WAIT = timedelta(seconds=120)  # for another rank: a kernel may be built meanwhile
_SAMPLE_NS, _MAX_CALLS = 4e6, 200
_MIN_ROUNDS, _MAX_ROUNDS, _QUICK_ROUNDS = 12, 24, 6
_ROUNDS_S = 2.0  # of a problem and a clock, beyond the least rounds
_GRAPH_NS = 1e6  # a call below which the host's time may be most of it: it is timed in a graph too


def world_size() -> int:
    """How many ranks torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True, slots=True)
class _Entry(Entry):
    """A way as rows name it."""

    of: Origin = "peer"

    @property
    def origin(self) -> Origin:
        return self.of


class World:
    """The ranks of a run. What it gathers goes by gloo, apart from what is timed."""

    def __init__(self) -> None:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        on_gpu = torch.cuda.is_available()
        if on_gpu and torch.cuda.device_count() <= local:
            raise ValueError(f"torchrun started rank {local} of this host, and it has {torch.cuda.device_count()} GPUs")
        if on_gpu:
            torch.cuda.set_device(local)
        else:
            torch.set_num_threads(1)
        self.bench: Bench = bench_here()
        if not dist.is_initialized():
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_WAIT)
        group = dist.group.WORLD
        assert group is not None
        self.group, self.rank, self.size = group, dist.get_rank(), dist.get_world_size()
        self._host = dist.new_group(backend="gloo", timeout=_WAIT)
        card = torch.cuda.get_device_name() if on_gpu else None
        self.cards = [one for one in self.gather(card) if one is not None]
        if len(set(self.cards)) > 1:
            raise ValueError(f"the ranks' GPUs are {', '.join(self.cards)}; a run needs cards of one kind")
        self._gate = torch.zeros(1, device=self.bench.device)

    def gather(self, one: T) -> list[T]:
        """What each rank gives, in their order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, one, group=self._host)
        return found

    def time(self, way: Way, call: Callable[[], object], calls: int) -> int:
        """Nanoseconds of a call on this rank; 0 where the way is one GPU's and this is another rank. All ranks begin at once."""
        runs = self.rank == 0 or not way.alone
        with way.within():
            dist.all_reduce(self._gate)  # on a GPU ranks leave it within microseconds, with the calls queued behind it
            if self.bench.gpu is None:
                began = time.perf_counter_ns()
                for _ in range(calls if runs else 0):
                    call()
                return (time.perf_counter_ns() - began) // calls if runs else 0
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(calls if runs else 0):
                call()
            last.record()
            torch.cuda.synchronize()
            return round(first.elapsed_time(last) * 1e6 / calls) if runs else 0


def suites() -> dict[str, tuple[str, ...]]:
    """Name -> the problems of a suite on several ranks, as text without their last word."""
    modules = (one.module("proof", "ranks") for one in OPERATIONS if one.cut)
    return {name: texts for module in modules for name, texts in module.SUITES.items()}


class WorldPlan:
    """A request made definite, on this rank. Making it raises ValueError, in one line, for whatever cannot be done."""

    def __init__(self, request: Request) -> None:
        self.request, self.found = request, list[str]()
        named = suites()
        refused = [word for word in ("kernel", "against", "draw") if getattr(request, word)]
        if refused or request.functions:
            raise ValueError(f"--{refused[0]} is given" if refused else "a function is named" + "; it is of one rank")
        words = request.targets or tuple(named)
        self.groups = {word: tuple(_on_ranks(text) for text in named[word]) for word in words if word in named}
        if custom := tuple(_on_ranks(word) for word in words if word not in named):
            self.groups["custom"] = custom
        self.world = World()
        self.writes = self.world.rank == 0
        for one in (one for problems in self.groups.values() for one in problems):
            if self.world.bench.gpu is None and one.flops() > MAX_CPU_FLOPS:
                raise ValueError(f"{one} is too much for a CPU, and there is no GPU here")

    def run(self, folder: Path, watch: Watch, earlier: Earlier = NOTHING_EARLIER) -> list[Outcome]:
        """A run for each suite, in a file of its own. Raises StoreError."""
        began, outcomes = time.monotonic(), list[Outcome]()
        for name, problems in self.groups.items():
            with RunWriter(folder / f"run-{name}.jsonl") if self.world.rank == 0 else nullcontext(list[Row]()) as sink:
                session = Session(self.world.bench, sink, self.request, watch, earlier, began)
                outcomes.append(_run(self.world, session, name, problems))
        return outcomes


def _on_ranks(text: str) -> OnRanks:
    """The problem on the ranks that there are. Raises ValueError: a text that says another number, or of no operation that is
    spread."""
    problem, ranks = parse_problem(text), world_size()
    if not isinstance(problem, OnRanks):
        cut = next((one.cut for one in OPERATIONS if one.name == problem.op), "")
        if not cut:
            raise ValueError(f"'{problem}' is not measured on several ranks")
        problem = OnRanks(problem, cut, ranks)
    if problem.ranks != ranks:
        raise ProblemError(f"'{problem}' is of {problem.ranks} ranks; torchrun started {ranks}")
    return problem


def _run(world: World, session: Session, name: str, problems: Sequence[OnRanks]) -> Outcome:
    session.begin(name, world.size, world.cards)
    session.total = len(problems)
    for problem in problems:
        session.show_progress(str(problem))
        late = any(world.gather(time.monotonic() > session.deadline))
        if late:
            break
        try:
            with torch.no_grad():
                _Measured(world, session, problem).go()
        except ValueError as error:  # the same on all ranks: it is of the problem
            session.unusable(str(error), problem)
        session.finish(problem)
        gc.collect()
        if world.bench.gpu is not None:
            torch.cuda.empty_cache()
    return session.end(None, session.total - session.done)


@dataclass(slots=True)
class _Ready:
    """A way that runs and is right. ``held`` is this rank's part of its answer. ``again``: it is the control, one more of the
    same."""

    way: Way
    entry: _Entry
    call: Callable[[], Results]
    held: Results
    again: bool = False
    samples: list[int] = field(default_factory=list)
    calls: int = 1
    by_rank: list[list[int]] = field(default_factory=list)

    @property
    def slowest(self) -> list[int]:
        return [max(times) for times in zip(*self.by_rank, strict=True)]


class _Measured:
    """One problem on all ranks."""

    def __init__(self, world: World, session: Session, problem: OnRanks) -> None:
        self.world, self.session, self.problem = world, session, problem
        self.contract, self.module = built_in(problem.whole.op), operation(problem.whole.op).module("proof", "ranks")
        inputs = make(self.contract, problem.whole, world.bench.device, Case(session.request.seed))
        self.ways: list[Way] = self.module.ways(problem.whole, inputs, world.group)
        self.sample: Sample = self.module.sample(problem.whole, inputs, world.group)

    def go(self) -> None:
        """Check every way, then time those that are right."""
        self._expect()
        ready = [one for way in self.ways if (one := self._prepared(way)) is not None]
        self._compare(ready)
        if self.world.bench.gpu is not None:
            ready = self._seen(ready)
        quick = [one for one in self._timed(ready, "eager", rounds=1) if not one.again]
        rounds = self._sized(quick)
        self._record(self._timed(quick, "eager", rounds), "eager")
        short = [one for one in quick if one.way.graphs and one.way.origin == "ours" and min(one.slowest) < _GRAPH_NS]
        if self.world.bench.gpu is not None and short:
            captured = [made for one in quick if one.way.graphs and (made := self._captured(one)) is not None]
            self._record(self._timed(captured, "graph", rounds), "graph")

    def _expect(self) -> None:
        one, contract = self.sample, self.contract
        reference = _as_tuple(contract.reference(one.problem, contract.widened(one.inputs)))
        caps, extra = contract.cap(one.problem, one.inputs, reference), contract.rounding(one.problem, one.inputs)
        plain = one.of_reference(_as_tuple(contract.plain(one.problem, one.inputs)))
        self.wanted = expected(one.of_reference(reference), plain, caps, extra)

    def _agreed(self, reason: str | None) -> str | None:
        """The first reason that a rank has."""
        return next((one for one in self.world.gather(reason) if one is not None), None)

    def _entry(self, way: Way) -> _Entry:
        return _Entry(way.name, way.name, None, way.config, way.origin)

    def _prepared(self, way: Way) -> _Ready | None:
        """A way that all ranks can call and whose answers are right on all."""
        entry, reason, held = self._entry(way), None, ()
        self.session.show_progress(f"{self.problem}: {entry}")
        call: Callable[[], Results] = tuple
        try:
            call = way.prepare()
        except (ValueError, ImportError, RuntimeError) as error:
            reason = str(error) if isinstance(error, ValueError) else one_line(error)
        if reason := self._agreed(reason):
            self.session.note(reason, self.problem, entry.name)
            return None
        try:
            with way.within():
                held = way.part(call())
            self.world.bench.synchronize()
        except Exception as error:  # whatever a peer raises is its own
            reason = f"it does not run: {one_line(error)}"
        if reason := self._agreed(reason):
            return self._refuse(way, reason)
        return _Ready(way, entry, call, held) if self._is_right(way, entry, held) else None

    def _refuse(self, way: Way, reason: str, voids: bool = False) -> None:
        self.session.refuse("correctness", reason, self.problem, self._entry(way), voids)

    def _is_right(self, way: Way, entry: _Entry, held: Results) -> bool:
        """Hold every rank's part to the oracle. A row a rank."""
        found, names = Finding(output_bytes=sum(x.nbytes for x in held)), [one.name for one in self.contract.outputs] or ["out"]
        for name, got, right in zip(names, self.sample.of_part(held), self.wanted, strict=False):
            found.stats[name], reasons = check_output(name, got, right)
            for reason in reasons:
                found.fault("wrong-result", f"rank {self.world.rank}: {reason}")
        if way.same is not None and not torch.equal(*way.same()):
            found.fault("other-bits", f"rank {self.world.rank}: it has other bits than one GPU's call")
        every = [self.session.examined(self.problem, entry, one, rank=n) for n, one in enumerate(self.world.gather(found))]
        return all(every)

    def _compare(self, ready: Sequence[_Ready]) -> None:
        """Note by how much answers of ours differ from one GPU's."""
        whole = next((one.held for one in ready if one.way.name == ALONE), None)
        for one in (one for one in ready if one.way.origin == "ours" and whole is not None):
            pairs = list(zip(one.held, whole or (), strict=True))
            same = all(self.world.gather(all(torch.equal(*pair) for pair in pairs)))
            most = max(self.world.gather(max((a.float() - b.float()).abs().max().item() for a, b in pairs)))
            words = "has the bits of" if same else f"differs by at most {most:.3g} from"
            self.session.note(f"{one.entry} {words} one GPU's call", self.problem, one.entry.name)

    def _seen(self, ready: list[_Ready]) -> list[_Ready]:
        """Record what each way launches on rank 0, and keep those that launch what they say."""
        reason = self._agreed(profiler_works(self.world.bench.device, self.world.bench.synchronize))
        if reason is not None:
            raise ValueError(reason)
        kept = []
        for one in ready:
            with one.way.within():
                launches = by_name(profile([one.call], self.world.bench.synchronize)[0])
            wanted = one.way.launches
            seen = not wanted or any(wanted in launch.name.lower() for launch in launches)
            broken = [] if seen else [f"no kernel named {wanted!r} ran"]
            self.session.record(CallPathRow, self.problem, one.entry, launches=launches, broken_promises=broken)
            if self._agreed("; ".join(broken) or None) is None:
                kept.append(one)
        return kept

    def _sized(self, ready: Sequence[_Ready]) -> int:
        """Set how many calls a sample of each way holds, by its quick time. Returns the number of rounds."""
        for one in ready:
            one.calls = max(1, min(_MAX_CALLS, math.ceil(_SAMPLE_NS / max(1, min(one.slowest)))))
        a_round = sum(one.calls * min(one.slowest) for one in ready) / 1e9
        if self.session.request.quick:
            return _QUICK_ROUNDS
        return max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(_ROUNDS_S / max(a_round, 1e-9))))

    def _captured(self, one: _Ready) -> _Ready | None:
        """The calls of a way's sample as one CUDA graph, None where they cannot be captured."""
        graph, reason, kept = torch.cuda.CUDAGraph(), None, list[Results]()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(one.calls if self.world.rank == 0 or not one.way.alone else 1):
                    kept[:] = [one.call()]
        except RuntimeError as error:
            reason = one_line(error)
        if reason := self._agreed(reason):
            self.session.note(f"it is in no graph: {reason}", self.problem, one.entry.name)
            return None

        def replay() -> Results:
            graph.replay()
            return kept[0]

        return _Ready(one.way, one.entry, replay, one.held, calls=one.calls)

    def _timed(self, ready: Sequence[_Ready], clock: Clock, rounds: int) -> list[_Ready]:
        """Sample all ways in turn, there and back, and the first of ours twice: the control. Answers are compared at the end."""
        first = next((one for one in ready if one.way.origin == "ours"), None)
        every = [replace(one, samples=[], by_rank=[]) for one in ready]
        every += [replace(first, samples=[], by_rank=[], again=True)] if first else []
        world, before = self.world, self.world.bench.telemetry()
        began = time.monotonic()
        for n in range(rounds + 1):  # the first warms up
            self.session.show_progress(f"{self.problem}: {clock} clock, round {n} of {rounds}")
            for one in every[:: 1 if n % 2 else -1]:
                replays = clock == "graph"
                took = world.time(one.way, one.call, 1 if replays else one.calls)
                one.samples += [took // one.calls if replays else took] if n else []
        self._seconds, after = time.monotonic() - began, world.bench.telemetry()
        self._conditions = _joined(world.gather(conditions(before, after)))
        for number, series in enumerate(zip(*world.gather([one.samples for one in every]), strict=True)):
            every[number].by_rank = [list(of_rank) for of_rank in series[: 1 if every[number].way.alone else None]]
        return [one for one in every if self._repeats(one, clock)]

    def _repeats(self, one: _Ready, clock: Clock) -> bool:
        """Whether one more call, of ours, gives the bits of the first."""
        if one.way.origin != "ours":
            return True
        with one.way.within():
            again = one.way.part(one.call())
        self.world.bench.synchronize()
        same = all(torch.equal(a, b) for a, b in zip(again, one.held, strict=True))
        if reason := self._agreed(None if same else f"rank {self.world.rank}: a timed call ({clock}) has other bits than the first"):
            self._refuse(one.way, reason, voids=True)
        return reason is None

    def _record(self, ready: Sequence[_Ready], clock: Clock) -> None:
        """A row for each of ours and each peer, of the same rounds, and the control's."""
        bench = self.world.bench
        reads = self.problem.min_bytes() // self.problem.gpus()
        cold = bench.gpu is None or reads > bench.gpu.l2_bytes
        for own in (one for one in ready if one.way.origin == "ours" and not one.again):
            rivals = [one for one in ready if one.way.origin == "peer" or (one.again and one.entry == own.entry)]
            for rival in rivals:
                self.session.record(
                    TimingRow,
                    self.problem,
                    own.entry,
                    op=self.problem.op,
                    origin=own.entry.origin,
                    rival=rival.entry.name,
                    rival_origin=rival.entry.origin,
                    rival_config=rival.entry.config,
                    clock=clock,
                    cache="cold" if cold else "warm",
                    calls=own.calls,
                    input_sets=1,
                    a=own.slowest,
                    b=rival.slowest,
                    a_by_rank=own.by_rank,
                    b_by_rank=rival.by_rank,
                    device_seconds=round(self._seconds / (len(ready) * max(1, len(rivals))), 4),
                    quick=self.session.request.quick,
                    **self._conditions,
                )


def _as_tuple(results: Any) -> Results:
    return results if isinstance(results, tuple) else (results,)


def _joined(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The conditions of all ranks: what discredits one GPU's samples discredits all."""
    hottest = max((one["temperature_c"] for one in every if one["temperature_c"] is not None), default=None)
    return {
        **every[0],
        "temperature_c": hottest,
        "throttle": sorted({word for one in every for word in one["throttle"]}),
        "power_capped": any(one["power_capped"] for one in every),
    }
