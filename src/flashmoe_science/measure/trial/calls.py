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
from flashmoe_science.measure.trial.cases import Case, Guarded, Tensors, allocations, make, same_bits
from flashmoe_science.measure.trial.players import Player
from flashmoe_science.measure.trial.wire import Commands
from flashmoe_science.problem import Problem

_SETTLE_S = 0.05  # that a call is given to be caught still working
_REPEAT_S = 15.0  # of one message: a kernel of seconds is slow, and does not hang
_SLEEP_CYCLES = 20_000_000  # about 10 ms at a GPU's clock

_sleep, _process_time, _monotonic = time.sleep, time.process_time, time.monotonic


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
        memory: str = "new",
        guard: bool = False,
        poison: bool = False,
        queued: bool = False,
        settle: bool = False,
        inputs_path: str | None = None,
    ) -> dict[str, Any]:
        """One call.

        Args:
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
        plain = all(type(one) is torch.Tensor for one in outputs)
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
        """The share of a processor that this process takes while it is asked for nothing."""
        began = _process_time()
        _sleep(_SETTLE_S)
        return (_process_time() - began) / _SETTLE_S

    def _wait(self) -> None:
        self.bench.synchronize()

    def repeat(self, who: str, config: str, case: dict[str, Any], times: int) -> dict[str, Any]:
        """Call so often on the same tensors, or for as long as a message may take; tells the first repetition whose bits differ
        from the first call's, and how many there were."""
        self._place(case, "new", guard=False, queued=False)
        player = self._player(who, config)
        call = player.bind(self._live, "eager")
        first = [one.detach().clone() for one in player.outputs(call())]
        until = _monotonic() + _REPEAT_S
        for index in range(1, times + 1):
            if not all(same_bits(one, other) for one, other in zip(first, player.outputs(call()), strict=True)):
                return {"differs_at": index, "times": index}
            if _monotonic() > until:
                return {"differs_at": None, "times": index}
        return {"differs_at": None, "times": times}

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
    if not isinstance(one, torch.Tensor):
        return {"type": type(one).__name__, "shape": [], "dtype": "", "device": ""}
    kind = "Tensor" if type(one) is torch.Tensor else type(one).__name__
    return {"type": kind, "shape": list(one.shape), "dtype": str(one.dtype).removeprefix("torch."), "device": one.device.type}


def _share(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether memory of one of ``some`` is memory of one of ``others``."""
    return any(first < last_b and first_b < last for first, last in map(_span, some) for first_b, last_b in map(_span, others))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def write_bytes(path: str, tensors: Sequence[torch.Tensor]) -> None:
    """The elements of the tensors, one after the other, in C order."""
    # To another name first: a file that exists is whole.
    partial = f"{path}.part"
    with Path(partial).open("wb") as file:
        for tensor in tensors:
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(file)
    os.replace(partial, path)
