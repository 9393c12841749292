"""One call repeated on the same tensors: whether its results keep their bits, and whether earlier results stay as they were."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from flashmoe_science.measure.inputs import in_parts, kind_of, same_bits

_LONGEST_S = 15.0  # of one message: a kernel that takes seconds is slow, and does not hang
_MORE = 256  # repetitions at the most, where they take little time
_DRIFT = 3  # outputs with other bits, each as far off as the one before or farther: chance would not do that
_HELD_BYTES = 2**28  # of earlier outputs that are kept, as a caller may keep them

_monotonic = time.monotonic

Outputs = Sequence[torch.Tensor]


class Repeats:
    """The outputs of repeated calls. ``worst`` is the output farthest from the first; empty where all have its bits."""

    def __init__(self, first: Outputs) -> None:
        self._right = [one.detach().clone() for one in first]
        self._equal = [first]  # those with the first one's bits, which have to keep them
        self._bytes = max(1, sum(one.nbytes for one in first))
        self._others: list[tuple[int, float]] = []  # of answers with other bits, the call and how far off it is
        self.worst: Outputs = ()

    def add(self, index: int, outputs: Outputs) -> None:
        """Add the outputs of repetition ``index``."""
        if len(outputs) == len(self._right) and all(map(same_bits, self._right, outputs)):
            if (len(self._equal) + 1) * self._bytes <= _HELD_BYTES:
                self._equal.append(outputs)
            return
        away = _distance(self._right, outputs)
        if away > max((other for _, other in self._others), default=-1.0):
            self.worst = [one.detach().clone() for one in outputs]
        self._others.append((index, away))

    def facts(self) -> dict[str, Any]:
        """Whether kept outputs were written to later, whether two of them share memory, and whether the error grew from output
        to output."""
        # Results of one call may be parts of one tensor, as the gradients of a fused projection.
        spans = sorted(place for outputs in self._equal for place in {span(one) for one in outputs if one.numel()})
        away = [distance for _, distance in self._others]
        drifts = len(away) >= _DRIFT and all(a <= b for a, b in pairwise((0.0, *away))) and away[-1] > 2.0 * away[0]
        return {
            "differs_at": self._others[0][0] if away else None,
            "worst_at": self._others[away.index(max(away))][0] if away else None,
            "drifts": drifts,
            "changed_later": not all(all(map(same_bits, self._right, outputs)) for outputs in self._equal),
            "shared": any(second < last for (_, last), (second, _) in pairwise(spans)),
        }


def repeated(
    call: Callable[[], Sequence[Any]], times: int, more_s: float, wait: Callable[[], None]
) -> tuple[Repeats, dict[str, Any]]:
    """Call once, and then ``times`` times or for as long as a message may take; more often within ``more_s`` seconds. Returns
    the outputs, and the facts: ``Repeats.facts``, how many ``times`` it was called again, and the kind (``odd``) of an output
    that was no tensor, which ended it."""
    outputs = call()
    seen, index, odd = Repeats(outputs), 0, None
    began = _monotonic()
    while index < max(times, _MORE):
        passed = _monotonic() - began
        if index and passed > (_LONGEST_S if index < times else more_s):
            break
        index += 1
        outputs = call()
        odd = next((kind for one in outputs if (kind := kind_of(one)) != "Tensor"), None)
        if odd is not None:
            break
        seen.add(index, outputs)
    wait()
    return seen, {"times": index, "odd": odd, **seen.facts()}


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's storage, first and past the last."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _distance(right: Outputs, outputs: Outputs) -> float:
    """The largest difference; infinite where the two cannot be compared."""
    if [one.shape for one in right] != [one.shape for one in outputs]:
        return math.inf
    parts = (part for pair in zip(right, outputs, strict=True) if pair[0].numel() for part in in_parts(*pair))
    away = ((one.double() - other.double()).abs().nan_to_num(nan=math.inf).max() for one, other in parts)
    return max(map(float, away), default=0.0)
