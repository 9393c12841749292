"""Why a run's kernels, samples and times are not believed, as text; None where they are.

A kernel is believed only with a correctness row and, on a GPU, a call path row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from operator import itemgetter

from flashmoe_science.hardware.floor import floor_ns
from flashmoe_science.hardware.gpus import MIB, listed, short_name
from flashmoe_science.judge.control import Control, control_of, is_control
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.records import (
    STAGES,
    Cache,
    CallPathRow,
    Clock,
    CorrectnessRow,
    DoneRow,
    Environment,
    Origin,
    PromiseRow,
    RefusalRow,
    TimingRow,
)
from flashmoe_science.store import Run

_ROUNDED = 1 + 1e-6
_OUTPUTS = {"out": "output", "lse": "log-sum-exp"}  # what contracts abbreviate

# Refusals at these stages are of samples that were not recorded; those that were recorded are judged by themselves.
AT_THE_CLOCK = ("sanity", "timing")
_OLD_PROMISE = "it promised"  # begins the reason of a missed speed-up in old records, whose stage is "sanity"

Who = tuple[str, str, str]  # problem, kernel, config
Where = tuple[str, Clock, Cache, str]  # problem, clock, cache, kernel


class Trust:
    """Looks up, for one run, why a kernel or a pair of samples is not believed."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.gpu_name = gpu_name(run.header.environment)
        self._gpu = listed(run.header.environment.gpu or "")
        self._on_gpu = run.header.environment.gpu is not None
        timings, checks, refusals = run.of(TimingRow), run.of(CorrectnessRow), run.of(RefusalRow)
        # What failed once in a run has failed: a later pass does not clear it.
        of_kernel = grouped(checks, _who).items()
        self.oracle = {who: next((row for row in rows if not row.passed), rows[-1]) for who, rows in of_kernel}
        self._checked = {who: {row.rank for row in rows} for who, rows in of_kernel}
        seen = grouped(run.of(CallPathRow), _who).items()
        self.paths = {who: next((row for row in rows if row.broken_promises), rows[-1]) for who, rows in seen}
        origins = [(row.kernel, row.origin) for row in checks] + [(row.kernel, row.origin) for row in timings]
        origins += [(row.rival, row.rival_origin) for row in timings]
        self._origins = {name: {origin for _, origin in some} for name, some in grouped(origins, itemgetter(0)).items()}
        self._controls = grouped(filter(is_control, timings), lambda row: (row.problem, row.clock, row.cache, row.kernel))
        self._control_results: dict[Where, Control] = {}
        self._sampled = Counter(map(_series, timings))
        self._copies = Counter(row.samples for row in timings if row.is_distinctive)
        self.refusals = [row for row in refusals if not is_promise(row)]
        # (problem, kernel) -> what it promised of its speed and did not keep. Its measured speed counts.
        self.promises = {(row.problem, row.kernel): row.reason for row in reversed(refusals) if is_promise(row)}
        self._on_trial = {row.kernel for row in run.of(PromiseRow)}

    def kernel(self, problem: str, kernel: str, config: str) -> str | None:
        """Why this kernel with this config is not believed on this problem, whatever its times; None if it is."""
        refusals = [row for row in self._refusals_of(problem, kernel, config) if row.voids or row.stage not in AT_THE_CLOCK]
        if refused := _first_reason(refusals):
            return refused
        if len(origins := self._origins.get(kernel, ())) > 1:
            return f"its run calls it {' and '.join(sorted(origins))}; it can be only one of them"
        if self._cut_short(problem, kernel):
            return "its trial on this problem ended before its last check; continue it with --resume"
        path = self.paths.get((problem, kernel, config)) if self._on_gpu else None
        if path is not None and path.broken_promises:  # before the oracle: a wrong result may be another kernel's, which ran
            return f"call path: {'; '.join(path.broken_promises)}"
        oracle = self.oracle.get((problem, kernel, config))
        if oracle is None:
            return "it was not held against the oracle"
        wrong = _error_in_words(oracle)
        if wrong or not oracle.passed:
            return f"wrong: {wrong or 'it failed a check of the correctness stage'}"
        checked, world = self._checked[problem, kernel, config], self.run.header.world
        if (rank := next((rank for rank in range(world) if rank not in checked), None)) is not None:
            return f"the part of rank {rank} was not held against the oracle"
        if not self._on_gpu:
            return None
        if path is None:
            return "its call path was not looked at"
        return None if path.launches else "call path: no kernel was seen"

    def _refusals_of(self, problem: str, kernel: str | None, config: str) -> list[RefusalRow]:
        """The refusals of a kernel with a config on a problem; with ``kernel`` None those that name no kernel."""
        own = (row for row in self.refusals if row.kernel == kernel)
        return [row for row in own if row.problem in (problem, None) and row.config in (config, None)]

    def never_timed(self, problem: str, kernel: str, config: str) -> str | None:
        """Why a kernel has no time, or none on one of the clocks: the earliest stage that refused it is the cause."""
        return _first_reason(self._refusals_of(problem, kernel, config)) or self.kernel(problem, kernel, config)

    def samples_refused(self, problem: str, kernel: str) -> bool:
        """Whether the run refused samples of a kernel."""
        return any(row.stage in AT_THE_CLOCK and (row.problem, row.kernel) == (problem, kernel) for row in self.refusals)

    def _cut_short(self, problem: str, kernel: str) -> bool:
        """Whether the run was killed after it wrote times of a user's kernel and before the kernel's last checks. A run that
        ended by itself, also for want of time, has made all checks of what it wrote."""
        return kernel in self._on_trial and not self.run.complete and problem not in self.run.done_by(kernel)

    def whole_problem(self, problem: str) -> str | None:
        """Why no number of this problem is believed: a refusal that names no kernel."""
        return _first_reason(self._refusals_of(problem, None, ""))

    def samples(self, row: TimingRow) -> str | None:
        """Why a pair's samples are not believed, whoever made them; None if they are."""
        if len(row.a) != len(row.b):
            return f"{row.kernel} has {len(row.a)} samples and {row.rival} {len(row.b)}; they are not pairs"
        for name, series in ((row.kernel, row.a), (row.rival, row.b)):
            if any(time <= 0 for time in series):
                return f"{name} has a sample of {min(series)} ns; it must be above 0"
        for series, by_rank in ((row.a, row.a_by_rank), (row.b, row.b_by_rank)):
            if (by_rank or self.run.header.world > 1) and [max(times) for times in zip(*by_rank, strict=False)] != series:
                return "its samples are not those of the slowest rank"
        if not is_control(row) and (times := self._sampled[_series(row)]) > 1:
            return f"its run sampled this pair {times} times; a pair may be sampled once"
        if self._copies[row.samples] > 1:
            return "its samples are those of another row of its run, to the nanosecond; one of the two was not measured"
        if row.clock == "graph" and not self._on_gpu:
            return "it says that a GPU's clock timed it, in a run without a GPU"
        if row.throttle:
            return f"the GPU was throttled: {', '.join(row.throttle)}"
        problem = parse_problem(row.problem)
        input_bytes = row.input_sets * problem.min_bytes() // problem.gpus()
        if row.cache == "cold" and self._gpu is not None and input_bytes <= self._gpu.l2_bytes:
            sets = f"its {row.input_sets} sets of tensors are {input_bytes / MIB:.3g} MiB"
            return f"it says that the L2 was cold, but {sets}, and the L2 holds {self._gpu.l2_bytes / MIB:.3g}"
        return None

    def too_fast(self, problem: Problem, time_ns: float, cache: Cache) -> str | None:
        """Why a time is below what the chip can do; None if it is not. A CPU's memory bandwidth is unknown."""
        floor = floor_ns(problem, self._gpu, cache if self._on_gpu else "warm")
        if time_ns >= floor:
            return None
        of = "the chip's" if self._gpu else "four times the fastest known chip's"
        return f"{time_ns:.0f} ns is less than the {floor:.0f} ns that {of} arithmetic and bandwidth allow"

    def control(self, problem: str, clock: Clock, cache: Cache, kernel: str = "") -> Control:
        """The control under these conditions; where there is none, a control of the problem under others.

        Each user's kernel has a process, and so a control, of its own: the one of ``kernel`` comes first."""
        # A kernel whose samples on the problem are void is no evidence on the harness, but for itself.
        void = {row.kernel for row in self.refusals if row.voids and row.problem in (problem, None)} - {kernel}
        near = [key for key in self._controls if key[0] == problem and key[3] not in void]
        best = max(near, key=lambda key: (key[:3] == (problem, clock, cache), key[3] == kernel), default=None)  # the first
        if best is None:
            return Control(None, 0.0, "no kernel was timed against itself, so the harness is unproved here")
        if best not in self._control_results:  # every verdict needs it, and it costs a bootstrap
            # A control that came out badly once has: a later one does not clear it.
            controls = sum(map(len, self._controls.values()))
            found = [control_of(row, self.samples(row), controls) for row in self._controls[best]]
            self._control_results[best] = max(found, key=lambda one: (one.reason is not None, one.bias))
        return self._control_results[best]

    def memory(self, problem: str, kernel: str, config: str) -> tuple[int | None, int | None]:
        """Bytes of device memory that one call took beyond its inputs, and bytes of its outputs; None where unknown."""
        oracle = self.oracle.get((problem, kernel, config))
        return (oracle.peak_extra_bytes, oracle.output_bytes) if oracle else (None, None)

    @cached_property
    def quick(self) -> bool:
        """Whether the run took few samples, as `--quick` does."""
        return any(row.quick for row in self.run.of(TimingRow))

    @cached_property
    def finished(self) -> frozenset[str]:
        """The problems that the run finished."""
        return frozenset(row.problem for row in self.run.of(DoneRow))

    @cached_property
    def origins(self) -> dict[str, Origin]:
        """Kernel name -> its origin, by its rows."""
        return {kernel: min(origins) for kernel, origins in self._origins.items()}

    def failed(self) -> Iterable[Who]:
        """Every (problem, kernel, config) that was refused by name, found wrong, or broke its promise; each once."""
        named = {(row.problem, row.kernel, row.config or "") for row in self.refusals if row.problem and row.kernel}
        wrong = {key for key, row in self.oracle.items() if not row.passed}
        off_path = {key for key, row in self.paths.items() if row.broken_promises or not row.launches}
        return sorted(named | wrong | off_path)

    def correct_peers(self, problem: str) -> list[str]:
        """Peers that passed the oracle on this problem."""
        rows = self.oracle.values()
        return sorted({row.kernel for row in rows if (row.problem, row.origin, row.passed) == (problem, "peer", True)})


