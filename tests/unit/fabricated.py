"""Fabricated runs: every fact of a real one, with times that the test chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.judge.standing import JudgedRun, standing
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.records import (
    Cache,
    CallPathRow,
    Clock,
    CorrectnessRow,
    DoneRow,
    EndRow,
    Environment,
    ErrorStats,
    NoteRow,
    RefusalRow,
    Row,
    RunRow,
    SeenLaunch,
    Stage,
    TimingRow,
)
from flashmoe_science.store import Run

PROBLEM = "attn b2 h8 q512 d64 fp16"
LONGER = "attn b2 h8 q1024 d64 fp16"
SEVERAL_L2 = 200_000_000  # bytes
OURS = ("fwd_triton", "fwd_gluon_sm90")


def verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """The verdicts of these runs that count."""
    return standing([JudgedRun(run) for run in runs])


class Fabricate:
    """A run in the making. Kernels named in OURS are ours, those with a colon a user's, all others peers; ``timed`` also proves
    both kernels."""

    def __init__(
        self, run: str = "r1", started: str = "2026-01-01T00:00:00+00:00", suite: str = "documents",
        gpu: str | None = "NVIDIA H200", quick: bool = False, sms: int | None = None,
    ) -> None:  # fmt: skip
        known = {card.product: card.sm_count for card in GPUS.values()}
        environment = Environment(
            gpu=gpu, gpu_memory_bytes=150_754_820_096 if gpu else None, sm_count=(sms or known.get(gpu)) if gpu else None,
            driver="580.1" if gpu else None, cuda="13.0" if gpu else None, cpu="a CPU", cpu_count=16, platform="Linux",
            python="3.12", torch="2.11", triton="3.6.0", packages={"fa3-fwd": "0.0.3"},
        )  # fmt: skip
        self.header = RunRow(
            run=run, started=started, suite=suite, command=["flashmoe", "prove", suite], commit="c0ffee" * 6 + "cafe",
            source_digest="5eed", seed=42, environment=environment,
        )  # fmt: skip
        self.name, self.quick = run, quick
        self.rows: list[Row] = []
        self._proved: set[tuple[str, str, str]] = set()
        self._random = np.random.default_rng(len(run) + sum(map(ord, run)))

    def times(self, mean: float, count: int, noise: float) -> list[int]:
        return [round(mean * math.exp(noise * value)) for value in self._random.standard_normal(count)]

    def prove(
        self, problem: str, kernel: str, config: str = "", *, passed: bool = True, broken: Sequence[str] = (), seen: bool = True
    ) -> None:
        """Write the kernel's oracle and call path rows, unless they are there."""
        if (problem, kernel, config) in self._proved:
            return
        self._proved.add((problem, kernel, config))
        asked = parse_problem(problem)
        heads = asked.batch * asked.heads if isinstance(asked, AttentionProblem) else 1
        output = heads * (asked.seqlen_q if isinstance(asked, AttentionProblem) else asked.queries() or 1) * 66
        about = {"run": self.name, "problem": problem, "kernel": kernel, "config": config}
        self.rows.append(
            CorrectnessRow(
                **about,
                origin=origin(kernel),
                passed=passed,
                outputs={"out": errors(passed)},
                peak_extra_bytes=output,
                output_bytes=output,
            )
        )
        if self.header.environment.gpu:
            launch = SeenLaunch(name=f"_{kernel}_device", grid=(8, 16, 1), block=(128, 1, 1), shared_bytes=49152)
            self.rows.append(CallPathRow(**about, launches=[launch] if seen else [], broken_promises=list(broken)))

    def timed(
        self, kernel: str, time: float, rival: str, rival_time: float, *, problem: str = PROBLEM, clock: Clock = "graph",
        cache: Cache = "cold", config: str = "", rival_config: str = "", pairs: int = 20, noise: float = 0.003,
        calls: int = 100, throttle: Sequence[str] = (), proved: bool = True,
    ) -> Fabricate:  # fmt: skip
        """Write the pair's samples, around these medians in ns."""
        if proved:
            self.prove(problem, kernel, config)
            self.prove(problem, rival, rival_config)
        self.rows.append(
            TimingRow(
                run=self.name, problem=problem, op=parse_problem(problem).op, kernel=kernel, origin=origin(kernel),
                config=config, rival=rival, rival_origin=origin(rival), rival_config=rival_config, clock=clock, cache=cache,
                calls=calls, input_sets=2 + SEVERAL_L2 // max(1, parse_problem(problem).min_bytes()),
                a=self.times(time, pairs, noise), b=self.times(rival_time, pairs, noise), throttle=list(throttle),
                device_seconds=0.5, quick=self.quick,
            )
        )  # fmt: skip
        return self

    def control(
        self, kernel: str = "fwd_triton", *, problem: str = PROBLEM, clock: Clock = "graph", cache: Cache = "cold",
        config: str = "", off: float = 1.0, noise: float = 0.003,
    ) -> Fabricate:  # fmt: skip
        """The kernel against itself; ``off`` is how far the harness errs."""
        return self.timed(
            kernel, 20_000, kernel, 20_000 * off, problem=problem, clock=clock, cache=cache,
            config=config, rival_config=config, noise=noise,
        )  # fmt: skip

    def refused(
        self, stage: Stage, reason: str, kernel: str | None = None, problem: str | None = PROBLEM, config: str | None = ""
    ) -> Fabricate:
        self.rows.append(
            RefusalRow(
                run=self.name, stage=stage, problem=problem, kernel=kernel, config=config if kernel else None, reason=reason
            )
        )
        return self

    def noted(self, text: str, kernel: str | None = None, problem: str | None = None) -> Fabricate:
        self.rows.append(NoteRow(run=self.name, text=text, kernel=kernel, problem=problem))
        return self

    def done(self, cut: bool = False) -> Run:
        """The run. ``cut``: it ended before it was done with any of its problems."""
        problems = () if cut else dict.fromkeys(row.problem for row in self.rows if isinstance(row, TimingRow))
        finished = [DoneRow(run=self.name, problem=problem) for problem in problems]
        end = EndRow(run=self.name, ended="2026-01-01T00:10:00+00:00", wall_seconds=600.0, device_seconds=480.0, exit_code=0)
        return Run(self.header, (*self.rows, *finished, end))


def errors(passed: bool = True) -> ErrorStats:
    """Of an output that is right, or is not."""
    error = 1e-4 if passed else 1.513
    return ErrorStats(
        max=error, rms=error / 4, mean=error / 5, worst=[0, 1, 2, 3], bound_max=1e-3, bound_rms=1e-3, bound_mean=1e-3,
        nonfinite=0,
    )  # fmt: skip


def origin(kernel: str) -> str:
    return "ours" if kernel in OURS else "candidate" if ":" in kernel else "peer"  # type: ignore[return-value]
