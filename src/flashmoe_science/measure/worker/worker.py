"""The worker, which runs in the process of a kernel: makes inputs, calls, times, and writes outputs.

It reports facts that can be seen only from inside the process; the caller decides what is right and what is fast. Kernels of
the package run in the process of the run. A function of a user runs in its own child, together with its peers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, StringConstraints

from flashmoe_science.contract import Contract, built_in, contract_of, is_built_in
from flashmoe_science.measure import l2_cache
from flashmoe_science.measure.bench import Bench, bench_here
from flashmoe_science.measure.child import serve
from flashmoe_science.measure.inputs import Files, Handover
from flashmoe_science.measure.promises import Promises
from flashmoe_science.measure.sandbox.natives import Natives
from flashmoe_science.measure.sandbox.settings import FilesWritten, RandomStates, Settings
from flashmoe_science.measure.worker.callers import Caller, FunctionCaller, caller_named
from flashmoe_science.measure.worker.calls import Calls
from flashmoe_science.measure.worker.clocks import Clocks
from flashmoe_science.measure.worker.loading import load
from flashmoe_science.operations import parse_problem

MODULE = "flashmoe_science.measure.worker.worker"
# Of a contract, as it gives them.
_LISTS = ("distributions", "variants", "everywhere", "sweep_variants", "edge_variants", "calls")


class Opened(BaseModel):
    """What a worker reports about its function and the contract; ``problems`` and ``sweep`` are texts."""

    model_config = ConfigDict(frozen=True, strict=True)

    contract: str
    built_in: bool
    problems: list[str]
    rivals: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.+-]{1,100}$")]]
    sweep: list[str]
    distributions: list[str]
    variants: list[str]
    everywhere: list[str]
    sweep_variants: list[str]
    edge_variants: list[str]
    calls: list[str]
    promises: Promises


class Worker:
    """Serves one contract, a problem after another: its function, if one is loaded, and its kernels and peers."""

    def __init__(self, bench: Bench, handover: Handover, trusted: bool) -> None:
        self.bench, self.handover, self.trusted = bench, handover, trusted
        self.contract: Contract | None = None
        self.fn: Any = None
        self._callers: dict[tuple[str, str], Caller] = {}
        self._parts: tuple[object, ...] = (self,)

    def command(self, do: str) -> Callable[..., dict[str, Any]]:
        """The method that answers a request: of this object, or of the problem's calls and clocks."""
        found: Callable[..., dict[str, Any]] = getattr(next(one for one in self._parts if hasattr(one, do)), do)
        return found

    def ping(self) -> dict[str, Any]:
        return {}

    def open(self, spec: str | None, contract: str) -> dict[str, Any]:
        """Load the function that ``spec`` names, or with None only a contract: an operation's, or that of a named function."""
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
            "sweep": [str(one) for one in self.contract.sweep_of(self.fn)],
            "promises": Promises.of(getattr(self.fn, "promises", None)).model_dump(exclude_none=True),
            **{name: list(getattr(self.contract, name)) for name in _LISTS},
        }

    def problem(self, text: str) -> dict[str, Any]:
        """Begin a problem and free the memory of the last one."""
        assert self.contract is not None
        self._parts = (self,)
        self._callers.clear()
        if self.bench.gpu is not None:
            torch.cuda.empty_cache()
        self.problem_now = parse_problem(text)
        if self.fn is not None and (reason := self.contract.cannot(self.problem_now)) is not None:
            raise ValueError(reason)
        self._parts = (self, Calls(self, self.contract, self.problem_now), Clocks(self, self.contract, self.problem_now))
        return {}

    def caller(self, who: str, config: str, variant: str = "") -> Caller:
        """The function that was loaded where ``who`` is empty, another where it has a colon, else a kernel or peer by its name.
        Raises ValueError: there is none of that name."""
        if (who, config) in self._callers and not variant:
            return self._callers[who, config]
        assert self.contract is not None
        contract = self.contract.variant(variant) if variant else self.contract
        if not who or ":" in who:
            found: Caller = FunctionCaller(contract, self.problem_now, load(who) if who else self.fn)
        else:
            found = caller_named(contract, self.problem_now, self.bench.gpu, who, config)
        if not variant:
            self._callers[who, config] = found
        return found


def main() -> None:
    warnings.simplefilter("ignore")
    bench = bench_here()
    if bench.gpu is None:
        torch.set_num_threads(1)  # as Bench.single_threaded
    else:
        torch.empty(1, device=bench.device)  # makes the context, for which drivers set a part of the L2 aside
        l2_cache.release()  # so that only the loaded function can set some aside later
    worker, natives, settings = Worker(bench, Files(), trusted=False), Natives(), Settings()
    states, files = RandomStates(), FilesWritten()

    def after(answer: dict[str, Any]) -> None:
        """Add to the answer what the last request replaced, changed, or left behind."""
        answer["replaced"], answer["settings"] = natives.restore(), settings.left()
        if bench.gpu is not None and (aside := l2_cache.set_aside_bytes()):
            l2_cache.release()
            answer["settings"].append(f"{aside} bytes of the L2 set aside for lines that stay")
        answer["remarks"] = [*states.moved(), *files.written()]

    serve(worker.command, after)
