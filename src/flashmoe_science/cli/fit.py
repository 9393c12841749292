"""``flashmoe fit``: does a kernel, or a tile not yet written, fit a GPU that need not be here, and what limits it there."""

from __future__ import annotations

import itertools
import json
import math
import re
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress

from flashmoe_science.cli.sheet import console, print_table, print_wrapped
from flashmoe_science.exit_codes import ExitCode
from flashmoe_science.hardware import probe, target
from flashmoe_science.hardware.fitting import Fit, fit_build
from flashmoe_science.hardware.gpus import GPUS, KIB, Gpu, gpu_named
from flashmoe_science.hardware.occupancy import kilobytes
from flashmoe_science.hardware.target import Build
from flashmoe_science.judge.report.blocks import Cell, Row, Table, columns
from flashmoe_science.kernel import AnyKernel, Config
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.operations import TRITON_MISSING, is_operation, kernel_named, operation, parse_problem
from flashmoe_science.problem import Problem

DEFAULT_PROBLEM = "attn b4 h16 q4096 d128 bf16 causal"
_ASSUMED = (128, 64)  # default threads of a planned block and registers of each
_MOST = 2**31 - 1
_BLOCK = "KB[,THREADS[,REGISTERS[,BLOCKS]]]"
_COLUMNS = columns(
    "kernel", "n:regs", "n:spills", "n:threads", "n:shared memory", "n:blocks/SM", "n:warps/SM", "n:waves", "v:limited by"
)  # fmt: skip


