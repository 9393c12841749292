"""The child that a user's function lives in, and the oracle beside it: who is asked, and whose fault it is when it fails."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from flashmoe_science.measure.channel import Child, Died, Failed, InProcess
from flashmoe_science.measure.handover import Files
from flashmoe_science.measure.oracle import MODULE as ORACLE
from flashmoe_science.measure.oracle import Oracle
from flashmoe_science.measure.worker.worker import MODULE as WORKER
from flashmoe_science.operations import is_operation

_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,100}")
_TEXTS = ("problems", "sweep", "distributions", "variants", "sweep_variants")


class Unusable(Exception):
    """A function that cannot be measured at all; the message says why."""


class Tampered(Exception):
    """It replaced something that the clocks or the checks rest on."""


class ContractFailed(Exception):
    """The contract's own code failed, which is not the function's fault."""


class FunctionChild:
    """The child that a function lives in. An answer that shows it tampering raises; settings that it left changed are collected
    in ``settings``, and what else it left behind in ``remarks``."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.folder = child.folder
        self.settings: list[str] = []
        self.remarks: list[str] = []

    @property
    def last_wall_ns(self) -> int:
        return self.child.last_wall_ns

    @property
    def alive(self) -> bool:
        return self.child.alive

    def close(self) -> None:
        self.child.close()

    def take_settings(self) -> list[str]:
        """The settings that were left changed since the last time, once each."""
        taken, self.settings = list(dict.fromkeys(self.settings)), []
        return taken

    def take_remarks(self) -> list[str]:
        """What else was left behind since the last time, once each."""
        taken, self.remarks = list(dict.fromkeys(self.remarks)), []
        return taken

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        answer = self.child.ask(do, **what)
        if "replaced" in answer:
            names = ", ".join(map(str, answer["replaced"][:4]))
            raise Tampered(f"it replaced {names}, which the clocks and checks rest on")
        self.settings += [str(one) for one in answer.get("settings", [])]
        self.remarks += [str(one) for one in answer.get("remarks", [])]
        return answer


class ContractOracle:
    """The oracle, in this process or another; what goes wrong in it is the contract's fault."""

    def __init__(self, channel: InProcess | Child) -> None:
        self._channel = channel

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        try:
            return self._channel.ask(do, **what)
        except (Failed, Died) as error:
            raise ContractFailed(f"its contract failed ({do}): {error}") from error


class FunctionHome:
    """A function, loaded in a child, and in a new one whenever the last has ended."""

    def __init__(self, spec: str, watchdog_s: float) -> None:
        self.spec, self._watchdog_s = spec, watchdog_s
        self.imported: list[str] = []  # settings that loading it changed, which are set back
        self._now: FunctionChild | None = None

    def open(self) -> dict[str, Any]:
        """Load it; what its child says of it and its contract. Raises Unusable, Tampered."""
        try:
            return self._load()[1]
        except (Failed, Died) as error:
            raise Unusable(f"it could not be loaded: {error}") from error

    def child(self) -> FunctionChild:
        """The child that is alive, or a new one. Raises Failed, Died, Tampered."""
        return self._now if self._now is not None and self._now.alive else self._load()[0]

    def _load(self) -> tuple[FunctionChild, dict[str, Any]]:
        self.close()
        child = self._now = FunctionChild(Child(WORKER, self._watchdog_s))
        answer = child.ask("open", spec=self.spec, contract="")
        try:
            opened = introduced(answer)
        except ValueError as error:
            raise Failed(str(error)) from error
        self.imported = child.take_settings()
        child.take_remarks()  # of loading, not of a call
        return child, opened

    def close(self) -> None:
        if self._now is not None:
            self._now.close()


@contextmanager
def oracle_of(opened: Mapping[str, Any], spec: str, device: torch.device, watchdog_s: float) -> Iterator[ContractOracle]:
    """The oracle of a function's contract: in this process for one of the package, in a child for anybody else's code."""
    known = is_operation(opened["contract"]) and bool(opened["built_in"])
    channel = InProcess(Oracle(Files(), device).commands) if known else Child(ORACLE, watchdog_s)
    try:
        oracle = ContractOracle(channel)
        oracle.ask("open", contract=opened["contract"] if known else spec)
        yield oracle
    finally:
        if isinstance(channel, Child):
            channel.close()


def introduced(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What a child says of the function and its contract, when both were loaded.

    Raises:
        ValueError: what no record could hold, or nobody could name on a command line.
    """
    for name in _TEXTS:
        if not isinstance(answer.get(name), list) or not all(isinstance(one, str) for one in answer[name]):
            raise ValueError(f"{name} of its contract is {repr(answer.get(name))[:200]}; it must be texts")
    for rival in answer["rivals"]:
        if not isinstance(rival, str) or not _NAME.fullmatch(rival):
            raise ValueError(f"a rival of its contract is called {rival!r}; a name is letters, digits and any of . + - _")
    return dict(answer)
