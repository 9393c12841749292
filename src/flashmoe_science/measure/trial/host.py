"""The process that a candidate lives in, with its rivals beside it: it makes inputs, calls, times, and hands bytes over.

Started by ``warden.Ward`` as ``python -m flashmoe_science.measure.trial.host``. It judges nothing but what can be seen only
from inside; what is right and what is fast is decided by the process that keeps it.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from flashmoe_science.contract import Contract, built_in, contract_of, is_built_in
from flashmoe_science.measure import l2
from flashmoe_science.measure.bench import bench_here
from flashmoe_science.measure.trial.calls import Caller
from flashmoe_science.measure.trial.clockwork import Clockwork
from flashmoe_science.measure.trial.loading import load
from flashmoe_science.measure.trial.natives import Natives
from flashmoe_science.measure.trial.players import Function, Player, rival_player
from flashmoe_science.measure.trial.promises import checked
from flashmoe_science.measure.trial.settings import Settings
from flashmoe_science.measure.trial.wire import Commands, serve
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem


class Host:
    """Serves one candidate (or none: a clean process of rivals) on one problem after another."""

    def __init__(self) -> None:
        self.bench = bench_here()
        if self.bench.gpu is None:
            torch.set_num_threads(1)  # as Bench.alone
        else:
            torch.empty(1, device=self.bench.device)  # makes the context, for which drivers set a part of the L2 aside
            l2.release()  # so that whoever sets some aside later is the candidate
        self.contract: Contract | None = None
        self.fn: Any = None
        self.problem_now: Problem | None = None
        self._players: dict[str, Player] = {}
        self.commands: Commands = {"open": self.open, "problem": self.problem, "ping": self.ping}

    def ping(self) -> dict[str, Any]:
        return {}

    def open(self, spec: str | None, contract: str) -> dict[str, Any]:
        """Load the candidate, or with ``spec`` of None only the contract that is named: a built-in one, or a candidate's."""
        if spec is not None:
            self.fn = load(spec)
            self.contract = contract_of(self.fn)
        else:
            self.contract = contract_of(load(contract)) if ":" in contract else built_in(contract)
        return {
            "contract": self.contract.name,
            "built_in": is_built_in(self.contract),
            "problems": [str(one) for one in self.contract.default_problems()],
            "rivals": list(self.contract.rivals()),
            "distributions": list(self.contract.distributions),
            "variants": list(self.contract.variants),
            "promises": checked(getattr(self.fn, "promises", None)),
        }

    def problem(self, text: str) -> dict[str, Any]:
        """Begin a problem; the one before is forgotten."""
        assert self.contract is not None
        for name in ("call", "repeat", "launches", "prepare", "refresh", "sample", "show"):
            self.commands.pop(name, None)
        self._players.clear()
        if self.bench.gpu is not None:
            torch.cuda.empty_cache()
        self.problem_now = parse_problem(text)
        caller = Caller(self.contract, self.problem_now, self.bench, self.player)
        clockwork = Clockwork(self.contract, self.problem_now, self.bench, self.player)
        self.commands |= caller.commands | clockwork.commands
        return {}

    def player(self, who: str, config: str, variant: str = "") -> Player:
        """The candidate where ``who`` is empty, another candidate where it names one, else a rival.

        ``variant`` of the contract is for the candidate alone.

        Raises:
            ValueError: nobody is called that.
        """
        assert self.contract is not None
        assert self.problem_now is not None
        if variant:
            return Function(self.contract.variant(variant), self.problem_now, self.fn)
        if who not in self._players:
            if not who or ":" in who:
                self._players[who] = Function(self.contract, self.problem_now, load(who) if who else self.fn)
            else:
                found = rival_player(self.contract, self.problem_now, self.bench, who, config)
                if found is None:
                    raise ValueError(f"no rival of the contract {self.contract.name} is called {who!r}")
                self._players[who] = found
        return self._players[who]


def main() -> None:
    warnings.simplefilter("ignore")
    host = Host()
    natives, settings = Natives(), Settings()

    def after(said: dict[str, Any]) -> None:
        replaced, left = natives.restore(), settings.left()
        if replaced:
            said["replaced"] = replaced
        aside = l2.set_aside_bytes() if host.bench.gpu is not None else None
        if aside:
            l2.release()
            left.append(f"{aside} bytes of the L2 set aside for lines that stay")
        if left:
            said["settings"] = left

    serve(host.commands, after)
    os._exit(0)  # a candidate's threads and exit handlers have nothing to add


if __name__ == "__main__":
    main()
