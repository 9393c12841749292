"""The example workflow stays true: its commands exist, with the options that it gives them, and it leaks no tab into YAML."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from flashmoe_science.cli.main import COMMANDS, app

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "examples" / "ci" / "flashmoe.yml").read_text(encoding="utf-8")
RUNS = re.findall(r"^\s+run: (.+)$", TEXT, re.MULTILINE)
FLASHMOE = [line.split(" || ")[0].split("/flashmoe ")[1] for line in RUNS if "/flashmoe " in line]
MAKE = [re.fullmatch(r'make prove ARGS="(.*)"', line)[1] for line in RUNS if line.startswith("make ")]  # type: ignore[index]


def test_it_has_a_job_without_a_gpu_and_one_with() -> None:
    assert re.findall(r"^  ([a-z-]+):$", TEXT.split("\njobs:\n")[1], re.MULTILINE) == ["proof-without-gpu", "proof-on-gpu"]
    assert "runs-on: [self-hosted, gpu]" in TEXT
    assert [words.split()[0] for words in FLASHMOE] == ["claims", "ratchet"]
    assert len(MAKE) == 2


@pytest.mark.parametrize("words", FLASHMOE + [f"prove {words}" for words in MAKE])
def test_its_commands_are_understood(words: str) -> None:
    name, *arguments = shlex.split(words)
    assert name in COMMANDS
    command = typer.main.get_command(app).get_command(None, name)  # type: ignore[attr-defined]
    command.make_context(name, arguments)  # raises where an option is not understood
