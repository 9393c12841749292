"""The correctness stage of a candidate: many calls, each laid out so that one kind of wrong shows, each held to the oracle.

The candidate's process tells what it saw (``calls.Caller``), the oracle judges the bytes (``referee.Referee``); this only lays
out the calls and finds the words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashmoe_science.measure.trial.cases import Case
from flashmoe_science.measure.trial.warden import Answers, Failed
from flashmoe_science.records import ErrorStats

_BUSY = 0.5  # of a processor, while it is asked for nothing
_SEEDS = 3
_CHANGED, _UNWRITTEN = "it changed its inputs", "it leaves a part of its output unwritten"
_SHARES = "its output lies in the memory of its earlier output, which a caller may still hold"
_OTHERS = {
    "zeros": "all zero",
    "constant": "all the same",
    "large": "large",
    "tiny": "tiny",
    "opposed": "opposed (every score far below zero)",
    "crowded": "crowded (all tokens for the same experts)",
}


@dataclass(slots=True)
class Examined:
    """What was found. ``reasons`` are faults in words, none where it passed; ``notes`` are worth knowing."""

    stats: ErrorStats | None = None
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Call:
    """One call and what the oracle says of it."""

    facts: dict[str, Any]
    verdict: dict[str, Any]
    other_kind: bool  # what came back was not of the kind that the contract has, and its numbers were not looked at

    @property
    def reasons(self) -> list[str]:
        found: list[str] = self.verdict["reasons"]
        return found


class Battery:
    """Examines whoever lives in ``host``. ``step`` is told what comes, and may raise when the time is up."""

    def __init__(
        self, host: Answers, folder: Path, referee: Answers, seed: int, on_gpu: bool, step: Callable[[str], None]
    ) -> None:
        self.host, self.referee, self.on_gpu, self.step = host, referee, on_gpu, step
        self.device = "cuda" if on_gpu else "cpu"
        self.seeds = [seed + 7919 * index for index in range(_SEEDS)]
        self._path, self._inputs_path = str(folder / "outputs"), str(folder / "inputs")

    def glance(self, who: str, config: str) -> Examined:
        """One call, held to the oracle: enough for a rival."""
        case = Case(self.seeds[0])
        found = Examined()
        call = self._call(case, who, config)
        found.stats = _stats(call)
        found.reasons += call.reasons
        if call.facts["changed"]:  # of whoever is timed after it, the answers would be wrong
            found.reasons.append(f"{_CHANGED} ({', '.join(call.facts['changed'])})")
        return found

    def examine(self, distributions: Sequence[str], variants: Sequence[str], repeats: int, deterministic: bool) -> Examined:
        """The whole battery on the candidate. ``distributions`` and ``variants`` are its contract's."""
        found = Examined()
        first = self._first_call(found)
        if first is None:
            return found
        found.stats = _stats(first)
        if first.reasons:
            self._what_is_wrong(found, first)
            return found
        if first.verdict["vacuous"]:
            found.reasons.append("the right result is not finite on ordinary inputs: nothing can be held to it")
            return found
        self._surroundings(found)
        if not self._earlier_answers(found, first):
            self._otherwise(found, [one for one in distributions if one in _OTHERS], variants)
        if not any(reason.startswith(_CHANGED) for reason in found.reasons):
            self._repeats(found, repeats, deterministic)
        found.reasons = list(dict.fromkeys(found.reasons))
        return found

    def _call(self, case: Case, who: str = "", config: str = "", **how: Any) -> Call:
        said = case.as_dict()
        wanted = self.referee.ask("outputs", case=said)["outputs"]
        most = sum(one["bytes"] for one in wanted)
        facts = self.host.ask("call", who=who, config=config, case=said, path=self._path, most=most, **how)
        wrong = _wrong_kind(facts["outputs"], wanted, self.device)
        verdict: dict[str, Any] = {"reasons": wrong, "stats": None, "named": [], "digest": "", "vacuous": False}
        if not wrong:
            verdict |= self.referee.ask("check", case=said, path=self._path)
        return Call(facts, verdict, bool(wrong))

    def _first_call(self, found: Examined) -> Call | None:
        self.step("checking against the oracle")
        case = Case(self.seeds[0])
        call = self._call(case, settle=True, inputs_path=self._inputs_path)
        if call.other_kind:
            found.reasons += call.reasons
            return None
        facts = call.facts
        if facts["late"]:
            found.reasons.append("its output still changed after the call had returned: it works on another stream or thread")
        names = f" ({', '.join(facts['threads'][:3])})" if facts["threads"] else ""
        if facts["busy"] > _BUSY:
            found.reasons.append(f"work or threads of its own go on after the call has returned{names}")
        elif names:  # a compiler's helpers, say
            found.notes.append(f"it leaves threads behind, which do nothing while it is asked for nothing{names}")
        if facts["changed"] or not self.referee.ask("inputs", case=case.as_dict(), path=self._inputs_path)["same"]:
            found.reasons.append(f"{_CHANGED} ({', '.join(facts['changed']) or 'as their bytes show'})")
        if facts["shares_inputs"]:
            found.reasons.append("its output lies in the memory of an input")
        return call

    def _what_is_wrong(self, found: Examined, first: Call) -> None:
        """Name the fault of a first call that gave a wrong output, as far as a few more calls tell."""
        found.reasons += first.reasons
        found.reasons += first.verdict["named"]
        poisoned = self._poisoned(found)
        if poisoned is not None and _nonfinite(poisoned) > _nonfinite(first):
            found.reasons.append(f"{_UNWRITTEN}: in memory full of NaN, {poisoned.reasons[0]}")
        elif not first.verdict["named"] and not self._call(Case(self.seeds[0], "zeros")).reasons:
            found.reasons.append("on inputs that are all zero it is right")

    def _surroundings(self, found: Examined) -> None:
        """NaN around the inputs; then NaN in, and guards around, whatever is allocated."""
        self.step("checking with guards around its memory")
        guarded = self._call(Case(self.seeds[0]), guard=True)
        if guarded.reasons:
            found.reasons.append(f"it reads beyond its tensors: with NaN around them, {guarded.reasons[0]}")
        if guarded.facts["outside"]:
            found.reasons.append(f"it wrote past the end of an input ({', '.join(guarded.facts['outside'])})")
        self._sharing(found, guarded)
        poisoned = self._poisoned(found)
        if poisoned is not None and poisoned.reasons:
            found.reasons.append(f"{_UNWRITTEN}: in memory full of NaN, {poisoned.reasons[0]}")
        if poisoned is not None and poisoned.facts["overrun"]:
            found.reasons.append("it wrote past the end of a tensor that it allocated")

    def _poisoned(self, found: Examined) -> Call | None:
        """A call whose allocations are guarded and full of NaN; None, with a note, where it does not run so."""
        try:
            return self._call(Case(self.seeds[0]), poison=True)
        except Failed as error:
            if "CUDA" in str(error):
                raise  # whatever it was, the process cannot go on
            why = str(error)
        try:
            self._call(Case(self.seeds[0]), poison=True)
        except Failed as error:
            found.notes.append(f"its own allocations could not be guarded: {error}")
        else:
            found.reasons.append(f"it failed in one call and not in the next, which was the same: {why}")
        return None

    def _sharing(self, found: Examined, call: Call) -> None:
        if call.facts["shares_earlier"]:
            found.reasons.append(_SHARES)

    def _earlier_answers(self, found: Examined, first: Call) -> bool:
        """Other values in other memory, then other values in the same memory; on a GPU also behind a wait on the stream.

        Returns whether it gave the answer of an earlier call.
        """
        self.step("checking with other values")
        other = self._call(Case(self.seeds[1]))
        self._sharing(found, other)
        stale = other.reasons and _stale(other, first, "other memory")
        if other.reasons:
            found.reasons.append(stale or f"right for one seed, wrong for another: {other.reasons[0]}")
        again = self._call(Case(self.seeds[2]), memory="same")
        stale_again = again.reasons and _stale(again, other, "the same memory, new values")
        if again.reasons:
            found.reasons.append(stale_again or f"wrong when the same memory holds other values: {again.reasons[0]}")
        if self.on_gpu and not again.reasons:
            queued = self._call(Case(self.seeds[0]), memory="same", queued=True)
            if queued.reasons or queued.facts["late"]:
                why = queued.reasons[0] if queued.reasons else "its output came late"
                found.reasons.append(f"it does not wait for the stream that it is called on: {why}")
        return bool(stale or stale_again)

    def _otherwise(self, found: Examined, distributions: Sequence[str], variants: Sequence[str]) -> None:
        """Inputs of other distributions, and the contract called otherwise."""
        for name in distributions:
            self.step(f"checking on inputs that are {_OTHERS[name]}")
            call = self._call(Case(self.seeds[1], name))
            if call.verdict["vacuous"]:
                found.notes.append(f"not judged on inputs that are {_OTHERS[name]}: the right result is not finite there")
            if call.reasons:
                found.reasons.append(f"wrong on inputs that are {_OTHERS[name]}: {call.reasons[0]}")
        for name in variants:
            self.step(f"checking with {name}")
            call = self._call(Case(self.seeds[1], variant=name))
            if call.reasons:
                found.reasons.append(f"wrong on inputs given with {name}: {call.reasons[0]}")

    def _repeats(self, found: Examined, repeats: int, deterministic: bool) -> None:
        self.step(f"repeating {repeats} times or more")
        case = Case(self.seeds[0]).as_dict()
        most = sum(one["bytes"] for one in self.referee.ask("outputs", case=case)["outputs"])
        said = self.host.ask("repeat", who="", config="", case=case, times=repeats, path=self._path, most=most)
        if said["odd"] is not None:
            found.reasons.append(f"repeated on the same inputs, it returned a {said['odd']} in the end (call {said['times']})")
            return
        if said["changed_later"]:
            found.reasons.append("an answer that its caller still holds is changed by a later call")
        if said["shared"]:
            found.reasons.append(_SHARES)
        if said["times"] < repeats:
            found.notes.append(f"repeated {said['times']} times, not {repeats}: a call takes too long")
        if said["differs_at"] is not None:
            self._not_the_same(found, said, case, deterministic)

    def _not_the_same(self, found: Examined, said: dict[str, Any], case: dict[str, Any], deterministic: bool) -> None:
        """Other bits from the same inputs: a broken promise where they were promised; and wrong if the oracle says so."""
        wrong = self.referee.ask("check", case=case, path=self._path)["reasons"]
        if wrong:
            where = f"call {said['worst_at']} of {said['times']} on the same inputs"
            found.reasons.append(f"it is wrong now and then ({where}): {wrong[0]}")
        differs = said["differs_at"]
        if deterministic:
            found.reasons.append(f"it promised the same bits at every call; call {differs} gave others")
        else:
            found.notes.append(f"its result differs from call to call in some bits (call {differs}); it promised nothing else")


