"""Which kernels ran: the profiler's trace of calls, sorted by call.

Several calls are profiled in one session, each inside a marked range that ends with a synchronisation. A kernel belongs to the
range in which the host launched it (its correlation id leads to the launch call); where a trace lacks that, to the range in
which it ran. Further ranges launch a kernel of our own, which shows how the trace numbers the caller's stream and thread. What
a call launches on another stream or thread, or after it has been waited for, has strayed.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
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

Event = Mapping[str, Any]


def profile(calls: Sequence[Callable[[], object]], synchronize: Callable[[], None]) -> list[list[SeenLaunch]]:
    """Run each call once under the profiler. Returns what each launched, in the order in which it ran on the device. The calls
    must have run before, so that nothing is compiled, loaded or autotuned here."""
    # torch.profiler.profile imports the compiler of PyTorch, for 3 s, to ask it for a setting.
    from torch.autograd.profiler import profile as torch_profile
    from torch.autograd.profiler import record_function

    own = torch.zeros(1, device="cuda")
    synchronize()

    def at_home() -> None:
        with record_function(_HOME):
            own.add_(1)
            synchronize()

    with torch_profile(use_device="cuda", use_kineto=True, acc_events=True) as profiler:
        for index, call in enumerate(calls):
            at_home()
            with record_function(f"{_MARK}{index}"):
                kept = call()
                synchronize()
            del kept
        time.sleep(_LINGER_S)
        at_home()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return launches_in(events, len(calls))


class _Trace:
    """A trace's events by kind. Times are microseconds; ranges are (begin, end, name), in order of time."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.on_device = sorted((one for one in events if one.get("cat") in _ON_DEVICE), key=lambda one: float(one["ts"]))
        # A launch call on the host, by its correlation id.
        self.launches = {one["args"]["correlation"]: one for one in events
                         if one.get("cat") in _ON_HOST and "correlation" in one.get("args", {})}  # fmt: skip
        ranges = [(one["ts"], one["ts"] + one.get("dur", 0), str(one.get("name", ""))) for one in events
                  if one.get("cat") == "user_annotation"]  # fmt: skip
        self.calls = [one for one in sorted(ranges) if one[2].startswith(_MARK)]
        # Our own kernel in each home range; other kernels there belong to a call that returned early.
        self.own: list[Event] = []
        for first, last, _ in (one for one in ranges if one[2] == _HOME):
            within = [one for one in self.on_device if first <= self.when(one) <= last and _OWN_KERNEL in str(one["name"])]
            self.own += within[:1]
        self.streams = {one["args"]["stream"] for one in self.own if "stream" in one.get("args", {})}
        self.threads = {launch["tid"] for one in self.own if (launch := self.launch(one)) is not None and "tid" in launch}

    def launch(self, event: Event) -> Event | None:
        return self.launches.get(event.get("args", {}).get("correlation"))

    def when(self, event: Event) -> float:
        return float((self.launch(event) or event)["ts"])

    def call(self, event: Event) -> tuple[int, bool] | None:
        """The call that an event belongs to, and whether it came too late for it; None where it is no call's."""
        when = self.when(event)
        begun = [one for one in self.calls if one[0] <= when]
        if not begun or event in self.own:
            return None
        _, end, name = begun[-1]
        late = when > end
        return None if late and self.launch(event) is None else (int(name.removeprefix(_MARK)), late)

    def strayed(self, event: Event, late: bool) -> str | None:
        """How an event ran apart from its caller (stream, thread, too late), as text, or None."""
        launch, stream = self.launch(event), event.get("args", {}).get("stream")
        words = []
        if self.streams and stream is not None and stream not in self.streams:
            words.append(f"on stream {stream}, where its caller's is {' or '.join(map(str, sorted(self.streams)))}")
        if self.threads and launch is not None and launch.get("tid") not in self.threads:
            words.append("from another thread")
        if late:
            words.append("after its call had been waited for")
        return " and ".join(words) or None


def launches_in(events: Sequence[Event], calls: int) -> list[list[SeenLaunch]]:
    """Sort a trace's device events by the marked call that they belong to. Events before every call are dropped."""
    trace = _Trace(events)
    seen: list[list[SeenLaunch]] = [[] for _ in range(calls)]
    for event in trace.on_device:
        index, late = trace.call(event) or (calls, False)
        if index < calls:
            seen[index].append(_seen(event, trace.strayed(event, late)))
    return seen


def _seen(event: Event, strayed: str | None) -> SeenLaunch:
    """An event as a record has it; a copy or a fill has no grid and no block, which is zeros."""
    args = event.get("args", {})
    return SeenLaunch(
        name=str(event["name"]),
        grid=args.get("grid") or (0, 0, 0),
        block=args.get("block") or (0, 0, 0),
        shared_bytes=args.get("shared memory", 0),
        cluster=args.get("cluster"),
        registers=args.get("registers per thread"),
        stream=args.get("stream"),
        strayed=strayed,
    )


@cache
def profiler_works(bench_device: torch.device, synchronize: Callable[[], None]) -> str | None:
    """None if the profiler sees a kernel that certainly ran, else the reason; tried once a process."""
    tensor = torch.ones(1 << 16, device=bench_device)
    profile([lambda: tensor + 1], synchronize)  # the first session of a process may miss its first kernels
    if profile([lambda: tensor + 1], synchronize)[0]:
        return None
    return "the profiler sees no kernels (CUPTI is missing or another profiler holds it), so no call path can be proved"
