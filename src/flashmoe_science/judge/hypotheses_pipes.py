"""Causes in the pipes of an SM: how busy each is, by counters where they were read, else by what the problem alone asks of it.

Without counters, a problem's own FLOPs and exponentials say the least that a pipe did; where that does not decide, a hypothesis
stays untested. Each function takes the Facts and returns a Hypothesis, or None where it has no meaning for the problem or the
machine.
"""

from __future__ import annotations

from flashmoe_science.judge.ceilings import Level
from flashmoe_science.judge.facts import Facts
from flashmoe_science.judge.hypotheses_memory import dram_share_at_most, l2_share_at_most
from flashmoe_science.judge.hypothesis import BOUND, FREE, NO_COUNTERS, TENSOR_IDLE, Hypothesis, Status, by_share, reckoned

_BEYOND = 1.1  # of a pipe's peak: more than clocks above their rating explain
_HARDLY = 0.1
_PEAK_CONFLICTS = 0.15  # of the shared-memory wavefronts; the counter also counts some that are no conflicts


def tensor_bound(facts: Facts) -> Hypothesis | None:
    return _pipe(facts, "tensor-bound", "tensor", "tensor", "compute bound: tensor pipe")


def fma_bound(facts: Facts) -> Hypothesis | None:
    return _pipe(facts, "fma-bound", "fma", "fma", "compute bound: FMA pipe", beyond=True)


def special_bound(facts: Facts) -> Hypothesis | None:
    return _pipe(facts, "special-bound", "special", "special", "compute bound: special-function pipe (exp2)")


def shared_bound(facts: Facts) -> Hypothesis | None:
    return _pipe(facts, "shared-bound", "shared", "shared", "bound by the shared-memory pipe")


def matmul_bound(facts: Facts) -> Hypothesis | None:
    """A CPU's arithmetic, where matrix products are the fastest that it has."""
    if facts.machine != "cpu" or not facts.is_products:
        return None
    key, title = "matmul-bound", "compute bound: matrix products"
    share = facts.share("matmul")
    if share is None:
        return Hypothesis(key, title, "untested", "neither a time nor a measured matrix product is on record")
    words = f"its FLOPs alone take {share:.1%} of {facts.ceilings['matmul']}"
    status: Status = "supported" if share >= BOUND else "ruled out" if share < FREE else "untested"
    return Hypothesis(key, title, status, words, reckoned(facts, "matmul"), {"least_share": share})


def _pipe(facts: Facts, key: str, quantity: str, level: Level, title: str, beyond: bool = False) -> Hypothesis | None:
    """A pipe's use: of its peak while its SM had work, by counters; else the problem's own need, of the SMs in use."""
    if facts.machine == "cpu":
        return None
    counted = None if facts.counters is None else facts.counters[quantity]
    if counted is not None:
        beside = "; the tensor cores' own reads are not in it" if quantity == "shared" else ""
        return by_share(key, title, counted, f"of the pipe's peak, on SMs that have work{beside}")
    share = facts.asked_of(level)
    if share is None:
        return Hypothesis(key, title, "untested", NO_COUNTERS)
    words = f"the problem alone asks for {share:.2%} of it on the SMs in use ({facts.ceilings[level]})"
    sources, numbers = reckoned(facts, level), {"least_share": share}
    if beyond:  # the FLOPs may be done elsewhere, and the pipe does other work beside them
        status: Status = "ruled out" if share < _HARDLY or share > _BEYOND else "untested"
        words += ", more than it can do" if share > _BEYOND else ""
        return Hypothesis(key, title, status, words, sources, numbers)
    if share >= BOUND:
        return Hypothesis(key, title, "supported", words, sources, numbers)
    return Hypothesis(key, title, "ruled out" if share < FREE else "untested", words, sources, numbers)


def no_tensor_cores(facts: Facts) -> Hypothesis | None:
    if facts.machine == "cpu" or not facts.is_products:
        return None
    key, title = "no-tensor-cores", "its matrix products do not use the tensor cores"
    counted = None if facts.counters is None else facts.counters["tensor"]
    if counted is not None:
        status: Status = "supported" if counted < TENSOR_IDLE else "ruled out"
        numbers = {"tensor_share": counted}
        words = f"the tensor pipe is at work in {counted:.2%} of the cycles"
        if facts.counters is not None and (fma := facts.counters["fma"]) is not None:
            words += f", the FMA pipe in {fma:.1%}"
            numbers["fma_share"] = fma
        return Hypothesis(key, title, status, words, ("counters",), numbers)
    share = facts.asked_of("fma")
    if share is None:
        return Hypothesis(key, title, "untested", NO_COUNTERS)
    pace = facts.problem.flops() / (facts.time_ns or 1.0) / 1e3
    words = f"{pace:.3g} TFLOP/s is {share:.1%} of the fp32 rate without tensor cores, on the SMs in use"
    sources, numbers = reckoned(facts, "fma"), {"of_fma_peak": share}
    if share > _BEYOND:
        return Hypothesis(key, title, "ruled out", f"{words}: only they can do so much", sources, numbers)
    return Hypothesis(key, title, "untested", f"{words}: no more than it could do without them; to know takes counters",
                      sources, numbers)  # fmt: skip


