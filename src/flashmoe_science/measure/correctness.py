"""The exam: many calls of a kernel, each designed to show one kind of fault and compared with the oracle.

The worker reports facts (``worker.calls.Calls``), the oracle checks the outputs (``oracle.Oracle``); this module makes the
calls and words the faults. A user's function and a kernel of the package get the same exam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flashmoe_science.measure.channel import Channel, Endpoint, Failed
from flashmoe_science.measure.finding import DISTRIBUTIONS, Call, Finding, contract_mismatch
from flashmoe_science.measure.inputs import Case
from flashmoe_science.records import ErrorStats

_BUSY = 0.25  # of a processor, while it is asked for nothing; on a busy machine threads get no more than a part of one
_LEFT_BYTES = 256  # that stay in use after a call: more than what an allocator or Python rounds
_CHANGED, _UNWRITTEN = "it changed its inputs", "it leaves a part of its output unwritten"
_SHARES = "its output lies in the memory of its earlier output, which a caller may still hold"


@dataclass(slots=True)
class Exam:
    """Examines the kernel ``who`` (empty: the function that the worker has loaded) with one of its configs.

    ``step`` is called before each part, and may raise when the time is up. ``repeats`` are calls that are compared bit by bit,
    more of them where those take less than ``more_s`` seconds.
    """

    worker: Channel
    oracle: Endpoint
    who: str
    config: str
    seed: int
    on_gpu: bool
    step: Callable[[str], None] = lambda text: None
    repeats: int = 10
    more_s: float = 0.5
    of_peer: bool = False  # settings that a peer leaves changed are noted, and no fault
    _digest: str = ""  # of the output of the last single call

    @contextmanager
    def _finding(self) -> Iterator[Finding]:
        """A Finding, completed at the end with the side effects of the calls."""
        found = Finding()
        try:
            yield found
        finally:
            settings, remarks = self.worker.drain()
        if settings and self.of_peer:
            found.notes.append(f"it leaves settings changed, which are set back: {'; '.join(settings)}")
        elif settings:
            found.fault("settings-changed", f"it leaves settings changed: {'; '.join(settings)}")
        found.notes += [] if self.of_peer else remarks

    def one_call(self, distribution: str = "normal", variant: str = "", **how: Any) -> Finding:
        """Check one call against the oracle: enough for a peer, or a config that is only a candidate. ``how`` as
        ``worker.calls.Calls`` takes it: ``guard`` with NaN around its inputs; ``poison`` with guards around what it allocates,
        which is full of NaN; ``under`` a mode of PyTorch."""
        with self._finding() as found:
            call = self._call(self._case(0, distribution, variant=variant), **how)
            found.stats, before, self._digest = call.stats, self._digest, call.digest
            if call.other_kind and how.get("under") == "autocast":  # which gives sums in fp32
                found.notes.append(f"not judged under torch.autocast: {call.reasons[0]}")
                return found
            if call.reasons and call.digest == before != "":
                found.fault("earlier-output", "it returned the output of an earlier call, which was of other values")
            elif call.reasons:
                found.wrong(call)
            self._memory_of(call, found)
            if call.vacuous:
                found.notes.append("not judged: the right result is not finite")
            if call.facts["changed"]:  # of whatever is timed after it, the answers would be wrong
                found.fault("changes-input", f"{_CHANGED} ({', '.join(call.facts['changed'])})")
            if call.facts["outside"] or call.facts["overrun"]:
                found.fault("writes-outside", "it wrote past the end of a tensor")
        return found

    def on_other_stream(self) -> Finding:
        """Check a call on another stream than PyTorch's default one, whose inputs are written behind a wait there."""
        with self._finding() as found:
            self._call(self._case(1))
            call = self._call(self._case(0), memory="same", queued=True, under="stream")
            if call.reasons or call.facts["late"]:
                why = call.reasons[0] if call.reasons else "its output came late"
                found.fault("ignores-stream", f"it does not work on the stream that is current: {why}")
        return found

    def memory_growth(self) -> Finding:
        """Check that calls leave no memory in use."""
        with self._finding() as found:
            grown = self.worker.ask("grown", who=self.who, config=self.config, case=self._case(0))["bytes"]
            if grown >= _LEFT_BYTES:
                found.fault("memory-grows", f"its memory grows with each call: {grown} bytes stay in use after it")
        return found

    def full(
        self, distributions: Sequence[str], variants: Sequence[str], deterministic: bool, workspace: int | None = None
    ) -> Finding:
        """Run every part of the exam.

        Args:
            distributions, variants: the contract's.
            deterministic: whether it promises the same bits at every call.
            workspace: bytes of device memory that it may take beyond its results, None where nothing is promised.
        """
        with self._finding() as found:
            first = self._first_call(found)
            if first is None:
                return found
            found.stats = first.stats
            if first.reasons:
                self._classify(found, first)
                return found
            if first.vacuous:
                found.fault("no-reference", "the right result is not finite on ordinary inputs: nothing can be held to it")
                return found
            self._guarded_calls(found)
            if not self._stale_outputs(found, first):
                self._other_inputs(found, [one for one in distributions if one in DISTRIBUTIONS], variants)
            if not any(reason.startswith(_CHANGED) for reason in found.reasons):
                self._repeats(found, deterministic)
            if workspace is not None:
                self._memory(found, workspace)
            found.reasons = list(dict.fromkeys(found.reasons))
        return found

    def is_right_again(self) -> bool:
        """Whether a kernel that was wrong with NaN around its inputs is right in one of two more such calls: then state between
        calls, or chance, is the reason."""
        return not all(self._call(self._case(0), guard=True).reasons for _ in range(2))

    def as_called(self) -> list[str]:
        """The faults of a call as a user makes it, which may launch another kernel than the planned call."""
        with self._finding() as found:
            found.reasons += self._call(self._case(0), use="eager").reasons
        return [f"called by a user: {reason}" for reason in found.reasons]

    def _case(self, seed: int, distribution: str = "normal", **more: Any) -> Case:
        """A case of one of three seeds."""
        return Case(self.seed + 7919 * seed, distribution, **more)

    def _path(self, what: str) -> str:
        return str(self.worker.folder / what)

    def _call(self, case: Case, **how: Any) -> Call:
        path = self._path("outputs")
        wanted = self.oracle.ask("outputs", case=case)["outputs"]
        most = sum(one["bytes"] for one in wanted)
        facts = self.worker.ask("call", who=self.who, config=self.config, case=case, path=path, most=most, **how)
        wrong = contract_mismatch(facts["outputs"], wanted, "cuda" if self.on_gpu else "cpu")
        if wrong:
            return Call(facts, wrong, other_kind=True)
        reply = self.oracle.ask("check", case=case, path=path, count=len(facts["outputs"]), naming=True)
        named = [(code, words) for code, words in reply["named"]]
        stats = {name: ErrorStats.model_validate(one) for name, one in reply["stats"].items()}
        return Call(facts, reply["reasons"], False, named, stats, reply["digest"], reply["vacuous"])

    def _first_call(self, found: Finding) -> Call | None:
        self.step("checking against the oracle")
        case, path = self._case(0), self._path("inputs")
        call = self._call(case, settle=True, inputs_path=path)
        if call.other_kind:
            found.wrong(call)
            return None
        facts = call.facts
        if facts["late"]:
            words = "its output still changed after the call had returned: it works on another stream or thread"
            found.fault("late-output", words)
        names = f" ({', '.join(facts['threads'][:3])})" if facts["threads"] else ""
        if facts["busy"] > _BUSY:
            found.fault("works-on", f"work or threads of its own go on after the call has returned{names}")
        elif names:  # a compiler's threads, for example
            found.notes.append(f"it leaves threads behind, which do nothing while it is asked for nothing{names}")
        if facts["changed"] or not self.oracle.ask("inputs", case=case, path=path)["same"]:
            found.fault("changes-input", f"{_CHANGED} ({', '.join(facts['changed']) or 'as their bytes show'})")
        self._memory_of(call, found)
        return call

    def _memory_of(self, call: Call, found: Finding) -> None:
        """Add the faults of an output that is a part of something else: of an input, of a graph, of an earlier output."""
        if call.other_kind:
            return
        if call.facts["shares_inputs"]:
            found.fault("shares-input", "its output lies in the memory of an input")
        if call.facts["grad"]:
            found.fault("requires-grad", "its output requires gradients, which none of its inputs does")
        if call.facts["shares_earlier"]:
            found.fault("shares-output", _SHARES)

    def _classify(self, found: Finding, first: Call) -> None:
        """Name the fault of a first call with a wrong output, with a few more calls."""
        found.wrong(first)
        poisoned = self._poisoned(found)
        if poisoned is not None and poisoned.nonfinite > first.nonfinite:
            found.fault("unwritten-output", f"{_UNWRITTEN}: in memory full of NaN, {poisoned.reasons[0]}")
        elif not first.named and not self._call(self._case(0, "zeros")).reasons:
            found.fault("right-on-zeros", "on inputs that are all zero it is right")

    def _guarded_calls(self, found: Finding) -> None:
        """Check with NaN around the inputs; then with NaN in, and guards around, all that the call allocates."""
        self.step("checking with guards around its memory")
        guarded = self._call(self._case(0), guard=True)
        if guarded.reasons and self.is_right_again():
            found.fault("wrong-at-times", f"it is wrong now and then: {guarded.reasons[0]}")
        elif guarded.reasons:
            found.fault("reads-outside", f"it reads beyond its tensors: with NaN around them, {guarded.reasons[0]}")
        if guarded.facts["outside"]:
            found.fault("writes-outside", f"it wrote past the end of an input ({', '.join(guarded.facts['outside'])})")
        if guarded.facts["shares_earlier"]:
            found.fault("shares-output", _SHARES)
        poisoned = self._poisoned(found)
        if poisoned is not None and poisoned.reasons:
            found.fault("unwritten-output", f"{_UNWRITTEN}: in memory full of NaN, {poisoned.reasons[0]}")
        if poisoned is not None and poisoned.facts["overrun"]:
            found.fault("writes-outside", "it wrote past the end of a tensor that it allocated")

    def _poisoned(self, found: Finding) -> Call | None:
        """A call whose allocations are guarded and full of NaN; None, with a note, where it does not run so."""
        try:
            return self._call(self._case(0), poison=True)
        except Failed as error:
            if "CUDA" in str(error):
                raise  # the process cannot be used any more
            why = str(error)
        try:
            self._call(self._case(0), poison=True)
        except Failed as error:
            found.notes.append(f"its own allocations could not be guarded: {error}")
        else:
            found.fault("fails-at-times", f"it failed in one call and not in the next, which was the same: {why}")
        return None

    def _stale_outputs(self, found: Finding, first: Call) -> bool:
        """Check other values in other memory, then in the same memory; on a GPU also behind a wait on the stream. Returns
        whether a call returned the output of an earlier call."""

        def is_stale(call: Call, before: Call, changed: str, wrong: str, code: str) -> bool:
            if call.reasons and call.digest == before.digest:
                found.fault("earlier-output", f"it returned the output of an earlier call ({changed})")
                return True
            if call.reasons:
                found.wrong(call, wrong, code)
            return False

        self.step("checking with other values")
        other = self._call(self._case(1))
        if other.facts["shares_earlier"]:
            found.fault("shares-output", _SHARES)
        stale = is_stale(other, first, "other memory", "right for one seed, wrong for another", "wrong-for-a-seed")
        again, new = self._call(self._case(2), memory="same"), "wrong-for-new-values"
        words = "wrong when the same memory holds other values"
        stale |= is_stale(again, other, "the same memory, new values", words, new)
        if again.reasons:
            return stale
        nudged = self._call(self._case(2, nudged=True), memory="same")
        is_stale(nudged, again, "one element of an input changed", "wrong when one element of an input changes", new)
        if self.on_gpu:
            queued = self._call(self._case(0), memory="same", queued=True)
            if queued.reasons or queued.facts["late"]:
                why = queued.reasons[0] if queued.reasons else "its output came late"
                found.fault("ignores-stream", f"it does not wait for the stream that it is called on: {why}")
        return stale

    def _other_inputs(self, found: Finding, distributions: Sequence[str], variants: Sequence[str]) -> None:
        """Check inputs of other distributions, and the variants of the contract."""
        for name in distributions:
            self.step(f"checking on inputs that are {DISTRIBUTIONS[name]}")
            call = self._call(self._case(1, name))
            if call.vacuous:
                found.notes.append(f"not judged on inputs that are {DISTRIBUTIONS[name]}: the right result is not finite there")
            if call.reasons:
                found.wrong(call, f"wrong on inputs that are {DISTRIBUTIONS[name]}", f"wrong-on-{name}")
        for name in variants:
            self.step(f"checking with {name}")
            call = self._call(self._case(1, variant=name))
            if call.reasons:
                found.wrong(call, f"wrong on inputs given with {name}", "wrong-on-variant")

    def _repeats(self, found: Finding, deterministic: bool) -> None:
        """Repeat a call on the same inputs. Other bits are a fault where the same bits were promised, or where the oracle
        refuses them."""
        self.step(f"repeating {self.repeats} times or more")
        case, path = self._case(0), self._path("outputs")
        most = sum(one["bytes"] for one in self.oracle.ask("outputs", case=case)["outputs"])
        how = {"times": self.repeats, "more_s": self.more_s, "path": path, "most": most}
        facts = self.worker.ask("repeat", who=self.who, config=self.config, case=case, **how)
        times, differs = facts["times"], facts["differs_at"]
        if facts["odd"] is not None:
            found.fault("wrong-kind", f"repeated on the same inputs, it returned a {facts['odd']} in the end (call {times})")
            return
        if facts["changed_later"]:
            found.fault("changes-earlier-output", "an answer that its caller still holds is changed by a later call")
        if facts["shared"]:
            found.fault("shares-output", _SHARES)
        if times < self.repeats:
            found.notes.append(f"repeated {times} times, not {self.repeats}: a call takes too long")
        if differs is None:
            return
        wrong = self.oracle.ask("check", case=case, path=path, count=facts["count"])["reasons"]
        if wrong:
            where = f"call {facts['worst_at']} of {times} on the same inputs"
            found.fault("wrong-at-times", f"it is wrong now and then ({where}): {wrong[0]}")
            if facts["drifts"]:
                found.fault("drift", "its error grows from call to call: something is kept between calls")
        if deterministic:
            found.fault("not-deterministic", f"it promised the same bits at every call; call {differs} gave others")
        else:
            found.notes.append(f"its result differs from call to call in some bits (call {differs}); it promised nothing else")

    def _memory(self, found: Finding, workspace: int) -> None:
        """Compare the device memory of one call with its results and the promised workspace."""
        facts = self.worker.ask("memory", who=self.who, config=self.config, case=self._case(0))
        found.peak_extra_bytes, found.output_bytes = facts["peak"], facts["results"]
        if facts["peak"] is not None and facts["peak"] > facts["results"] + workspace:
            more = f" and the workspace that it promises {workspace}" if workspace else ""
            words = f"one call takes {facts['peak']} bytes of device memory; its results are {facts['results']}{more}"
            found.fault("more-memory", words)
