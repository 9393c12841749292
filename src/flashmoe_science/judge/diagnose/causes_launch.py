"""Causes that the launch and the clocks show: a grid that leaves SMs idle, idle threads, a host that cannot keep up.

Each function returns a Hypothesis, or None where the cause has no meaning for the problem.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from flashmoe_science.hardware.gpus import WARP
from flashmoe_science.hardware.occupancy import shared_verdict
from flashmoe_science.judge.diagnose.causes_units import no_tensor_cores
from flashmoe_science.judge.diagnose.facts import Facts
from flashmoe_science.judge.diagnose.hypothesis import TENSOR_IDLE, Change, Hypothesis, ruled_out, untested
from flashmoe_science.records import Clock

_HOST = 1.25  # eager time over device time, from which on the host is the cause
_SLOW = 0.05  # of the fp32 rate of the SMs in use: every kernel whose threads all work reaches more
_LONG_NS = 20_000.0  # the launch does not dominate a call of this length
_MOST_OF_A_WARP = 28  # threads an instruction: a mask here and there leaves a few out
_MUCH_WAITING = 0.3  # of the warps' waiting
_KEYS_WORTH_A_SPLIT = 64  # the fewest keys of a block after a split: one tile's
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
    parts = _row_parts(facts, blocks, sms)
    how = f"{blocks} blocks on {sms} SMs, each in {parts:.3g} parts"
    return Hypothesis("supported", evidence, Change("smaller tiles: the rows of a block over more blocks", 1.0, parts, how))


def _row_parts(facts: Facts, blocks: int, sms: int) -> float:
    """Into how many blocks one block's rows can be split until every SM has a block, or a block has the rows of one tensor core
    tile (one row, if the kernel does not use tensor cores)."""
    if facts.rows_per_block is None:
        return sms / blocks
    plain = no_tensor_cores(facts)
    least = 1 if plain is not None and plain.status == "supported" else _LEAST_ROWS
    return max(1, min(sms // blocks, facts.rows_per_block // least))


def serial_loop(facts: Facts) -> Hypothesis | None:
    """One block walks all keys of its rows, one tile after another, while idle SMs could take a part of the keys."""
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
        return untested(f"each block has {rows:.4g} rows for its {threads} threads; only counters can tell whether all work")
    words, pace = _rows_words(rows, threads), facts.pipe_share("fma")
    if pace is not None and pace < _SLOW and (facts.time_ns or 0.0) > _LONG_NS:
        words += f"; the SMs in use run at {pace:.1%} of their fp32 rate, far too slow for threads that all work"
        return Hypothesis("supported", words, _use_all(rows / threads))
    return untested(f"{words}, unless they share rows, as tensor cores make them do; only counters can tell")


def _idle_by_counters(facts: Facts, per_instruction: float) -> Hypothesis:
    """Idle threads of a warp show in the threads per instruction; idle warps issue nothing and show as waiting at barriers."""
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
    """An eager call takes longer than the device works."""
    times = {clock: time.time_ns for clock, time in facts.times.items()}
    found = _host(times)
    if found.status != "supported":
        return found
    share = 1 - times["graph"] / times["eager"]
    what = "launch from a CUDA graph, or shorten the path to the launch"
    change = Change(what, share, math.inf, f"all but the device's time goes: {share:.0%} of a call", "eager")
    return replace(found, change=change)


def rival_floor(facts: Facts) -> Hypothesis | None:
    """The rival's time, with which the kernel is compared, is the rival's host overhead and not its kernel."""
    return None if facts.rival is None else _host(facts.rival_ns)  # the rival is not ours to change


def _host(times: Mapping[Clock, float]) -> Hypothesis:
    if "eager" not in times or "graph" not in times:
        return untested(f"it was not timed {'by its device time' if 'eager' in times else 'as eager calls'}")
    eager, graph = times["eager"], times["graph"]
    words = f"a call takes {eager / 1e3:.4g} us, its kernels {graph / 1e3:.4g} us of device time"
    return Hypothesis("ruled out" if eager < _HOST * graph else "supported", words)


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
