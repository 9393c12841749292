"""Samplers in the process of a kernel, on input sets that all samplers of a problem share and whose values can be changed.

``refresh`` changes the values without a trace in PyTorch's version counters. Instead of being timed, a sample can be cut at an
unforeseeable call, whose output is handed over: this catches a kernel that computes only when it is checked. For an untrusted
function a sample of the wall clock also keeps a few results, each chosen after its call returned, for a later check (``show``).
"""

from __future__ import annotations

import gc
import operator
import os
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from flashmoe_science.contract import Contract
from flashmoe_science.measure.clocks import EAGER_SAMPLE_NS, CannotTime, Sampler, eager_sampler, graph_sampler
from flashmoe_science.measure.inputs import Case, InputSets, Tensors, is_scaled, kind_of, make
from flashmoe_science.measure.worker.callers import Caller, FunctionCaller
from flashmoe_science.problem import Problem
from flashmoe_science.records import Cache, Clock

if TYPE_CHECKING:
    from flashmoe_science.measure.worker.worker import Worker

Bound = Callable[[], Any]
Load = Callable[[Any, Tensors], Tensors] | None
_CPU_SAMPLE_NS = 10_000_000  # long compared with a message between two processes on a busy machine
_COPIED_BYTES = 2**34  # of input sets of which copies are kept; values of larger ones are made again
_KEPT = 4  # outputs of calls in the middle of a graph
_SHOWN, _SHOWN_BYTES = 64, 2**26  # results of a timed sample that are kept, and the memory that they may take beyond one

_random = random.Random(os.urandom(32))  # a function may seed, or replace, the one that everybody shares
_draw, _choice = _random.random, _random.choice


class _Cut(Exception):
    """Ends a sample that is not to be timed."""


@dataclass(slots=True)
class Tap:
    """Makes every call of a sampler, given as (input set, bound call), and keeps some of the results to be checked."""

    cut_after: int = 0  # calls left until the sample is cut; 0: it is not cut
    kept: list[tuple[int, Any]] = field(default_factory=list)  # (input set, result)
    room: int = 1  # for results of a sample of the wall clock
    _called: int = 0

    def begin(self) -> None:
        """A sample of the wall clock, or a capture, begins."""
        self.kept.clear()
        self._called = 0

    def _keep(self, one: tuple[int, Any], room: int) -> None:
        """Reservoir sampling: every call's result is as likely to be kept."""
        self._called += 1
        if len(self.kept) < room:
            self.kept.append(one)
        elif (place := int(_draw() * self._called)) < room:
            self.kept[place] = one

    def eager(self, one: tuple[int, Bound]) -> Any:
        result = one[1]()
        self._keep((one[0], result), self.room)
        if self.cut_after > 0:
            self.cut_after -= 1
            if not self.cut_after:
                self.kept[:] = [(one[0], result)]
                raise _Cut
        return result

    def captured(self, one: tuple[int, Bound]) -> Any:
        """Keep the last result of a graph and a few others at random, to be checked after a replay."""
        result = one[1]()
        if not torch.cuda.is_current_stream_capturing():
            self.begin()
            return result
        self._keep((one[0], result), _KEPT)
        self.kept[-1] = (one[0], result)
        return result


@dataclass(frozen=True, slots=True)
class Slot:
    """A caller on a clock. ``bound`` are its calls, one an input set; ``tap`` is None where nothing may come between them and
    the clock."""

    caller: Caller
    sampler: Sampler
    bound: tuple[Bound, ...]
    tap: Tap | None


