"""What a user writes for a budget, in seconds: ``90s``, ``5m``, ``1.5h``, ``2usd``; and the price of an hour of the machine."""

from __future__ import annotations

import math
import os
import re

PRICE_VARIABLE = "FLASHMOE_PRICE_PER_HOUR"
_MOST_PRICE = 1_000_000
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BUDGET = re.compile(r"(?P<dollar>\$)?(?P<number>[0-9]*\.?[0-9]+)\s*(?P<unit>s|m|min|h|usd)?", re.IGNORECASE)


def seconds_of_budget(text: str, price: float | None) -> float:
    """Seconds that a budget lasts: as it says, or as its money buys of a machine at ``price`` USD an hour.

    Raises:
        ValueError: words that are no budget, nothing at all, or money where no price is given.
    """
    match = _BUDGET.fullmatch(text.strip())
    unit = (match["unit"] or "").lower() if match else ""
    if match is None or (match["dollar"] and unit):
        raise ValueError(f"--budget is {text!r}; it must be seconds (600), a duration (90s, 5m, 1.5h) or money (2usd, '$2')")
    amount = float(match["number"])
    if not 0 < amount < math.inf:
        raise ValueError(f"--budget is {text!r}; it must be more than 0")
    if not (match["dollar"] or unit == "usd"):
        return amount * _UNITS[unit]
    if not price:
        raise ValueError(f"--budget is {text!r}, which needs a price above 0: set {PRICE_VARIABLE} to USD an hour")
    return amount / price * 3600


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
