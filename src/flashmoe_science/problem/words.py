"""What the text forms of all problems share: their words, how they are read, and how a wrong one is refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Literal, get_args

Dtype = Literal["fp16", "bf16", "fp32"]

DTYPE_BYTES: dict[str, int] = {"fp16": 2, "bf16": 2, "fp32": 4}
MAX_EXTENT = 2**31 - 1  # a size that a kernel's 32-bit row counter can hold
_MOST_DIGITS = 30  # Python refuses to read integers of thousands
_SIZE = re.compile(r"([a-z][a-z_]*)([0-9]+)")


class ProblemError(ValueError):
    """A problem that cannot exist, said in one line: the field, what it was and what is allowed."""


def check_extent(field: str, value: object, least: int = 1, most: int = MAX_EXTENT) -> None:
    """Refuse a size that is not an integer in range."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ProblemError(f"{field} is {value!r}; it must be an integer from {least} to {most}")


def check_word(field: str, value: object, allowed: Collection[str]) -> None:
    """Refuse a word that is not one of those allowed."""
    if value not in allowed:
        raise ProblemError(f"{field} is {value!r}; it must be one of {', '.join(allowed)}")


def check_dtype(value: object) -> None:
    check_word("dtype", value, get_args(Dtype))


def read_words(
    text: str, grammar: str, sizes: Collection[str] | None, flags: Mapping[str, Collection[str]]
) -> tuple[dict[str, int], dict[str, str]]:
    """Read the words after the first as sizes (a name and an integer, ``q4096``) and flags (``causal``).

    ``sizes`` are the names allowed, None for any; ``flags`` maps a field to the words that it may be. A word that could be
    either is a flag.

    Raises:
        ProblemError: a word is not understood or stands twice; the message gives the grammar.
    """
    found: dict[str, int] = {}
    said: dict[str, str] = {}
    for word in text.split()[1:]:
        field = next((field for field, allowed in flags.items() if word in allowed), None)
        if field is not None:
            if field in said:
                raise ProblemError(f"problem {text!r} gives the {field} twice ({said[field]!r} and {word!r})")
            said[field] = word
            continue
        size = _SIZE.fullmatch(word)
        if size is None or (sizes is not None and size[1] not in sizes):
            raise ProblemError(f"problem {text!r} has the unknown word {word!r}; write: {grammar}")
        if size[1] in found:
            raise ProblemError(f"problem {text!r} gives {size[1]!r} twice")
        if len(size[2]) > _MOST_DIGITS:
            raise ProblemError(f"{size[1]} is a number of {len(size[2])} digits; no size has more than {_MOST_DIGITS}")
        found[size[1]] = int(size[2])
    return found, said


def require(text: str, grammar: str, sizes: Mapping[str, int], needed: Collection[str]) -> None:
    """Refuse a text that lacks a size that has no default."""
    missing = [key for key in needed if key not in sizes]
    if missing:
        raise ProblemError(f"problem {text!r} lacks {', '.join(f'{key}<n>' for key in missing)}; write: {grammar}")
