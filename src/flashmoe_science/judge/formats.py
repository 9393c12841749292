"""Numbers as text for reports: units, significant digits, plurals."""

from __future__ import annotations


def microseconds(nanoseconds: float | None) -> str:
    """Nanoseconds as microseconds, to ten nanoseconds, or below one microsecond to three significant digits."""
    if nanoseconds is None:
        return ""
    return f"{nanoseconds / 1e3:.2f}" if nanoseconds >= 1000 else f"{nanoseconds / 1e3:.3g}"


def significant(value: float | None) -> str:
    """Three significant digits, without an exponent where possible: 0.0123, 4.57, 612."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def ratio(value: float | None) -> str:
    """A ratio to three decimals; very small and very large ones to three significant digits."""
    if value is None:
        return ""
    if value == 0 or 0.1 <= value < 1000:
        return f"{value:.3f}"
    return f"{value:.3g}" if value < 0.1 or value >= 1e9 else f"{value:.0f}"


def within(low: float | None, high: float | None) -> str:
    """An interval: "1.193 to 1.201"."""
    return "" if low is None else f"{ratio(low)} to {ratio(high)}"


def with_interval(middle: float, low: float, high: float) -> str:
    """A ratio with its interval: "1.198x [1.193, 1.201]"."""
    return f"{ratio(middle)}x [{ratio(low)}, {ratio(high)}]"


def times(value: float | None) -> str:
    """A ratio as a speed-up: "1.70x", "0.093x", "12.5x", "310x"."""
    return "" if value is None else f"{value:.2f}x" if 0.1 <= value < 10 else f"{significant(value)}x"


def duration(seconds: float) -> str:
    """ "8.2 s", "3 min 12 s" or "1 h 05 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def count(number: int, what: str) -> str:
    """ "1 problem" or "2 problems"."""
    return f"{number} {what}{'s' * (number != 1)}"
