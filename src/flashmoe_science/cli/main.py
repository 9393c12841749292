"""The command ``flashmoe``: which commands there are, and what a user sees when something is wrong.

Each command lives in a module of its own and is imported when it is called, so that help comes at once; one that measures
imports PyTorch only then.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flashmoe_science.exit_codes import MEANINGS, ExitCode
from flashmoe_science.printable import printable

PROGRAM = "flashmoe"
# Click's UsageError. Typer has its own copy of click in newer versions, so click itself may be absent.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

# Name -> what it does, in the order of the help. Each is the function of that name in cli/<name>.py.
COMMANDS = {
    "check": "Check that a function is right, in seconds.",
    "prove": "Prove kernels: call path, correctness, speed, verdicts, a report.",
    "verdicts": "Print which kernel is faster than which, with intervals.",
    "report": "Write the records' verdicts as HTML, Markdown and CSV.",
    "claims": "Compare claims with the records.",
    "compare": "Compare commits, runs or kernels with each other.",
    "ratchet": "Fail on a proven regression.",
    "diagnose": "Say why a kernel is not faster, and what would help.",
    "explain": "Say which kernel would serve a problem, and why.",
    "tune": "Measure on this card which kernels are fastest, for dispatch.",
    "warmup": "Compile ahead of serving what a model's calls launch.",
    "fit": "Say whether kernels fit a GPU that need not be here.",
}

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class CommandGroup(TyperGroup):
    """The commands of COMMANDS. Help imports none of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        function = getattr(importlib.import_module(f"flashmoe_science.cli.{cmd_name}"), cmd_name)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(cmd_name, context_settings=CONTEXT)(function)
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), f"{code.word}: {meaning}") for code, meaning in MEANINGS.items()])


app = typer.Typer(
    cls=CommandGroup, add_completion=False, rich_markup_mode=None, context_settings=CONTEXT, pretty_exceptions_enable=False
)


@app.callback(invoke_without_command=True)
def flashmoe(
    context: typer.Context, show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False
) -> None:
    """Test and time kernels of attention and of mixtures of experts: the package's and your own.

    A problem is written as text, sizes and flags in any order after its operation:

    \b
      attn b2 h16 hk4 q4096 k4096 d128 bf16 causal
      moe t64 e128 k8 d2048 f768 bf16 logits

    Of attention: b batch, h query heads, hk key/value heads, q queries, k keys, d head dimension. Of experts: t tokens,
    e experts, k experts a token, d hidden size, f intermediate size; logits: from the router on.

    \b
    Examples:
      flashmoe check my_module:my_fn   is it right? on some 120 tiny problems
      flashmoe prove                   prove the kernels, with or without a GPU
      flashmoe verdicts                what the committed records say
      flashmoe diagnose long           why not faster, and what would change that?
    """
    if show_version:
        typer.echo(f"{PROGRAM} {version('flashmoe-science')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    A wrong input ends in one line that says what is wrong; FLASHMOE_TRACEBACK=1 shows where it came from instead.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a letter that the terminal's encoding lacks is written out, as \u65e5
            stream.reconfigure(errors="backslashreplace")
    try:
        code = typer.main.get_command(app).main(arguments, prog_name=PROGRAM, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = ExitCode.INTERRUPTED
    except SystemExit:  # the only one that reaches us: click and rich leave so where a pipe is closed
        code = ExitCode.NOT_READ
    except UsageError as error:
        _print_error(_usage_message(error))
        code = ExitCode.COULD_NOT_RUN
    except (ValueError, OSError) as error:
        if os.environ.get("FLASHMOE_TRACEBACK") == "1":
            raise
        _print_error(_error_line(error))
        code = ExitCode.COULD_NOT_RUN
    if code == ExitCode.INTERRUPTED:  # which newer versions of Typer return by themselves
        _print_error("interrupted")
    sys.exit(code if isinstance(code, int) else 0)


def _error_line(error: ValueError | OSError) -> str:
    """One line; of the operating system, its words and the file that they are about."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror.lower()}{'' if error.filename is None else f': {error.filename}'}"
    return " ".join(str(error).split())


def _usage_message(error: Any) -> str:
    """Click's message on one line, with the command whose help explains more."""
    where = error.ctx.command_path if error.ctx else PROGRAM
    return f"{' '.join(error.format_message().split())} (see: {where} --help)"


def _print_error(message: str) -> None:
    typer.echo(f"{PROGRAM}: {printable(message)}", err=True)
