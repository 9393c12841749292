"""Which kernels ran: the profiler's trace of calls, sorted by call.

Several calls are profiled in one session, each inside a marked range that ends with a synchronisation. A kernel belongs to the
range in which the host launched it (its correlation id leads to the launch call); where a trace lacks that, to the range in
which it ran. Two further ranges launch a kernel of our own: they show which stream and which thread are the caller's, as the
trace numbers them. What a call launches elsewhere, or after it has been waited for, has strayed.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashmoe_science.records import SeenLaunch

_MARK = "flashmoe-call-"
_HOME = "flashmoe-home"
_OWN_KERNEL = "elementwise"  # in the name of the kernel that adds 1 to a tensor
_LINGER_S = 0.02  # after the last call, for work that another thread puts off
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")


def profile(calls: Sequence[Callable[[], object]], synchronize: Callable[[], None]) -> list[list[SeenLaunch]]:
    """Run each call once under the profiler. Returns what each launched, in the order in which it ran on the device.

    The calls must have run before, so that nothing is compiled, loaded or autotuned here.
    """
    from torch.profiler import ProfilerActivity, record_function
    from torch.profiler import profile as torch_profile

    own = torch.zeros(1, device="cuda")
    synchronize()
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
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


def profiler_works(bench_device: torch.device, synchronize: Callable[[], None]) -> str | None:
    """None if the profiler sees a kernel that certainly ran, else what a user can do about it."""
    tensor = torch.ones(1 << 16, device=bench_device)
    profile([lambda: tensor + 1], synchronize)  # the first session of a process may miss its first kernels
    if profile([lambda: tensor + 1], synchronize)[0]:
        return None
    return "the profiler sees no kernels (CUPTI is missing or another profiler holds it), so no call path can be proved"
