"""What a producer warp and its consumers share in Gluon: pipelines of stages in shared memory, and a mailbox of tiles of work.

A stage of a pipeline is full once the copies to it have completed, and empty once every consumer has read it. The mailbox has
two slots of shared memory, each of a few numbers, so that the producer is up to two tiles ahead; a tile whose first number is
negative says that there is no more work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

_SLOTS = gl.constexpr(2)


class PipelineState(NamedTuple):
    """A stage of a pipeline, and the phase of its barriers."""

    stage: Any
    phase: Any


class Mailbox(NamedTuple):
    """The numbers of two tiles, [2 * numbers, 1] int32, and the barriers of its slots, [2, 1]."""

    numbers: Any
    full: Any
    empty: Any


@gluon.jit
def first_stage():
    """The PipelineState at which a producer and its consumers begin."""
    return PipelineState(gl.to_tensor(0), gl.to_tensor(0))


@gluon.jit
def advance(state, STAGES: gl.constexpr):
    """The PipelineState of the next stage."""
    stage = state.stage + 1
    wrapped = stage == STAGES
    return PipelineState(gl.where(wrapped, 0, stage), gl.where(wrapped, state.phase ^ 1, state.phase))


@gluon.jit
def make_row(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers [STAGES, 1], each complete after ARRIVALS. Make none that no one waits for: the compiler gives its memory to
    others, and PTX demands that it is invalidated before."""
    row = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(row.index(i), count=ARRIVALS)
    return row


@gluon.jit
def make_barriers(STAGES: gl.constexpr, READERS: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """The barriers of full and of empty stages, [STAGES, 1] each: full after ARRIVALS, empty after READERS. Whoever makes them
    fences before other warps start."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def make_mailbox(NUMBERS: gl.constexpr, CONSUMERS: gl.constexpr):
    """A Mailbox of ``NUMBERS`` numbers a tile. Whoever makes it fences before other warps start."""
    numbers = gl.allocate_shared_memory(gl.int32, [_SLOTS * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = make_barriers(_SLOTS, CONSUMERS)
    return Mailbox(numbers, full, empty)


@gluon.jit
def publish(mailbox, iteration, numbers, layout: gl.constexpr):
    """Write the numbers of the ``iteration``-th tile for the consumers."""
    NUMBERS: gl.constexpr = mailbox.numbers.shape[0] // _SLOTS
    slot = iteration % _SLOTS
    mbarrier.wait(mailbox.empty.index(slot), (iteration // _SLOTS & 1) ^ 1)
    for n in gl.static_range(NUMBERS):
        mailbox.numbers.index(NUMBERS * slot + n).store(gl.full([1], numbers[n], gl.int32, layout))
    mbarrier.arrive(mailbox.full.index(slot))


@gluon.jit
def receive(mailbox, iteration, layout: gl.constexpr):
    """The numbers of the ``iteration``-th tile, once the producer has published them."""
    NUMBERS: gl.constexpr = mailbox.numbers.shape[0] // _SLOTS
    slot = iteration % _SLOTS
    mbarrier.wait(mailbox.full.index(slot), iteration // _SLOTS & 1)
    numbers = (gl.max(mailbox.numbers.index(NUMBERS * slot).load(layout), 0),)
    for n in gl.static_range(1, NUMBERS):
        numbers = numbers + (gl.max(mailbox.numbers.index(NUMBERS * slot + n).load(layout), 0),)  # type: ignore[assignment]
    mbarrier.arrive(mailbox.empty.index(slot))
    return numbers
