"""All orders in which ranks may take the steps of merging parts, explored (run with TRITON_INTERPRET=1).

The steps are those of the kernel itself, interpreted rank by rank, or of the kernel with a fault. A program's steps may take
effect in any order that releases, acquires and barriers do not forbid. Prints what goes wrong first, by case and by fault.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from triton.runtime import interpreter

from flashmoe_science.parallel import merge
from flashmoe_science.parallel.parts import Part

CALLS, WIDTH, NEVER = 4, 16, 2**30
_STORES = "        for first in range(program * ROWS, rows, programs * ROWS):\n            row = first"
_SENDS = "        tl.debug_barrier()", "        for n in tl.static_range(1, RANKS):\n            _wait("
FAULTS: dict[str, tuple[str, str]] = {  # what is replaced, by what
    "": ("", ""),
    "no release": ('sem="release"', 'sem="relaxed"'),
    "no acquire": ('sem="acquire"', 'sem="relaxed"'),
    "no barrier": ("tl.debug_barrier()", "pass"),
    "the epoch stands": ("rank * programs) + 1", "rank * programs) + 0"),
    "one slot": ("(epoch & 1)", "0"),
    "no wait": ("seen - epoch < 0", "seen - epoch < -9"),
    "a wait for the call before": ("seen - epoch < 0", "seen - epoch < -1"),
    "a flag at another's place": ("theirs + rank * programs", "theirs + (rank + 1) % RANKS * programs"),
    "a flag of another program": ("programs + program, epoch", "programs + (program + 1) % programs, epoch"),
    "a flag before the data": ("", ""),  # moved, below
}


class Step(NamedTuple):
    """``kind``: store, load, barrier, or of a flag send or wait. ``value``: what is sent, or the least that is waited for."""

    kind: str
    place: tuple[int, ...] = ()
    value: int = 0
    holds: bool = True  # release or acquire


class Stuck(Exception):
    """A flag was asked for in vain."""


class Memory:
    """In the place of ``Symmetric``: the buffers of all ranks, of one process."""

    buffers: list[torch.Tensor] = []  # noqa: RUF012

    def __init__(self, group: Any, size: int) -> None:
        if not self.buffers:
            self.buffers[:] = [torch.zeros(size + 16, dtype=torch.uint8) for _ in range(group.size())]
        self.own, self.addresses = self.buffers[group.rank()], torch.tensor([one.data_ptr() for one in self.buffers])

    def barrier(self) -> None:
        pass


class Group(NamedTuple):
    of: int
    ranks: int

    def rank(self) -> int:
        return self.of

    def size(self) -> int:
        return self.ranks


def with_fault(fault: str) -> Any:
    """The module of the kernel, with a fault."""
    text, (old, new) = Path(merge.__file__).read_text(), FAULTS[fault]
    assert old in text
    text = text.replace(old, new) if old else text
    if fault == "a flag before the data":
        first, last = map(text.index, _SENDS)
        sends = text[first:last]
        text = text[:first] + text[last:]
        text = text.replace(_STORES, sends + _STORES, 1)
    path = Path(tempfile.mkdtemp()) / "faulty.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("faulty", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Recorder:
    """The kernel of so many ranks and programs, and the steps that it takes."""

    def __init__(self, module: Any, ranks: int, programs: int) -> None:
        self._programs, self._part = programs, Part.of(programs, WIDTH, torch.float32)
        module.Symmetric, module.PROGRAMS, module._ELEMENTS = Memory, programs, WIDTH  # a row a program
        module.globaltimer = lambda: 0
        Memory.buffers.clear()
        self._slots = [module.Slots(Group(rank, ranks), self._part.size) for rank in range(ranks)]
        self._bases, self._flags = [one.data_ptr() for one in Memory.buffers], (4 * ranks * programs + 15) // 16 * 16
        self.steps: list[list[Step]] = []
        builder = interpreter.interpreter_builder
        for name, record in (("masked_load", self._load), ("masked_store", self._store), ("atomic_rmw", self._atomic)):
            taken = getattr(type(builder), f"create_{name}")
            setattr(builder, f"create_{name}", lambda *given, t=taken, r=record: r(lambda: t(builder, *given), *given))
        builder.create_barrier = lambda: self._add(Step("barrier"))

    def call(self, rank: int, call: int) -> list[list[Step]]:
        """The steps of each program in a rank's call, with waits that end at the least flag with which the kernel goes on."""
        before = [one.clone() for one in Memory.buffers]
        for seen in range(call + 1):
            for buffer, one in zip(Memory.buffers, before, strict=True):
                buffer.copy_(one)
            flags = Memory.buffers[rank][: self._flags].view(torch.int32)
            for place in range(len(self._bases) * self._programs):
                if place // self._programs != rank:
                    flags[place] = seen
            self.steps, self._asked, self._seen = [[] for _ in range(self._programs)], 0, seen
            results, lse = torch.zeros(self._programs, WIDTH), torch.zeros(self._programs)
            try:
                self._slots[rank].merge(results, lse, torch.empty_like(results))
            except interpreter.InterpreterError as error:
                if "Stuck" not in str(error):
                    raise
                continue
            return self.steps
        return [[step._replace(value=NEVER) if step.kind == "wait" else step for step in steps] for steps in self.steps]

    def _add(self, step: Step) -> None:
        self.steps[interpreter.interpreter_builder.grid_idx[0]].append(step)

    def _place(self, pointers: Any, mask: Any = None) -> tuple[int, ...]:
        """(owner, from, program) of a flag; (owner, slot, row, 0 or 1: a log-sum-exp or a result) of a part; () elsewhere."""
        found = pointers.data.flatten()
        found = found if mask is None else found[np.broadcast_to(mask.data, pointers.data.shape).flatten()]
        for owner, base in enumerate(self._bases):
            at = int(found[0]) - base
            if 0 <= at < self._flags:
                return owner, *divmod(at // 4, self._programs)
            if 0 <= at < self._flags + 2 * self._part.size:
                slot, at = divmod(at - self._flags, self._part.size)
                result = at >= self._part.results
                return owner, slot, (at - self._part.results) // (4 * WIDTH) if result else at // 4, int(result)
        return ()

    def _load(self, take: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        if len(place := self._place(pointers, mask)) == 4:
            self._add(Step("load", place))
        return take()

    def _store(self, take: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if len(place := self._place(pointers, mask)) == 4:
            self._add(Step("store", place))
        return take()

    def _atomic(self, take: Any, operation: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        place, holds = self._place(pointers), "RELAXED" not in str(sem)
        if "XCHG" in str(operation):
            self._add(Step("send", place, int(value.data.item()), holds))
            return take()
        *_, last = self.steps[interpreter.interpreter_builder.grid_idx[0]]
        if last[:2] == ("wait", place):
            raise Stuck
        self._add(Step("wait", place, self._seen, holds))
        return take()


def comes_before(steps: list[Step], first: int, then: int) -> bool:
    """Whether a program's step takes effect before a later one, for all who look."""
    one, other = steps[first], steps[then]
    if one.kind == "wait":
        return one.holds or other.kind != "load"  # what is written after a wait depends on it
    if other.kind == "send":  # other threads' steps only behind a barrier
        return other.holds and (one.kind == "send" or any(step.kind == "barrier" for step in steps[first:then]))
    return one.place == other.place or (other.kind == "wait" and one.kind == "wait")


def earlier_ones(steps: list[Step]) -> list[list[int]]:
    """Of each step of a program the numbers of those that come before it."""
    return [[first for first in range(then) if comes_before(steps, first, then)] for then in range(len(steps))]


class Explorer:
    """All orders of the steps of ``calls[rank][call][program]``."""

    def __init__(self, calls: list[list[list[list[Step]]]]) -> None:
        self._calls, self._seen, self.fault = calls, set[Any](), ""
        self._before = [[[earlier_ones(steps) for steps in call] for call in rank] for rank in calls]

    def explore(self) -> str:
        """The first fault, or nothing."""
        start = tuple((0, tuple(0 for _ in rank[0])) for rank in self._calls)
        waiting: list[Any] = [(start, frozenset[Any]())]
        while waiting and not self.fault:
            state = waiting.pop()
            if state in self._seen:
                continue
            self._seen.add(state)
            found = self._next(*state)
            if not found and any(call < len(self._calls[rank]) for rank, (call, _) in enumerate(state[0])):
                self.fault = self.fault or "ranks wait for each other"
            waiting += found
        return self.fault

    def _next(self, at: Any, memory: frozenset[Any]) -> list[Any]:
        found, values = [], dict(memory)
        for rank, (call, done) in enumerate(at):
            for program, taken in enumerate(done):
                if call == len(self._calls[rank]):
                    continue
                steps, before = self._calls[rank][call][program], self._before[rank][call][program]
                for n, step in enumerate(steps):
                    if taken >> n & 1 or not all(taken >> a & 1 for a in before[n]):
                        continue
                    if (after := self._effect(step, call + 1, values)) is None:
                        continue
                    others = [*done]
                    others[program] |= 1 << n
                    ended = all(one == (1 << len(of)) - 1 for one, of in zip(others, self._calls[rank][call], strict=True))
                    now = (call + 1, (0,) * len(done)) if ended else (call, tuple(others))
                    found.append(((*at[:rank], now, *at[rank + 1 :]), frozenset(after.items())))
        return found

    def _effect(self, step: Step, call: int, values: dict[Any, int]) -> dict[Any, int] | None:
        """What memory is then; None where a wait goes on."""
        held = values.get(step.place, 0)
        if step.kind == "wait":
            return values if held >= step.value else None
        if step.kind == "load":
            if held != call:
                owner, slot, row, result = step.place
                what = f"{('the log-sum-exp', 'the result')[result]} of row {row} of rank {owner}, slot {slot}"
                self.fault = f"call {call} reads {what}, as call {held} wrote it"
            return values
        if step.kind == "barrier":
            return values
        return values | {step.place: step.value if step.kind == "send" else call}


def seen_by(steps: list[Step], rank: int, result: int) -> list[Step]:
    """The steps on what other ranks see, of log-sum-exps or of results."""
    return [
        one
        for one in steps
        if len(one.place) != 4 or (one.place[3] == result and (one.kind == "store" or one.place[0] != rank))
    ]


def explored(fault: str, ranks: int, programs: int) -> str:
    """What goes wrong first."""
    recorder = Recorder(with_fault(fault), ranks, programs)
    calls = [[recorder.call(rank, call + 1) for call in range(CALLS)] for rank in range(ranks)]
    for result in range(2):  # log-sum-exps, then results: apart they have fewer orders
        shown = [[[seen_by(steps, rank, result) for steps in call] for call in of] for rank, of in enumerate(calls)]
        if found := Explorer(shown).explore():
            return found
    return ""


def main() -> None:
    sizes = (2, 1), (2, 2), (3, 1)  # ranks, programs of each
    right = {f"{ranks} ranks, {programs} programs": explored("", ranks, programs) for ranks, programs in sizes}
    faulty = {fault: next(filter(None, (explored(fault, *size) for size in sizes)), "") for fault in FAULTS if fault}
    print(json.dumps({"right": right, "faulty": faulty}))


if __name__ == "__main__":
    main()
