"""The bounded dictionary behind every cache of plans, launches and builds."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_CALLS, MAX_PLANS = 1024, 256


class Cache(OrderedDict[K, V]):
    """A dictionary that drops its oldest entry when it is full. Dropping all would make one call wait, and later ones for their
    entries; an order of use would have to be kept at each call."""

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self.max_entries = max_entries

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.max_entries:
            self.popitem(last=False)  # one step in C, which no other thread can interrupt
        super().__setitem__(key, value)
