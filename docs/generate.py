"""Write what can drift: the reference pages, the README's picture, and the numbers between marks in README.md.

    python docs/generate.py            write them
    python docs/generate.py --check    exit 1, naming each page, if one is not as it would be written now

Either way it exits 1, naming each, if README.md or CHANGELOG.md has a figure of speed that no claim
or run which it cites gives.

Nothing here depends on the machine: no GPU is asked for, and the numbers come from the committed records alone.
"""

from __future__ import annotations

import difflib
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import support_matrix
from numbers_from_records import NO_RECORDS, Numbers
from picture import picture

import flashmoe_science
from flashmoe_science import parallel, proof
from flashmoe_science.cli.main import COMMANDS
from flashmoe_science.cli.main import main as flashmoe
from flashmoe_science.judge.standing import JudgedRun

ROOT = Path(__file__).resolve().parent.parent
NOTICE = "<!-- Written by docs/generate.py; `make docs` writes it anew. -->\n\n"
HELP_WIDTH = 100
BLOCK = re.compile(r"<!-- generated:(?P<name>\w+) -->\n.*?<!-- end generated:(?P=name) -->", re.DOTALL)


def cli_page() -> str:
    """Every command's ``--help``, as a user sees it."""
    parts = ["# The command `flashmoe`\n"]
    for command in ("", *COMMANDS):
        words = ["flashmoe", *command.split(), "--help"]
        parts.append(f"## `{' '.join(words[:-1])}`\n\n```\n{_help(command)}\n```\n")
    return NOTICE + "\n".join(parts)


def _help(command: str) -> str:
    os.environ.update({"COLUMNS": str(HELP_WIDTH + 2), "NO_COLOR": "1"})
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            flashmoe([*command.split(), "--help"])
    except SystemExit as ended:
        if ended.code:
            sys.exit(f"docs: flashmoe {command} --help failed")
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


def api_page() -> str:
    """Signature and docstring of every public name."""
    parts = ["# The Python interface\n\n`from flashmoe_science import ...`\n"]
    public = {name: getattr(flashmoe_science, name) for name in sorted(flashmoe_science.__all__, key=str.lower)}
    others = {f"parallel.{name}": getattr(parallel, name) for name in parallel.__all__}
    for name, value in {**public, **others, "proof.check": proof.check, "proof.prove": proof.prove}.items():
        if not callable(value):
            continue
        kind = "class " if inspect.isclass(value) else ""
        called = f"{kind}{name.rpartition('.')[2]}{_signature(value)}"
        parts.append(f"## `{name}`\n\n```python\n{called}\n```\n\n```text\n{inspect.getdoc(value)}\n```\n")
    return NOTICE + "\n".join(parts)


class _Bare(str):
    """An annotation that is printed as it was written, without the quotes of a string."""

    def __repr__(self) -> str:
        return str(self)


def _signature(value: Callable[..., object]) -> str:
    signature = inspect.signature(value)
    parameters = [p.replace(annotation=_Bare(p.annotation)) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters, return_annotation=_Bare(signature.return_annotation)))
    if len(text) <= 90:
        return text
    inside, _, result = text[1:].rpartition(")")
    return "(\n    " + ",\n    ".join(_split_parameters(inside)) + f",\n){result}"


def _split_parameters(text: str) -> list[str]:
    """Split at the commas that no bracket encloses: a default may be a tuple and a type may have parameters."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def fill(text: str, numbers: Numbers) -> str:
    """``text`` with its block "losses" written anew; raises ValueError where a mark has no end or another name."""

    def block(match: re.Match[str]) -> str:
        if match["name"] != "losses":
            raise ValueError(f"README.md marks the block {match['name']!r}; it must be losses")
        content = numbers.losses() if numbers.runs else NO_RECORDS
        return f"<!-- generated:losses -->\n{content}\n<!-- end generated:losses -->"

    filled, found = BLOCK.subn(block, text)
    if found != len(re.findall(r"<!-- (?:end )?generated:", text)) / 2:
        raise ValueError("README.md has a generated block without its end, or an end without its block")
    return filled


def pages(numbers: Numbers) -> dict[Path, str]:
    """Path and content of all that is generated."""
    reference = ROOT / "docs" / "reference"
    written = {
        reference / "cli.md": cli_page(),
        reference / "api.md": api_page(),
        reference / "support.md": NOTICE + support_matrix.page(),
    }
    written[ROOT / "docs" / "speed.svg"] = picture(numbers.cases)
    readme = ROOT / "README.md"
    written[reference / "results.md"] = NOTICE + numbers.results_page()
    written[readme] = fill(readme.read_text(encoding="utf-8"), numbers)
    return written


def main(arguments: list[str], judged: Sequence[JudgedRun] = ()) -> None:
    if arguments not in ([], ["--check"]):
        sys.exit("usage: python docs/generate.py [--check]")
    numbers = Numbers.of(judged, ROOT) if judged else Numbers.read(ROOT)
    written = pages(numbers)
    stale = 0
    for path, content in written.items():
        now = path.read_text(encoding="utf-8") if path.is_file() else ""
        if now == content:
            continue
        name = str(path.relative_to(ROOT))
        if not arguments:
            path.write_text(content, encoding="utf-8")
            print(f"docs: wrote {name}")
            continue
        stale += 1
        print(f"docs: {name} is stale; run: make docs")
        changes = list(difflib.unified_diff(now.splitlines(), content.splitlines(), "committed", "now", n=0, lineterm=""))
        print("\n".join(f"  {line}" for line in changes[2:14]))
    texts = {"README.md": written[ROOT / "README.md"], "CHANGELOG.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")}
    unbacked = [f"{name}:{line}" for name, text in texts.items() for line in numbers.unbacked(text)]
    for line in unbacked:
        print(f"docs: {line}")
    if stale or unbacked:
        sys.exit(1)
    if arguments:
        print("docs: all generated pages are fresh")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:  # a record, a claim or the README that cannot be read as it should
        sys.exit(f"docs: {error}")
