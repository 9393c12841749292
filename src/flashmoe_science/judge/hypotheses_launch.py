"""Causes that the launch and the clocks show: a grid that leaves SMs idle, idle threads, a host that cannot keep up.

Each function takes the Facts and returns a Hypothesis, or None where it has no meaning for the problem or the machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from flashmoe_science.hardware.counters import Counters
from flashmoe_science.hardware.gpus import WARP
from flashmoe_science.hardware.occupancy import shared_verdict, waves
from flashmoe_science.judge.facts import Facts, Time
from flashmoe_science.judge.hypothesis import TENSOR_IDLE, Hypothesis, Source, Status
from flashmoe_science.operations import parse_problem

_TAIL = 0.9  # of the rounds' time in use: a tail below this costs more than a tenth
_FLAT = 1.25  # two times within this are the same for these purposes
_HOST = 1.25  # eager calls over device time from which the host is the cause
_MORE = 4.0  # times as much work, which should show
_SLOW = 0.05  # of the fp32 rate of the SMs in use: less than any kernel with busy threads, however poor
_LONG_NS = 20_000.0  # a call so long is not the launch itself
_MOST_OF_A_WARP = 28  # threads an instruction: a mask here and there leaves a few out
_MUCH_WAITING = 0.3  # of the warps' waiting
_KEYS_WORTH_A_SPLIT = 64  # a block's share of the keys after a split: a tile's
_NO_LAUNCH = "no record says what it launched"


def small_grid(facts: Facts) -> Hypothesis | None:
    """Failure 5 of the documents: two blocks on a GPU of 58 SMs."""
    if facts.machine == "cpu":
        return None
    key, title = "small-grid", "the grid is smaller than the GPU"
    blocks, sms = facts.blocks, facts.sm_count
    if blocks is None or sms is None:
        return Hypothesis(key, title, "untested", _NO_LAUNCH)
    numbers = {"blocks": blocks, "sms": sms, "idle_share": max(0.0, 1 - blocks / sms)}
    if blocks >= sms:
        return Hypothesis(key, title, "ruled out", f"{blocks} blocks on {sms} SMs", ("launch data",), numbers)
    evidence = f"{blocks} blocks on {sms} SMs: {1 - blocks / sms:.1%} of the GPU gets no work"
    sources: tuple[Source, ...] = ("launch data",)
    if (grown := _more_blocks_for_nothing(facts)) is not None:
        more, slower = grown
        evidence += f"; {more:.3g} times the work in more blocks took only {slower:.2f} times as long"
        numbers |= {"more_work": more, "took": slower}
        sources = ("launch data", "timings")
    return Hypothesis(key, title, "supported", evidence, sources, numbers)


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


def tail_wave(facts: Facts) -> Hypothesis | None:
    """SMs that are done wait for those that have blocks: a last wave that is nearly empty, or blocks of unequal length."""
    if facts.machine == "cpu":
        return None
    key, title = "tail-wave", "a tail: SMs wait for the last blocks"
    measured = _evenness(facts)
    if measured is not None:
        words = f"SMs are at work in {measured:.1%} of the cycles of the busiest of them"
        status: Status = "supported" if measured < _TAIL else "ruled out"
        return Hypothesis(key, title, status, words, ("launch data", "counters"), {"efficiency": measured})
    resident = facts.residency()
    if facts.blocks is None or facts.gpu is None or resident is None or not resident.blocks:
        return Hypothesis(key, title, "untested", "blocks, registers or the GPU's limits are not on record")
    filled = waves(facts.gpu, facts.blocks, resident.blocks)
    numbers = {
        "blocks": facts.blocks,
        "resident_blocks": resident.blocks,
        "waves": filled.count,
        "efficiency": filled.efficiency,
    }
    if filled.rounds == 1:
        words = f"one wave, {filled.count:.2f} of what the GPU holds at once"
        return Hypothesis(key, title, "ruled out", words, ("launch data", "spec"), numbers)
    status = "supported" if filled.efficiency < _TAIL else "ruled out"
    return Hypothesis(key, title, status, str(filled), ("launch data", "spec"), numbers)


def _evenness(facts: Facts) -> float | None:
    """Mean over busiest SM's cycles, where the profile counted them and no SM was without a block to begin with."""
    if facts.counters is None or not facts.blocks or not facts.sm_count or facts.blocks < facts.sm_count:
        return None
    mean, most = facts.counters["sm_cycles_mean"], facts.counters["sm_cycles_most"]
    return mean / most if mean is not None and most else None


