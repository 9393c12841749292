"""The exit codes of the command ``flashmoe``: ``flashmoe --help`` prints this list, and every command ends with one of them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended; ``word`` begins the line that reports it."""

    GOOD = 0
    WRONG = 1
    COULD_NOT_RUN = 2
    NO_NUMBER = 3
    INTERRUPTED = 130  # 128 + SIGINT, as shells report it
    NOT_READ = 141  # 128 + SIGPIPE

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", " ")


MEANINGS = {
    ExitCode.GOOD: "right, and every number can be believed, also a slower one; every claim holds; nothing regressed",
    ExitCode.WRONG: "a kernel is wrong, crashes or does not fit; a claim fails; a kept ratio regressed",
    ExitCode.COULD_NOT_RUN: "the input is wrong, or nothing of it can be checked here",
    ExitCode.NO_NUMBER: "nothing is wrong, but a number was refused, a promise broken, or there is no number at all",
    ExitCode.INTERRUPTED: "by the user; the rows so far are kept",
    ExitCode.NOT_READ: "what read the output, such as head, had enough",
}


def worst(codes: Iterable[ExitCode]) -> ExitCode:
    """The code of a whole, by the codes of its parts: 1, then 2, then 3, then 0."""
    return min(codes, key=lambda code: (code == ExitCode.GOOD, code), default=ExitCode.GOOD)