def is_promise(row: RefusalRow) -> bool:
    """Whether the refusal is of a promised speed-up that was missed, which leaves the measured speed valid."""
    old = row.stage == "sanity" and not row.voids and row.reason.startswith(_OLD_PROMISE)
    return row.stage == "promise" or old


def in_order(refusals: Iterable[RefusalRow]) -> list[RefusalRow]:
    """The refusals by stage, the earliest first: a later one may be a consequence of it."""
    return sorted(refusals, key=lambda row: STAGES.index(row.stage))


def _first_reason(refusals: Iterable[RefusalRow]) -> str | None:
    """The reason of the earliest stage, None where there is none."""
    return next((f"{row.stage}: {row.reason}" for row in in_order(refusals)), None)


def _who(row: CorrectnessRow | CallPathRow) -> Who:
    return row.problem, row.kernel, row.config


def _series(row: TimingRow) -> tuple[object, ...]:
    """The key of what a run samples at most once: a pair of configs under one set of conditions, quickly or in full."""
    return row.problem, row.clock, row.cache, row.kernel, row.config, row.rival, row.rival_config, row.quick


def gpu_name(machine: Environment) -> str:
    """The ``short_name`` of its GPU; "cpu" where there is none."""
    return "cpu" if machine.gpu is None else short_name(machine.gpu, machine.sm_count)