def _stats(call: Call) -> ErrorStats | None:
    return None if call.verdict["stats"] is None else ErrorStats.model_validate(call.verdict["stats"])


def _nonfinite(call: Call) -> int:
    stats = _stats(call)
    return 0 if stats is None else stats.nonfinite


def _stale(call: Call, before: Call, how: str) -> str | None:
    """The reason, where a wrong output is to the bit the one before."""
    if call.verdict["digest"] != before.verdict["digest"]:
        return None
    return f"it returned the output of an earlier call ({how})"


def _wrong_kind(outputs: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], device: str) -> list[str]:
    if len(outputs) != len(wanted):
        return [f"it returned {len(outputs)} results; the contract has {len(wanted)}"]
    wrong = []
    for one, right in zip(outputs, wanted, strict=True):
        if one["type"] != "Tensor":
            wrong.append(f"it returned a {one['type']}, not a plain tensor")
        elif one["shape"] != right["shape"]:
            wrong.append(f"its output has shape {one['shape']}; it must be {right['shape']}")
        elif one["dtype"] != right["dtype"]:
            wrong.append(f"its output is {one['dtype']}; it must be {right['dtype']}")
        elif one["device"] != device:
            wrong.append(f"its output is on {one['device']}; the inputs are on {device}")
    return wrong
