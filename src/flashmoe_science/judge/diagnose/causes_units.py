"""Causes in memory and in the execution units of an SM (tensor, FMA, special-function and shared-memory pipes, registers).

Counters decide where they were read. Without counters, memory or a pipe did at least what the problem must move or compute, and
at most what the launch's blocks can ask for; where these two bounds do not decide, a hypothesis stays untested. Each function
returns a Hypothesis, or None where the cause has no meaning for the problem.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from flashmoe_science.hardware.counters import Counters
from flashmoe_science.judge.diagnose.facts import Facts
from flashmoe_science.judge.diagnose.hypothesis import (
    BOUND,
    FREE,
    NO_COUNTERS,
    TENSOR_IDLE,
    Change,
    Hypothesis,
    by_least,
    by_share,
    ruled_out,
    shares_words,
    untested,
)
from flashmoe_science.judge.diagnose.roofline import Level

_MOST_ROWS = 256  # a block with more rows walks the keys once for each of several tiles, so the bytes it reads are unknown
_SECTOR = 32  # bytes
_BEYOND = 1.1  # of a pipe's peak: a clock above its rating does not explain more
_HARDLY = 0.1  # of a pipe's peak
_MOST_CONFLICTS = 0.97  # 31 of 32 wavefronts
_PEAK_CONFLICTS = 0.15  # of the shared-memory wavefronts: the counter also counts some that are no conflicts
_FEW_GLOBAL = 0.05  # of the L2's traffic; the copy engine brings the rest


def dram_bound(facts: Facts) -> Hypothesis | None:
    counted = facts.counter("dram")
    if counted is not None:
        return by_share(counted, "of the DRAM's peak bandwidth is in use")
    least = facts.share("dram")
    if least is None:
        return untested("neither a time with a known bandwidth nor counters are on record")
    words = f"what it must read and write once takes {least:.2%} of {facts.ceilings['dram']}"
    if least >= BOUND:
        return Hypothesis("supported", words)
    most, why = _dram_at_most(facts)
    if most is not None and most < BOUND:
        return ruled_out(f"{words}; {why}, at most {most:.1%} of it")
    return untested(f"{words}; only counters can tell what it reads again")


def l2_bound(facts: Facts) -> Hypothesis | None:
    counted = facts.counter("l2")
    return NO_COUNTERS if counted is None else by_share(counted, "of the L2's peak throughput is in use")


def uncoalesced(facts: Facts) -> Hypothesis | None:
    used = facts.counter("bytes_per_sector")
    if used is None:
        return NO_COUNTERS
    words = f"threads use {used:.1f} of the {_SECTOR} bytes of each sector they load"
    sectors, through_l2 = facts.counter("global_sectors"), facts.counter("l2_bytes")
    share = sectors * _SECTOR / through_l2 if sectors is not None and through_l2 else 1.0
    if share < _FEW_GLOBAL:
        return ruled_out(f"{words}, and such loads ask for {share:.1%} of what passes the L2")
    if used >= 0.75 * _SECTOR:
        return ruled_out(words)
    busy = max(facts.counter("l2") or 0.0, facts.counter("dram") or 0.0)
    part = max(busy, facts.waiting("long_scoreboard", "lg_throttle"))
    how = f"memory is in use or waited for {part:.0%} of the time; {used:.0f} of each {_SECTOR} bytes are used"
    change = Change("load 16 bytes a thread, neighbours side by side", part, _SECTOR / max(used, 1.0), how)
    return Hypothesis("supported", words, change)


def _dram_at_most(facts: Facts) -> tuple[float | None, str]:
    """The largest share of the DRAM's bandwidth that the kernel can use, and why not more; None where that is unknown."""
    least, walk, rows = facts.problem.min_bytes(), facts.problem.walk(), facts.rows_per_block
    if facts.gpu is not None and 2 * least <= facts.gpu.l2_bytes:
        most, why = least, "all of it fits the L2, which serves what is read again"
    elif walk is not None and rows is not None and facts.blocks and 1 <= rows <= _MOST_ROWS:
        # Each block reads all keys and values of its head; Q and the output are moved once.
        most = (facts.blocks * walk.steps + walk.rows) * walk.step_bytes
        why = "blocks that walk their keys once ask for no more"
    else:
        return None, ""
    if "dram" not in facts.ceilings or not facts.time_ns:
        return None, ""
    return most / facts.time_ns * 1e9 / facts.ceilings["dram"].value, why


