"""The child that a user's function lives in, and the oracle beside it: who is asked, and whose fault it is when it fails."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from flashmoe_science.measure.channel import Child, Died, Failed, Home, InProcess
from flashmoe_science.measure.inputs import Files
from flashmoe_science.measure.oracle import MODULE as ORACLE
from flashmoe_science.measure.oracle import Oracle
from flashmoe_science.operations import is_operation

_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,100}")
_TEXTS = ("problems", "sweep", "distributions", "variants", "sweep_variants")


class Unusable(Exception):
    """A function that cannot be measured at all; the message says why."""


class Tampered(Exception):
    """It replaced something that the clocks or the checks rest on."""


class ContractFailed(Exception):
    """The contract's own code failed, which is not the function's fault."""


class FunctionChild(Child):
    """The child that a function lives in. An answer that shows it tampering raises; settings that it left changed are collected
    in ``settings``, and what else it left behind in ``remarks``."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.settings: list[str] = []
        self.remarks: list[str] = []

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        return self.seen(super().ask(do, **what))

    def seen(self, answer: dict[str, Any]) -> dict[str, Any]:
        """An answer, once it was looked at."""
        if "replaced" in answer:
            names = ", ".join(map(str, answer["replaced"][:4]))
            raise Tampered(f"it replaced {names}, which the clocks and checks rest on")
        self.settings += [str(one) for one in answer.get("settings", [])]
        self.remarks += [str(one) for one in answer.get("remarks", [])]
        return answer

    def take(self) -> tuple[list[str], list[str]]:
        """Settings that were left changed and what else was left behind since the last time, once each."""
        taken = list(dict.fromkeys(self.settings)), list(dict.fromkeys(self.remarks))
        self.settings, self.remarks = [], []
        return taken


class ContractOracle:
    """The oracle, in this process or another; what goes wrong in it is the contract's fault."""

    def __init__(self, channel: InProcess | Child) -> None:
        self._channel = channel

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        try:
            return self._channel.ask(do, **what)
        except (Failed, Died) as error:
            raise ContractFailed(f"its contract failed ({do}): {error}") from error


class FunctionHome(Home):
    """A function, loaded in a child, and in a new one whenever the last has ended."""

    kind = FunctionChild

    def __init__(self, spec: str, watchdog_s: float) -> None:
        super().__init__(spec, "", watchdog_s)
        self.imported: list[str] = []  # settings that loading it changed, which are set back

    def open(self) -> dict[str, Any]:
        """Load it; what its child says of it and its contract. Raises Unusable, Tampered."""
        try:
            self.child()
        except (Failed, Died) as error:
            raise Unusable(f"it could not be loaded: {error}") from error
        return self.opened

    def child(self) -> FunctionChild:
        """Raises Failed, Died, Tampered."""
        child = super().child()
        assert isinstance(child, FunctionChild)
        return child

    def loaded(self) -> None:
        try:
            introduced(self.opened)
        except ValueError as error:
            raise Failed(str(error)) from error
        self.imported, _ = self.child().take()  # of loading, not of a call


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


def introduced(answer: Mapping[str, Any]) -> None:
    """Look at what a child says of the function and its contract, when both were loaded.

    Raises:
        ValueError: what no record could hold, or nobody could name on a command line.
    """
    for name in _TEXTS:
        if not isinstance(answer.get(name), list) or not all(isinstance(one, str) for one in answer[name]):
            raise ValueError(f"{name} of its contract is {repr(answer.get(name))[:200]}; it must be texts")
    for rival in answer["rivals"]:
        if not isinstance(rival, str) or not _NAME.fullmatch(rival):
            raise ValueError(f"a rival of its contract is called {rival!r}; a name is letters, digits and any of . + - _")
