"""Single calls in the candidate's process, each watched for what only shows from inside; outputs are handed over as bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flashmoe_science.contract import Contract
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.callpath import profile, profiler_works
from flashmoe_science.measure.trial.cases import Case, Guarded, Tensors, allocations, kind_of, make, same_bits
from flashmoe_science.measure.trial.players import Player
from flashmoe_science.measure.trial.repeats import repeated, span
from flashmoe_science.measure.trial.wire import Commands
from flashmoe_science.problem import Problem

_SETTLE_S, _LOOKS = 0.05, 3  # that a call is given to be caught still working
_SLEEP_CYCLES = 20_000_000  # about 10 ms at a GPU's clock

_sleep, _process_time = time.sleep, time.process_time


class Caller:
    """Calls on one problem. Answers hold facts, never an opinion; files hold the outputs' bytes."""

    def __init__(self, contract: Contract, problem: Problem, bench: Bench, player: Callable[..., Player]) -> None:
        self.contract, self.problem, self.bench, self._player = contract, problem, bench, player
        self._live: Tensors = {}
        self._held: list[Any] = []  # inputs and outputs of the call before, so that new memory is new
        self.commands: Commands = {"call": self.call, "repeat": self.repeat, "launches": self.launches}

    def call(
        self,
        who: str,
        config: str,
        case: dict[str, Any],
        path: str,
        most: int,
        memory: str = "new",
        guard: bool = False,
        poison: bool = False,
        queued: bool = False,
        settle: bool = False,
        inputs_path: str | None = None,
    ) -> dict[str, Any]:
        """One call.

        Args:
            most: bytes that the outputs may have; of more, as of what is no plain tensor, none is handed over.
            memory: "new" for new tensors, "same" to write the case's values into the tensors of the call before.
            guard: put NaN around the inputs. poison: guard and poison what the call allocates.
            queued: on a GPU, write the values behind a wait on the current stream, and call without waiting for it.
            settle: wait a little after the call and look whether anything still works on.
            path, inputs_path: files for the outputs' and the inputs' bytes.
        """
        player = self._player(who, config, str(case.get("variant", "")))
        values, around = self._place(case, memory, guard, queued)
        threads = set(threading.enumerate())
        with allocations(poison) as guards:
            outputs = player.outputs(player.bind(self._live, "eager")())
        facts: dict[str, Any] = {"outputs": [_described(one) for one in outputs]}
        plain = _can_be_taken(facts["outputs"], most)
        seen = [one.detach().clone() for one in outputs] if plain else []
        busy = self._settle() if settle else 0.0
        self._wait()
        facts |= {
            "plain": plain,
            "late": not all(same_bits(one, now) for one, now in zip(seen, outputs, strict=True)) if plain else False,
            "busy": busy,
            "threads": sorted(one.name for one in set(threading.enumerate()) - threads),
            "changed": [name for name, tensor in self._live.items() if not same_bits(tensor, values[name])],
            "outside": [name for name, guard in around.items() if guard.touched()],
            "overrun": guards is not None and guards.overrun(),
            "shares_inputs": plain and _share(outputs, list(self._live.values())),
            "shares_earlier": plain and _share(outputs, [one for one in self._held if isinstance(one, torch.Tensor)]),
        }
        if plain:
            write_bytes(path, seen)
            self._held = [self._live, *outputs]
        if inputs_path is not None:
            write_bytes(inputs_path, list(self._live.values()))
        for name, tensor in self._live.items():
            tensor.data.copy_(values[name])  # whoever is called next finds what belongs there
        return facts

    def _place(self, case: dict[str, Any], memory: str, guard: bool, queued: bool) -> tuple[Tensors, dict[str, Guarded]]:
        """Have the case's values where the call will look for them.

        Returns a copy of them that nobody is given, and the guards around each input.
        """
        values = make(self.contract, self.problem, self.bench.device, Case.of(case))
        if memory == "same" and self._live:
            self._poison_freed()
            if queued and self.bench.gpu is not None:
                torch.cuda._sleep(_SLEEP_CYCLES)
            for name, tensor in self._live.items():
                tensor.data.copy_(values[name])  # .data: a tensor's version number would give the change away
            return values, {}
        self._held.append(self._live)
        around = {name: Guarded(tensor) for name, tensor in values.items()} if guard else {}
        self._live = {name: one.placed for name, one in around.items()} if guard else values
        copies = values if guard else {name: tensor.clone() for name, tensor in values.items()}
        self._poison_freed()  # the last that is freed before the call
        return copies, around

    def _poison_freed(self) -> None:
        """Free blocks full of NaN of the sizes that outputs have, for an allocator to hand to the candidate."""
        freed = [
            torch.full_like(one, torch.nan) for one in self._held if isinstance(one, torch.Tensor) and one.is_floating_point()
        ]
        self._wait()
        del freed

    def _settle(self) -> float:
        """The share of a processor that this process takes while it is asked for nothing: the least of a few looks, as what a
        first call has begun may have to come to its end."""
        shares = []
        for _ in range(_LOOKS):
            began = _process_time()
            _sleep(_SETTLE_S)
            shares.append((_process_time() - began) / _SETTLE_S)
        return min(shares)

    def _wait(self) -> None:
        self.bench.synchronize()

    def repeat(self, who: str, config: str, case: dict[str, Any], times: int, path: str, most: int) -> dict[str, Any]:
        """Call again and again on the same tensors, see ``repeats``. The outputs of the call that is farthest from the first go
        to ``path``, where one differs."""
        self._place(case, "new", guard=False, queued=False)
        player = self._player(who, config)
        call = player.bind(self._live, "eager")
        seen, facts = repeated(lambda: player.outputs(call()), times, self._wait)
        if seen.worst:
            if _can_be_taken([_described(one) for one in seen.worst], most):
                write_bytes(path, seen.worst)
            else:
                facts["odd"] = "tensor of another size"
        return facts

    def launches(self, who: Sequence[tuple[str, str]], case: dict[str, Any]) -> dict[str, Any]:
        """The kernels that one call of each launches. A process that has profiled must not time any more."""
        blind = profiler_works(self.bench.device, self.bench.synchronize)
        if blind is not None:
            return {"blind": blind}
        self._place(case, "new", guard=False, queued=False)
        found = {}
        for name, config in who:
            try:
                call = self._player(name, config).bind(self._live, "eager")
                for _ in range(2):
                    call()
                self._wait()
            except Exception:  # whoever calls it in earnest meets the same error, and records it
                continue
            found[name] = [one.model_dump() for one in profile([call], self.bench.synchronize)[0]]
        return {"launches": found}


def _described(one: Any) -> dict[str, Any]:
    kind = kind_of(one)
    if kind != "Tensor":
        return {"type": kind, "shape": [], "dtype": "", "device": "", "bytes": 0}
    dtype = str(one.dtype).removeprefix("torch.")
    size = one.numel() * one.element_size()
    return {"type": kind, "shape": list(one.shape), "dtype": dtype, "device": one.device.type, "bytes": size}


def _can_be_taken(described: Sequence[dict[str, Any]], most: int) -> bool:
    return all(one["type"] == "Tensor" for one in described) and sum(one["bytes"] for one in described) <= most


def _share(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether memory of one of ``some`` is memory of one of ``others``."""
    return any(first < last_b and first_b < last for first, last in map(span, some) for first_b, last_b in map(span, others))


def write_bytes(path: str, tensors: Sequence[torch.Tensor]) -> None:
    """The elements of the tensors, one after the other, in C order."""
    # To another name first: a file that exists is whole.
    partial = f"{path}.part"
    with Path(partial).open("wb") as file:
        for tensor in tensors:
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(file)
    os.replace(partial, path)
