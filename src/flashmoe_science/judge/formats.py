"""Numbers and texts as a reader of a report takes them in: units, digits that count, cells that stay cells."""

from __future__ import annotations


def microseconds(nanoseconds: float | None) -> str:
    """Nanoseconds as microseconds, to ten nanoseconds, or below one microsecond to three digits that count."""
    if nanoseconds is None:
        return ""
    return f"{nanoseconds / 1e3:.2f}" if nanoseconds >= 1000 else f"{nanoseconds / 1e3:.3g}"


def significant(value: float | None, digits: int = 3) -> str:
    """Three digits that count, never in exponent form where it need not be: 0.0123, 4.57, 612."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def ratio(value: float | None) -> str:
    """A ratio to three decimals, or, where those would show little of it or too much, three digits that count."""
    if value is None:
        return ""
    if value == 0 or 0.1 <= value < 1000:
        return f"{value:.3f}"
    return f"{value:.3g}" if value < 0.1 or value >= 1e9 else f"{value:.0f}"


def within(low: float | None, high: float | None) -> str:
    """An interval as a reader says it: "1.193 to 1.201"."""
    return "" if low is None else f"{ratio(low)} to {ratio(high)}"


def with_interval(middle: float, low: float, high: float) -> str:
    """A ratio with its interval: "1.198 [1.193, 1.201]"."""
    return f"{ratio(middle)} [{ratio(low)}, {ratio(high)}]"


def times(ratio: float | None) -> str:
    """A ratio as a reader says it: "1.70x", "0.093x", "12.5x", "310x"."""
    if ratio is None:
        return ""
    return f"{ratio:.2f}x" if 0.1 <= ratio < 10 else f"{significant(ratio)}x"


def duration(seconds: float | None, digits: int = 1) -> str:
    """ "8.2 s" (to so many digits), "3 min 12 s" or "1 h 05 min"."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.{digits}f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def usd(amount: float | None) -> str:
    return "" if amount is None else f"${amount:.4f}" if amount < 0.1 else f"${amount:.2f}"
