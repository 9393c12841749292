"""Foreign text made safe to show, and values for error messages. A terminal obeys control characters, and a reader trusts the
order of letters.

Kernel names, notes and claims come from files that anyone may have written. An escape sequence in one of them could hide the
next line or colour a failure green; a mark that turns the writing direction could make one name look like another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

# C0 but for the tab and the newline, DEL, C1, and Unicode's marks that break lines or turn the direction.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""The text with control characters written out, such as ``\x1b``."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """The same on one line: a name with a line break in it could pass for a line of ours."""
    return re.sub("[\t\n]+", " ", printable(text))


def printable_values(value: Any, show: Callable[[str], str] = printable) -> Any:
    """The same for every text in a JSON or TOML value, keys included."""
    if isinstance(value, str):
        return show(value)
    if isinstance(value, list):
        return [printable_values(one, show) for one in value]
    if isinstance(value, dict):
        return {one_line(key): printable_values(one, show) for key, one in value.items()}
    return value


def shown(value: object) -> str:
    """A short, one-line text of any value that a user may have passed by mistake."""
    if isinstance(shape := getattr(value, "shape", None), tuple):  # a tensor's text is long, and waits for its GPU
        return f"a {type(value).__name__.lower()} of shape {tuple(shape)}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"
