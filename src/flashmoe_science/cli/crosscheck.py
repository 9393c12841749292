"""``flashmoe crosscheck``: does our graph clock agree with other tools?"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flashmoe_science.judge.crosscheck import Agreement

GOOD, COULD_NOT_RUN, UNTRUSTWORTHY = 0, 2, 3
_COLOURS = {"agrees": "green", "differs": "red", "undecided": "yellow", "no number": "magenta"}


def crosscheck(
    problems: Annotated[
        list[str] | None, typer.Argument(metavar="PROBLEM", help="Texts of problems; by default seven, from 5 to 90 us.")
    ] = None,
    kernel: Annotated[str | None, typer.Option("--kernel", help="This kernel in place of the library's choice.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the records (reports/crosscheck-<time>).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects, one a comparison.")] = False,
) -> int:
    """Time one kernel by our graph clock and by other tools, like with like, and say whether they agree within 3%.

    The tools are triton.testing.do_bench_cudagraph (warm cache) and NVIDIA's cuda-bench (cold and warm cache; install it with
    pip install "cuda-bench[cu13]"). Our samples are taken before and after each tool's, in one process on the same tensors.
    It needs a GPU. The records are kept; copy them under evidence/runs/<gpu>/ and flashmoe report shows them.

    Exit code: 0 all agree, 2 it could not run or a tool gave no number, 3 a tool differs.

    \b
    Examples:
      flashmoe crosscheck
      flashmoe crosscheck "attn b4 h16 q4096 d128 bf16 causal" --kernel fwd_triton --json
    """
    from flashmoe_science.cli.progress import Screen
    from flashmoe_science.judge.crosscheck import agreements, tools_that_agree
    from flashmoe_science.measure.bench import bench_here
    from flashmoe_science.measure.profile.crosscheck import SUITE, CrossCheck, problems_of
    from flashmoe_science.store import RunWriter, read_run

    asked = problems_of(problems or [])
    bench = bench_here()
    if bench.gpu is None:
        raise ValueError("flashmoe crosscheck needs an NVIDIA GPU, and PyTorch sees none here: the graph clock is the GPU's")
    check = CrossCheck(bench, asked, kernel, ("flashmoe", *sys.argv[1:]))
    path = (out or Path("reports") / f"crosscheck-{datetime.now():%Y%m%d-%H%M%S}") / f"run-{SUITE}.jsonl"
    with Screen() as screen, RunWriter(path) as writer:
        check.run(writer, screen.watch)
    found = agreements([read_run(path)])
    if as_json:
        typer.echo(json.dumps([one.as_dict() for one in found], indent=1))
    else:
        _print(found)
        for tool, (agrees, given) in tools_that_agree(found).items():
            typer.echo(f"{tool} agrees on {agrees} of {given} problems")
        typer.echo(f"records in {path}")
    said = {one.said for one in found}
    return UNTRUSTWORTHY if "differs" in said else GOOD if said == {"agrees"} else COULD_NOT_RUN


def _print(found: Sequence[Agreement]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, justify in (
        ("problem", "left"), ("kernel", "left"), ("tool", "left"), ("cache", "left"),
        ("tool's us", "right"), ("ours us", "right"), ("difference", "right"), ("drift", "right"), ("", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]  # the two are words that rich knows
    for one in found:
        told = one.said if one.why is None else f"{one.said}: {one.why}"
        table.add_row(
            Text(one.problem),
            Text(one.kernel),
            Text(one.tool),
            one.cache,
            "" if one.time_ns is None else f"{one.time_ns / 1e3:.2f}",
            "" if one.ours_ns is None else f"{one.ours_ns / 1e3:.2f}",
            "" if one.difference is None else f"{one.difference:+.2%}",
            "" if one.drift is None else f"{one.drift:+.2%}",
            Text(told, style=_COLOURS[one.said]),
        )
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 240
    console.print(table)