def serial_loop(facts: Facts) -> Hypothesis | None:
    """One block walks all keys of its rows, one tile after another, while SMs stand idle that could share them."""
    walk = facts.problem.walk()
    if facts.machine == "cpu" or walk is None:
        return None
    key, title = "serial-loop", "a serial loop over the keys that could be split over blocks"
    blocks, sms = facts.blocks, facts.sm_count
    if blocks is None or sms is None:
        return Hypothesis(key, title, "untested", _NO_LAUNCH)
    parts = min(sms // blocks, walk.steps // _KEYS_WORTH_A_SPLIT)
    numbers = {"blocks": blocks, "sms": sms, "keys": walk.steps, "parts": parts}
    if parts >= 2:
        evidence = (
            f"{blocks} blocks walk up to {walk.steps} keys each, one tile after another, while {sms - blocks} of {sms} "
            f"SMs have none: the keys could go to {parts} times as many blocks"
        )
        return Hypothesis(key, title, "supported", evidence, ("launch data",), numbers)
    why = "the grid has no room for more" if sms // blocks < 2 else f"{walk.steps} keys are too few to share out"
    return Hypothesis(key, title, "ruled out", f"{blocks} blocks on {sms} SMs: {why}", ("launch data",), numbers)


def idle_threads(facts: Facts) -> Hypothesis | None:
    """Failure 6 of the documents: 256 threads of which 64 work."""
    if facts.machine == "cpu":
        return None
    key, title = "idle-threads", "threads that do no work"
    per_instruction = None if facts.counters is None else facts.counters["threads_per_instruction"]
    if facts.counters is not None and per_instruction is not None:
        return _idle_by_counters(key, title, facts, facts.counters, per_instruction)
    rows, threads = facts.rows_per_block, facts.threads
    if rows is None or not threads:
        return Hypothesis(key, title, "untested", "no counter says how many threads take part in an instruction")
    numbers = {"rows": rows, "threads": threads}
    if 2 * rows > threads:
        evidence = f"each block has {rows:.4g} rows for its {threads} threads; whether a warp's threads all work takes counters"
        return Hypothesis(key, title, "untested", evidence, ("launch data",), numbers)
    pace = facts.asked_of("fma")
    if pace is not None and pace < _SLOW and (facts.time_ns or 0.0) > _LONG_NS:
        evidence = (
            f"{_rows_words(rows, threads)}; the SMs in use run at {pace:.1%} of their fp32 rate, far too slow for threads that "
            "all work"
        )
        numbers |= {"active_share": rows / threads, "pace": pace}
        return Hypothesis(key, title, "supported", evidence, ("launch data", "timings"), numbers)
    evidence = f"{_rows_words(rows, threads)}, unless they share rows, as tensor cores make them do; that takes counters"
    return Hypothesis(key, title, "untested", evidence, ("launch data",), numbers)


def _idle_by_counters(key: str, title: str, facts: Facts, counters: Counters, per_instruction: float) -> Hypothesis:
    """Idle threads of a warp show in its instructions; idle warps issue none, and show as waiting at barriers."""
    barrier = counters.stalls().get("barrier", 0.0)
    numbers = {"threads_per_instruction": per_instruction, "barrier_share": barrier}
    evidence = f"{per_instruction:.1f} of a warp's {WARP} threads take part in an instruction"
    if (unmasked := counters["threads_not_predicated_off"]) is not None:
        evidence += f", {unmasked:.1f} are not predicated off"
        numbers["threads_not_predicated_off"] = unmasked
    if per_instruction < _MOST_OF_A_WARP:
        numbers["active_share"] = per_instruction / WARP
        return Hypothesis(key, title, "supported", evidence, ("counters",), numbers)
    rows, threads, tensor = facts.rows_per_block, facts.threads, counters["tensor"]
    if rows and threads and 2 * rows <= threads and barrier > _MUCH_WAITING and tensor is not None and tensor < TENSOR_IDLE:
        evidence = (
            f"{_rows_words(rows, threads)}; warps spend {barrier:.0%} of their waiting at barriers, for the few that work"
        )
        numbers |= {"rows": rows, "threads": threads, "active_share": rows / threads}
        return Hypothesis(key, title, "supported", evidence, ("launch data", "counters"), numbers)
    return Hypothesis(key, title, "ruled out", evidence, ("counters",), numbers)


def _rows_words(rows: float, threads: int) -> str:
    return f"each block has {rows:.4g} query rows for its {threads} threads: a row a thread keeps {rows:.4g} of them busy"


def host_bound(facts: Facts) -> Hypothesis | None:
    """Failure 8 of the documents: times that are the host's floor, whatever the size."""
    if facts.machine == "cpu":
        return None
    key, title = "host-bound", "launch or host bound: eager calls wait for the host"
    eager, graph = facts.times.get("eager"), facts.times.get("graph")
    if eager is None:
        return Hypothesis(key, title, "untested", "it was not timed as eager calls")
    own = [eager, *(time for time in facts.others if time.clock == "eager")]
    return _host(key, title, own, eager, graph)


def rival_floor(facts: Facts) -> Hypothesis | None:
    """Whether the time that a kernel is compared with is the rival's host floor, not the rival's kernel."""
    if facts.machine == "cpu" or facts.rival is None:
        return None
    key, title = "rival-floor", f"as eager calls, its rival {facts.rival} waits for the host"
    here = [time for time in facts.rival_times if time.problem == str(facts.problem)]
    eager = next((time for time in here if time.clock == "eager"), None)
    graph = next((time for time in here if time.clock == "graph"), None)
    if eager is None:
        return Hypothesis(key, title, "untested", f"{facts.rival} was not timed as eager calls beside it")
    return _host(key, title, [time for time in facts.rival_times if time.clock == "eager"], eager, graph)


def _host(key: str, title: str, eager_times: Sequence[Time], eager: Time, graph: Time | None) -> Hypothesis:
    flat = _flat_over_sizes(eager_times)
    numbers = {"eager_ns": eager.time_ns}
    if graph is not None:
        ratio = eager.time_ns / graph.time_ns
        numbers |= {"graph_ns": graph.time_ns, "eager_over_graph": ratio}
        words = f"a call takes {_us(eager.time_ns)}, its kernels {_us(graph.time_ns)} of device time"
        if ratio < _HOST:
            return Hypothesis(key, title, "ruled out", words, ("timings",), numbers)
        words += f"; calls take {flat}" if flat else ""
        return Hypothesis(key, title, "supported", words, ("timings",), numbers)
    if flat is not None:
        return Hypothesis(key, title, "supported", f"calls take {flat}", ("timings",), numbers)
    grows = _grows_with_size(eager_times)
    if grows is not None:
        return Hypothesis(key, title, "ruled out", grows, ("timings",), numbers)
    evidence = f"a call takes {_us(eager.time_ns)}; neither its device time nor other sizes are on record"
    return Hypothesis(key, title, "untested", evidence, ("timings",), numbers)


def _flat_over_sizes(times: Sequence[Time]) -> str | None:
    """In words, the sizes over which the time stood still although the work of a block grew with them; None where none."""
    small, large, growth = _extremes(times, lambda low, high: high.time_ns < _FLAT * low.time_ns)
    if small is None or large is None:
        return None
    least, most = sorted((small.time_ns, large.time_ns))
    return f"{_us(least)} to {_us(most)} from '{small.problem}' to '{large.problem}', {growth:.3g} times the work"


def _grows_with_size(times: Sequence[Time]) -> str | None:
    small, large, growth = _extremes(times, lambda low, high: high.time_ns >= 2 * low.time_ns)
    if small is None or large is None:
        return None
    return f"it grows from {_us(small.time_ns)} to {_us(large.time_ns)} with {growth:.3g} times the work"


def _extremes(times: Sequence[Time], alike: Callable[[Time, Time], bool]) -> tuple[Time | None, Time | None, float]:
    """The two times furthest apart in work for which ``alike`` holds, where the work grew within a block too."""
    found: tuple[Time | None, Time | None, float] = (None, None, 0.0)
    typical = _typical(times)
    for low in typical:
        for high in typical:
            growth = _deeper(low.problem, high.problem)
            if growth >= _MORE and growth > found[2] and alike(low, high):
                found = (low, high, growth)
    return found


def _typical(times: Sequence[Time]) -> list[Time]:
    """One time a problem: the median of its own."""
    by_problem: dict[str, list[Time]] = {}
    for time in times:
        by_problem.setdefault(time.problem, []).append(time)
    chosen = []
    for group in by_problem.values():
        middle = statistics.median_low([time.time_ns for time in group])
        chosen.append(next(time for time in group if time.time_ns == middle))
    return chosen


def _deeper(low: str, high: str) -> float:
    """How much more work ``high`` is, 0 where it may all lie in further blocks, which an idle GPU does for nothing."""
    small, large = parse_problem(low), parse_problem(high)
    if type(small) is not type(large) or small.op != large.op or not small.flops():
        return 0.0
    short, long = small.walk(), large.walk()
    if short is not None and long is not None and long.steps < 2 * short.steps:
        return 0.0
    return large.flops() / small.flops()


def shared_tile(facts: Facts) -> Hypothesis | None:
    """Failure 3 of the documents: a tile taken for too large that fits by opt-in, and one that fits nowhere."""
    if facts.machine == "cpu":
        return None
    key, title = "shared-tile", "its tile does not fit shared memory"
    refused = [reason for reason in facts.refusals if "shared memory" in reason.lower()]
    if refused:
        return Hypothesis(key, title, "supported", refused[0], ("refusal",))
    if facts.launch is None or facts.gpu is None:
        return Hypothesis(key, title, "untested", "its launch or the GPU's limits are not on record")
    used, gpu, resident = facts.launch.shared_bytes, facts.gpu, facts.residency()
    numbers: dict[str, float] = {
        "shared_bytes": used,
        "static_limit": gpu.shared_per_block_static,
        "opt_in_limit": gpu.shared_per_block,
        "by_opt_in": float(gpu.shared_per_block_static < used <= gpu.shared_per_block),
    }
    evidence = shared_verdict(gpu, used)
    if resident is not None:
        evidence += f"; blocks resident on an SM: {resident.blocks}, limited by {resident.reason}"
        numbers["resident_blocks"] = resident.blocks
    status: Status = "supported" if used > gpu.shared_per_block else "ruled out"
    return Hypothesis(key, title, status, evidence, ("launch data", "spec"), numbers)


def _us(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e3:.4g} us"
