"""What a user writes for a budget, in seconds: ``90s``, ``5m``, ``1.5h``; and the price of an hour of the machine."""

from __future__ import annotations

import math
import os
import re

PRICE_VARIABLE = "FLASHMOE_PRICE_PER_HOUR"
_MOST_PRICE = 1_000_000
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BUDGET = re.compile(r"([0-9]*\.?[0-9]+)\s*(s|m|min|h|)", re.IGNORECASE)


def seconds_of_budget(text: str) -> float:
    """Seconds that a budget lasts. Raises ValueError: words that are no budget, or nothing at all."""
    match = _BUDGET.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"--budget is {text!r}; it must be seconds (600) or a duration (90s, 5m, 1.5h)")
    amount = float(match[1])
    if not 0 < amount < math.inf:
        raise ValueError(f"--budget is {text!r}; it must be more than 0")
    return amount * _UNITS[match[2].lower()]


def price_per_hour() -> float | None:
    """USD an hour for this machine, from the environment; None where it holds none, for no price is made up.

    Raises:
        ValueError: the variable is no number of USD an hour.
    """
    text = os.environ.get(PRICE_VARIABLE, "").strip()
    if not text:
        return None
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price <= _MOST_PRICE:
        raise ValueError(f"{PRICE_VARIABLE} is {text!r}; it must be USD an hour, from 0 to {_MOST_PRICE:,}")
    return price
