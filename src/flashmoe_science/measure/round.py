"""Everything that is measured of one problem, in order: call path, correctness, quick bench, full bench.

A candidate that fails a stage is refused there, with the reason on record, and takes no part in the later ones.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import CannotServe, Device, Kernel
from flashmoe_science.measure import callpath, l2, oracle
from flashmoe_science.measure.bench import Bench, Candidate, conditions, one_line
from flashmoe_science.measure.eager import user_call
from flashmoe_science.measure.inputs import InputSets, make_inputs
from flashmoe_science.measure.ledger import Ledger
from flashmoe_science.measure.paths import Paths
from flashmoe_science.measure.sanity import floor_ns, impossible
from flashmoe_science.measure.timed import Entrant, Timed, fastest_of_each
from flashmoe_science.measure.timing import (
    QUICK_SAMPLES,
    CannotTime,
    Sampler,
    Sampling,
    eager_sampler,
    graph_sampler,
    paired,
)
from flashmoe_science.measure.tolerance import attention_reference
from flashmoe_science.problem import Problem
from flashmoe_science.records import CallPathRow, Clock, TimingRow

_USERS = "sdpa"  # the peer that a PyTorch user calls


class BudgetSpent(Exception):
    """The time given to the run is over; what was measured stands."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a round measures, and how thoroughly. ``subjects`` are on trial, ``rivals`` are what they are compared with."""

    subjects: tuple[Kernel, ...]
    rivals: tuple[Kernel, ...]
    configs: int
    sampling: Sampling
    quick: bool
    seed: int
    deadline: float | None  # on time.monotonic's clock
    warm: bool = False  # time with a warm cache too, beside the cold one

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(dict.fromkeys((*self.subjects, *self.rivals)))

    def candidates(self, problem: Problem, device: Device) -> tuple[Candidate, ...]:
        """The kernels that say they serve the problem, each with the configs to try."""
        return tuple(
            Candidate(kernel, config)
            for kernel in self.kernels
            if kernel.supports(problem, device) is None
            for config in kernel.configs(problem, device)[: self.configs]
        )