def pipe_bound(facts: Facts, level: Level) -> Hypothesis:
    """Whether a pipe is busy: by counters, on SMs that have work; else by the problem's own need, on the SMs in use."""
    counted = facts.counter(level)
    if counted is not None:
        without = "; reads by the tensor cores themselves are not counted" if level == "shared" else ""
        return by_share(counted, f"of the pipe's peak, on SMs that have work{without}")
    share = facts.pipe_share(level)
    if share is None:
        return NO_COUNTERS
    words = f"the problem alone asks for {share:.2%} of it on the SMs in use ({facts.ceilings[level]})"
    if level != "fma":
        return by_least(share, words)
    # The tensor cores may do the problem's FLOPs, and the FMA pipe does other work too.
    if share > _BEYOND:
        return ruled_out(f"{words}, more than it can do")
    return ruled_out(words) if share < _HARDLY else untested(words)


def matmul_bound(facts: Facts) -> Hypothesis | None:
    """Whether a CPU's arithmetic is busy; its fastest is that of matrix products."""
    if not facts.problem.is_products():
        return None
    share = facts.share("matmul")
    if share is None:
        return untested("neither a time nor a measured matrix product is on record")
    return by_least(share, f"its FLOPs alone take {share:.1%} of {facts.ceilings['matmul']}")


def no_tensor_cores(facts: Facts) -> Hypothesis | None:
    if not facts.problem.is_products():
        return None
    counted = facts.counter("tensor")
    if counted is not None:
        words = f"the tensor pipe is at work in {counted:.2%} of the cycles"
        if (fma := facts.counter("fma")) is not None:
            words += f", the FMA pipe in {fma:.1%}"
        return ruled_out(words) if counted >= TENSOR_IDLE else Hypothesis("supported", words, _use_tensor_cores(facts, fma))
    share = facts.pipe_share("fma")
    if share is None:
        return NO_COUNTERS
    pace = facts.problem.flops() / (facts.time_ns or 1.0) / 1e3
    words = f"{pace:.3g} TFLOP/s is {share:.1%} of the fp32 rate without tensor cores, on the SMs in use"
    if share > _BEYOND:
        return ruled_out(f"{words}: only tensor cores can do so much")
    return untested(f"{words}: no more than is possible without them; only counters can tell")


def _use_tensor_cores(facts: Facts, fma_share: float | None) -> Change | None:
    """The matrix products take at most the time in which no other instruction issues."""
    tensor, fma, issued = facts.ceilings.get("tensor"), facts.ceilings.get("fma"), facts.counter("issue")
    if tensor is None or fma is None or fma_share is None or issued is None:
        return None
    others, faster = max(0.0, issued - fma_share), tensor.value / fma.value
    how = f"other instructions issue in {others:.0%} of the cycles; the tensor cores are {faster:.1f} times the FMA pipe"
    return Change("do the matrix products on the tensor cores", 1 - others, faster, how)


def bank_conflicts(facts: Facts) -> Hypothesis | None:
    if facts.counters is None:
        return NO_COUNTERS
    conflicts = facts.counter("load_conflicts", "store_conflicts")
    wavefronts = facts.counter("shared_wavefronts")
    if conflicts is None or wavefronts is None:
        return untested("the profile did not count them")
    share = conflicts / wavefronts if wavefronts else 0.0
    words = f"{conflicts:.4g} of {wavefronts:.4g} shared-memory wavefronts ({share:.1%}) are conflicts"
    if (pipe := facts.counter("shared")) is not None:
        words += f"; the shared-memory pipe is {pipe:.1%} in use"
    if share < _PEAK_CONFLICTS:
        return ruled_out(words)
    wasted = min(share, _MOST_CONFLICTS)
    part = max(pipe or 0.0, facts.waiting("short_scoreboard", "mio_throttle"))
    how = f"shared memory is in use or waited for {part:.0%} of the time; {wasted:.0%} of its wavefronts are conflicts"
    change = Change("swizzle or pad shared memory against bank conflicts", part, 1 / (1 - wasted), how)
    return Hypothesis("supported", words, change)


