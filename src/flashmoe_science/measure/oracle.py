"""The oracle: the fp64 reference of a contract, and outputs compared with it as numbers, never as another process's objects.

For the operations of the package it runs in the process that keeps the records. A user's contract is foreign code and runs in
its own process, apart from the kernel's.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from flashmoe_science.contract import Contract, Errors, built_in, contract_of
from flashmoe_science.measure.bench import bench_here
from flashmoe_science.measure.channel import Child, Died, Failed, InProcess
from flashmoe_science.measure.child import serve
from flashmoe_science.measure.finding import Named, classify_error, is_mistake
from flashmoe_science.measure.inputs import (
    Case,
    Files,
    Handover,
    Tensors,
    as_tuple,
    disturb,
    extent_of,
    in_parts,
    kind_of,
    make,
    same_bits,
    varied,
)
from flashmoe_science.measure.tolerance import DRAWS, Expected, by_chance, check_output, expected, is_under_cap, plain_error
from flashmoe_science.measure.worker.loading import load
from flashmoe_science.measure.worker.worker import Opened
from flashmoe_science.operations import is_operation, parse_problem
from flashmoe_science.problem import Problem

MODULE = "flashmoe_science.measure.oracle"
_DRAWS_S = 20.0  # after which no more of the plain maths are made
_KEPT_BYTES = 4 * 2**30  # of references that a CPU keeps: those of one exam, but for the longest problems
_KEPT_SHARE = 8  # of a GPU's memory: the references of an exam of a backward, fp64, are some 10 GB


class Oracle:
    """Checks outputs of one contract by the tolerance rule, a problem at a time."""

    _contract: Contract
    _problem: Problem

    def __init__(self, handover: Handover, device: torch.device | None = None) -> None:
        self._device = bench_here().device if device is None else device
        self._handover = handover
        on_gpu = self._device.type == "cuda"
        self._kept = torch.cuda.mem_get_info(self._device)[1] // _KEPT_SHARE if on_gpu else _KEPT_BYTES
        self._references: OrderedDict[Case, tuple[Expected, ...]] = OrderedDict()

    def command(self, do: str) -> Callable[..., dict[str, Any]]:
        """The method that answers a request of that name."""
        found: Callable[..., dict[str, Any]] = getattr(self, do)
        return found

    def open(self, contract: str) -> dict[str, Any]:
        """Load an operation's contract by its name, or the contract of the function that is named."""
        self._contract = contract_of(load(contract)) if ":" in contract else built_in(contract)
        self._references.clear()
        return {}

    def problem(self, text: str, by_function: bool = True) -> dict[str, Any]:
        """Begin a problem. The answer has the reason where the problem cannot be run, and the bytes of its inputs.
        ``by_function``: for a user's function, which the contract calls, and not for kernels of the package."""
        contract, problem = self._contract, parse_problem(text)
        if problem != getattr(self, "_problem", None):
            self._references.clear()
        self._problem = problem
        reason = contract.cannot(problem) if by_function else None
        if reason is None and problem.flops() != contract.flops(problem):
            reason = f"it says flops{problem.flops()}, and its contract counts {contract.flops(problem)}"
        if reason is None and problem.min_bytes() != contract.min_bytes(problem):
            reason = f"it says bytes{problem.min_bytes()}, and its contract counts {contract.min_bytes(problem)}"
        if reason is not None:
            return {"cannot": reason}
        made = make(contract, problem, self._device, Case(0))
        if by_function:  # for the package's own operations, tests do this
            _check_inputs(contract, made, make(contract, problem, self._device, Case(0)))
        return {"cannot": None, "input_bytes": sum(one.nbytes for one in made.values())}

    def outputs(self, case: Sequence[Any]) -> dict[str, Any]:
        """The shapes and dtypes of the results, how many bytes they are, and which of them may be left out."""
        outputs = varied(self._contract, Case(*case)).outputs
        optional = {index for index, one in enumerate(outputs) if one.optional}
        wanted = self._expected(Case(*case))
        return {
            "outputs": [
                {
                    "shape": list(one.value.shape),
                    "dtype": str(one.dtype).removeprefix("torch."),
                    "bytes": one.value.numel() * one.dtype.itemsize,
                    "optional": index in optional,
                }
                for index, one in enumerate(wanted)
            ]
        }

    def inputs(self, case: Sequence[Any], path: str) -> dict[str, Any]:
        """Whether the transferred tensors are the inputs of the case, bit by bit."""
        made = list(make(self._contract, self._problem, self._device, Case(*case)).values())
        try:
            given, _ = self._handover.get(path, [(tuple(one.shape), one.dtype) for one in made], self._device)
        except ValueError:
            return {"same": False}
        return {"same": all(map(same_bits, made, given))}

    def check(self, case: Sequence[Any], path: str, count: int | None = None, naming: bool = False) -> dict[str, Any]:
        """Compare the transferred outputs, the first ``count`` of the contract's, with the reference.

        The answer has reasons as text, none where the outputs are right; with ``naming`` the likely kinds of mistake; the
        errors of each output by its name; a digest of the bits. Outputs without a finite reference are not compared
        (``vacuous``).
        """
        wanted = self._expected(Case(*case))[:count]
        answer: dict[str, Any] = {"reasons": [], "stats": {}, "digest": "", "named": [], "vacuous": False}
        try:
            kinds = [(tuple(one.value.shape), one.dtype) for one in wanted]
            outputs, answer["digest"] = self._handover.get(path, kinds, self._device)
        except ValueError as error:
            return answer | {"reasons": [str(error)]}
        names = [one.name for one in varied(self._contract, Case(*case)).outputs]
        for index, (got, one) in enumerate(zip(outputs, wanted, strict=True)):
            if not _judgeable(one):
                answer["vacuous"] = True
                continue
            name = names[index] if index < len(names) else "out" if len(wanted) == 1 else f"output {index}"
            stats, reasons = check_output(name, got, one)
            if reasons and is_under_cap(stats, one):
                one = self._by_chance(Case(*case))[index]
                stats, reasons = check_output(name, got, one)
            answer["stats"][name] = stats.model_dump()
            answer["reasons"] += reasons
            if reasons and naming:
                answer["named"] += self._mistake(Case(*case), index, got) or classify_error(got, one, stats)
        return answer

    def _mistake(self, case: Case, index: int, got: torch.Tensor) -> list[Named]:
        """The first of the contract's common mistakes that result ``index`` matches; empty where none does."""
        contract, problem = varied(self._contract, case), self._problem
        wide = contract.widened(make(contract, problem, self._device, case))
        right = self._expected(case)[index]
        for one in contract.mistakes(problem, wide):
            if is_mistake(got, right, as_tuple(one.outputs)[index]):
                return [(one.code, one.words)]
        return []

    def _expected(self, case: Case) -> tuple[Expected, ...]:
        if case not in self._references:
            size = max((sum(one.value.nbytes for one in each) for each in self._references.values()), default=0)
            while len(self._references) > 1 and size * (1 + len(self._references)) > self._kept:
                self._references.popitem(last=False)
            inputs, references, plains = self._maths(case)
            bounds = varied(self._contract, case).bounds(self._problem, inputs, references)
            self._references[case] = expected(references, plains, *bounds)
        return self._references[case]

    def _by_chance(self, case: Case) -> tuple[Expected, ...]:
        """The expected results of a case with the allowance for chance. Used only where an output exceeds twice the plain
        error: it computes the reference and the plain maths some thirty times."""
        wanted, began = self._expected(case), time.monotonic()
        if wanted[0].chance is not None:
            return wanted
        draws: list[tuple[Errors, ...]] = [tuple(one.plain for one in wanted)]
        for draw in range(1, DRAWS):
            draws.append(tuple(map(plain_error, *self._maths(case, draw)[1:])))
            if time.monotonic() - began > _DRAWS_S:
                break
        of_each = zip(wanted, zip(*draws, strict=True), strict=True)
        self._references[case] = tuple(replace(one, chance=by_chance(drawn)) for one, drawn in of_each)
        return self._references[case]

    def _maths(self, case: Case, draw: int = 0) -> tuple[Tensors, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """The inputs of a case, disturbed where ``draw`` is not 0, and the results of the reference and of the plain maths."""
        contract, problem = varied(self._contract, case), self._problem
        inputs = make(contract, problem, self._device, case)
        if draw:
            disturb(inputs, draw)
        references = as_tuple(contract.reference(problem, contract.widened(inputs)))
        _check_references(contract, references)
        return inputs, references, as_tuple(contract.plain(problem, inputs))


def _check_inputs(contract: Contract, made: Tensors, again: Tensors) -> None:
    """Raises ValueError where two processes would not make the same inputs, or where the values cannot be changed."""
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
    """Raises ValueError where a reference cannot be compared with an output."""
    for one in references:
        if not isinstance(one, torch.Tensor):
            raise ValueError(f"reference() of contract {contract.name} gave a {type(one).__name__}, not a tensor")
        if one.is_complex():
            raise ValueError(f"reference() of contract {contract.name} is complex; give real tensors (torch.view_as_real)")
        if not one.numel():
            raise ValueError(f"reference() of contract {contract.name} is empty: there is nothing to hold an output to")


def _judgeable(one: Expected) -> bool:
    """Whether the reference is all numbers that its dtype has (or -inf, the logarithm of nothing). Inputs scaled up may leave
    the range of the dtype, which is no fault of the kernel."""
    if not one.dtype.is_floating_point:
        return True
    numbers = (torch.isfinite(part.to(one.dtype)) | (part == -torch.inf) for (part,) in in_parts(one.value))
    return all(bool(part.all()) for part in numbers) and all(map(math.isfinite, (one.bound.max, one.bound.rms)))


class ContractFailed(Exception):
    """The contract's own code failed, which is not the function's fault."""

    code = "contract-fails"


class ContractOracle:
    """The oracle, in this process or another; a failure of it raises ContractFailed."""

    def __init__(self, channel: InProcess | Child) -> None:
        self._channel = channel

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        try:
            return self._channel.ask(do, **what)
        except (Failed, Died) as error:
            raise ContractFailed(f"its contract failed ({do}): {error}") from error


@contextmanager
def oracle_of(opened: Opened, spec: str, device: torch.device, watchdog_s: float) -> Iterator[ContractOracle]:
    """The oracle of a function's contract: in this process for one of the package, in a child for a user's."""
    in_package = is_operation(opened.contract) and opened.built_in
    channel = InProcess(Oracle(Files(), device).command) if in_package else Child(MODULE, watchdog_s)
    try:
        oracle = ContractOracle(channel)
        oracle.ask("open", contract=opened.contract if in_package else spec)
        yield oracle
    finally:
        if isinstance(channel, Child):
            channel.close()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    serve(Oracle(Files()).command, lambda answer: None)
