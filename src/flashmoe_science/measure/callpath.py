"""Which kernels ran? The profiler's trace of one call, held against what the Kernel promised to launch.

Several calls are profiled in one session, each inside a marked range that ends with a synchronisation. A kernel belongs to the
range in which the host launched it (its correlation id leads to the launch call); where a trace lacks that, to the range in
which it ran. Two further ranges launch a kernel of our own: they show which stream and which thread are the caller's, as the
trace numbers them. What a call launches elsewhere, or after it has been waited for, has strayed.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashmoe_science.kernel import Launch, Origin
from flashmoe_science.records import SeenLaunch

_MARK = "flashmoe-call-"
_HOME = "flashmoe-home"
_OWN_KERNEL = "elementwise"  # in the name of the kernel that adds 1 to a tensor
_LINGER_S = 0.02  # after the last call, for work that another thread puts off
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")
# Whose kernels attend, by their names; a peer that launches one of another family than its own has fallen back.
_ATTENTION = {
    "PyTorch's FlashAttention-2": "pytorch_flash::",
    "cuDNN": "cudnn.*(sdpa|attention|flash)",
    "PyTorch's memory-efficient attention": "fmha_cutlass",
    "FlashAttention-3": "flash::.*FlashAttnFwd",
    "FlashAttention-4": "flash_attncute",
    "FlexAttention": "triton_.*flex_(attention|decoding)",
    "this project": "^flashmoe_",
}


def profile(calls: Sequence[Callable[[], object]], synchronize: Callable[[], None]) -> list[list[SeenLaunch]]:
    """Run each call once under the profiler. Returns what each launched, in the order in which it ran on the device.

    The calls must have run before, so that nothing is compiled, loaded or autotuned here.
    """
    from torch.profiler import ProfilerActivity, record_function
    from torch.profiler import profile as torch_profile

    own = torch.zeros(1, device="cuda")
    synchronize()
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for index, call in enumerate(calls):
            _at_home(own, synchronize)
            with record_function(f"{_MARK}{index}"):
                kept = call()
                synchronize()
            del kept
        time.sleep(_LINGER_S)
        _at_home(own, synchronize)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return launches_in(events, len(calls))


def _at_home(own: torch.Tensor, synchronize: Callable[[], None]) -> None:
    from torch.profiler import record_function

    with record_function(_HOME):
        own.add_(1)
        synchronize()


@dataclass(frozen=True, slots=True)
class _Trace:
    """A trace's events by kind. Times are microseconds; ``marks`` are (call, begin, end), in order of time."""

    marks: tuple[tuple[int, float, float], ...]
    home_ranges: tuple[tuple[float, float], ...]
    launches: Mapping[int, Mapping[str, Any]]  # a launch call on the host, by its correlation id
    on_device: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, events: Sequence[Mapping[str, Any]]) -> _Trace:
        marks, home_ranges, launches, on_device = [], [], {}, []
        for event in events:
            category, name = event.get("cat"), str(event.get("name", ""))
            if category == "user_annotation" and name.startswith(_MARK):
                marks.append((int(name.removeprefix(_MARK)), event["ts"], event["ts"] + event.get("dur", 0)))
            elif category == "user_annotation" and name == _HOME:
                home_ranges.append((event["ts"], event["ts"] + event.get("dur", 0)))
            elif category in _ON_HOST and "correlation" in event.get("args", {}):
                launches[event["args"]["correlation"]] = event
            elif category in _ON_DEVICE:
                on_device.append(event)
        marks.sort(key=lambda mark: mark[1])
        on_device.sort(key=lambda event: float(event["ts"]))
        return cls(tuple(marks), tuple(home_ranges), launches, tuple(on_device))

    def launch(self, event: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return self.launches.get(event.get("args", {}).get("correlation"))

    def when(self, event: Mapping[str, Any]) -> float:
        launch = self.launch(event)
        return float(event["ts"] if launch is None else launch["ts"])

    def own(self) -> list[Mapping[str, Any]]:
        """The kernel of our own in each home range; whatever else began meanwhile is somebody's who did not wait."""
        found = []
        for first, last in self.home_ranges:
            within = [one for one in self.on_device if first <= self.when(one) <= last and _OWN_KERNEL in str(one["name"])]
            found += within[:1]
        return found

    def call(self, event: Mapping[str, Any]) -> tuple[int, bool] | None:
        """The call that an event belongs to, and whether it came too late for it; None where it is no call's."""
        when = self.when(event)
        begun = [mark for mark in self.marks if mark[1] <= when]
        if not begun:
            return None
        index, _, end = begun[-1]
        late = when > end
        return None if late and self.launch(event) is None else (index, late)


def launches_in(events: Sequence[Mapping[str, Any]], calls: int) -> list[list[SeenLaunch]]:
    """Sort a trace's device events by the marked call that they belong to. Events before every call are dropped."""
    trace = _Trace.of(events)
    own = trace.own()
    streams = {event["args"]["stream"] for event in own if "stream" in event.get("args", {})}
    threads = {launch["tid"] for event in own if (launch := trace.launch(event)) is not None and "tid" in launch}
    seen: list[list[SeenLaunch]] = [[] for _ in range(calls)]
    for event in trace.on_device:
        found = None if event in own else trace.call(event)
        if found is None or found[0] >= calls:
            continue
        index, late = found
        launch, stream = trace.launch(event), event.get("args", {}).get("stream")
        strayed = []
        if streams and stream is not None and stream not in streams:
            strayed.append(f"on stream {stream}, where its caller's is {_one_of(streams)}")
        if threads and launch is not None and launch.get("tid") not in threads:
            strayed.append("from another thread")
        if late:
            strayed.append("after its call had been waited for")
        seen[index].append(_seen(event, " and ".join(strayed) or None))
    return seen


def _one_of(values: set[Any]) -> str:
    return " or ".join(map(str, sorted(values)))


def _seen(event: Mapping[str, Any], strayed: str | None) -> SeenLaunch:
    args = event.get("args", {})
    registers, stream, cluster = args.get("registers per thread"), args.get("stream"), args.get("cluster")
    return SeenLaunch(
        name=str(event["name"]),
        grid=_triple(args.get("grid")),
        block=_triple(args.get("block")),
        shared_bytes=int(args.get("shared memory", 0)),
        cluster=None if cluster is None else _triple(cluster),
        registers=None if registers is None else int(registers),
        stream=None if stream is None else int(stream),
        strayed=strayed,
    )


def _triple(value: Sequence[int] | None) -> tuple[int, int, int]:
    """A grid or block; zeros for what has none (a copy or a fill)."""
    x, y, z = value or (0, 0, 0)
    return int(x), int(y), int(z)


def broken_promises(promised: Sequence[Launch], seen: Sequence[SeenLaunch], origin: Origin) -> list[str]:
    """What was promised and did not happen, or happened otherwise, in words. Empty where all is as promised.

    Ours must launch exactly what it promises. A peer may launch more (padding, a reduction): that is part of its time; but no
    attention kernel of another family than it promised, which is a library's silent fallback. Nobody's work may stray.
    """
    if not seen:
        return ["no kernel was seen"]
    broken = [f"launched {_short(one.name)} {one.strayed}" for one in seen if one.strayed]
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
    if origin == "peer":
        others = {index: family for index, one in enumerate(seen) if index not in covered and (family := family_of(one.name))}
        broken += [
            f"launched {_short(seen[index].name)} of {family}, which it did not promise" for index, family in others.items()
        ]
    return broken


def other_launches(planned: Sequence[SeenLaunch], by_user: Sequence[SeenLaunch]) -> list[str]:
    """How the launches of a call as a user makes it differ from those of the planned call, which is what is timed, in words.

    Names and sizes are held to the promise; this holds the rest, the registers and shared memory of the very build, to it too.
    """
    mine, theirs = (
        [one.model_dump(exclude={"stream", "strayed"}, exclude_none=True) for one in side] for side in (planned, by_user)
    )
    if [one["name"] for one in mine] != [one["name"] for one in theirs]:
        return []  # said already, of each by its name
    return [
        f"{_short(one['name'])} with {field} {other[field]}, where the planned call has {one[field]}"
        for one, other in zip(mine, theirs, strict=True)
        for field in one
        if field in other and one[field] != other[field]
    ]


def family_of(name: str) -> str | None:
    """Whose attention kernel this is; None for any other kernel."""
    return next((family for family, pattern in _ATTENTION.items() if re.search(pattern, name)), None)


def _differences(launch: Launch, seen: SeenLaunch) -> list[str]:
    threads = seen.block[0] * seen.block[1] * seen.block[2]
    pairs = (
        ("grid", launch.grid, seen.grid),
        ("threads a block", launch.threads, threads),
        ("bytes of shared memory", launch.shared_bytes, seen.shared_bytes),
        ("cluster", launch.cluster if seen.cluster is not None else None, seen.cluster),
        ("registers a thread", launch.registers, seen.registers),
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
