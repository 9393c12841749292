"""What a user writes for a budget or a price, in numbers: ``90s``, ``5m``, ``1.5h``, ``2usd``, ``$2``."""

from __future__ import annotations

import math
import os
import re

PRICE_VARIABLE = "FLASHMOE_PRICE_PER_HOUR"
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BUDGET = re.compile(r"(?P<dollar>\$)?(?P<number>[0-9]*\.?[0-9]+)\s*(?P<unit>s|m|min|h|usd)?", re.IGNORECASE)


def seconds_of_budget(text: str, price_per_hour: float | None) -> float:
    """Seconds that a budget lasts: as it says, or as its money buys of a machine at ``price_per_hour`` USD.

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
    if price_per_hour is None:
        raise ValueError(f"--budget is {text!r}, which needs a price: give --price USD_PER_HOUR or set {PRICE_VARIABLE}")
    if price_per_hour == 0:
        raise ValueError(f"--budget is {text!r}, and at a price of 0 money sets no limit; give seconds")
    return amount / price_per_hour * 3600


def price_or_default(price: float | None) -> float | None:
    """The price given, else the environment's; None where there is neither, for no price is made up.

    Raises:
        ValueError: one that is no number of USD an hour.
    """
    if price is not None:
        return _checked("--price", price, price)
    text = os.environ.get(PRICE_VARIABLE, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return _checked(PRICE_VARIABLE, value, text)


def _checked(name: str, price: float, as_given: object) -> float:
    if not 0 <= price < math.inf:
        raise ValueError(f"{name} is {as_given!r}; it must be USD an hour, 0 or more")
    return price