def spills(facts: Facts) -> Hypothesis | None:
    counted = facts.counter("local_loads", "local_stores")
    if counted is None:
        return NO_COUNTERS
    words, share = f"{counted:.4g} loads and stores of local memory", 0.0
    if instructions := facts.counter("instructions"):
        share = counted / instructions
        words += f", {share:.2%} of its instructions"
    if not counted:
        return ruled_out(words)
    part = max(share, facts.waiting("long_scoreboard", "lg_throttle"))
    how = f"spills, and waits for these and other loads, are at most {part:.0%} of the time"
    change = Change("keep registers from spilling: a smaller tile, or more warps", part, math.inf, how)
    return Hypothesis("supported", words, change)


def latency_bound(facts: Facts) -> Hypothesis | None:
    """Neither memory nor any pipe is busy: the time goes into waiting."""
    if facts.counters is not None:
        return _latency_by_counters(facts, facts.counters)
    own = {
        "DRAM": facts.share("dram"),
        "tensor pipe": facts.pipe_share("tensor"),
        "special-function pipe": facts.pipe_share("special"),
        "arithmetic": facts.share("matmul"),
        "an empty launch": facts.share("launch"),
    }
    least = {name: share for name, share in own.items() if share is not None}
    if not least:
        return untested("no time beside known ceilings is on record")
    on_cpu, fma = facts.machine == "cpu", facts.pipe_share("fma")
    may = {
        "DRAM": least.get("DRAM") if on_cpu else _dram_at_most(facts)[0],
        "FMA pipe": None if fma is None or fma > _BEYOND else fma,  # the tensor cores did it, in part or all
    }
    most = least | {name: share for name, share in may.items() if share is not None}
    if max(least.values()) >= BOUND:
        return ruled_out(f"the problem alone asks for {shares_words(least)}")
    words = f"at the most, {shares_words(most)}{_occupancy_words(facts)}"
    if max(most.values()) < FREE and may["DRAM"] is not None:
        return Hypothesis("supported", f"{words}: what is left is waiting", _hide_latency(facts, most))
    return untested(words)


def _latency_by_counters(facts: Facts, counters: Counters) -> Hypothesis:
    names = ("dram", "l2", "tensor", "fma", "alu", "special", "lsu", "shared", "issue")
    shares = {name: share for name in names if (share := counters[name]) is not None}
    if not {"dram", "tensor", "fma"} <= shares.keys():
        return untested("the profile lacks the use of memory or of the pipes")
    words = shares_words(shares)
    stalls = list(counters.stalls().items())[:3]
    if stalls:
        words += f"; warps wait for {', '.join(f'{reason} ({share:.0%})' for reason, share in stalls)}"
    if (occupancy := facts.counter("occupancy")) is not None:
        words += f"; {occupancy:.1%} of the warps that an SM can hold are resident"
    if (eligible := facts.counter("eligible_warps")) is not None:
        words += f", {eligible:.2f} warps a scheduler are ready to issue"
    return ruled_out(words) if max(shares.values()) >= BOUND else Hypothesis("supported", words, _hide_latency(facts, shares))


def _hide_latency(facts: Facts, shares: Mapping[str, float]) -> Change | None:
    """More warps or loads in flight can gain until the busiest unit is fully in use."""
    busiest = max(shares.values(), default=0.0)
    if not 0 < busiest < 1:
        return None
    on_cpu = facts.machine == "cpu"
    what = "vectorise, and block for the caches" if on_cpu else "more work in flight: deeper pipelining, more warps"
    return Change(what, 1.0, 1 / busiest, f"the busiest unit is {busiest:.0%} in use; waiting is the rest")


def _occupancy_words(facts: Facts) -> str:
    resident, blocks, sms = facts.residency(), facts.blocks, facts.sm_count
    if resident is None or blocks is None or not sms or facts.threads is None or not resident.blocks:
        return ""
    on_one = min(resident.blocks, -(-blocks // sms))
    return f"; {on_one * -(-facts.threads // 32)} of {resident.max_warps} warps on an SM in use"