def bank_conflicts(facts: Facts) -> Hypothesis | None:
    if facts.machine == "cpu":
        return None
    key, title = "bank-conflicts", "shared-memory bank conflicts"
    if facts.counters is None:
        return Hypothesis(key, title, "untested", NO_COUNTERS)
    conflicts = facts.counters.total("load_conflicts", "store_conflicts")
    wavefronts = facts.counters["shared_wavefronts"]
    if conflicts is None or wavefronts is None:
        return Hypothesis(key, title, "untested", "the profile did not count them")
    share = conflicts / wavefronts if wavefronts else 0.0
    words = f"{conflicts:.4g} of {wavefronts:.4g} shared-memory wavefronts ({share:.1%}) are conflicts"
    numbers = {"conflicts": conflicts, "wavefronts": wavefronts, "conflict_share": share}
    if (pipe := facts.counters["shared"]) is not None:
        words += f"; the shared-memory pipe is {pipe:.1%} in use"
        numbers["pipe_share"] = pipe
    return Hypothesis(key, title, "supported" if share >= _PEAK_CONFLICTS else "ruled out", words, ("counters",), numbers)


def spills(facts: Facts) -> Hypothesis | None:
    if facts.machine == "cpu":
        return None
    key, title = "spills", "registers spilled to memory"
    counted = None if facts.counters is None else facts.counters.total("local_loads", "local_stores")
    if facts.counters is not None and counted is not None:
        words, numbers = f"{counted:.4g} loads and stores of local memory", {"local_accesses": counted}
        if instructions := facts.counters["instructions"]:
            words += f", {counted / instructions:.2%} of its instructions"
            numbers["instruction_share"] = counted / instructions
        return Hypothesis(key, title, "supported" if counted else "ruled out", words, ("counters",), numbers)
    registers, threads = (None if facts.launch is None else facts.launch.registers), facts.threads
    if registers is None or not threads:
        return Hypothesis(key, title, "untested", NO_COUNTERS)
    most = min(255, 65536 // threads // 8 * 8)
    where = "at the most it can have: spills begin there" if registers >= most else f"of {most} it can have"
    words = f"{registers} registers a thread, {where}; to know takes counters"
    return Hypothesis(key, title, "untested", words, ("launch data",), {"registers": registers, "most_registers": most})


def latency_bound(facts: Facts) -> Hypothesis | None:
    """Nothing is busy: neither memory nor any pipe. The documents' 0.47 TFLOP/s that they took for memory bound."""
    key, title = "latency-bound", "latency bound: neither memory nor a pipe is busy"
    if facts.counters is not None:
        return _latency_by_counters(key, title, facts)
    own = {
        "DRAM": facts.share("dram"),
        "tensor pipe": facts.asked_of("tensor"),
        "special-function pipe": facts.asked_of("special"),
        "arithmetic": facts.share("matmul"),
        "an empty launch": facts.share("launch"),
    }
    least = {name: share for name, share in own.items() if share is not None}
    if not least:
        return Hypothesis(key, title, "untested", "no time beside known ceilings is on record")
    on_cpu, fma = facts.machine == "cpu", facts.asked_of("fma")
    may = {
        "DRAM": least.get("DRAM") if on_cpu else dram_share_at_most(facts),
        "L2": l2_share_at_most(facts),
        "FMA pipe": None if fma is None or fma > _BEYOND else fma,  # the tensor cores did it, in part or all
    }
    most = least | {name: share for name, share in may.items() if share is not None}
    words = f"at the most, {_said(most)}{_occupancy_words(facts)}"
    numbers = {f"{name} share": share for name, share in most.items()}
    sources = reckoned(facts, "dram")
    if max(least.values()) >= BOUND:
        words = f"the problem alone asks for {_said(least)}"
        return Hypothesis(key, title, "ruled out", words, sources, {f"{name} share": share for name, share in least.items()})
    if max(most.values()) < FREE and may["DRAM"] is not None:
        return Hypothesis(key, title, "supported", f"{words}: what is left is waiting", sources, numbers)
    return Hypothesis(key, title, "untested", words, sources, numbers)


def _latency_by_counters(key: str, title: str, facts: Facts) -> Hypothesis:
    assert facts.counters is not None
    names = ("dram", "l2", "tensor", "fma", "alu", "special", "lsu", "shared", "issue")
    shares = {name: share for name in names if (share := facts.counters[name]) is not None}
    if not {"dram", "tensor", "fma"} <= shares.keys():
        return Hypothesis(key, title, "untested", "the profile lacks the use of memory or of the pipes")
    busiest = max(shares, key=lambda name: shares[name])
    words = _said(shares)
    stalls = list(facts.counters.stalls().items())[:3]
    if stalls:
        words += f"; warps wait for {', '.join(f'{reason} ({share:.0%})' for reason, share in stalls)}"
    if (occupancy := facts.counters["occupancy"]) is not None:
        words += f"; {occupancy:.1%} of the warps that an SM can hold are there"
    if (eligible := facts.counters["eligible_warps"]) is not None:
        words += f", {eligible:.2f} of a scheduler's ready to issue"
    numbers = {f"{name}_share": share for name, share in shares.items()}
    status: Status = "supported" if shares[busiest] < BOUND else "ruled out"
    return Hypothesis(key, title, status, words, ("counters",), numbers)


def _occupancy_words(facts: Facts) -> str:
    resident, blocks, sms = facts.residency(), facts.blocks, facts.sm_count
    if resident is None or blocks is None or not sms or facts.threads is None or not resident.blocks:
        return ""
    on_one = min(resident.blocks, -(-blocks // sms))
    return f"; {on_one * -(-facts.threads // 32)} of {resident.max_warps} warps on an SM in use"


def _said(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))
