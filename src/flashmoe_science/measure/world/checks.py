"""Correctness on every rank: the parts of each implementation's results against the oracle, and what it launches."""

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
from flashmoe_science.ops.distributed import Checked, Implementation, Results
from flashmoe_science.problem import DistributedProblem
from flashmoe_science.records import ONE_GPU, CallPathRow


def entry_of(one: Implementation) -> Entry:
    """An implementation as rows name it."""
    return Entry(one.name, one.name, None, one.config, one.origin)


@dataclass(slots=True)
class Ready:
    """An implementation that is right. ``results`` are this rank's part, ``by_rank`` the samples of each rank that is timed.
    ``is_control``: the implementation a second time, as its own rival."""

    implementation: Implementation
    call: Callable[[], Results]
    results: Results
    is_control: bool = False
    calls: int = 1
    by_rank: list[list[int]] = field(default_factory=list)

    @property
    def entry(self) -> Entry:
        return entry_of(self.implementation)

    def call_in_context(self) -> Results:
        with self.implementation.context():
            return self.call()

    @property
    def slowest(self) -> list[int]:
        return [max(times) for times in zip(*self.by_rank, strict=True)]


class Checks:
    """One problem on all ranks, before it is timed."""

    def __init__(self, world: World, session: Session, problem: DistributedProblem) -> None:
        self.world, self.session, self.problem = world, session, problem
        self._contract, module = built_in(problem.whole.op), operation(problem.whole.op).module("proof", "ranks")
        inputs = make(self._contract, problem.whole, world.bench.device, Case(session.request.seed))
        self._implementations: list[Implementation] = module.implementations(problem.whole, inputs, world.group)
        self._checked: Checked = module.checked(problem.whole, inputs, world.group)
        self._reference = self._expected()

    def ready(self) -> list[Ready]:
        """The implementations that are right on all ranks. Raises ValueError where no launches can be seen."""
        found = [one for each in self._implementations if (one := self._prepared(each)) is not None]
        self._note_bits(found)
        return found if self.world.bench.gpu is None else self._seen(found)

    def _expected(self) -> Any:
        one, contract = self._checked, self._contract
        reference = as_tuple(contract.reference(one.problem, contract.widened(one.inputs)))
        plain = one.of_reference(as_tuple(contract.plain(one.problem, one.inputs)))
        return expected(one.of_reference(reference), plain, *contract.bounds(one.problem, one.inputs, reference))

    def _prepared(self, one: Implementation) -> Ready | None:
        """An implementation that all ranks can call and whose results are right on all; else None."""
        entry, world = entry_of(one), self.world
        self.session.show_progress(f"{self.problem}: {entry}")
        reason, results = "", Results()
        call: Callable[[], Results] = tuple
        try:
            call = one.prepare()
        except (ValueError, ImportError, RuntimeError) as error:
            reason = str(error) if isinstance(error, ValueError) else one_line(error)
        if reason := world.first_of(reason):
            self.session.note(f"by {one.config}: {reason}" if one.config else reason, self.problem, entry.name)
            return None
        try:
            with one.context():
                results = one.own_part(call())
            world.bench.synchronize()
        except Exception as error:  # whatever a peer raises is its own
            reason = f"it does not run: {one_line(error)}"
        if reason := world.first_of(reason):
            self.session.refuse("correctness", reason, self.problem, entry)
            return None
        return Ready(one, call, results) if self._is_right(one, results) else None

    def _is_right(self, one: Implementation, results: Results) -> bool:
        """Compare every rank's part with the oracle's, a row a rank. Returns whether all are right."""
        found = Finding(output_bytes=sum(x.nbytes for x in results))
        names = [one.name for one in self._contract.outputs] or ["out"]
        for name, got, right in zip(names, self._checked.of_results(results), self._reference, strict=False):
            found.stats[name], reasons = check_output(name, got, right)
            for reason in reasons:
                found.fault("wrong-result", f"rank {self.world.rank}: {reason}")
        if not self._has_equal_bits(one):
            found.fault("other-bits", f"rank {self.world.rank}: by the same kernel it has other bits than one GPU's call")
        every = enumerate(self.world.gather(found))
        passed = [self.session.examined(self.problem, entry_of(one), of_rank, rank) for rank, of_rank in every]
        return all(passed)

    def _has_equal_bits(self, one: Implementation) -> bool:
        """Whether results that must have equal bits have them. True, with a note, where they cannot be computed."""
        try:
            return one.bits is None or torch.equal(*one.bits())
        except ValueError as error:  # the kernel cannot serve the problem, the same on all ranks
            self.session.note(f"by {one.config}: its bits were not compared: {error}", self.problem, one.name)
            return True

    def _note_bits(self, ready: Sequence[Ready]) -> None:
        """Note by how much answers of ours differ from one GPU's."""
        whole = next((one.results for one in ready if one.implementation.name == ONE_GPU), ())
        for one in (one for one in ready if one.implementation.origin == "ours" and whole):
            here = max((a.float() - b.float()).abs().max().item() for a, b in zip(one.results, whole, strict=True))
            most = max(self.world.gather(here))
            words = f"differs by at most {most:.3g} from" if most else "has the bits of"
            self.session.note(f"{one.entry} {words} one GPU's call", self.problem, one.entry.name)

    def _seen(self, ready: Sequence[Ready]) -> list[Ready]:
        """Record what each implementation launches on rank 0. Returns those that launch what they promise."""
        world = self.world
        if reason := world.first_of(profiler_works(world.bench.device, world.bench.synchronize)):
            raise ValueError(reason)
        kept = []
        for one, seen in zip(ready, profile([one.call_in_context for one in ready], world.bench.synchronize), strict=True):
            launches = by_name(seen)
            wanted = one.implementation.launches
            broken = [] if any(wanted in launch.name.lower() for launch in launches) else [f"no kernel named {wanted!r} ran"]
            self.session.record(CallPathRow, self.problem, one.entry, launches=launches, broken_promises=broken)
            kept += [] if world.first_of("; ".join(broken)) else [one]
        return kept