class Round:
    """One problem's measurement on one bench."""

    def __init__(
        self, bench: Bench, problem: Problem, plan: Plan, paths: Paths, ledger: Ledger, tell: Callable[[str], None]
    ) -> None:
        self.bench, self.problem, self.plan, self.paths, self.ledger, self.tell = bench, problem, plan, paths, ledger, tell

    def go(self) -> None:
        """Measure. Raises BudgetSpent between two steps when the deadline has passed."""
        l2_bytes = self.bench.gpu.l2_bytes if self.bench.gpu is not None else 0
        inputs = make_inputs(self.problem, self.bench.device, self.plan.seed, l2_bytes)
        entrants = self._able(inputs)
        entrants = self._on_the_promised_path(entrants)
        entrants = self._correct(entrants, inputs)
        self._timed(entrants, inputs)

    def _step(self, text: str) -> None:
        if self.plan.deadline is not None and time.monotonic() > self.plan.deadline:
            raise BudgetSpent
        self.tell(text)

    def _able(self, inputs: InputSets) -> list[Entrant]:
        """The candidates that can serve the problem and run; the others leave a note or a refusal."""
        entrants = []
        for kernel in self.plan.kernels:
            reason = kernel.supports(self.problem, self.bench.gpu)
            if reason is not None:
                self.ledger.note(reason, self.problem, kernel.name)
        for candidate in self.plan.candidates(self.problem, self.bench.gpu):
            self._step(f"building {candidate}")
            entrant = self._first_call(candidate, inputs)
            if entrant is not None:
                entrants.append(entrant)
        return entrants

    def _first_call(self, candidate: Candidate, inputs: InputSets) -> Entrant | None:
        """Build and run a candidate once; PyTorch says only in warnings why a backend cannot serve, so those are kept."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                call = candidate.planned(inputs.first)
                call(inputs.first)
                self.bench.synchronize()
            except CannotServe as error:
                self.ledger.note(str(error), self.problem, candidate.name)
                return None
            except Exception as error:  # whatever a compiler, a driver or a peer raises is the finding
                reasons = dict.fromkeys(str(one.message).split(" (Triggered")[0].strip()[:160] for one in said)
                words = "; ".join((one_line(error), *reasons))
                self.ledger.refuse("callpath", f"it does not run: {words}", self.problem, candidate)
                return None
        return Entrant(candidate, call, user_call(candidate, call, self.problem, self.bench.gpu))

    def _on_the_promised_path(self, entrants: list[Entrant]) -> list[Entrant]:
        """Those whose call, planned and as a user makes it, launched what was promised."""
        if self.bench.gpu is None:
            return entrants  # a CPU has no kernel launches to see; the run's header says that it was one
        return [entrant for entrant in entrants if self._keeps_its_promise(entrant.candidate, self.bench.gpu)]

    def _keeps_its_promise(self, candidate: Candidate, gpu: Gpu) -> bool:
        kernel, config = candidate.kernel, candidate.config
        seen = self.paths.get((str(self.problem), kernel.name, str(config)))
        if seen is None:
            broken = ["its call path was not seen: the process that looked at it ended"]
        else:
            promised = kernel.launches(self.problem, config, gpu)
            broken = callpath.broken_promises(promised, seen.planned, kernel.origin)
            by_user = callpath.broken_promises(promised, seen.by_user, kernel.origin)
            if kernel.origin != "peer":
                by_user += callpath.other_launches(seen.planned, seen.by_user)
            broken += [f"called by a user: {reason}" for reason in by_user]
        self.ledger.add(
            CallPathRow(
                run=self.ledger.run,
                problem=str(self.problem),
                kernel=kernel.name,
                config=str(config),
                launches=[] if seen is None else seen.planned,
                broken_promises=broken,
            )
        )
        if broken:
            self.ledger.refuse("callpath", "; ".join(broken), self.problem, candidate)
        return not broken

    def _correct(self, entrants: list[Entrant], inputs: InputSets) -> list[Entrant]:
        if not entrants:
            return []
        self._step("oracle")
        reference = attention_reference(inputs.first)
        kept = []
        for entrant in entrants:
            self._step(f"checking {entrant.candidate}")
            try:
                finding = oracle.examine(self.ledger.run, self.bench, entrant.candidate, inputs.first, reference)
            except Exception as error:  # as above: the finding
                self.ledger.refuse("correctness", f"it does not run: {one_line(error)}", self.problem, entrant.candidate)
                continue
            self.ledger.add(finding.row)
            if finding.reasons:
                self.ledger.refuse("correctness", "; ".join(finding.reasons), self.problem, entrant.candidate)
            else:
                kept.append(entrant)
        return kept

    def _timed(self, entrants: list[Entrant], inputs: InputSets) -> None:
        clock: Clock = "eager" if self.bench.gpu is None else "graph"
        timed = [one for entrant in entrants if (one := self._quick(entrant, clock, inputs)) is not None]
        if timed:
            text = ", ".join(f"{one.candidate}: {one.quick_ns:.0f} ns" for one in timed)
            self.ledger.note(f"quick bench ({clock}): {text}", self.problem)
        subjects = fastest_of_each(timed, self.plan.subjects)
        rivals = fastest_of_each(timed, [kernel for kernel in self.plan.rivals if kernel not in self.plan.subjects])
        if not subjects:
            return
        self._against(subjects, rivals, clock, inputs)
        if clock == "graph":
            self._eagerly(subjects[0].entrant, rivals, inputs)
            if self.plan.warm and inputs.cache == "cold":
                self._warmly(subjects, rivals, InputSets((inputs.first,), "warm"))

    def _warmly(self, subjects: Sequence[Timed], rivals: Sequence[Timed], inputs: InputSets) -> None:
        """The same pairs with one set of inputs, which a call finds in the L2 as the one before it left them."""
        mine, theirs = (
            [timed for one in side if (timed := self._quick(one.entrant, "graph", inputs)) is not None]
            for side in (subjects, rivals)
        )
        if mine:
            mine.sort(key=lambda timed: timed.quick_ns)
            theirs.sort(key=lambda timed: timed.quick_ns)
            self._against(mine, theirs, "graph", inputs)

    def _quick(self, entrant: Entrant, clock: Clock, inputs: InputSets) -> Timed | None:
        """Put an entrant on a clock and take a few samples of it alone."""
        self._step(f"quick bench ({clock}) of {entrant.candidate}")
        try:
            sampler = self._sampler(entrant, clock, inputs)
        except CannotTime as error:
            self.ledger.refuse("timing", str(error), self.problem, entrant.candidate)
            return None
        samples = [sampler.sample() for _ in range(QUICK_SAMPLES)]
        return Timed(entrant, sampler, statistics.median(samples))

    def _sampler(self, entrant: Entrant, clock: Clock, inputs: InputSets) -> Sampler:
        if clock == "graph":
            return graph_sampler(self.bench, entrant.call, inputs)
        return eager_sampler(self.bench, entrant.user_call, inputs)

    def _against(self, subjects: Sequence[Timed], rivals: Sequence[Timed], clock: Clock, inputs: InputSets) -> None:
        """The best subject against itself and every rival; every other subject against the two best rivals."""
        best = subjects[0]
        self._control(best, clock, inputs)
        for rival in rivals:
            self._pair(best, rival, inputs)
        for subject in subjects[1:]:
            for rival in rivals[:2]:
                self._pair(subject, rival, inputs)

    def _eagerly(self, best: Entrant, rivals: Sequence[Timed], inputs: InputSets) -> None:
        """What a user waits: the best subject against PyTorch as it is called, and against the best rival."""
        if best.candidate.kernel.origin == "ours" and best.user_call is best.call:
            text = f"eager clock: {best.candidate} is called as planned; the public function would not choose this config here"
            self.ledger.note(text, self.problem, best.candidate.name)
        timed = self._quick(best, "eager", inputs)
        if timed is None:
            return
        self._control(timed, "eager", inputs)
        for index, one in enumerate(rivals):
            if index == 0 or one.candidate.name == _USERS:
                rival = self._quick(one.entrant, "eager", inputs)
                if rival is not None:
                    self._pair(timed, rival, inputs)

    def _control(self, timed: Timed, clock: Clock, inputs: InputSets) -> None:
        """A/A: the same kernel captured or prepared a second time. Anything but a tie discredits the round; the judge says."""
        again = self._quick(timed.entrant, clock, inputs)
        if again is not None:
            self._pair(timed, again, inputs)

    def _pair(self, a: Timed, b: Timed, inputs: InputSets) -> None:
        warm = ", warm cache" if inputs.cache == "warm" and self.bench.gpu is not None else ""
        self._step(f"{a.sampler.clock} clock{warm}: {a.candidate} against {b.candidate}")
        kept_from = l2.release()
        before, began = self.bench.telemetry(), time.monotonic()
        a_ns, b_ns = paired(a.sampler.sample, b.sampler.sample, self.plan.sampling)
        seconds, after = time.monotonic() - began, self.bench.telemetry()
        if kept_from or l2.set_aside_bytes():
            aside = f"{l2.set_aside_bytes() or kept_from} bytes of the L2 are set aside for lines that stay"
            self.ledger.refuse("sanity", f"{aside}, against {b.candidate}", self.problem, a.candidate)
            return
        floor = floor_ns(self.problem, self.bench.gpu, inputs.cache)
        for one, samples in ((a, a_ns), (b, b_ns)):
            reason = impossible(samples, floor, one.quick_ns)
            if reason is not None:
                self.ledger.refuse("sanity", f"{reason} ({a.sampler.clock} clock)", self.problem, one.candidate)
                return
        self.ledger.add(
            TimingRow(
                run=self.ledger.run,
                problem=str(self.problem),
                op=self.problem.op,
                kernel=a.candidate.name,
                origin=a.candidate.kernel.origin,
                config=str(a.candidate.config),
                rival=b.candidate.name,
                rival_origin=b.candidate.kernel.origin,
                rival_config=str(b.candidate.config),
                clock=a.sampler.clock,
                cache=inputs.cache,
                calls=a.sampler.calls,
                input_sets=len(inputs.sets),
                a=a_ns,
                b=b_ns,
                **conditions(before, after),
                device_seconds=round(seconds, 4),
                quick=self.plan.quick,
            )
        )
