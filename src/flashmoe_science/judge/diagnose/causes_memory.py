"""Causes in memory: by counters where they were read, else by bounds: the least that a problem must move, and the most that
the blocks of its launch can ask for. Each function returns a Hypothesis, or None where the cause has no meaning.
"""

from __future__ import annotations

from flashmoe_science.judge.diagnose.facts import Facts
from flashmoe_science.judge.diagnose.hypothesis import (
    BOUND,
    NO_COUNTERS,
    Change,
    Hypothesis,
    by_share,
    ruled_out,
    untested,
)

_MOST_ROWS = 256  # a block with more has several tiles, walks the keys for each, and what it reads is not known
_SECTOR = 32  # bytes
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
    most = dram_share_at_most(facts)
    if most is not None and most < BOUND:
        return ruled_out(f"{words}; {_most_traffic(facts)[1]}, at most {most:.1%} of it")
    return untested(f"{words}; to know what it reads again takes counters")


def l2_bound(facts: Facts) -> Hypothesis | None:
    counted = facts.counter("l2")
    return NO_COUNTERS if counted is None else by_share(counted, "of the L2's peak throughput is in use")


def uncoalesced(facts: Facts) -> Hypothesis | None:
    used = facts.counter("bytes_per_sector")
    if used is None:
        return NO_COUNTERS
    words = f"threads use {used:.1f} of the {_SECTOR} bytes of each sector they load"
    if (asked := facts.counter("sectors_per_request")) is not None:
        words += f", {asked:.1f} sectors a request"
    sectors, through_l2 = facts.counter("global_sectors"), facts.counter("l2_bytes")
    few = False
    if sectors is not None and through_l2:
        share = sectors * _SECTOR / through_l2
        words += f"; such loads ask for {share:.3g} times what passes the L2"  # what the L1 serves never gets to the L2
        few = share < _FEW_GLOBAL
    if few or used >= 0.75 * _SECTOR:
        return ruled_out(words)
    busy = max(facts.counter("l2") or 0.0, facts.counter("dram") or 0.0)
    part = max(busy, facts.waiting("long_scoreboard", "lg_throttle"))
    how = f"memory is in use or waited for {part:.0%} of the time; {used:.0f} of each {_SECTOR} bytes are used"
    change = Change("load 16 bytes a thread, neighbours side by side", part, _SECTOR / max(used, 1.0), how)
    return Hypothesis("supported", words, change)


def dram_share_at_most(facts: Facts) -> float | None:
    """The most of the DRAM's bandwidth that a GPU's kernel may use; None where that is not known."""
    most, _ = _most_traffic(facts)
    if most is None or "dram" not in facts.ceilings or not facts.time_ns:
        return None
    return most / facts.time_ns * 1e9 / facts.ceilings["dram"].value


def _most_traffic(facts: Facts) -> tuple[float | None, str]:
    """The most bytes that may cross DRAM, and why no more; None where that is not known."""
    least = facts.problem.min_bytes()
    if _fits_l2(facts, least):
        return least, "all of it fits the L2, which serves what is read again"
    read = _read_by_blocks(facts)
    return (None, "") if read is None else (read, "blocks that walk their keys once ask for no more")


def _read_by_blocks(facts: Facts) -> float | None:
    """Bytes that an attention's blocks load if each reads all keys and values of its head, beside Q and the output once."""
    walk, rows = facts.problem.walk(), facts.rows_per_block
    if walk is None or rows is None or facts.blocks is None or not 1 <= rows <= _MOST_ROWS:
        return None
    return (facts.blocks * walk.steps + walk.rows) * walk.step_bytes


def _fits_l2(facts: Facts, count: int) -> bool:
    return facts.gpu is not None and 2 * count <= facts.gpu.l2_bytes
