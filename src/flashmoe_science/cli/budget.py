"""What a user writes for a budget or a price, in numbers: ``90s``, ``5m``, ``1.5h``, ``2usd``, ``$2``."""

from __future__ import annotations

import math
import re

from flashmoe_science.measure.price import PRICE_VARIABLE, checked_price, price_per_hour

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
    return price_per_hour() if price is None else checked_price("--price", price, price)
