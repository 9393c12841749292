"""``flashmoe warmup``: compile ahead what a model's calls launch, into Triton's cache on disk."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from flashmoe_science.cli.progress import Screen
from flashmoe_science.exit_codes import ExitCode
from flashmoe_science.hardware import probe, target
from flashmoe_science.hardware.gpus import gpu_named

_OF_FUSED_MOE = "As in fused_moe."


def warmup(
    gpu: Annotated[str | None, typer.Option("--gpu", help="l4, a100, h200, ...; without it, this machine's.")] = None,
    heads: Annotated[int | None, typer.Option("--heads", help="Query heads; without it, no attention.")] = None,
    heads_kv: Annotated[int | None, typer.Option("--heads-kv", help="Heads of keys and values, if fewer.")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", help="Width of a head.")] = None,
    head_dim_v: Annotated[int | None, typer.Option("--head-dim-v", help="Width of a head of values, if different.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="bf16, fp16 or fp32.")] = "bf16",
    batch: Annotated[
        list[int] | None, typer.Option("--batch", metavar="N", help="Sequences of a call (1); may be repeated.")
    ] = None,
    max_seqlen: Annotated[int, typer.Option("--max-seqlen", help="The longest sequence.")] = 4096,
    full: Annotated[bool, typer.Option("--full", help="Full attention; without it, causal.")] = False,
    window: Annotated[
        tuple[int, int], typer.Option("--window", metavar="LEFT RIGHT", help="Keys left and right of a query; -1: no limit.")
    ] = (-1, -1),
    softcap: Annotated[float, typer.Option("--softcap", help="Soft cap of the scores.")] = 0.0,
    sinks: Annotated[bool, typer.Option("--sinks", help="Heads have learned sinks.")] = False,
    page_size: Annotated[int | None, typer.Option("--page-size", help="Tokens of a page of a paged cache.")] = None,
    append: Annotated[bool, typer.Option("--append", help="Calls append keys (flash_attn_with_kvcache).")] = False,
    rotary_dim: Annotated[int, typer.Option("--rotary-dim", help="Width of the rotary embedding of appended keys.")] = 0,
    rotary_halves: Annotated[bool, typer.Option("--rotary-halves", help="Rotate halves (rotary_interleaved=False).")] = False,
    experts: Annotated[int | None, typer.Option("--experts", help="Number of experts; without it, no experts.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Experts of a token.")] = None,
    hidden: Annotated[int | None, typer.Option("--hidden", help="Width of the model.")] = None,
    intermediate: Annotated[int | None, typer.Option("--intermediate", help="Width of an expert.")] = None,
    activation: Annotated[str, typer.Option("--activation", help=_OF_FUSED_MOE)] = "silu",
    expert_bias: Annotated[bool, typer.Option("--expert-bias", help="Experts have biases.")] = False,
    transposed: Annotated[bool, typer.Option("--transposed", help=_OF_FUSED_MOE)] = False,
    interleaved: Annotated[bool, typer.Option("--interleaved", help=_OF_FUSED_MOE)] = False,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Most tokens of a call (--max-seqlen).")] = None,
) -> int:
    """Compile what a model's calls launch, ahead of serving, on every processor; with --gpu for a GPU that is not here.

    The kernels go to Triton's cache, ~/.triton/cache or TRITON_CACHE_DIR, from which a serving process loads each in
    milliseconds. Copy that folder to machines with the same GPU, Triton and version of this package, or run this command where
    an image is built. Inside a process, flashmoe_science.warmup(...) takes the same description and loads the kernels too.

    Exit code: 0 all are compiled, 1 one is refused, 2 it could not run.

    \b
    Examples:
      flashmoe warmup --heads 32 --heads-kv 8 --head-dim 128 --max-seqlen 32768
      flashmoe warmup --heads 32 --heads-kv 4 --head-dim 128 --page-size 16 \\
        --experts 128 --top-k 8 --hidden 2048 --intermediate 768 --gpu h200
    """
    from flashmoe_science.ahead import Model, dtype_named, jobs_of
    from flashmoe_science.hardware.compiler import cache_folder

    device = gpu_named(gpu) if gpu is not None else probe.current_gpu()
    if device is None:
        raise typer.BadParameter("there is no NVIDIA GPU here; name one", param_hint="--gpu")
    started = time.monotonic()
    model = Model(
        heads, heads_kv, head_dim, head_dim_v, dtype_named(dtype), tuple(batch or (1,)), max_seqlen, not full, window, softcap,
        sinks, page_size, append, rotary_dim, not rotary_halves, experts, top_k, hidden, intermediate, activation, expert_bias,
        transposed, interleaved, max_tokens,
    )  # fmt: skip
    with Screen() as screen:
        jobs, done = jobs_of(model, device, lambda: screen.watch("listing what the calls launch")), 0

        def on_done(index: int, build: target.Build) -> None:
            nonlocal done
            done += 1
            screen.watch(f"compiling for {device.name}", done, len(jobs))

        try:
            builds = target.compile_many([(job, device) for job in jobs], on_done)
        except target.CompilerUnavailable as error:
            raise ValueError(str(error)) from error
    refused = [build for build in builds if build.refusal is not None]
    for build in refused:
        typer.echo(f"{build.kernel}: {build.refusal}")
    seconds = time.monotonic() - started
    typer.echo(f"{len(builds) - len(refused)} kernels for {device.product} are in {cache_folder()}, after {seconds:.1f} s")
    return ExitCode.WRONG if refused else ExitCode.GOOD
