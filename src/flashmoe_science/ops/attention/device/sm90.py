"""What a warp-specialised program of sm_90 has: rows, threads, registers of its warpgroups, shared memory; its window."""

from __future__ import annotations

from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.problem import AttentionProblem

ROWS = 64  # query rows of a consumer: the M of a warpgroup's matrix instruction
PRODUCER_REGISTERS = 24  # the fewest that a warpgroup may keep
PAGES_REGISTERS = 40  # of a producer's thread that keeps the numbers of a tile's pages
FAR = 2**28  # keys: a window that hides nothing; two of them and a position still fit 32 bits
SHARED_BYTES = 226 << 10  # for tiles: a block may have 227 KB, and its barriers take little of the last one


def threads(config: Config) -> int:
    """Threads of a program: its consumers' and its producer's warpgroups."""
    return 128 * (config["consumers"] + 1)


def registers(config: Config) -> int:
    """Registers a thread at launch: what the wanted number of resident blocks leaves, in steps of 8."""
    return 65536 // (config["occupancy"] * threads(config)) // 8 * 8


def producer_registers(one_copy: bool) -> int:
    """Registers that a producer's thread keeps; more where a tile of keys is not one copy but several, of pages."""
    return PRODUCER_REGISTERS if one_copy else PAGES_REGISTERS


def consumer_registers(config: Config, producer: int = PRODUCER_REGISTERS) -> int:
    """Registers of a consumer's thread once the producer's warpgroup has given up its own but ``producer`` a thread."""
    consumers = config["consumers"]
    return (registers(config) * (consumers + 1) - producer) // consumers // 8 * 8


def window_of(problem: AttentionProblem) -> tuple[int | None, int | None]:
    """The keys before a row's own that it sees, and those after it; None where no window limits them. A window's right edge is
    the diagonal of a causal mask, further right."""
    left, right = problem.features.window_left, problem.features.window_right
    return None if left is None else min(left, FAR), None if right is None else min(right, FAR)
