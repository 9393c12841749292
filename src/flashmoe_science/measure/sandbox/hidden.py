"""Work that is done where no clock runs: put off until somebody looks at an answer, or done ahead, while values are changed.

However a function does it, by a replaced function, a mode of PyTorch's or an operator of its own, it takes time somewhere. What
reading a rival's answers takes, and changing values without the function, is the baseline. The least of a few times is
compared: whatever else the machine does only adds to a time.
"""

from __future__ import annotations

from flashmoe_science.measure.channel import Channel
from flashmoe_science.measure.samplers import RemoteSampler, random_scale

_ROUNDS = 7
_MORE = 1.25  # of what it takes by itself: less may be chance
_FASTER = 0.7  # of the rival's time: who takes more has hidden nothing that is worth it
_OF_LOOK = 0.3  # of what a rival's calls take that would give as many answers
_OF_CHANGE = 0.25  # of what a rival's calls take, one on every input set


def put_off(own: RemoteSampler, rival: RemoteSampler, own_ns: float, rival_ns: float) -> str | None:
    """Why a function's answers are made when they are read; None where nothing speaks for it, and on a graph's clock, whose
    replays put nothing off. ``own_ns`` and ``rival_ns`` are the least that a call takes."""
    if own_ns > _FASTER * rival_ns or own.clock != "eager":
        return None
    own, rival = own.again(), rival.again()
    looks = [(_looked(own), _looked(rival)) for _ in range(_ROUNDS)][1:]  # the first tells how many can be kept
    (mine, kept), (theirs, of_rival) = min(one for one, _ in looks), min(one for _, one in looks)
    alike = theirs * max(1.0, kept / max(1, of_rival))
    if mine <= _MORE * alike or mine - alike <= _OF_LOOK * kept * rival_ns:
        return None
    return (
        f"it puts work off until somebody looks: reading {kept} of its answers takes {mine / 1e6:.2f} ms, "
        f"of its rival's {alike / 1e6:.2f} ms"
    )


def _looked(one: RemoteSampler) -> tuple[int, int]:
    """Nanoseconds that reading answers of a timed sample takes, by this process's clock, and how many they were."""
    one.sample()
    kept = one.read()
    return one.channel.last_wall_ns, kept


def done_ahead(beside: Channel, alone: Channel, own_ns: float, rival_ns: float, sets: int) -> str | None:
    """Why a function works while new values are put in place; None where nothing speaks for it. ``alone`` is the process
    without it, with as many input sets."""
    if own_ns > _FASTER * rival_ns:
        return None
    changes = [(_changed(beside), _changed(alone)) for _ in range(_ROUNDS)]
    with_it, without = min(one for one, _ in changes), min(one for _, one in changes)
    if with_it <= _MORE * without or with_it - without <= _OF_CHANGE * sets * rival_ns:
        return None
    return (
        f"it works while no clock runs: new values in its {sets} input sets take {with_it / 1e6:.2f} ms, "
        f"without it {without / 1e6:.2f} ms"
    )


def _changed(channel: Channel) -> int:
    channel.ask("refresh", scale=random_scale())
    return channel.last_wall_ns