def _error_in_words(row: CorrectnessRow) -> str | None:
    """Why the recorded errors are wrong, whatever the row's ``passed`` says; None if they are right."""
    for output, stats in row.outputs.items():
        name = _OUTPUTS.get(output, output)
        if stats.nonfinite:
            return f"{stats.nonfinite} values of its {name} are NaN or Inf"
        if stats.max is None or stats.rms is None or stats.mean is None:
            return f"the error of its {name} is not on record"
        # Of any numbers, the mean size is at most the RMS and that at most the largest; what rounding may add is far less.
        if not 0 <= stats.mean <= stats.rms * _ROUNDED <= stats.max * _ROUNDED**2:
            sizes = f"{stats.mean:.2e} (mean), {stats.rms:.2e} (RMS) and {stats.max:.2e} (largest)"
            return f"the errors of its {name} contradict each other: {sizes}"
        if stats.max > stats.bound_max:
            return f"its {name} is off by {stats.max:.2e} at {stats.worst}; {stats.bound_max:.2e} is allowed"
        for measure, error, bound in (("RMS", stats.rms, stats.bound_rms), ("mean", stats.mean, stats.bound_mean)):
            if error > bound:
                return f"its {name} has an {measure} error of {error:.2e}; {bound:.2e} is allowed"
    return None