class Clocks:
    """Samplers on one problem. A ``trusted`` worker's kernels are timed on the wall clock with nothing between their calls."""

    def __init__(self, worker: Worker, contract: Contract, problem: Problem) -> None:
        self.contract, self.problem = contract, problem
        self.bench, self._handover, self._caller = worker.bench, worker.handover, worker.caller
        self._trusted = worker.trusted
        self._sets: list[Tensors] = []
        # (index of a set, a kernel's work at load, None for most) -> the tensors after that work, and what kernels are given.
        self._given: dict[tuple[int, Load], tuple[Tensors, Any]] = {}
        self._seed = 0
        self._base: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._slots: list[Slot] = []
        self._turns = count()

    def prepare(self, who: str, config: str, clock: Clock, sets: int, cache: Cache, seed: int) -> dict[str, Any]:
        """Put a caller on a clock. Input set i holds the case of seed + i. The answer has its slot and how many calls a sample
        holds, or why the clock cannot time it."""
        self._make_sets(sets, seed)
        caller = self._caller(who, config)
        bound = tuple(self._bound(caller, index, clock) for index in range(sets))
        if not self._trusted:
            gc.collect()
            # For good: a function that is not trusted may make garbage between two samples. (gc.disable is a setting that a
            # call may not leave changed, and it is looked at.)
            gc.set_threshold(0)
        tap = None if self._trusted and clock == "eager" else Tap()
        numbered = InputSets(tuple(enumerate(bound)), cache, self._turns)
        target_ns = EAGER_SAMPLE_NS if self.bench.gpu is not None else _CPU_SAMPLE_NS
        try:
            if tap is None:
                sampler = eager_sampler(self.bench, operator.call, InputSets(bound, cache, self._turns), target_ns=target_ns)
            elif clock == "graph":
                sampler = graph_sampler(self.bench, tap.captured, numbered)
            else:
                sampler = eager_sampler(self.bench, tap.eager, numbered, target_ns=target_ns)
        except CannotTime as error:
            return {"cannot": str(error)}
        if tap is not None and clock == "eager":
            tap.room = _room(caller.outputs(tap.kept[0][1]))
        self._slots.append(Slot(caller, sampler, bound, tap))
        return {"slot": len(self._slots) - 1, "calls": sampler.calls}

    def _bound(self, caller: Caller, index: int, clock: Clock) -> Bound:
        """A call on an input set."""
        if isinstance(caller, FunctionCaller):
            return caller.bind(self._sets[index], clock)
        key = index, caller.kernel.load
        if key not in self._given:
            loaded = caller.loaded(self._sets[index])
            self._given[key] = loaded, self.contract.for_kernel(self.problem, loaded)
        return caller.bind_given(self._given[key][1], clock)

    def _make_sets(self, sets: int, seed: int) -> None:
        first, self._seed = len(self._sets), seed
        self._sets += [make(self.contract, self.problem, self.bench.device, Case(seed + i)) for i in range(first, sets)]

    def refresh(self, scale: float) -> dict[str, Any]:
        """Give every input set the values of its case, times ``scale``."""
        if sum(tensor.nbytes for tensors in self._sets for tensor in tensors.values()) > _COPIED_BYTES:
            for index, tensors in enumerate(self._sets):
                values = make(self.contract, self.problem, self.bench.device, Case(self._seed + index, scale=scale))
                for name, tensor in tensors.items():
                    tensor.data.copy_(values[name])
        else:
            self._copy_values(scale)
        for (index, load), (loaded, given) in self._given.items():
            if load is not None:  # in place, as graphs have the addresses
                for name, one in load(self.problem, self._sets[index]).items():
                    loaded[name].copy_(one)
            self.contract.renew(self.problem, loaded, given)
        self.bench.synchronize()
        return {}

    def _copy_values(self, scale: float) -> None:
        """Write the values from copies of all sets, by one launch a dtype: a tiny problem has thousands of sets."""
        if not self._base:
            for tensor in (tensor for tensors in self._sets for tensor in tensors.values() if is_scaled(tensor)):
                live, base = self._base.setdefault(tensor.dtype, ([], []))
                live.append(tensor.data)
                base.append(tensor.clone())
        for live, base in self._base.values():
            torch._foreach_copy_(live, base)
            torch._foreach_mul_(live, scale)

    def sample(self, slot: int, cut_at: float | None = None, path: str = "") -> dict[str, Any]:
        """One sample: nanoseconds a call. With ``cut_at`` (0 to 1, how far into the sample) it is not timed: the output of the
        call that it is cut after is handed over, and the answer has the input set of that call."""
        one = self._slots[slot]
        if cut_at is not None:
            return self._handed_over(one, *self._cut(one, cut_at), path)
        if one.tap is not None and one.sampler.clock == "eager":  # what a graph writes to stays the same from replay to replay
            one.tap.begin()
        return {"ns": one.sampler.sample()}

    def _cut(self, one: Slot, cut_at: float) -> tuple[int, Any]:
        """The input set and the result of the call that a sample is cut after."""
        after = 1 + int(cut_at * (one.sampler.calls - 1))
        if one.tap is None:
            for place in range(after):
                result = one.bound[place % len(one.bound)]()
            return (after - 1) % len(one.bound), result
        if one.sampler.clock == "graph":
            for _, result in one.tap.kept:  # what a replay does not write stays NaN
                for output in one.caller.outputs(result):
                    if isinstance(output, torch.Tensor) and output.is_floating_point():
                        output.detach().fill_(torch.nan)
            one.sampler.sample()
            self.bench.synchronize()
            kept: tuple[int, Any] = _choice(one.tap.kept)
            return kept
        one.tap.begin()
        one.tap.cut_after = after
        with suppress(_Cut):
            one.sampler.sample()
        return one.tap.kept[0]

    def show(self, slot: int, which: float, path: str) -> dict[str, Any]:
        """Results of the sample that was timed last on the wall clock: all are read, and one (``which``, 0 to 1) is handed over
        under ``path``, if that is not empty. The answer has how many there were."""
        one = self._slots[slot]
        assert one.tap is not None
        kept = list(one.tap.kept)
        for output in (output for _, result in kept for output in one.caller.outputs(result) if kind_of(output) == "Tensor"):
            output.clone()
        self.bench.synchronize()
        index, result = kept[int(which * len(kept))]
        return {"kept": len(kept), **(self._handed_over(one, index, result, path) if path else {})}

    def _handed_over(self, slot: Slot, index: int, result: Any, path: str) -> dict[str, Any]:
        outputs = slot.caller.outputs(result)
        if not all(kind_of(output) == "Tensor" for output in outputs):
            return {"set": index, "plain": False, "count": 0}
        self._handover.put(path, [output.detach().clone() for output in outputs])
        return {"set": index, "plain": True, "count": len(outputs)}


def _room(outputs: Sequence[Any]) -> int:
    """How many results of a timed sample are kept, by the size of a call's outputs. The number is the same for a function and
    its rival, from the first sample on: kept results change where a call's memory lies, which cost 3% of 45 us on a CPU."""
    size: int = sum(output.nbytes for output in outputs if kind_of(output) == "Tensor")
    return max(1, min(_SHOWN, _SHOWN_BYTES // max(1, size)))
