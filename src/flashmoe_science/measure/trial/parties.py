"""Who takes part in a trial beside this process: the candidate's own, those without it, the oracle; and how each may fail."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flashmoe_science.measure.trial.warden import Answers, Died, Failed, Ward

HOST, REFEREE = "flashmoe_science.measure.trial.host", "flashmoe_science.measure.trial.referee"


_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,100}")
_TEXTS = ("problems", "distributions", "variants")


def introduced(said: Mapping[str, Any]) -> dict[str, Any]:
    """What a candidate's process says of the candidate and its contract, when both were loaded.

    Raises:
        ValueError: what no record could hold, or nobody could name on a command line.
    """
    for name in _TEXTS:
        if not isinstance(said.get(name), list) or not all(isinstance(one, str) for one in said[name]):
            raise ValueError(f"{name} of its contract is {repr(said.get(name))[:200]}; it must be texts")
    for rival in said["rivals"]:
        if not isinstance(rival, str) or not _NAME.fullmatch(rival):
            raise ValueError(f"a rival of its contract is called {rival!r}; a name is letters, digits and any of . + - _")
    return dict(said)


class Tampered(Exception):
    """It replaced something that the clocks or the checks rest on."""


class ContractFailed(Exception):
    """The contract's own code failed, which is not the candidate's fault."""


class Oracle:
    """The referee, wherever it runs; what goes wrong in it is the contract's."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        try:
            return self._answers.ask(do, **what)
        except (Failed, Died) as error:
            raise ContractFailed(f"its contract failed ({do}): {error}") from error


class Watched:
    """A candidate's process. An answer that shows it tampering raises; settings that it left changed are collected."""

    def __init__(self, ward: Ward) -> None:
        self.ward = ward
        self.folder = ward.folder
        self.settings: list[str] = []

    @property
    def last_wall_ns(self) -> int:
        return self.ward.last_wall_ns

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        said = self.ward.ask(do, **what)
        if "replaced" in said:
            raise Tampered(f"it replaced {', '.join(map(str, said['replaced'][:4]))}, which the clocks and checks rest on")
        self.settings += [str(one) for one in said.get("settings", [])]
        return said


class CleanRoom:
    """Processes without a candidate, where rivals show what they can do: one for each contract, started when it is needed."""

    def __init__(self, watchdog_s: float) -> None:
        self._watchdog_s = watchdog_s
        self._rooms: dict[str, Ward] = {}

    def get(self, contract: str) -> Ward:
        """The process for a contract: a built-in one's name, or the candidate that names its own. Raises Failed, Died."""
        room = self._rooms.get(contract)
        if room is None or not room.alive:
            room = self._rooms[contract] = Ward(HOST, self._watchdog_s)
            room.ask("open", spec=None, contract=contract)
        return room

    def close(self) -> None:
        for room in self._rooms.values():
            room.close()
