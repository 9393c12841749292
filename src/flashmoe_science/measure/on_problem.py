"""One problem under measurement: its worker and oracle, what calls launch, and the stages before the clocks, each with its row.

An entry that fails a stage is refused there, and takes no part in the later ones. Launches are seen by a process that only
profiles: a profiler that was attached once slows every later launch of its process (CUPTI is not detached when a session
ends), so the process that times must never have profiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from flashmoe_science.contract import built_in
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.kernel import Launch
from flashmoe_science.measure.channel import Channel, Died, Endpoint, Failed, TooLittleMemory, WorkerHost
from flashmoe_science.measure.correctness import Exam
from flashmoe_science.measure.finding import Finding
from flashmoe_science.measure.inputs import Case
from flashmoe_science.measure.promises import broken_launches
from flashmoe_science.measure.request import Entry
from flashmoe_science.measure.session import Session
from flashmoe_science.operations import is_operation, operation
from flashmoe_science.problem import Problem
from flashmoe_science.records import CallPathRow, SeenLaunch, Stage

# (problem, name for the worker or "" for the loaded function, config) -> the launches of each call that was profiled.
Launches = dict[tuple[str, str, str], list[list[SeenLaunch]]]


class ProfilerUnavailable(Exception):
    """The profiler sees no kernels here; the message is the reason."""


def profile_launches(
    spec: str | None,
    contract: str,
    todo: Sequence[tuple[Problem, Sequence[tuple[str, str]]]],
    seed: int,
    watchdog_s: float,
    step: Callable[[str], None],
    processes: int = 1,
) -> Launches:
    """Profile each (name, config) on each problem in that many processes; ``step`` is called as each problem ends. What fails
    or ends its process is not in the result: the exam records the same failure. Raises ProfilerUnavailable, and what ``step``
    raises.

    ``spec`` is a function to load, or None for ``contract``, the operation's name.
    """
    seen: Launches = {}
    idle: SimpleQueue[WorkerHost] = SimpleQueue()

    def one(problem: Problem, who: Sequence[tuple[str, str]]) -> dict[str, Any]:
        host = idle.get()
        try:
            return host.at(problem).ask("launches", who=list(who), case=Case(seed))
        except (Failed, Died, TooLittleMemory):
            return {"launches": []}
        finally:
            idle.put(host)

    with ExitStack() as hosts, ThreadPoolExecutor(processes) as pool:
        for _ in range(processes):
            idle.put(hosts.enter_context(closing(WorkerHost(spec, contract, watchdog_s))))
        step(f"call path of {len(todo)} problems")
        answers = [pool.submit(one, *each) for each in todo]
        try:
            for index, (answer, (problem, _)) in enumerate(zip(answers, todo, strict=True), 1):
                reply = answer.result()
                if "unavailable" in reply:
                    raise ProfilerUnavailable(str(reply["unavailable"]))
                for name, config, calls in reply["launches"]:
                    launches = [[SeenLaunch.model_validate(launch) for launch in call] for call in calls]
                    seen[str(problem), name, config] = launches
                step(f"call path {index} of {len(todo)}: {problem}")
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # before the processes are closed: threads still read from them
    return seen


_MAX_NAMES = 64  # of a call path, that are recorded
_MORE_REPEATS_S, _MORE_OF_A_FUNCTION_S = 0.1, 0.5  # seconds for repetitions beyond those asked for, of kernels and functions


def by_name(launches: Sequence[SeenLaunch]) -> list[SeenLaunch]:
    """Of each name the launch with the most threads, with the count of all, in order: a loop over experts has thousands."""
    by_names = grouped(launches, lambda one: one.name).values()
    return [max(same, key=lambda one: one.threads).model_copy(update={"count": len(same)}) for same in by_names]


@dataclass(slots=True)
class OnProblem:
    """``worker`` holds the subject and its rivals, ``rivals_worker`` the rivals without it; ``of`` names a step."""

    session: Session
    problem: Problem
    worker: Channel
    rivals_worker: Channel
    oracle: Endpoint
    input_bytes: int
    launches: Launches
    of: str

    @classmethod
    def begin(
        cls, session: Session, problem: Problem, worker: Channel, oracle: Endpoint, launches: Launches, function: str = ""
    ) -> OnProblem:
        """Begin the problem in the worker and the oracle, for kernels of the package or for ``function``. Raises Failed,
        Died."""
        worker.ask("problem", text=str(problem))  # first: it lets the tensors of the problem before go
        asked = oracle.ask("problem", text=str(problem), by_function=bool(function))
        of = f"{function} on {problem}" if function else str(problem)
        return cls(session, problem, worker, worker, oracle, int(asked["input_bytes"]), launches, of)

    def step(self, text: str) -> None:
        """Show the next step. Raises BudgetSpent."""
        self.session.step(text, self.of)

    @property
    def framework(self) -> str | None:
        """The name of the framework's own operator, a peer."""
        return operation(self.problem.op).fallback() if is_operation(self.problem.op) else None

    @property
    def families(self) -> Mapping[str, str]:
        """Patterns of kernel names by library."""
        return built_in(self.problem.op).families if is_operation(self.problem.op) else {}

    def exam(self, entry: Entry, where: Channel | None = None) -> Exam:
        on_gpu, request = self.session.bench.gpu is not None, self.session.request
        more_s = _MORE_REPEATS_S if entry.who else _MORE_OF_A_FUNCTION_S
        who = (entry.who, entry.config, request.seed)
        of_peer = entry.origin == "peer"
        return Exam(where or self.worker, self.oracle, *who, on_gpu, self.step, request.repeats, more_s, of_peer)

    def serves(self, entry: Entry) -> bool:
        """Whether an implementation supports the problem; if not, the reason is recorded as a note."""
        reason = entry.cannot(self.problem, self.session.bench.gpu)
        if reason is not None:
            self.session.note(reason, self.problem, entry.name)
        return reason is None

    def runs(self, entry: Entry, where: Channel | None = None, examined_later: bool = False) -> bool:
        """Whether one call of the entry is right and launched what was promised; if not, the reason is recorded. A right call
        gets no row if the entry is ``examined_later`` in full."""
        self.step(f"checking {entry}")
        try:
            found = self.exam(entry, where).one_call()
        except Failed as error:
            if error.cannot_serve is not None:
                self.session.note(error.cannot_serve, self.problem, entry.name)
            else:
                self.refuse("callpath", f"it does not run: {error}", entry)
            return False
        if not self.keeps_its_promise(entry):
            return False
        return (examined_later and not found.reasons) or self.examined(entry, found)

    def keeps_its_promise(self, entry: Entry, promised: Sequence[Launch] | None = None) -> bool:
        """Record what the entry's call launched, and compare it with what was promised; nothing on a CPU, which launches no
        kernels. ``promised`` of None is what its implementation promises."""
        if self.session.bench.gpu is None:
            return True
        if promised is None:
            promised = entry.promised(self.problem, self.session.bench.gpu)
        # The plain maths and a contract's own rivals promise nothing, and may launch any library's kernels.
        origin = "candidate" if entry.kernel is None else entry.origin
        seen = self.launches.get((str(self.problem), entry.who, entry.config))
        broken = ["its call path was not seen: the process that looked at it ended"]
        if seen is not None:
            broken = broken_launches(promised, seen, origin, self.families)
        launched = by_name(seen[0] if seen else [])[:_MAX_NAMES]
        self.session.record(CallPathRow, self.problem, entry, launches=launched, broken_promises=broken)
        if broken:
            self.refuse("callpath", "; ".join(broken), entry)
        return not broken

    def examined(self, entry: Entry, found: Finding) -> bool:
        """Record what an exam found; returns whether nothing is wrong."""
        for note in found.notes:
            self.session.note(note, self.problem, entry.name)
        return self.session.examined(self.problem, entry, found, voids=not entry.who)

    def refuse(self, stage: Stage, reason: str, entry: Entry) -> None:
        self.session.refuse(stage, reason, self.problem, entry, voids=not entry.who)
