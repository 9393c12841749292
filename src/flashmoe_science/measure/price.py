"""What the machine costs an hour, where its user says so: no price is made up."""

from __future__ import annotations

import math
import os

_MOST = 1_000_000
PRICE_VARIABLE = "FLASHMOE_PRICE_PER_HOUR"


def price_per_hour() -> float | None:
    """USD an hour, from the environment; None where it holds none.

    Raises:
        ValueError: the variable is no number of USD an hour.
    """
    text = os.environ.get(PRICE_VARIABLE, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return checked_price(PRICE_VARIABLE, value, text)


def checked_price(name: str, price: float, as_given: object) -> float:
    """The price, where it is one. Raises ValueError, in one line, where it is not."""
    if not 0 <= price <= _MOST:
        raise ValueError(f"{name} is {as_given!r}; it must be USD an hour, from 0 to {_MOST:,}")
    return price


def set_price(price: float | None) -> None:
    """Make a price that was given on the command line the one of this process and of those it starts."""
    if price is not None:
        os.environ[PRICE_VARIABLE] = repr(checked_price("--price", price, price))
