"""What is right: the fp64 oracle of a contract, and outputs held against it as bytes, never as objects.

For the contracts that come with the package it runs in the process that keeps the records. A contract of a user's own is
somebody else's code: it gets a process of its own (``python -m flashmoe_science.measure.trial.referee``), apart from the
candidate's.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashmoe_science.contract import Contract, built_in, contract_of
from flashmoe_science.measure.bench import bench_here
from flashmoe_science.measure.tolerance import Expected, check_output, expected
from flashmoe_science.measure.trial.cases import Case, Tensors, as_tuple, extent_of, kind_of, make, same_bits, varied
from flashmoe_science.measure.trial.loading import load
from flashmoe_science.measure.trial.wire import Commands, serve
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.records import ErrorStats

_KEPT = 4  # cases whose reference is kept
_FEW = 8  # wrong elements that are still told by number
_EVEN = 60.0  # the largest error over the RMS: below it, every element is off alike
_COARSE = 2.0**-4  # of the largest result: an error that rounding to 8 bits may make


class Referee:
    """Judges outputs of one contract, a problem at a time."""

    def __init__(self) -> None:
        self._device = bench_here().device
        self._contract: Contract | None = None
        self._problem: Problem | None = None
        self._known: OrderedDict[Case, tuple[Expected, ...]] = OrderedDict()
        self.commands: Commands = {
            "open": self.open,
            "problem": self.problem,
            "outputs": self.outputs,
            "check": self.check,
            "inputs": self.inputs,
        }

    def open(self, contract: str) -> dict[str, Any]:
        """Take a built-in contract by its name, or the contract of the candidate that is named."""
        self._contract = contract_of(load(contract)) if ":" in contract else built_in(contract)
        return {}

    def problem(self, text: str) -> dict[str, Any]:
        """Begin a problem. Tells why it cannot be asked for, or the bytes of its inputs."""
        contract = self._asked()
        problem = parse_problem(text)
        self._known.clear()
        self._problem = problem
        reason = contract.cannot(problem)
        for what, said, counted in (
            ("flops", problem.flops(), contract.flops(problem) if reason is None else 0),
            ("bytes", problem.min_bytes(), contract.min_bytes(problem) if reason is None else 0),
        ):
            if reason is None and said != counted:
                reason = f"it says {what}{said}, and its contract counts {counted}"
        if reason is not None:
            return {"cannot": reason}
        made, again = (make(contract, problem, self._device, Case(0)) for _ in range(2))
        _check_inputs(contract, made, again)
        return {"cannot": None, "input_bytes": sum(one.numel() * one.element_size() for one in made.values())}

    def outputs(self, case: dict[str, Any]) -> dict[str, Any]:
        """The shapes and dtypes that a candidate must return, and how many bytes they are."""
        return {
            "outputs": [
                {
                    "shape": list(one.value.shape),
                    "dtype": str(one.dtype).removeprefix("torch."),
                    "bytes": one.value.numel() * one.dtype.itemsize,
                }
                for one in self._expected(Case.of(case))
            ]
        }

    def inputs(self, case: dict[str, Any], path: str) -> dict[str, Any]:
        """Whether the bytes in ``path`` are the inputs of the case, every one."""
        made = make(self._asked(), self._now(), self._device, Case.of(case))
        parts = [one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for one in made.values()]
        return {"same": Path(path).read_bytes() == b"".join(parts)}

    def check(self, case: dict[str, Any], path: str) -> dict[str, Any]:
        """Hold the outputs in ``path`` against the oracle.

        Returns:
            reasons: in words, empty where they are right; named: what kind of wrong it looks like; stats: of the first output,
            or of the first that is wrong; digest: of the bytes; vacuous: the case has no finite reference.
        """
        wanted = self._expected(Case.of(case))
        raw = Path(path).read_bytes()
        sizes = [one.value.numel() * one.dtype.itemsize for one in wanted]
        if len(raw) != sum(sizes):
            return {"reasons": [f"it gave {len(raw)} bytes of output; {sum(sizes)} are needed"], "stats": None}
        said: dict[str, Any] = {"reasons": [], "stats": None, "digest": hashlib.blake2b(raw).hexdigest()}
        said |= {"named": [], "vacuous": False}
        first = 0
        for index, (one, size) in enumerate(zip(wanted, sizes, strict=True)):
            flat = torch.from_numpy(np.frombuffer(raw, np.uint8, size, first).copy()).view(one.dtype)
            first += size
            if not _judgeable(one):
                said["vacuous"] = True
                continue
            got = flat.reshape(one.value.shape).to(one.value.device)
            name = "out" if len(wanted) == 1 else f"output {index}"
            stats, reasons = check_output(name, got, one.value, one.bound)
            if said["stats"] is None or (reasons and not said["reasons"]):
                said["stats"] = stats.model_dump()
            said["reasons"] += reasons
            said["named"] += _named(got, one, stats) if reasons else []
        return said

    def _expected(self, case: Case) -> tuple[Expected, ...]:
        if case not in self._known:
            contract, problem = varied(self._asked(), case), self._now()
            inputs = make(contract, problem, self._device, case)
            wide = {name: one.double() if one.is_floating_point() else one for name, one in inputs.items()}
            references = as_tuple(contract.reference(problem, wide))
            _check_references(contract, references)
            plains = as_tuple(contract.plain(problem, inputs))
            self._known[case] = expected(references, plains, contract.cap(problem, inputs, references))
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return self._known[case]

    def _asked(self) -> Contract:
        assert self._contract is not None
        return self._contract

    def _now(self) -> Problem:
        assert self._problem is not None
        return self._problem


def _check_inputs(contract: Contract, made: Tensors, again: Tensors) -> None:
    """Raises ValueError where no two processes could have the same inputs, or nobody could change their values."""
    if not any(one.numel() for one in made.values()):
        raise ValueError(f"inputs() of contract {contract.name} gives no numbers at all")
    for name, tensor in made.items():
        if kind_of(tensor) != "Tensor" or extent_of(tensor) < tensor.numel():
            kind = "one whose elements share memory" if kind_of(tensor) == "Tensor" else f"a {kind_of(tensor)}"
            raise ValueError(f"inputs() of contract {contract.name} must give plain tensors; {name!r} is {kind}")
    differ = [name for name, one in made.items() if name not in again or not same_bits(one, again[name])]
    if differ:
        what = f"{', '.join(map(repr, differ))} came out otherwise the second time"
        raise ValueError(f"inputs() of contract {contract.name} must draw from the generator that it is given; {what}")


def _check_references(contract: Contract, references: tuple[Any, ...]) -> None:
    """Raises ValueError where there is nothing that an output could be held to."""
    for one in references:
        if not isinstance(one, torch.Tensor):
            raise ValueError(f"reference() of contract {contract.name} gave a {type(one).__name__}, not a tensor")
        if one.is_complex():
            raise ValueError(f"reference() of contract {contract.name} is complex; give real tensors (torch.view_as_real)")
        if not one.numel():
            raise ValueError(f"reference() of contract {contract.name} is empty: there is nothing to hold an output to")


def _judgeable(one: Expected) -> bool:
    """Whether the reference is all numbers that its dtype has. Inputs scaled up may leave them; that is nobody's fault."""
    if not one.dtype.is_floating_point:
        return True
    return bool(torch.isfinite(one.value.to(one.dtype)).all()) and all(map(math.isfinite, (one.bound.max, one.bound.rms)))


