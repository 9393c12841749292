"""What --resume takes: the folder of one command's runs, with the options that they were given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from tests.unit.fabricated import Fabricate

from flashmoe_science.cli.main import app
from flashmoe_science.cli.options import earlier_of
from flashmoe_science.measure.bench import source_digest
from flashmoe_science.records import DoneRow
from flashmoe_science.store import RunWriter

PROBLEM = "attn b1 h2 q16 d16 fp32"
Endpoint = Callable[..., typer.Context]


def write(path: Path, *command: str, world: int = 1) -> Path:
    with RunWriter(path) as writer:
        header = Fabricate(path.stem, gpu=None).header
        writer.append(
            header.model_copy(update={"command": ["flashmoe", *command], "source_digest": source_digest(), "world": world})
        )
        writer.append(DoneRow(run=path.stem, problem=PROBLEM))
    return path.parent


@pytest.fixture
def asked() -> Endpoint:
    prove = typer.main.get_command(app).get_command(None, "prove")  # type: ignore[attr-defined]
    return lambda *words: prove.make_context("prove", list(words))  # type: ignore[no-any-return]


def test_a_folder_gives_what_is_done_and_the_options_as_they_were_given(tmp_path: Path, asked: Endpoint) -> None:
    folder = write(tmp_path / "run.jsonl", "prove", PROBLEM, "--against", "sdpa", "--quick", "--seed", "7", "--budget", "60")
    earlier, options = earlier_of(asked("--resume", str(folder)), folder, ("resume",))
    assert earlier.done == {(None, PROBLEM)}
    assert (list(options["targets"]), list(options["against"])) == ([PROBLEM], ["sdpa"])
    assert (options["quick"], options["full"], options["seed"], options["budget"]) == (True, False, 7, "60")


def test_what_cannot_be_gone_on_with_is_said(tmp_path: Path, asked: Endpoint) -> None:
    def refused(folder: Path, said: str, *words: str) -> None:
        with pytest.raises(ValueError, match=said):
            earlier_of(asked("--resume", str(folder), *words), folder, ("resume",))

    refused(tmp_path, "leave out seed", "--seed", "3")
    refused(tmp_path / "absent", "which is no folder; give the folder of a run")
    refused(tmp_path, "where no run has begun; start it anew")
    refused(write(tmp_path / "x" / "run.jsonl", "profile", "x"), "was not made by flashmoe prove but by 'flashmoe profile'")
    refused(write(tmp_path / "y" / "run.jsonl"), "was not made by flashmoe prove but by 'flashmoe'")
    refused(write(tmp_path / "m" / "run.jsonl", "prove", "--magic"), "'--magic' is not understood")
    refused(write(tmp_path / "ranks" / "run.jsonl", "prove", "context", world=2), "holds a run on several ranks; begin it anew")
    write(tmp_path / "two" / "run-a.jsonl", "prove", "long")
    refused(write(tmp_path / "two" / "run-b.jsonl", "prove", "quick"), "holds runs of 2 commands; give a folder of one")


def test_ranks_do_not_go_on_with_a_run(tmp_path: Path, asked: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--resume is given under torchrun"):
        earlier_of(asked("--resume", str(tmp_path)), tmp_path, ("resume",))
