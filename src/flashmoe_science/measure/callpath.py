"""Which kernels ran? The profiler's trace of one call, held against what the Kernel promised to launch.

Several calls are profiled in one session, each inside a marked range that ends with a synchronisation. A kernel belongs to the
range in which the host launched it (its correlation id leads to the launch call); where a trace lacks that, to the range in
which it ran.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flashmoe_science.kernels.kernel import Launch, Origin
from flashmoe_science.records import SeenLaunch

_MARK = "flashmoe-call-"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")


def profile(calls: Sequence[Callable[[], object]], synchronize: Callable[[], None]) -> list[list[SeenLaunch]]:
    """Run each call once under the profiler. Returns what each launched, in the order in which it ran on the device.

    The calls must have run before, so that nothing is compiled, loaded or autotuned here.
    """
    from torch.profiler import ProfilerActivity, record_function
    from torch.profiler import profile as torch_profile

    synchronize()
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for index, call in enumerate(calls):
            with record_function(f"{_MARK}{index}"):
                kept = call()
                synchronize()
            del kept
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return launches_in(events, len(calls))


def launches_in(events: Sequence[Mapping[str, Any]], calls: int) -> list[list[SeenLaunch]]:
    """Sort a trace's device events by the marked call that they belong to. Events outside every call are dropped."""
    ranges: dict[int, tuple[float, float]] = {}
    launched_at: dict[int, float] = {}
    on_device = []
    for event in events:
        category, name = event.get("cat"), str(event.get("name", ""))
        if category == "user_annotation" and name.startswith(_MARK):
            ranges[int(name.removeprefix(_MARK))] = (event["ts"], event["ts"] + event.get("dur", 0))
        elif category in _ON_HOST and "correlation" in event.get("args", {}):
            launched_at[event["args"]["correlation"]] = event["ts"]
        elif category in _ON_DEVICE:
            on_device.append(event)
    seen: list[list[SeenLaunch]] = [[] for _ in range(calls)]
    for event in sorted(on_device, key=lambda event: float(event["ts"])):
        when = launched_at.get(event.get("args", {}).get("correlation"), event["ts"])
        for index, (first, last) in ranges.items():
            if first <= when <= last and index < calls:
                seen[index].append(_seen(event))
    return seen


def _seen(event: Mapping[str, Any]) -> SeenLaunch:
    args = event.get("args", {})
    registers, stream = args.get("registers per thread"), args.get("stream")
    return SeenLaunch(
        name=str(event["name"]),
        grid=_triple(args.get("grid")),
        block=_triple(args.get("block")),
        shared_bytes=int(args.get("shared memory", 0)),
        registers=None if registers is None else int(registers),
        stream=None if stream is None else int(stream),
    )


def _triple(value: Sequence[int] | None) -> tuple[int, int, int]:
    """A grid or block; zeros for what has none (a copy or a fill)."""
    x, y, z = value or (0, 0, 0)
    return int(x), int(y), int(z)


def broken_promises(promised: Sequence[Launch], seen: Sequence[SeenLaunch], origin: Origin) -> list[str]:
    """What was promised and did not happen, or happened otherwise, in words. Empty where all is as promised.

    Ours must launch exactly what it promises. A peer may launch more (padding, a reduction): that is part of its time.
    """
    if not seen:
        return ["no kernel was seen"]
    broken = []
    covered = set()
    for launch in promised:
        matching = [index for index, one in enumerate(seen) if re.search(launch.name, one.name)]
        if not matching:
            broken.append(f"promised a kernel named {launch.name!r}; saw {', '.join(_short(one.name) for one in seen)}")
            continue
        covered.update(matching)
        kept = [index for index in matching if not _differences(launch, seen[index])]
        if not kept:
            broken.append(f"{_short(seen[matching[0]].name)}: {'; '.join(_differences(launch, seen[matching[0]]))}")
        elif origin == "ours" and len(matching) > sum(re.search(one.name, seen[kept[0]].name) is not None for one in promised):
            broken.append(f"{_short(seen[kept[0]].name)} was launched {len(matching)} times")
    if origin == "ours":
        extra = [one.name for index, one in enumerate(seen) if index not in covered]
        broken += [f"launched {_short(name)}, which it did not promise" for name in extra]
    return broken


def _differences(launch: Launch, seen: SeenLaunch) -> list[str]:
    threads = seen.block[0] * seen.block[1] * seen.block[2]
    pairs = (
        ("grid", launch.grid, seen.grid),
        ("threads a block", launch.threads, threads),
        ("bytes of shared memory", launch.shared_bytes, seen.shared_bytes),
    )
    return [f"promised {what} {promise}, saw {found}" for what, promise, found in pairs if promise not in (None, found)]


def _short(name: str) -> str:
    return repr(name if len(name) <= 120 else name[:117] + "...")


def profiler_works(bench_device: torch.device, synchronize: Callable[[], None]) -> str | None:
    """None if the profiler sees a kernel that certainly ran, else what a user can do about it."""
    tensor = torch.ones(1 << 16, device=bench_device)
    profile([lambda: tensor + 1], synchronize)  # the first session of a process may miss its first kernels
    if profile([lambda: tensor + 1], synchronize)[0]:
        return None
    return "the profiler sees no kernels (CUPTI is missing or another profiler holds it), so no call path can be proved"
