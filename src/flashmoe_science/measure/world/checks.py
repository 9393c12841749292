"""Which ways to compute a problem are right on every rank: their parts held to the oracle, and what they launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashmoe_science.contract import built_in
from flashmoe_science.measure.bench import one_line
from flashmoe_science.measure.finding import Finding
from flashmoe_science.measure.inputs import Case, as_tuple, make
from flashmoe_science.measure.launches.trace import profile, profiler_works
from flashmoe_science.measure.on_problem import by_name
from flashmoe_science.measure.request import Entry
from flashmoe_science.measure.session import Session
from flashmoe_science.measure.tolerance import check_output, expected
from flashmoe_science.measure.world.ranks import World
from flashmoe_science.operations import operation
from flashmoe_science.ops.on_ranks import Results, Sample, Way
from flashmoe_science.problem import OnRanks
from flashmoe_science.records import ALONE, CallPathRow, Origin


@dataclass(frozen=True, slots=True)
class _Entry(Entry):
    """A way as rows name it."""

    of: Origin = "peer"

    @property
    def origin(self) -> Origin:
        return self.of


def entry_of(way: Way) -> Entry:
    return _Entry(way.name, way.name, None, way.config, way.origin)


@dataclass(slots=True)
class Ready:
    """A way that runs and is right. ``held`` is this rank's part of its answer, ``by_rank`` the samples of each rank that makes
    the call. ``again``: it is the control, one more of the same."""

    way: Way
    call: Callable[[], Results]
    held: Results
    again: bool = False
    calls: int = 1
    by_rank: list[list[int]] = field(default_factory=list)

    @property
    def entry(self) -> Entry:
        return entry_of(self.way)

    def within(self) -> Results:
        """One call, as it is meant to be made."""
        with self.way.within():
            return self.call()

    @property
    def slowest(self) -> list[int]:
        return [max(times) for times in zip(*self.by_rank, strict=True)]


class Checks:
    """One problem on all ranks, before it is timed."""

    def __init__(self, world: World, session: Session, problem: OnRanks) -> None:
        self.world, self.session, self.problem = world, session, problem
        self._contract, module = built_in(problem.whole.op), operation(problem.whole.op).module("proof", "ranks")
        inputs = make(self._contract, problem.whole, world.bench.device, Case(session.request.seed))
        self._ways: list[Way] = module.ways(problem.whole, inputs, world.group)
        self._sample: Sample = module.sample(problem.whole, inputs, world.group)
        self._right = self._expected()

    def ready(self) -> list[Ready]:
        """The ways that are right on all ranks. Raises ValueError where no launches can be seen."""
        found = [one for way in self._ways if (one := self._prepared(way)) is not None]
        self._note_bits(found)
        return found if self.world.bench.gpu is None else self._seen(found)

    def _expected(self) -> Any:
        one, contract = self._sample, self._contract
        reference = as_tuple(contract.reference(one.problem, contract.widened(one.inputs)))
        caps, extra = contract.cap(one.problem, one.inputs, reference), contract.rounding(one.problem, one.inputs)
        plain = one.of_reference(as_tuple(contract.plain(one.problem, one.inputs)))
        return expected(one.of_reference(reference), plain, caps, extra)

    def _prepared(self, way: Way) -> Ready | None:
        """A way that all ranks can call and whose answers are right on all."""
        entry, world = entry_of(way), self.world
        self.session.show_progress(f"{self.problem}: {entry}")
        reason, held = "", Results()
        call: Callable[[], Results] = tuple
        try:
            call = way.prepare()
        except (ValueError, ImportError, RuntimeError) as error:
            reason = str(error) if isinstance(error, ValueError) else one_line(error)
        if reason := world.first_of(reason):
            self.session.note(f"by {way.config}: {reason}" if way.config else reason, self.problem, entry.name)
            return None
        try:
            with way.within():
                held = way.part(call())
            world.bench.synchronize()
        except Exception as error:  # whatever a peer raises is its own
            reason = f"it does not run: {one_line(error)}"
        if reason := world.first_of(reason):
            self.session.refuse("correctness", reason, self.problem, entry)
            return None
        return Ready(way, call, held) if self._is_right(way, held) else None

    def _is_right(self, way: Way, held: Results) -> bool:
        """Hold every rank's part to the oracle. A row a rank."""
        found = Finding(output_bytes=sum(x.nbytes for x in held))
        names = [one.name for one in self._contract.outputs] or ["out"]
        for name, got, right in zip(names, self._sample.of_part(held), self._right, strict=False):
            found.stats[name], reasons = check_output(name, got, right)
            for reason in reasons:
                found.fault("wrong-result", f"rank {self.world.rank}: {reason}")
        if not self._has_bits(way):
            found.fault("other-bits", f"rank {self.world.rank}: by the same kernel it has other bits than one GPU's call")
        every = enumerate(self.world.gather(found))
        passed = [self.session.examined(self.problem, entry_of(way), one, rank) for rank, one in every]
        return all(passed)

    def _has_bits(self, way: Way) -> bool:
        """Whether results that must have equal bits do, or cannot be had."""
        try:
            return way.same is None or torch.equal(*way.same())
        except ValueError as error:  # the kernel cannot serve the problem, the same on all ranks
            self.session.note(f"by {way.config}: its bits were not compared: {error}", self.problem, way.name)
            return True

    def _note_bits(self, ready: Sequence[Ready]) -> None:
        """Note by how much answers of ours differ from one GPU's."""
        whole = next((one.held for one in ready if one.way.name == ALONE), ())
        for one in (one for one in ready if one.way.origin == "ours" and whole):
            here = max((a.float() - b.float()).abs().max().item() for a, b in zip(one.held, whole, strict=True))
            most = max(self.world.gather(here))
            words = f"differs by at most {most:.3g} from" if most else "has the bits of"
            self.session.note(f"{one.entry} {words} one GPU's call", self.problem, one.entry.name)

    def _seen(self, ready: Sequence[Ready]) -> list[Ready]:
        """Record what each way launches on rank 0. Returns those that launch what they say."""
        world = self.world
        if reason := world.first_of(profiler_works(world.bench.device, world.bench.synchronize)):
            raise ValueError(reason)
        kept = []
        for one, seen in zip(ready, profile([one.within for one in ready], world.bench.synchronize), strict=True):
            launches = by_name(seen)
            wanted = one.way.launches
            broken = [] if any(wanted in launch.name.lower() for launch in launches) else [f"no kernel named {wanted!r} ran"]
            self.session.record(CallPathRow, self.problem, one.entry, launches=launches, broken_promises=broken)
            kept += [] if world.first_of("; ".join(broken)) else [one]
        return kept
