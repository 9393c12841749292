"""Single calls in the process of a kernel, watched for faults that show only there; outputs are handed over as numbers."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch

from flashmoe_science.contract import Contract
from flashmoe_science.measure.guards import Guarded, allocations
from flashmoe_science.measure.inputs import Case, Tensors, is_scaled, kind_of, make, same_bits, varied, write
from flashmoe_science.measure.launches.trace import profile, profiler_works
from flashmoe_science.measure.worker.callers import Caller, KernelCaller, Use
from flashmoe_science.measure.worker.growth import growth
from flashmoe_science.measure.worker.repeats import repeated, span
from flashmoe_science.problem import Problem

if TYPE_CHECKING:
    from flashmoe_science.measure.worker.worker import Worker

_SETTLE_S, _LOOKS, _IDLE = 0.05, 3, 0.1  # length and number of looks for work after a call; less of a processor is idle
_SLEEP_CYCLES = 20_000_000  # about 10 ms at a GPU's clock

_sleep, _process_time = time.sleep, time.process_time


# A call's mode of PyTorch, or the thread or stream that it is made on; "gradients": on inputs that require gradients;
# "default": under another default dtype.
Under = Literal["", "inference", "no_grad", "gradients", "autocast", "default", "thread", "stream"]


class Calls:
    """Calls on one problem. Answers hold facts only; outputs are written under a name."""

    def __init__(self, worker: Worker, contract: Contract, problem: Problem) -> None:
        self.contract, self.problem = contract, problem
        self.bench, self._handover, self._caller = worker.bench, worker.handover, worker.caller
        self._live: Tensors = {}
        self._previous: list[Any] = []  # inputs and outputs of the call before, so that new memory is new

    def call(self, under: Under = "", **how: Any) -> dict[str, Any]:
        """One call, in a mode of PyTorch or on a thread or stream of its own; ``how`` as ``_call`` takes it."""
        with _within(under):
            return self._call(under, **how)

    def _call(
        self,
        under: Under,
        who: str,
        config: str,
        case: Sequence[Any],
        path: str,
        most: int,
        use: Use = "exam",
        memory: str = "new",
        guard: bool = False,
        poison: bool = False,
        queued: bool = False,
        settle: bool = False,
        inputs_path: str | None = None,
    ) -> dict[str, Any]:
        """One call.

        Args:
            most: bytes that the outputs may have; if they have more, or one is no plain tensor, none is handed over.
            use: what the call is bound for.
            memory: "new" for new tensors, "same" to write the case's values into the tensors of the call before.
            guard: put NaN around the inputs. poison: guard and poison what the call allocates.
            queued: on a GPU, write the values behind a wait on the current stream, and call without waiting for it.
            settle: look for work of this process that goes on after the call.
            path, inputs_path: names under which the outputs and the inputs are handed over.
        """
        caller = self._caller(who, config, Case(*case).variant)
        values, around = self._place(case, memory, guard, queued)
        threads = set(threading.enumerate())
        for name, tensor in self._live.items() if under == "gradients" else ():
            tensor.requires_grad_(is_scaled(tensor) and name not in self.contract.constants)
        with allocations(poison) as guards:
            call = caller.bind(self._live, use)
            # Around the call alone: ``make`` would cast too.
            with self._dtype_of(under) if under in ("autocast", "default") else nullcontext():
                outputs = caller.outputs(_on_a_thread(call) if under == "thread" else _warned(call))
        described = [_described(one) for one in outputs]
        plain = _can_be_taken(described, most)
        seen = [one.detach().clone() for one in outputs] if plain else []
        busy = self._settle() if settle else 0.0
        self.bench.synchronize()
        facts = {
            "outputs": described,
            "late": plain and not all(map(same_bits, seen, outputs)),
            "busy": busy,
            "threads": sorted(one.name for one in set(threading.enumerate()) - threads),
            "changed": [name for name, tensor in self._live.items() if not same_bits(tensor, values[name])],
            "outside": [name for name, guard in around.items() if guard.overwritten()],
            "overrun": guards is not None and guards.overrun(),
            "grad": plain and under != "gradients" and any(one.requires_grad for one in outputs),
            "shares_inputs": plain and _share(outputs, list(self._live.values())),
            "shares_earlier": plain and _share(outputs, [one for one in self._previous if isinstance(one, torch.Tensor)]),
        }
        if plain:
            self._handover.put(path, seen)
            self._previous = [self._live, *outputs]
        if inputs_path is not None:
            self._handover.put(inputs_path, list(self._live.values()))
        for name, tensor in self._live.items():
            write(tensor.data, values[name])  # the next call finds the original values
        return facts

    def _dtype_of(self, under: Under) -> AbstractContextManager[Any]:
        """The problem's dtype as autocast's, or as the default."""
        dtype = self.contract.dtype(self.problem)
        return torch.autocast(self.bench.device.type, dtype) if under == "autocast" else _default_dtype(dtype)

    def _place(self, case: Sequence[Any], memory: str, guard: bool, queued: bool) -> tuple[Tensors, dict[str, Guarded]]:
        """Write the case's values to the inputs of the call. Returns a private copy of them, and the guards around each
        input."""
        asked = Case(*case)
        contract = varied(self.contract, asked)
        values = make(contract, self.problem, self.bench.device, asked)
        if guard:
            values = contract.poisoned(self.problem, values)
        if memory == "same" and self._live:
            self._poison_freed()
            if queued and self.bench.gpu is not None:
                torch.cuda._sleep(_SLEEP_CYCLES)
            for name, tensor in self._live.items():
                write(tensor.data, values[name])  # .data: a tensor's version number would give the change away
            return values, {}
        self._previous = [*(one for one in self._previous if isinstance(one, torch.Tensor)), self._live]
        around = {name: Guarded(tensor) for name, tensor in values.items()} if guard else {}
        self._live = {name: one.placed for name, one in around.items()} if guard else values
        copies = values if guard else {name: tensor.clone() for name, tensor in values.items()}
        self._poison_freed()  # the last that is freed before the call
        return copies, around

    def _poison_freed(self) -> None:
        """Free blocks of the sizes of the outputs, full of NaN, so that the allocator gives them to the call."""
        previous = [one for one in self._previous if isinstance(one, torch.Tensor) and one.is_floating_point()]
        freed = [torch.full_like(one, torch.nan) for one in previous]
        self.bench.synchronize()
        del freed

    def _settle(self) -> float:
        """The share of a processor that this process uses while no request runs: the minimum of a few samples, as work that a
        first call has begun may still have to end."""
        least = 1.0
        for _ in range(_LOOKS):
            began = _process_time()
            _sleep(_SETTLE_S)
            least = min(least, (_process_time() - began) / _SETTLE_S)
            if least < _IDLE:
                break
        return least

    def _ready(self, who: str, config: str, case: Sequence[Any]) -> tuple[Caller, Callable[[], Any]]:
        """A caller, and its call on new tensors."""
        self._place(case, "new", guard=False, queued=False)
        caller = self._caller(who, config)
        return caller, caller.bind(self._live, "exam")

    def repeat(
        self, who: str, config: str, case: Sequence[Any], times: int, more_s: float, path: str, most: int
    ) -> dict[str, Any]:
        """Call again and again on the same tensors, see ``repeats``. Where outputs differ, those (``count``) that are farthest
        from the first are handed over."""
        caller, call = self._ready(who, config, case)
        seen, facts = repeated(lambda: caller.outputs(call()), times, more_s, self.bench.synchronize)
        facts["count"] = len(seen.worst)
        if seen.worst:
            if _can_be_taken([_described(one) for one in seen.worst], most):
                self._handover.put(path, seen.worst)
            else:
                facts["odd"] = "tensor of another size"
        return facts

    def grown(self, who: str, config: str, case: Sequence[Any]) -> dict[str, Any]:
        """Bytes that each call leaves in use, see ``growth``. The inputs of calls in turn are in other memory."""
        self._place(case, "new", guard=False, queued=False)
        caller = self._caller(who, config)

        def calls(count: int) -> None:
            sets = [{name: tensor.clone() for name, tensor in self._live.items()} for _ in range(count)]
            for one in sets:
                caller.outputs(caller.bind(one, "exam")())

        return {"bytes": growth(calls, self.bench)}

    def memory(self, who: str, config: str, case: Sequence[Any]) -> dict[str, Any]:
        """Device memory that one call takes beyond its inputs, as requested of PyTorch's allocator, and the bytes of its
        results. None on a CPU."""
        if self.bench.gpu is None:
            return {"peak": None, "results": None}
        caller, call = self._ready(who, config, case)
        call()  # once before, so that no one-time workspace is counted as a call's
        self.bench.synchronize()
        torch.cuda.reset_peak_memory_stats(self.bench.device)
        before = self._requested("current")
        result = call()
        self.bench.synchronize()
        peak = self._requested("peak") - before
        return {"peak": peak, "results": sum(one.nbytes for one in caller.outputs(result))}

    def _requested(self, which: str) -> int:
        return int(torch.cuda.memory_stats(self.bench.device)[f"requested_bytes.all.{which}"])

    def launches(self, who: Sequence[tuple[str, str]], case: Sequence[Any]) -> dict[str, Any]:
        """The kernels that one call of each launches. A kernel of the package is called as planned, and then as its users call
        it. A process that has profiled must not time any more: CUPTI slows every later launch."""
        unavailable = profiler_works(self.bench.device, self.bench.synchronize)
        if unavailable is not None:
            return {"unavailable": unavailable}
        self._place(case, "new", guard=False, queued=False)
        found: list[tuple[str, str, int, int]] = []
        calls: list[Callable[[], Any]] = []
        for name, config in who:
            try:
                caller = self._caller(name, config)
                by_user = isinstance(caller, KernelCaller) and caller.user_call() is not None
                uses: tuple[Use, ...] = ("graph", "eager") if by_user else ("graph",)
                bound = [caller.bind(self._live, use) for use in uses]
                for call in (*bound, *bound):
                    call()
                self.bench.synchronize()
            except Exception:  # the exam hits the same error, and records it
                continue
            found.append((name, config, len(calls), len(bound)))
            calls += bound
        seen = profile(calls, self.bench.synchronize) if calls else []
        traced = [[one.model_dump() for one in launches] for launches in seen]
        return {"launches": [[name, config, traced[first : first + count]] for name, config, first, count in found]}


def _within(under: Under) -> AbstractContextManager[Any]:
    """The mode or stream of a call, for all work on its tensors: tensors made in inference mode can be changed only in it."""
    if under == "inference":
        return torch.inference_mode()
    if under == "no_grad":
        return torch.no_grad()
    return torch.cuda.stream(torch.cuda.Stream()) if under == "stream" else nullcontext()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def _on_a_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_warned, call).result()


def _warned(call: Callable[[], Any]) -> Any:
    """The result of a call; PyTorch only warns why a backend cannot serve, so its warnings are added to an exception."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return call()
        except Exception as error:
            for word in dict.fromkeys(str(one.message).split(" (Triggered")[0].strip()[:160] for one in caught):
                error.add_note(word)
            raise


def _described(one: Any) -> dict[str, Any]:
    kind = kind_of(one)
    if kind != "Tensor":
        return {"type": kind, "shape": [], "dtype": "", "device": "", "bytes": 0}
    dtype = str(one.dtype).removeprefix("torch.")
    return {"type": kind, "shape": list(one.shape), "dtype": dtype, "device": one.device.type, "bytes": one.nbytes}


def _can_be_taken(described: Sequence[dict[str, Any]], most: int) -> bool:
    return all(one["type"] == "Tensor" for one in described) and sum(one["bytes"] for one in described) <= most


def _share(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether memory of one of ``some`` is memory of one of ``others``."""
    return any(first < last_b and first_b < last for first, last in map(span, some) for first_b, last_b in map(span, others))
