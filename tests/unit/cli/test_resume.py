"""Which command a folder's runs were made by, and the file of each as it is gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashmoe_science.cli.resume import open_run, options_of, recorded
from flashmoe_science.records import EndRow, Environment, NoteRow, RunRow
from flashmoe_science.store import RunWriter

ENVIRONMENT = Environment(gpu=None, cpu="c", cpu_count=1, platform="p", python="3", torch="2", triton=None)


def write(path: Path, *arguments: str, ended: bool = False) -> Path:
    with RunWriter(path) as writer:
        writer.append(
            RunRow(run=path.stem, started="2026-01-02T00:00:00Z", suite="s", command=["flashmoe", *arguments], commit=None,
                   source_digest="d", seed=1, environment=ENVIRONMENT)
        )  # fmt: skip
        if ended:
            writer.append(EndRow(run=path.stem, ended="later", wall_seconds=1.0, device_seconds=0.0, exit_code=0))
    return path


def test_a_folder_or_a_file_gives_the_command(tmp_path: Path) -> None:
    path = write(tmp_path / "run-long.jsonl", "prove", "long", "quick")
    write(tmp_path / "run-quick.jsonl", "prove", "long", "quick", ended=True)
    command = ("flashmoe", "prove", "long", "quick")
    assert recorded(tmp_path) == (tmp_path, command)
    assert recorded(path) == (tmp_path, command)


def test_runs_of_two_commands_need_a_file(tmp_path: Path) -> None:
    long = write(tmp_path / "run-long.jsonl", "prove", "long")
    quick = write(tmp_path / "run-quick.jsonl", "prove", "quick")
    with pytest.raises(ValueError, match=r"holds runs of 2 commands; give one of .*run-long\.jsonl, .*run-quick\.jsonl"):
        recorded(tmp_path)
    assert [recorded(path)[1][2] for path in (long, quick)] == ["long", "quick"]


def test_what_cannot_be_gone_on_with_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which does not exist; give the folder of a run, or its file"):
        recorded(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"where no run has begun \(run-\*\.jsonl with a first row\); start it anew"):
        recorded(tmp_path)
    with pytest.raises(ValueError, match="was not made by flashmoe prove but by 'flashmoe profile x'"):
        recorded(write(tmp_path / "run-x.jsonl", "profile", "x"))


def test_the_options_of_a_recorded_command_are_read_as_they_were_given() -> None:
    words = [
        "attn b1 h2 q16 d16 fp32",
        "--against",
        "sdpa",
        "--against",
        "sdpa_math",
        "--quick",
        "--seed",
        "7",
        "--budget",
        "60",
    ]
    options = options_of(("flashmoe", "prove", *words))
    assert (tuple(options["targets"]), tuple(options["against"])) == ((words[0],), ("sdpa", "sdpa_math"))
    assert (options["quick"], options["full"], options["seed"], options["budget"]) == (True, False, 7, "60")


def test_an_option_that_is_no_more_is_said() -> None:
    with pytest.raises(ValueError, match="was made by 'flashmoe prove --magic', which is not understood"):
        options_of(("flashmoe", "prove", "--magic"))


def test_a_file_without_a_whole_header_is_kept_aside_and_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "run-long.jsonl"
    path.write_text('{"kind": "ru')
    writer, earlier = open_run(path)
    writer.close()
    assert earlier is None
    assert path.read_text() == ""
    (aside,) = tmp_path.glob("run-long.jsonl.cut-*")
    assert aside.read_text() == '{"kind": "ru'


def test_a_file_that_holds_a_run_is_reopened(tmp_path: Path) -> None:
    path = write(tmp_path / "run-long.jsonl", "prove", "long")
    writer, earlier = open_run(path)
    with writer:
        writer.append(NoteRow(run="run-long", text="on"))
    assert earlier is not None
    assert earlier.header.command == ["flashmoe", "prove", "long"]
    assert len(path.read_text().splitlines()) == 2
