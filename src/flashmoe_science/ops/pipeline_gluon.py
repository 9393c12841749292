"""What a producer and its consumers share in the Gluon kernels: rings of stages, and the board that tells of the next tile.

The board has two slots of shared memory, each of a few numbers. The barriers of a slot say that it was written and that every
consumer has read it, so that the producer is up to two tiles ahead. A tile whose first number is negative says that there is
none.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

_SLOTS = gl.constexpr(2)


@gluon.jit
def first_stage():
    """The first stage of a ring, and the phase of its barriers."""
    return gl.to_tensor(0), gl.to_tensor(0)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring, and the phase of its barriers."""
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def make_board(NUMBERS: gl.constexpr, CONSUMERS: gl.constexpr):
    """A board of so many numbers a tile. Its barriers are initialised; whoever makes it fences before other warps start."""
    values = gl.allocate_shared_memory(gl.int32, [_SLOTS * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    given = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_SLOTS):
        mbarrier.init(given.index(i), count=1)
        mbarrier.init(read.index(i), count=CONSUMERS)
    return values, given, read


@gluon.jit
def give(board, turn, numbers, layout: gl.constexpr):
    """Tell the consumers of the ``turn``-th tile."""
    values, given, read = board
    NUMBERS: gl.constexpr = values.shape[0] // _SLOTS
    slot = turn % _SLOTS
    mbarrier.wait(read.index(slot), (turn // _SLOTS & 1) ^ 1)
    for n in gl.static_range(NUMBERS):
        values.index(NUMBERS * slot + n).store(gl.full([1], numbers[n], gl.int32, layout))
    mbarrier.arrive(given.index(slot))


@gluon.jit
def take(board, turn, layout: gl.constexpr):
    """The numbers of the ``turn``-th tile."""
    values, given, read = board
    NUMBERS: gl.constexpr = values.shape[0] // _SLOTS
    slot = turn % _SLOTS
    mbarrier.wait(given.index(slot), turn // _SLOTS & 1)
    numbers = (gl.max(values.index(NUMBERS * slot).load(layout), 0),)
    for n in gl.static_range(1, NUMBERS):
        numbers = numbers + (gl.max(values.index(NUMBERS * slot + n).load(layout), 0),)  # type: ignore[assignment]
    mbarrier.arrive(read.index(slot))
    return numbers
