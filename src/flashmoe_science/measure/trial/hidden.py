"""Work that is done where no clock runs: put off until somebody looks at an answer, or done ahead, while values are changed.

However a candidate does it, by a replaced function, a mode of PyTorch's or an operator of its own, it takes its time somewhere;
and that a rival's answers are read, and values changed without the candidate, tells what both take by themselves. The least of
a few times is compared: whatever else the machine does only adds to one.
"""

from __future__ import annotations

from flashmoe_science.measure.trial.duel import Remote, random_scale
from flashmoe_science.measure.trial.warden import Child

_ROUNDS = 7
_FASTER = 0.7  # of the rival's time: who takes more has hidden nothing that is worth it
_OF_LOOK = 0.3  # of what a rival's calls take that would give as many answers
_OF_CHANGE = 0.25  # of what a rival's calls take, one on every input set


def put_off(own: Remote, rival: Remote, own_ns: float, rival_ns: float, path: str) -> str | None:
    """Why a candidate's answers are made when they are read; None where nothing speaks for it, and on a graph's clock, whose
    replays put nothing off. ``own_ns`` and ``rival_ns`` are the least that a call takes, ``path`` a file for answers."""
    if own_ns > _FASTER * rival_ns or own.clock != "eager":
        return None
    own, rival = own.again(), rival.again()
    looks = [(_looked(own, path), _looked(rival, path)) for _ in range(_ROUNDS)]
    mine, theirs = min(one for one, _ in looks), min(one for _, one in looks)
    alike = theirs * max(1.0, own.kept / max(1, rival.kept))
    if mine - alike <= _OF_LOOK * own.kept * rival_ns:
        return None
    return (
        f"it puts work off until somebody looks: reading {own.kept} of its answers takes {mine / 1e6:.2f} ms, "
        f"of its rival's {alike / 1e6:.2f} ms"
    )


def _looked(one: Remote, path: str) -> int:
    """Nanoseconds that reading answers of a timed sample takes, by this process's clock."""
    one.sample()
    one.shown(path)
    return one.child.last_wall_ns


def done_ahead(host: Child, clean: Child, own_ns: float, rival_ns: float, sets: int) -> str | None:
    """Why a candidate works while new values are put in place; None where nothing speaks for it. ``clean`` is the process
    without it, with as many input sets."""
    if own_ns > _FASTER * rival_ns:
        return None
    changes = [(_changed(host), _changed(clean)) for _ in range(_ROUNDS)]
    with_it, without = min(one for one, _ in changes), min(one for _, one in changes)
    if with_it - without <= _OF_CHANGE * sets * rival_ns:
        return None
    return (
        f"it works while no clock runs: new values in its {sets} input sets take {with_it / 1e6:.2f} ms, "
        f"without it {without / 1e6:.2f} ms"
    )


def _changed(child: Child) -> int:
    child.ask("refresh", scale=random_scale())
    return child.last_wall_ns
