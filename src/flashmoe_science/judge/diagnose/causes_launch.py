"""Causes that the launch and the clocks show: a grid that leaves SMs idle, idle threads, a host that cannot keep up.

Each function returns a Hypothesis, or None where the cause has no meaning for the problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from flashmoe_science.hardware.gpus import WARP
from flashmoe_science.hardware.occupancy import shared_verdict
from flashmoe_science.judge.diagnose.causes_units import no_tensor_cores
from flashmoe_science.judge.diagnose.facts import Facts, Time
from flashmoe_science.judge.diagnose.hypothesis import TENSOR_IDLE, Change, Hypothesis, ruled_out, untested
from flashmoe_science.operations import parse_problem

_FLAT = 1.25  # two times within this factor count as equal
_HOST = 1.25  # eager time over device time from which the host is the cause
_MORE = 4.0  # times as much work, which should show
_SLOW = 0.05  # of the fp32 rate of the SMs in use: less than any kernel reaches whose threads all work
_LONG_NS = 20_000.0  # a call so long is not dominated by its launch
_MOST_OF_A_WARP = 28  # threads an instruction: a mask here and there leaves a few out
_MUCH_WAITING = 0.3  # of the warps' waiting
_KEYS_WORTH_A_SPLIT = 64  # a block's share of the keys after a split: a tile's
_LEAST_ROWS = 16  # of a tile of a matrix product
_NO_LAUNCH = untested("no record says what it launched")


def small_grid(facts: Facts) -> Hypothesis | None:
    """Fewer blocks than SMs."""
    blocks, sms = facts.blocks, facts.sm_count
    if blocks is None or sms is None:
        return _NO_LAUNCH
    if blocks >= sms:
        return ruled_out(f"{blocks} blocks on {sms} SMs")
    evidence = f"{blocks} blocks on {sms} SMs: {1 - blocks / sms:.1%} of the GPU gets no work"
    if (grown := _more_blocks_for_nothing(facts)) is not None:
        more, slower = grown
        evidence += f"; {more:.3g} times the work in more blocks took only {slower:.2f} times as long"
    parts = _row_parts(facts, blocks, sms)
    how = f"{blocks} blocks on {sms} SMs, each in {parts:.3g} parts"
    return Hypothesis("supported", evidence, Change("smaller tiles: the rows of a block over more blocks", 1.0, parts, how))


def _row_parts(facts: Facts, blocks: int, sms: int) -> float:
    """Into how many blocks the rows of one can go, until every SM has one or a block has the rows of a tensor core's tile (one
    row, where it uses none)."""
    if facts.rows_per_block is None:
        return sms / blocks
    plain = no_tensor_cores(facts)
    least = 1 if plain is not None and plain.status == "supported" else _LEAST_ROWS
    return max(1, min(sms // blocks, facts.rows_per_block // least))


def _more_blocks_for_nothing(facts: Facts) -> tuple[float, float] | None:
    """The largest growth of batch or heads (work in further blocks, no longer ones) that the time did not follow."""
    here = facts.problem
    own = facts.times.get("graph") or facts.times.get("eager")
    if own is None:
        return None
    found = []
    for other in facts.others:
        there = parse_problem(other.problem)
        alike = there.op == here.op and there.piece() == here.piece()
        if alike and other.clock == own.clock and other.config == own.config:
            more = there.flops() / here.flops()
            if more >= _MORE and other.time_ns / own.time_ns < more / 2:
                found.append((more, other.time_ns / own.time_ns))
    return max(found, default=None)


def serial_loop(facts: Facts) -> Hypothesis | None:
    """One block walks all keys of its rows, one tile after another, while SMs stand idle that could share them."""
    walk, blocks, sms = facts.problem.walk(), facts.blocks, facts.sm_count
    if walk is None:
        return None
    if blocks is None or sms is None:
        return _NO_LAUNCH
    parts = min(sms // blocks, walk.steps // _KEYS_WORTH_A_SPLIT)
    if parts < 2:
        why = "the grid has no room for more" if sms // blocks < 2 else f"{walk.steps} keys are too few to share out"
        return ruled_out(f"{blocks} blocks on {sms} SMs: {why}")
    evidence = (
        f"{blocks} blocks walk up to {walk.steps} keys each, one tile after another, while {sms - blocks} of {sms} SMs have "
        f"none: the keys could go to {parts} times as many blocks"
    )
    spread = blocks * _row_parts(facts, blocks, sms)  # the SMs that are still idle once the rows have been spread
    split = max(min(sms // spread, parts), 1.0)
    how = f"{spread:.0f} blocks, their rows spread, walk 1/{split:.0f} of the keys each; combining the parts is not counted"
    change = Change("split the keys over blocks, then combine the parts", 1.0, split, how)
    return Hypothesis("supported", evidence, change)


def idle_threads(facts: Facts) -> Hypothesis | None:
    """Threads of a block that have no row to work on."""
    per_instruction = facts.counter("threads_per_instruction")
    if per_instruction is not None:
        return _idle_by_counters(facts, per_instruction)
    rows, threads = facts.rows_per_block, facts.threads
    if rows is None or not threads:
        return untested("no counter says how many threads take part in an instruction")
    if 2 * rows > threads:
        return untested(
            f"each block has {rows:.4g} rows for its {threads} threads; whether a warp's threads all work takes counters"
        )
    words, pace = _rows_words(rows, threads), facts.asked_of("fma")
    if pace is not None and pace < _SLOW and (facts.time_ns or 0.0) > _LONG_NS:
        words += f"; the SMs in use run at {pace:.1%} of their fp32 rate, far too slow for threads that all work"
        return Hypothesis("supported", words, _use_all(rows / threads))
    return untested(f"{words}, unless they share rows, as tensor cores make them do; that takes counters")


def _idle_by_counters(facts: Facts, per_instruction: float) -> Hypothesis:
    """Idle threads of a warp show in its instructions; idle warps issue none, and show as waiting at barriers."""
    barrier = facts.waiting("barrier")
    evidence = f"{per_instruction:.1f} of a warp's {WARP} threads take part in an instruction"
    if (unmasked := facts.counter("threads_not_predicated_off")) is not None:
        evidence += f", {unmasked:.1f} are not predicated off"
    if per_instruction < _MOST_OF_A_WARP:
        return Hypothesis("supported", evidence, _use_all(per_instruction / WARP))
    rows, threads, tensor = facts.rows_per_block, facts.threads, facts.counter("tensor")
    if rows and threads and 2 * rows <= threads and barrier > _MUCH_WAITING and tensor is not None and tensor < TENSOR_IDLE:
        evidence = (
            f"{_rows_words(rows, threads)}; warps spend {barrier:.0%} of their waiting at barriers, for the few that work"
        )
        return Hypothesis("supported", evidence, _use_all(rows / threads))
    return ruled_out(evidence)


def _use_all(share: float) -> Change:
    return Change("give every thread work", 1.0, 1 / share, f"{share:.0%} of the threads work")


def _rows_words(rows: float, threads: int) -> str:
    return f"each block has {rows:.4g} query rows for its {threads} threads: a row a thread keeps {rows:.4g} of them busy"


def host_bound(facts: Facts) -> Hypothesis | None:
    """Eager calls take longer than the device works, or as long whatever the size."""
    eager, graph = facts.times.get("eager"), facts.times.get("graph")
    if eager is None:
        return untested("it was not timed as eager calls")
    return _host([eager, *(time for time in facts.others if time.clock == "eager")], eager, graph)


def rival_floor(facts: Facts) -> Hypothesis | None:
    """The time that a kernel is compared with is its rival's host overhead, not the rival's kernel."""
    if facts.rival is None:
        return None
    here = {time.clock: time for time in reversed(facts.rival_times) if time.problem == str(facts.problem)}
    if "eager" not in here:
        return untested(f"{facts.rival} was not timed as eager calls beside it")
    eager_times = [time for time in facts.rival_times if time.clock == "eager"]
    return replace(_host(eager_times, here["eager"], here.get("graph")), change=None)  # the rival is not ours to change


def _host(eager_times: Sequence[Time], eager: Time, graph: Time | None) -> Hypothesis:
    flat = _extremes(eager_times, lambda low, high: high.time_ns < _FLAT * low.time_ns)
    same = ""
    if flat is not None:
        small, large, growth = flat
        least, most = sorted((small.time_ns, large.time_ns))
        same = (
            f"calls take {_us(least)} to {_us(most)} from '{small.problem}' to '{large.problem}', {growth:.3g} times the work"
        )
    if graph is not None:
        ratio = eager.time_ns / graph.time_ns
        words = f"a call takes {_us(eager.time_ns)}, its kernels {_us(graph.time_ns)} of device time"
        if ratio < _HOST:
            return ruled_out(words)
        how = f"all but the device's time goes: {1 - 1 / ratio:.0%} of a call"
        what = "launch from a CUDA graph, or shorten the path to the launch"
        change = Change(what, 1 - 1 / ratio, math.inf, how, "eager")
        return Hypothesis("supported", "; ".join(filter(None, (words, same))), change)
    if same:
        return Hypothesis("supported", same)
    grown = _extremes(eager_times, lambda low, high: high.time_ns >= 2 * low.time_ns)
    if grown is not None:
        small, large, growth = grown
        return ruled_out(f"it grows from {_us(small.time_ns)} to {_us(large.time_ns)} with {growth:.3g} times the work")
    return untested(f"a call takes {_us(eager.time_ns)}; neither its device time nor other sizes are on record")


def _extremes(times: Sequence[Time], alike: Callable[[Time, Time], bool]) -> tuple[Time, Time, float] | None:
    """The two times furthest apart in the work of a block, at least _MORE, for which ``alike`` holds, and that factor."""
    by_problem: dict[str, list[Time]] = {}
    for time in times:
        by_problem.setdefault(time.problem, []).append(time)
    # One time a problem: the median of its own.
    typical = [sorted(group, key=lambda time: time.time_ns)[(len(group) - 1) // 2] for group in by_problem.values()]
    pairs = ((low, high, _work_growth_in_block(low.problem, high.problem)) for low in typical for high in typical)
    found = [(low, high, growth) for low, high, growth in pairs if growth >= _MORE and alike(low, high)]
    return max(found, key=lambda one: one[2], default=None)


def _work_growth_in_block(low: str, high: str) -> float:
    """How much more work ``high`` is, 0 where all of it may lie in further blocks, which an idle GPU does at no cost."""
    small, large = parse_problem(low), parse_problem(high)
    if type(small) is not type(large) or small.op != large.op or not small.flops():
        return 0.0
    short, long = small.walk(), large.walk()
    if short is not None and long is not None and long.steps < 2 * short.steps:
        return 0.0
    return large.flops() / small.flops()


def shared_tile(facts: Facts) -> Hypothesis | None:
    """A tile larger than the shared memory that a block may have: refused, or launched within the opt-in limit."""
    refused = [reason for reason in facts.refusals if "shared memory" in reason.lower()]
    if refused:
        return Hypothesis("supported", refused[0])
    if facts.launch is None or facts.gpu is None:
        return untested("its launch or the GPU's limits are not on record")
    used, gpu, resident = facts.launch.shared_bytes, facts.gpu, facts.residency()
    evidence = shared_verdict(gpu, used)
    if resident is not None:
        evidence += f"; blocks resident on an SM: {resident.blocks}, limited by {resident.reason}"
    return Hypothesis("supported" if used > gpu.shared_per_block else "ruled out", evidence)


def _us(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e3:.4g} us"
