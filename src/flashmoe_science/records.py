"""The rows of a run's JSONL file: what was measured, raw, with nothing judged. Versioned; never edited once written.

The first row of a file is a ``RunRow``; the others name its ``run`` id. Times are nanoseconds, as integers: small files.
"""

from __future__ import annotations

import math
import statistics
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

SCHEMA = 3  # older ones are read too: they lacked rows and fields that have defaults here, and named two outputs alone

Clock = Literal["graph", "eager"]
Cache = Literal["cold", "warm"]
Stage = Literal["preflight", "callpath", "correctness", "sanity", "timing", "promise", "profile"]  # in the order of a run
STAGES: tuple[Stage, ...] = get_args(Stage)
Origin = Literal["ours", "peer", "candidate"]  # candidate: brought by a user
ONE_GPU = "one_gpu"  # in a run on several GPUs, the peer that computes the whole problem on one


Int64 = Annotated[int, Field(lt=2**63, ge=-(2**63))]
Nanoseconds = Int64  # what is 0 or below is read, and refused where it is judged
Extent = Annotated[int, Field(ge=0, lt=2**31)]
Extents = tuple[Extent, Extent, Extent]
Seconds = Annotated[float, Field(ge=0, le=1e10)]  # three centuries


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Row(_Model):
    schema_version: int = SCHEMA
    run: str


class _OfKernel(_Row):
    problem: str
    kernel: str
    config: str


class Environment(_Model):
    """The machine and software of a run. ``gpu`` is None on a machine without one; then ``cpu`` did the work."""

    gpu: str | None
    gpu_memory_bytes: Int64 | None = None
    sm_count: Int64 | None = None
    driver: str | None = None
    cuda: str | None = None
    cpu: str
    cpu_count: int
    platform: str
    python: str
    torch: str
    triton: str | None
    packages: dict[str, str] = Field(default_factory=dict)  # peers and what they bring: fa3-fwd, flash-attn-4, cudnn
    cards: list[str] = Field(default_factory=list)  # of a run on several GPUs that of each rank; ``gpu`` is the first


class RunRow(_Row):
    """Header of a run: what was asked, of which source, where and when."""

    kind: Literal["run"] = "run"
    started: str  # ISO 8601, UTC
    suite: str
    command: list[str]
    commit: str | None
    source_digest: str  # SHA-256 over the package's source files: which kernel produced the numbers
    seed: int
    environment: Environment
    world: Annotated[int, Field(ge=1)] = 1  # ranks, each a process with a GPU of its own; rank 0 writes the rows
    price_per_hour: Annotated[float, Field(ge=0, le=1e10)] | None = None  # USD for the machine, where the user gave one


class SeenLaunch(_Model):
    """One kernel as the profiler saw it."""

    name: str
    grid: Extents
    block: Extents  # of zeros for a copy or a fill
    shared_bytes: Extent
    cluster: Extents | None = None
    registers: Extent | None = None
    stream: int | None = None
    strayed: str | None = None  # where it ran otherwise than for its caller, in words: another stream or thread, too late
    count: Annotated[int, Field(ge=1)] = 1  # launches of that name in a call path; of these, this one has the most threads

    @property
    def threads(self) -> int:
        """The threads of all its blocks; 0 for a copy or a fill."""
        return math.prod((*self.grid, *self.block))


class CallPathRow(_OfKernel):
    """Kernels that one call launched, each name once (in older rows each launch), and what the promise did not cover (empty
    where all is as promised)."""

    kind: Literal["callpath"] = "callpath"
    launches: list[SeenLaunch]
    broken_promises: list[str]


class PromiseRow(_Row):
    """What a kernel that a user brought promises of itself (``fn.promises``), before anything of it was measured."""

    kind: Literal["promise"] = "promise"
    kernel: str
    speedup: float | None = None  # over its best rival
    launch: str | None = None  # the name of a kernel that it launches
    threads: int | None = None  # a block
    deterministic: bool = False
    source_digest: str | None = None  # SHA-256 over its file and those of the candidates in its folder; None: not found


class ErrorStats(_Model):
    """Error against the fp64 oracle. ``bound`` is what the tolerance rule allows; ``worst`` is the index of ``max``."""

    max: float | None  # None where the output held NaN or Inf
    rms: float | None
    mean: float | None
    worst: list[int]
    bound_max: float
    bound_rms: float
    bound_mean: float
    nonfinite: int


class CorrectnessRow(_OfKernel):
    """Errors of one call's outputs by the contract's names for them; those without a finite reference are left out."""

    kind: Literal["correctness"] = "correctness"
    origin: Origin
    passed: bool
    outputs: Annotated[dict[str, ErrorStats], Field(min_length=1)]
    peak_extra_bytes: Int64 | None = None  # device memory of one call beyond its inputs
    output_bytes: Int64 | None = None  # of all outputs that were asked for
    rank: Annotated[int, Field(ge=0)] = 0  # whose part of the outputs

    @property
    def tightest(self) -> ErrorStats:
        """Errors of the output whose largest error is nearest to its bound, or farthest beyond it."""
        return max(self.outputs.values(), key=lambda one: math.inf if one.max is None else one.max / (one.bound_max or 1e-300))

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, values: Any) -> Any:
        """Read rows to schema 2, which had the fields ``out`` and, at times, ``lse``."""
        if not isinstance(values, dict) or "outputs" in values:
            return values
        rest = {name: value for name, value in values.items() if name not in ("out", "lse")}
        return rest | {"outputs": {name: values[name] for name in ("out", "lse") if values.get(name) is not None}}