def _named(got: torch.Tensor, one: Expected, stats: ErrorStats) -> list[str]:
    """What kind of wrong it looks like, where the errors tell."""
    count = got.numel()
    if stats.nonfinite or not one.dtype.is_floating_point:
        return []
    if count > 1 and bool((got == got.reshape(-1)[0]).all()) and not bool((one.value == one.value.reshape(-1)[0]).all()):
        return [f"its output is constant ({got.reshape(-1)[0].item():g} everywhere)"]
    error = (got.double() - one.value).abs()
    wrong = int((error > one.bound.max).sum())
    if 0 < wrong <= min(_FEW, count // 4):
        return [f"{wrong} of {count} elements {'is' if wrong == 1 else 'are'} wrong, the rest are right"]
    there = _only_at(error > one.bound.max)
    if there is not None:
        return [f"what is wrong lies {there}, the rest is right"]
    largest, rms = float(error.max()), float(error.square().mean().sqrt())
    scale = float(one.value.abs().max())
    if largest < _COARSE * scale and largest < _EVEN * rms:
        times = rms / max(one.bound.rms, 1e-300)
        return [f"every element is off a little, {times:.3g} times what is allowed: as lower precision inside makes it"]
    return []


def _only_at(wrong: torch.Tensor) -> str | None:
    """Where along one dimension all that is wrong lies, if that is one place of several; None if it is not."""
    for dim, size in enumerate(wrong.shape):
        others = [one for one in range(wrong.dim()) if one != dim]
        (places,) = torch.nonzero(wrong.any(dim=others) if others else wrong, as_tuple=True)
        if size > 1 and len(places) == 1:
            return f"at index {int(places[0])} of dimension {dim} (of {size})"
    return None


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    serve(Referee().commands, lambda said: None)
    os._exit(0)


if __name__ == "__main__":
    main()