def fit(
    kernel: Annotated[str | None, typer.Argument(metavar="KERNEL", help="One of our kernels; without it, all.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="l4, a100, h200, ...; without it, this machine's.")] = None,
    every_gpu: Annotated[bool, typer.Option("--all", help="Every GPU that flashmoe knows.")] = False,
    problem: Annotated[
        str, typer.Option("--problem", help="The problem that decides the configs and the grid.")
    ] = DEFAULT_PROBLEM,
    block: Annotated[
        str | None,
        typer.Option(
            "--block",
            metavar=_BLOCK,
            help="In place of a kernel, a block that is not written yet: shared memory in KB (1,024 bytes), threads (128), "
            "registers a thread (64), and the number of blocks in the grid.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print registers, spills, shared memory, resident blocks and waves of our kernels on a GPU that need not be here.

    Each kernel is compiled for that GPU, on any machine.

    Exit code: 0 all fit, 1 something does not fit, 2 it could not run.

    \b
    Examples:
      flashmoe fit --gpu l4
      flashmoe fit fwd_triton --gpu a100 --problem "attn b1 h32 q8192 d64 fp16"
      flashmoe fit fwd_triton --all --json
      flashmoe fit --gpu l4 --block 56.75,256,64
    """
    gpus = _chosen_gpus(gpu, every_gpu)
    unsupported: list[tuple[Gpu, str]] = []
    if block is not None:
        if kernel is not None or problem != DEFAULT_PROBLEM:
            raise ValueError(f"--block is {block!r} and a kernel or --problem is given; give one or the other")
        what, rows = f"a block of {block} ({_BLOCK})", _given(block, gpus)
    else:
        what, asked = problem, parse_problem(problem)
        rows = _built(_chosen_kernels(kernel, asked.op), gpus, asked, unsupported)
        if kernel is not None and not rows:
            raise ValueError(f"{unsupported[0][1]}, on {unsupported[0][0].product}")
    if as_json:
        named = [({"kernel": row.kernel, "config": row.config} if row.kernel else {}) | row.fit.as_dict() for row in rows]
        typer.echo(json.dumps(named, indent=2))
    else:
        _print_tables(gpus, rows, unsupported, what)
    if any(row.fit.refusal for row in rows):
        raise typer.Exit(ExitCode.WRONG)


class _Row(NamedTuple):
    """A build and how it fits its GPU. ``kernel`` is empty for a given block."""

    kernel: str
    config: str
    fit: Fit


def _chosen_gpus(name: str | None, every: bool) -> list[Gpu]:
    if every and name is not None:
        raise ValueError(f"--gpu is {name!r} and --all is given; give one or the other")
    if every:
        return list(GPUS.values())
    here = probe.current_gpu() if name is None else gpu_named(name)
    if here is None:
        raise ValueError(f"--gpu is not given and this machine has no NVIDIA GPU; give one of {', '.join(GPUS)}")
    return [here]


def _given(text: str, gpus: list[Gpu]) -> list[_Row]:
    """A row for each GPU, of a block that is not written yet."""
    words = text.split(",")
    try:
        kb, counts = float(words[0]), [int(word) for word in words[1:]]
    except ValueError:
        kb, counts = math.nan, []
    if not 0 <= kb <= _MOST / KIB or len(counts) > 3 or not all(1 <= count <= _MOST for count in counts):
        raise ValueError(f"--block is {text!r}; it must be {_BLOCK}, numbers of 1 or more, such as 56.75,256,64")
    threads, registers, *blocks = (*counts, *_ASSUMED[len(counts) :])
    shared = math.ceil(kb * KIB)
    builds = (Build(gpu.name, "given", registers=registers, shared_dynamic=shared, threads=threads) for gpu in gpus)
    return [_Row("", "", fit_build(build, gpu, *blocks)) for gpu, build in zip(gpus, builds, strict=True)]


def _chosen_kernels(name: str | None, op: str) -> list[AnyKernel]:
    ours = [*operation(op).ours()] if is_operation(op) else []
    if name is None:
        if not ours:
            raise ValueError(f"there is no kernel of {op} to build here{f': {TRITON_MISSING}' if TRITON_MISSING else ''}")
        return ours
    kernel = kernel_named(name, op if is_operation(op) else None)
    if kernel not in ours:
        names = ", ".join(one.name for one in ours)
        raise ValueError(f"kernel is {name!r}, a peer, which is not built here; it must be one of {names}")
    return [kernel]


def _built(kernels: list[AnyKernel], gpus: list[Gpu], problem: Problem, unsupported: list[tuple[Gpu, str]]) -> list[_Row]:
    """A row for each GPU, kernel and config. GPUs whose kernels cannot serve the problem go to ``unsupported``, with the
    reason. Raises ValueError: nothing can be compiled here."""
    cases: list[tuple[Gpu, AnyKernel, Config]] = []
    for gpu, kernel in itertools.product(gpus, kernels):
        reason = kernel.supports(problem, gpu)
        if reason is None:
            cases += [(gpu, kernel, config) for config in kernel.configs(problem, gpu)]
        else:
            unsupported.append((gpu, f"kernel {kernel.name!r} cannot serve {problem}: {reason}"))
    if not cases:
        return []
    jobs = [(compile_jobs(kernel, problem, config, gpu)[0], gpu) for gpu, kernel, config in cases]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling", total=len(jobs))
        try:
            builds = target.compile_many(jobs, on_done=lambda _index, _build: progress.advance(task))
        except target.CompilerUnavailable as error:
            raise ValueError(str(error)) from error
    rows = []
    for (gpu, kernel, config), build in zip(cases, builds, strict=True):
        # A kernel may launch several; the grid is that of the one that was built.
        grids = (launch.grid for launch in kernel.launches(problem, config, gpu) if re.search(launch.name, build.kernel))
        grid = next(grids, None)
        rows.append(_Row(kernel.name, str(config), fit_build(build, gpu, None if grid is None else math.prod(grid))))
    return rows


def _print_tables(gpus: list[Gpu], rows: list[_Row], unsupported: list[tuple[Gpu, str]], what: str) -> None:
    out = console()
    out.print(what)
    for gpu in gpus:
        static, opt_in = kilobytes(gpu.shared_per_block_static), kilobytes(gpu.shared_per_block)
        out.print()
        here = [row for row in rows if row.fit.gpu is gpu]
        names = (Cell(f"{row.kernel or 'block'} {row.config}".rstrip(), _note(row)) for row in here)
        built = [Row((name, *map(Cell, _cells(row.fit)))) for name, row in zip(names, here, strict=True)]
        title = f"{gpu.product} ({gpu.arch}, {gpu.sm_count} SMs); a block's shared memory: {static} static, {opt_in} by opt-in"
        print_table(out, Table("fits", title, _COLUMNS, built))
        for where, reason in unsupported:
            if where is gpu:
                print_wrapped(out, reason)


def _cells(fit: Fit) -> tuple[str, ...]:
    build, resident, filled = fit.build, fit.residency, fit.waves
    if resident is None:
        return (*["-"] * 7, "not built")
    static = build.shared_bytes <= fit.gpu.shared_per_block_static
    shared = "static" if static else "opt-in" if build.shared_bytes <= fit.gpu.shared_per_block else "too much"
    return (
        str(build.registers),
        f"{build.spill_bytes} B",
        str(build.threads),
        f"{kilobytes(build.shared_bytes)}, {shared}",
        str(resident.blocks),
        f"{resident.warps} of {resident.max_warps}",
        "-" if filled is None else f"{filled.count:.2f} ({filled.efficiency:.0%})",
        ", ".join(resident.limited_by),
    )


def _note(row: _Row) -> str | None:
    """The note below a row: why a kernel's build does not fit, or all facts of a given block as text."""
    fit = row.fit
    if row.kernel or fit.refusal:
        return fit.refusal and f"does not fit: {fit.refusal}"
    limit = f"limited by {fit.residency.reason}" if fit.residency else None
    return "; ".join(filter(None, ("fits", fit.shared, limit, str(fit.waves) if fit.waves else None)))
