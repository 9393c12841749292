"""``flashmoe fit``: does a kernel, or a tile not yet written, fit a GPU that need not be here, and what limits it there."""

from __future__ import annotations

import itertools
import json
import math
import re
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

if TYPE_CHECKING:
    from flashmoe_science.hardware.fitting import Fit
    from flashmoe_science.hardware.gpus import Gpu
    from flashmoe_science.kernel import AnyKernel, Config

DEFAULT_PROBLEM = "attn b4 h16 q4096 d128 bf16 causal"
DOES_NOT_FIT = 1
ASSUMED_THREADS = 128  # of a planned block, where nothing is said
ASSUMED_REGISTERS = 64
_MOST_KB = 1_000_000
_MOST_BLOCKS = 2**31 - 1  # of a grid's first dimension


def fit(
    kernel: Annotated[str | None, typer.Argument(metavar="KERNEL", help="One of our kernels; without it, all.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="l4, a100, h200, ...; without it, this machine's.")] = None,
    every_gpu: Annotated[bool, typer.Option("--all", help="Every GPU that flashmoe knows.")] = False,
    problem: Annotated[
        str, typer.Option("--problem", help="What is computed: it decides the configs and the grid.")
    ] = DEFAULT_PROBLEM,
    shared_kb: Annotated[
        float | None, typer.Option("--shared-kb", help="A block's shared memory in KB (1,024 bytes), in place of a kernel.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help=f"Threads in a block, with --shared-kb ({ASSUMED_THREADS}).")
    ] = None,
    registers: Annotated[
        int | None, typer.Option("--registers", help=f"Registers a thread, with --shared-kb ({ASSUMED_REGISTERS}).")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option("--blocks", help="Blocks in the grid, with --shared-kb: gives the waves.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Registers, spills, shared memory, resident blocks and waves of our kernels on a GPU that need not be here.

    Each kernel is compiled for that GPU; none is needed. Exit code 1: something does not fit.

    \b
    Examples:
      flashmoe fit --gpu l4
      flashmoe fit fwd_triton --gpu a100 --problem "attn b1 h32 q8192 d64 fp16"
      flashmoe fit fwd_triton --all --json
      flashmoe fit --gpu l4 --shared-kb 56.75 --threads 256 --registers 64
    """
    gpus = _chosen_gpus(gpu, every_gpu)
    given = {"--threads": threads, "--registers": registers, "--blocks": blocks}
    if shared_kb is None:
        for option, value in given.items():
            if value is not None:
                raise ValueError(f"{option} is {value} without --shared-kb; a kernel's own number is read from its build")
        what, (rows, unable) = problem, _kernel_rows(kernel, gpus, problem)
    else:
        if kernel is not None:
            raise ValueError(f"kernel is {kernel!r} and --shared-kb is {shared_kb:g}; give one or the other")
        if problem != DEFAULT_PROBLEM:
            raise ValueError(f"--problem is {problem!r} and --shared-kb is {shared_kb:g}; a given block computes no problem")
        what, unable = f"a block with {shared_kb:g} KB of shared memory", []
        rows = _given_rows(gpus, shared_kb, threads, registers, blocks)
    if as_json:
        named = ({"kernel": row.kernel, "config": row.config} if row.kernel else {} for row in rows)
        typer.echo(json.dumps([names | row.fit.as_dict() for names, row in zip(named, rows, strict=True)], indent=2))
    else:
        _print_tables(gpus, rows, unable, what)
    if any(row.fit.refusal for row in rows):
        raise typer.Exit(DOES_NOT_FIT)


class _Row(NamedTuple):
    """A build that was held against its GPU. ``kernel`` is empty for a given block."""

    kernel: str
    config: str
    fit: Fit


def _chosen_gpus(name: str | None, every: bool) -> list[Gpu]:
    from flashmoe_science.hardware.gpus import GPUS, gpu_named
    from flashmoe_science.hardware.probe import current_gpu

    if every and name is not None:
        raise ValueError(f"--gpu is {name!r} and --all is given; give one or the other")
    if every:
        return list(GPUS.values())
    here = current_gpu() if name is None else gpu_named(name)
    if here is None:
        raise ValueError(f"--gpu is not given and this machine has no NVIDIA GPU; give one of {', '.join(GPUS)}")
    return [here]


def _given_rows(gpus: list[Gpu], kb: float, threads: int | None, registers: int | None, blocks: int | None) -> list[_Row]:
    from flashmoe_science.hardware.fitting import fit_build, given_block
    from flashmoe_science.hardware.gpus import KIB

    if not 0 <= kb <= _MOST_KB:
        raise ValueError(f"--shared-kb is {kb:g}; it must be from 0 to {_MOST_KB:,}")
    if blocks is not None and not 1 <= blocks <= _MOST_BLOCKS:
        raise ValueError(f"--blocks is {blocks}; it must be from 1 to {_MOST_BLOCKS}")
    threads = ASSUMED_THREADS if threads is None else threads
    registers = ASSUMED_REGISTERS if registers is None else registers
    made = (given_block(gpu, shared_bytes=math.ceil(kb * KIB), threads=threads, registers=registers) for gpu in gpus)
    return [_Row("", "", fit_build(build, gpu, blocks)) for gpu, build in zip(gpus, made, strict=True)]


def _kernel_rows(name: str | None, gpus: list[Gpu], text: str) -> tuple[list[_Row], list[tuple[Gpu, str, str]]]:
    """A row for each GPU, kernel and config; and GPUs with the kernels that cannot serve the problem there, and why. Raises
    ValueError: a problem that does not parse, no such kernel, a peer, or a named kernel that serves it on none of the GPUs."""
    from rich.console import Console
    from rich.progress import Progress

    from flashmoe_science.hardware.fitting import fit_build
    from flashmoe_science.hardware.target import CompilerUnavailable, compile_many
    from flashmoe_science.operations import parse_problem

    problem = parse_problem(text)
    cases: list[tuple[Gpu, AnyKernel, Config]] = []
    unable: list[tuple[Gpu, str, str]] = []
    for gpu, kernel in itertools.product(gpus, _chosen_kernels(name, problem.op)):
        reason = kernel.supports(problem, gpu)
        if reason is None:
            cases += [(gpu, kernel, config) for config in kernel.configs(problem, gpu)]
        else:
            unable.append((gpu, kernel.name, reason))
    if name is not None and not cases:
        raise ValueError(f"kernel {name!r} cannot serve {problem} on {unable[0][0].product}: {unable[0][2]}")
    jobs = [(kernel.compile_job(problem, config, gpu), gpu) for gpu, kernel, config in cases if kernel.compile_job]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling", total=len(jobs))
        try:
            builds = compile_many(jobs, on_done=lambda _index, _build: progress.advance(task))
        except CompilerUnavailable as error:
            raise ValueError(str(error)) from error
    rows = []
    for (gpu, kernel, config), build in zip(cases, builds, strict=True):
        # A kernel may launch several; the grid is that of the one that was built.
        grids = (launch.grid for launch in kernel.launches(problem, config, gpu) if re.search(launch.name, build.kernel))
        grid = next(grids, None)
        rows.append(_Row(kernel.name, str(config), fit_build(build, gpu, None if grid is None else math.prod(grid))))
    return rows, unable


def _chosen_kernels(name: str | None, op: str) -> list[AnyKernel]:
    from flashmoe_science.operations import TRITON_MISSING, is_operation, kernel_named, operation

    ours = [kernel for kernel in operation(op).ours() if kernel.compile_job is not None] if is_operation(op) else []
    if name is None:
        if not ours:
            raise ValueError(f"there is no kernel of {op} to build here{f': {TRITON_MISSING}' if TRITON_MISSING else ''}")
        return ours
    kernel = kernel_named(name, op if is_operation(op) else None)
    if kernel not in ours:
        names = ", ".join(one.name for one in ours)
        raise ValueError(f"kernel is {name!r}, a peer, which is not built here; it must be one of {names}")
    return [kernel]


def _print_tables(gpus: list[Gpu], rows: list[_Row], unable: list[tuple[Gpu, str, str]], what: str) -> None:
    from flashmoe_science.cli.sheet import console, print_table, put_wrapped
    from flashmoe_science.hardware.occupancy import kilobytes
    from flashmoe_science.judge.report.blocks import Cell, Row, Table, columns

    headings = columns(
        "kernel", "n:regs", "n:spills", "n:threads", "n:shared memory", "n:blocks/SM", "n:warps/SM", "n:waves", "v:limited by"
    )
    out = console()
    out.print(what)
    for gpu in gpus:
        static, opt_in = kilobytes(gpu.shared_per_block_static), kilobytes(gpu.shared_per_block)
        out.print()
        here = [row for row in rows if row.fit.gpu is gpu]
        # The configs stand above their rows: in a column of their own they would fold everything on a narrow terminal.
        names = (Cell(f"{row.kernel or 'block'} {row.config}".rstrip(), _note(row)) for row in here)
        built = [Row((name, *map(Cell, _cells(row.fit)))) for name, row in zip(names, here, strict=True)]
        title = f"{gpu.product} ({gpu.arch}, {gpu.sm_count} SMs); a block's shared memory: {static} static, {opt_in} by opt-in"
        print_table(out, Table("fits", title, headings, built))
        for where, name, reason in unable:
            if where is gpu:
                put_wrapped(out, f"{name} cannot serve it here: {reason}")


def _cells(fit: Fit) -> tuple[str, ...]:
    from flashmoe_science.hardware.occupancy import kilobytes

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
    """What stands below a row: why a kernel's build does not fit, and of a given block everything in words."""
    fit = row.fit
    if row.kernel or fit.refusal:
        return fit.refusal and f"does not fit: {fit.refusal}"
    limit = f"limited by {fit.residency.reason}" if fit.residency else None
    return "; ".join(filter(None, ("fits", fit.shared, limit, str(fit.waves) if fit.waves else None)))
