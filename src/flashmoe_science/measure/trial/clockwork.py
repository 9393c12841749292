"""The clocks in the candidate's process. It takes a sample when told to; how many, and what they mean, is decided outside.

All players share the input sets. Between samples the values in them change (``refresh``), without a trace in PyTorch's
version counters. Now and then a sample is not timed but cut at a call that nobody could foresee, and that call's output handed
over: up to there it runs through the very same functions, so that a candidate that computes only when it is looked at is looked
at when it is timed. A sample of the wall clock also keeps a few of its results, each chosen after its call returned; whether
they are looked at (``show``) is decided when the sample has been timed.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import torch

from flashmoe_science.contract import Contract
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.inputs import InputSets
from flashmoe_science.measure.timing import CannotTime, Sampler, eager_sampler, graph_sampler
from flashmoe_science.measure.trial.calls import write_bytes
from flashmoe_science.measure.trial.cases import Case, Tensors, kind_of, make
from flashmoe_science.measure.trial.players import Player
from flashmoe_science.measure.trial.wire import Commands
from flashmoe_science.problem import Problem
from flashmoe_science.records import Cache, Clock

Bound = Callable[[], Any]
_CPU_SAMPLE_NS = 10_000_000  # long beside what a message between two processes may take on a busy machine
_KEPT = 4  # outputs of calls in the middle of a graph
_SHOWN, _SHOWN_BYTES = 16, 2**26  # results of a timed sample that are kept, and the memory that they may take beyond one

_random = random.Random(os.urandom(32))  # a candidate may seed, or replace, the one that everybody shares
_draw, _choice = _random.random, _random.choice


class _Cut(Exception):
    """Ends a sample that is not to be timed."""


@dataclass(slots=True)
class Tap:
    """Makes every call of a player, (input set, bound call) by (input set, bound call), and keeps the results asked for."""

    cut_after: int = 0  # calls left until a sample is cut; 0 or less: it is not
    kept: list[tuple[int, Any]] = field(default_factory=list)  # (input set, result)
    room: int = 1  # for results of a sample of the wall clock
    _called: int = 0
    _captured: int = 0

    def begin(self) -> None:
        """A sample of the wall clock begins."""
        self.kept.clear()
        self._called = 0

    def eager(self, one: tuple[int, Bound]) -> Any:
        result = one[1]()
        self._called += 1
        if len(self.kept) < self.room:
            self.kept.append((one[0], result))
        elif (place := int(_draw() * self._called)) < self.room:  # reservoir sampling: every call is as likely to be kept
            self.kept[place] = (one[0], result)
        if self.cut_after > 0:
            self.cut_after -= 1
            if not self.cut_after:
                self.kept[:] = [(one[0], result)]
                raise _Cut
        return result

    def captured(self, one: tuple[int, Bound]) -> Any:
        """Holds the last result of a graph and a few others at random, so that they can be looked at after a replay."""
        result = one[1]()
        if not torch.cuda.is_current_stream_capturing():
            self.kept.clear()
            self._captured = 0
            return result
        self._captured += 1
        place = int(_draw() * self._captured)  # reservoir sampling; the last place is the last call's
        if len(self.kept) < _KEPT:
            self.kept.append((one[0], result))
        elif place < _KEPT - 1:
            self.kept[place] = (one[0], result)
        self.kept[-1] = (one[0], result)
        return result


@dataclass(frozen=True, slots=True)
class Slot:
    """A player on a clock."""

    player: Player
    clock: Clock
    sampler: Sampler
    tap: Tap


class Clockwork:
    """Samplers on one problem."""

    def __init__(self, contract: Contract, problem: Problem, bench: Bench, player: Callable[[str, str], Player]) -> None:
        self.contract, self.problem, self.bench, self._player = contract, problem, bench, player
        self._sets: list[Tensors] = []
        self._base: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._slots: list[Slot] = []
        self._turns = count()
        self.commands: Commands = {
            "prepare": self.prepare,
            "refresh": self.refresh,
            "sample": self.sample,
            "show": self.show,
        }

    def prepare(self, who: str, config: str, clock: Clock, sets: int, cache: Cache, seed: int) -> dict[str, Any]:
        """Put a player on a clock. Input set i holds the case of seed + i. Tells its slot and how many calls a sample holds."""
        self._make_sets(sets, seed)
        player = self._player(who, config)
        bound = [(index, player.bind(one, clock)) for index, one in enumerate(self._sets)]
        gc.collect()
        gc.disable()  # a collection inside a sample would be charged to whoever is running
        tap, inputs = Tap(), InputSets(cast(Any, tuple(bound)), cache, self._turns)
        try:
            if clock == "graph":
                sampler = graph_sampler(self.bench, cast(Any, tap.captured), inputs)
            else:
                target = {} if self.bench.gpu is not None else {"target_ns": _CPU_SAMPLE_NS}
                sampler = eager_sampler(self.bench, cast(Any, tap.eager), inputs, **target)
        except CannotTime as error:
            return {"cannot": str(error)}
        self._slots.append(Slot(player, clock, sampler, tap))
        return {"slot": len(self._slots) - 1, "calls": sampler.calls}

    def _make_sets(self, sets: int, seed: int) -> None:
        if self._sets:
            return
        self._sets = [make(self.contract, self.problem, self.bench.device, Case(seed + index)) for index in range(sets)]
        for tensors in self._sets:
            for tensor in tensors.values():
                if tensor.is_floating_point():
                    live, base = self._base.setdefault(tensor.dtype, ([], []))
                    live.append(tensor.data)
                    base.append(tensor.clone())

    def refresh(self, scale: float) -> dict[str, Any]:
        """Give every input set the values of its case, times ``scale``."""
        for live, base in self._base.values():
            torch._foreach_copy_(live, base)
            torch._foreach_mul_(live, scale)
        self.bench.synchronize()
        return {}

    def sample(self, slot: int, cut_at: float | None = None, path: str = "") -> dict[str, Any]:
        """One sample: nanoseconds a call.

        With ``cut_at`` (0 to 1, how far into the sample) it is not timed: the output of the call that it is cut after goes to
        ``path``, and the answer tells which input set that call had.
        """
        one = self._slots[slot]
        if cut_at is None:
            if one.clock == "eager":  # what a graph writes to stays the same from replay to replay
                one.tap.begin()
            return {"ns": one.sampler.sample()}
        if one.clock == "graph":
            self._poison(one)
            one.sampler.sample()
            self.bench.synchronize()
            index, result = _choice(one.tap.kept)
        else:
            one.tap.begin()
            one.tap.cut_after = 1 + int(cut_at * (one.sampler.calls - 1))
            with suppress(_Cut):
                one.sampler.sample()
            index, result = one.tap.kept[0]
        return self._handed_over(one, index, result, path)

    def show(self, slot: int, which: float, path: str) -> dict[str, Any]:
        """Results of the sample that was timed last on the wall clock: all are read, and one (``which``, 0 to 1) goes to
        ``path``, if that is not empty. Tells how many there were."""
        one = self._slots[slot]
        kept = list(one.tap.kept)
        read = [output.clone() for _, result in kept for output in one.player.outputs(result) if kind_of(output) == "Tensor"]
        self.bench.synchronize()
        size = max(1, sum(output.numel() * output.element_size() for output in read) // len(kept))
        one.tap.room = max(1, min(_SHOWN, _SHOWN_BYTES // size))
        index, result = kept[int(which * len(kept))]
        return {"kept": len(kept), **(self._handed_over(one, index, result, path) if path else {})}

    def _handed_over(self, slot: Slot, index: int, result: Any, path: str) -> dict[str, Any]:
        outputs = slot.player.outputs(result)
        if not all(kind_of(output) == "Tensor" for output in outputs):
            return {"set": index, "plain": False}
        write_bytes(path, [output.detach().clone() for output in outputs])
        return {"set": index, "plain": True}

    def _poison(self, slot: Slot) -> None:
        """What a replay does not write stays NaN."""
        for _, result in slot.tap.kept:
            for output in slot.player.outputs(result):
                if isinstance(output, torch.Tensor) and output.is_floating_point():
                    output.detach().fill_(torch.nan)