_DISTINCTIVE = 8  # different samples: on a grid of 100 readings the same series come again once in 10**16 times


class TimingRow(_OfKernel):
    """Samples of a kernel and a rival on the same inputs, taken A B B A: ``a[i]`` and ``b[i]`` are a pair, each the mean of
    ``calls`` calls. ``rival`` equal to ``kernel`` is the A/A control.

    On several ranks a sample is the time of the slowest, and ``a_by_rank`` and ``b_by_rank`` are those of each; of rank 0 alone
    where no other rank takes part. The rival has as many calls a sample as fill the same time there."""

    kind: Literal["timing"] = "timing"
    op: str
    origin: Origin
    rival: str
    rival_origin: Origin
    rival_config: str
    clock: Clock
    cache: Cache
    calls: Annotated[Int64, Field(ge=1)]
    input_sets: Annotated[Int64, Field(ge=1)]
    a: list[Nanoseconds]  # a call
    b: list[Nanoseconds]
    a_by_rank: list[list[Nanoseconds]] = Field(default_factory=list)
    b_by_rank: list[list[Nanoseconds]] = Field(default_factory=list)
    sm_clock_mhz: list[Int64] = Field(default_factory=list)  # before, after
    temperature_c: Int64 | None = None
    power_w: float | None = None
    throttle: list[str] = Field(default_factory=list)  # what discredits samples: heat, a hardware brake, another GPU's clock
    power_capped: bool = False  # at its power limit, as long matrix products always are; both kernels of a pair meet it
    device_seconds: Seconds = 0.0
    quick: bool = False

    @property
    def samples(self) -> tuple[tuple[int, ...], ...]:
        """Both series, in their order."""
        return tuple(sorted((tuple(self.a), tuple(self.b))))

    @property
    def is_distinctive(self) -> bool:
        """Whether the samples vary so much that no other measurement gives the same ones."""
        return len({*self.a, *self.b}) >= _DISTINCTIVE


class OtherRow(_Row):
    """What no verdict rests on: times by another tool, as tools/crosscheck_clocks.py takes them; old predictions."""

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: Literal["crosscheck", "prediction"]


class ProfileRow(_OfKernel):
    """One kernel launch of a call, with its hardware counters as Nsight Compute read them, caches flushed before it, by the
    tool's names, in base units. ``absent`` is the reason where no counter could be read; the launch may still be there."""

    kind: Literal["profile"] = "profile"
    launch: SeenLaunch | None = None
    time_ns: float | None = None  # under the profiler
    metrics: dict[str, float] = Field(default_factory=dict)
    tool: str | None = None  # name and version
    absent: str | None = None


CeilingName = Literal[
    "dram read", "dram copy", "tensor bf16", "tensor fp16", "matmul fp32", "matmul bf16",
    "l2 read", "shared read", "fma fp32", "exp2", "empty launch",  # in older records
]  # fmt: skip
CeilingUnit = Literal["B/s", "FLOP/s", "op/s"]


class CeilingRow(_Row):
    """What a machine was seen to reach at one thing: ``work`` bytes, FLOPs or operations a call, and how long calls took."""

    kind: Literal["ceiling"] = "ceiling"
    name: CeilingName
    unit: CeilingUnit
    work: Annotated[int, Field(ge=1, lt=2**63)]
    samples: Annotated[list[Annotated[Nanoseconds, Field(ge=1)]], Field(min_length=1)]  # a call
    how: str

    @property
    def value(self) -> float:
        """Units a second, by the median call."""
        return self.work / statistics.median(self.samples) * 1e9


class RefusalRow(_Row):
    """A number that was not given, and why, in words and in ``codes`` for machines. ``voids``: what was sampled of the kernel
    on the problem is no number either, whenever it was. At the stage "promise" the measured speed stays valid."""

    kind: Literal["refusal"] = "refusal"
    stage: Stage
    problem: str | None
    kernel: str | None
    config: str | None = None
    reason: str
    codes: list[str] = []
    voids: bool = False


class NoteRow(_Row):
    """A remark for readers of the run: an absent peer, a kernel that cannot serve a problem."""

    kind: Literal["note"] = "note"
    problem: str | None = None
    kernel: str | None = None
    text: str


class DoneRow(_Row):
    """A problem is finished: every row of it is before this one. In a run of candidates, of the candidate ``kernel``."""

    kind: Literal["done"] = "done"
    problem: str
    kernel: str | None = None


class EndRow(_Row):
    """Last row of a run that ended by itself; a file without one was cut short. Seconds are of the whole run."""

    kind: Literal["end"] = "end"
    ended: str
    wall_seconds: Seconds
    device_seconds: Seconds
    exit_code: int


Row = (
    RunRow | CallPathRow | PromiseRow | CorrectnessRow | TimingRow | OtherRow | ProfileRow | CeilingRow
    | RefusalRow | NoteRow | DoneRow | EndRow
)  # fmt: skip
ROW: TypeAdapter[Row] = TypeAdapter(Annotated[Row, Field(discriminator="kind")])
