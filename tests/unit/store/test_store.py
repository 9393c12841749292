"""Runs survive the disk: whole rows come back, a torn end is said, anything else is an error in one line."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.unit.fabricated import Fabricate, errors

from flashmoe_science.locks import hold
from flashmoe_science.records import (
    CallPathRow,
    CorrectnessRow,
    DoneRow,
    EndRow,
    NoteRow,
    OtherRow,
    RunRow,
    SeenLaunch,
    TimingRow,
)
from flashmoe_science.store import RunWriter, StoreError, read_run, read_runs, write_whole

ONE, TWO = "attn b1 h1 q4 d4 fp16", "attn b1 h1 q8 d4 fp16"
TIMING = TimingRow(
    run="r1", problem=ONE, op="attention", kernel="k", origin="ours", config="", rival="s", rival_origin="peer",
    rival_config="", clock="graph", cache="cold", calls=1, input_sets=1, a=[100], b=[200], device_seconds=0.5,
)  # fmt: skip
LAUNCH = SeenLaunch(name="k", grid=(8, 16, 1), block=(128, 1, 1), shared_bytes=49152, registers=200)
OTHER = OtherRow(
    kind="crosscheck", run="r1", problem=ONE, kernel="k", config="", cache="warm", tool="t", tool_version="1", method="m",
    time_ns=1.5,
)  # fmt: skip


def header(run: str = "r1", started: str = "2026-01-02T03:04:05Z") -> RunRow:
    return Fabricate(run, started, gpu=None).header


def write(path: Path, run: str = "r1", started: str = "2026-01-02T03:04:05Z") -> Path:
    with RunWriter(path) as writer:
        writer.append(header(run, started))
        writer.append(NoteRow(run=run, text="naïve\nnote"))
        writer.append(EndRow(run=run, ended="later", wall_seconds=1.0, device_seconds=0.0, exit_code=0))
    return path


def fault(path: Path) -> str:
    with pytest.raises(StoreError) as caught:
        read_run(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    run = read_run(write(tmp_path / "deep" / "er" / "run.jsonl"))
    assert run.header == header()
    assert [row.kind for row in run.rows] == ["note", "end"]
    assert isinstance(run.rows[0], NoteRow)
    assert run.rows[0].text == "naïve\nnote"
    assert run.complete
    assert run.torn is None


def test_rows_of_the_other_kinds_come_back(tmp_path: Path) -> None:
    calls = CallPathRow(run="r1", problem=ONE, kernel="k", config="", launches=[LAUNCH], broken_promises=[])
    done = (DoneRow(run="r1", problem=ONE, kernel="a:f"), DoneRow(run="r1", problem=TWO))
    with RunWriter(tmp_path / "run.jsonl") as writer:
        for row in (header(), TIMING, calls, OTHER, *done):
            writer.append(row)
    run = read_run(tmp_path / "run.jsonl")
    assert run.rows == (TIMING, calls, OTHER, *done)
    assert (run.done_by("a:f"), run.done_by("b:f"), run.done_by(None)) == ({ONE}, frozenset(), {TWO})


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"run\.jsonl exists already"):
        RunWriter(path)
    assert path.read_bytes() == before
    with pytest.raises(StoreError, match=r"run\.jsonl"):
        RunWriter(path / "deeper" / "run.jsonl")  # a folder that is a file


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files of this process may not grow beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_row_that_finds_no_room_leaves_no_part_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunWriter(path) as writer:
        writer.append(header())
        whole = path.read_bytes()
        with room_for(len(whole) + 20), pytest.raises(StoreError, match="file too large; the rows before it are kept"):
            writer.append(NoteRow(run="r1", text="x" * 100))
        assert path.read_bytes() == whole
        writer.append(NoteRow(run="r1", text="there is room again"))
    assert [row.text for row in read_run(path).rows] == ["there is room again"]


def test_every_cut_of_the_last_line_is_torn_or_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl")
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(start + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        run = read_run(path)
        assert run.torn is not None
        assert f"run.jsonl:3: the last line is torn (cut after {end - start} bytes)" in run.torn
        assert [row.kind for row in run.rows] == ["note"]
        assert not run.complete
    path.write_bytes(whole[:-1])  # only the newline is missing: the row is whole
    assert read_run(path).complete


@pytest.mark.parametrize("names", [(), ("out",), ("lse",), ("out", "lse")])
def test_outputs_of_older_rows_get_their_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    """To schema 2 a row had the fields ``out`` and ``lse``; which of them was absent was null."""
    path, stats = write(tmp_path / "run.jsonl"), errors()
    old = {"schema_version": 2, "kind": "correctness", "run": "r1", "problem": ONE, "kernel": "k", "config": ""}
    old |= {"origin": "ours", "passed": True, "out": None, "lse": None} | {name: stats.model_dump() for name in names}
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], json.dumps(old), lines[2], ""]))
    if not names:
        assert "outputs: Dictionary should have at least 1 item" in fault(path)
        return
    (row, _) = read_run(path).rows
    assert isinstance(row, CorrectnessRow)
    assert row.outputs == dict.fromkeys(names, stats)


def test_the_error_that_is_shown_is_of_the_output_nearest_to_its_bound() -> None:
    near, nan = (errors().model_copy(update=changes) for changes in ({"bound_max": 2e-4}, {"max": None, "nonfinite": 1}))
    row = CorrectnessRow(
        run="r1", problem=ONE, kernel="k", config="", origin="ours", passed=True, outputs={"out": errors(), "lse": near}
    )
    assert row.tightest == near
    assert row.model_copy(update={"outputs": row.outputs | {"dq": nan}}).tightest == nan


def timing(**changes: object) -> Callable[[object], str]:
    """A timing row with these fields, in place of the row that there was."""
    return lambda row: json.dumps(TIMING.model_dump(mode="json") | changes)


def launched(**changes: object) -> Callable[[object], str]:
    row = {"kind": "callpath", "run": "r1", "problem": ONE, "kernel": "k", "config": "", "broken_promises": []}
    return lambda _: json.dumps(row | {"launches": [LAUNCH.model_dump(mode="json") | changes]})


@pytest.mark.parametrize(
    ("line", "change", "said"),
    [
        (2, lambda row: "{not json", ":2: not a line of JSON"),
        (2, lambda row: json.dumps(row | {"kind": "gossip"}), ":2: not a record row"),
        (2, lambda row: json.dumps(row | {"text": 7}), "text: Input should be a valid string"),
        (2, lambda row: json.dumps(row | {"problem": "attn b0"}), ":2: problem 'attn b0' lacks"),
        (2, lambda row: json.dumps(row | {"problem": "attn q4 b1 h1 d4 fp16"}), "it must be written 'attn b1 h1 q4 d4 fp16'"),
        (2, lambda row: json.dumps(row | {"schema_version": 0}), ":2: schema version 0 never was"),
        (1, lambda row: json.dumps(row | {"started": "zzz"}), ":1: started is 'zzz'; it must be a time in UTC"),
        (2, lambda row: json.dumps(row | {"schema_version": 4}), ":2: schema version 4 is newer than 3"),
        (3, lambda row: json.dumps(row | {"schema_version": 99, "kind": "new"}), ":3: schema version 99 is newer than 3"),
        (2, lambda row: json.dumps(row | {"run": "other"}), ":2: the row is of run 'other'"),
        (1, lambda row: json.dumps({"kind": "note", "run": "r1", "text": "x"}), ":1: the first row is of kind 'note'"),
        (2, lambda row: header().model_dump_json(), ":2: a second row of kind 'run'"),
        (1, lambda row: json.dumps(row | {"price_per_hour": 1e308}), "price_per_hour: Input should be less than or equal to"),
        (3, timing(calls=0), "calls: Input should be greater than or equal to 1"),
        (3, timing(calls=10**400), "calls: Input should be less than"),
        (
            1,
            lambda row: json.dumps(row | {"environment": row["environment"] | {"gpu_memory_bytes": 10**400}}),
            "gpu_memory_bytes",
        ),
        (3, timing(a=[10**19]), "a.0: Input should be less than"),
        (3, timing(device_seconds=-1e9), "device_seconds: Input should be greater than or equal to 0"),
        (3, timing(device_seconds=float("nan")), "it holds NaN; a number must be finite"),
        (3, lambda row: timing()(row).replace("0.5", "1e999"), "it holds 1e999; a number must be finite"),
        (3, launched(grid=[-1, 2, 3]), "launches.0.grid"),
        (3, launched(block=[10**30, 1, 1]), "launches.0.block"),
        (3, launched(shared_bytes=-1), "launches.0.shared_bytes"),
        (3, launched(registers=-1), "launches.0.registers"),
    ],
)
def test_a_bad_line_is_an_error_that_names_it(tmp_path: Path, line: int, change: object, said: str) -> None:
    path = write(tmp_path / "run.jsonl")
    lines = path.read_text().splitlines()
    lines[line - 1] = change(json.loads(lines[line - 1]))  # type: ignore[operator]
    path.write_text("\n".join(lines) + "\n")
    message = fault(path)
    assert f"{path}:{line}" in message
    assert said in message


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    assert "no such file" in fault(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    assert "the file is empty" in fault(tmp_path / "empty.jsonl")
    (tmp_path / "torn.jsonl").write_text('{"kind": "ru')
    assert "torn.jsonl:1: the last line is torn" in fault(tmp_path / "torn.jsonl")
    with pytest.raises(StoreError, match="is not a folder"):
        read_runs(tmp_path / "absent")


def test_runs_are_found_in_every_folder_oldest_first(tmp_path: Path) -> None:
    write(tmp_path / "h200" / "b.jsonl", "late", "2026-02-01T00:00:00Z")
    write(tmp_path / "cpu" / "z.jsonl", "early", "2026-01-01T00:00:00Z")
    (tmp_path / "notes.txt").write_text("not a run")
    assert [run.header.run for run in read_runs(tmp_path)] == ["early", "late"]


def test_a_gzipped_run_is_read_as_the_same_run(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl")
    packed = path.with_name("run.jsonl.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    plain, (run,) = read_run(path), (path.unlink(), read_runs(tmp_path))[1]
    assert (run.header, run.rows, run.torn, run.path) == (plain.header, plain.rows, None, packed)
    packed.write_bytes(packed.read_bytes()[:-9])
    assert "run.jsonl.gz is no whole gzip file" in fault(packed)
    packed.write_bytes(b"no gzip")
    assert "run.jsonl.gz is no whole gzip file" in fault(packed)


def test_one_run_in_two_files_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl")
    with pytest.raises(StoreError, match=r"both hold run 'r1'"):
        read_runs(tmp_path)


def test_a_run_that_was_copied_under_another_name_is_an_error(tmp_path: Path) -> None:
    a, b = [100, 101, 99, 104, 102, 98], [200, 207, 201, 199, 202, 203]
    row = TIMING.model_copy(update={"a": a, "b": b})
    for name, samples in (("one", (a, b)), ("two", (b, a))):
        with RunWriter(tmp_path / f"{name}.jsonl") as writer:
            writer.append(header(name))
            writer.append(row.model_copy(update={"run": name, "kernel": name, "a": samples[0], "b": samples[1]}))
    with pytest.raises(
        StoreError, match=r"two\.jsonl and .*one\.jsonl hold the same samples of two beside s on 'attn b1 h1 q4"
    ):
        read_runs(tmp_path)


def test_a_run_that_is_being_written_is_locked(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    source = "import sys; from flashmoe_science.store import RunWriter; w = RunWriter(sys.argv[1]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", source, path], stdin=-1, stdout=-1) as other:
        assert other.stdout.readline() == b"\n"
        with path.open("rb") as file:
            assert not hold(file, shared=True)
        other.kill()  # a killed process lets go of it
        other.wait()
    with path.open("rb") as file:
        assert hold(file, shared=True)


def test_what_a_terminal_would_obey_is_written_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunWriter(path) as writer:
        writer.append(header())
        writer.append(NoteRow(run="r1", kernel="fwd\x1b[8m\u202e\x7f\x9b", text="a\x07b\r\n\tc"))
    run = read_run(path)
    assert isinstance(run.rows[0], NoteRow)
    assert (run.rows[0].kernel, run.rows[0].text) == ("fwd\\x1b[8m\\u202e\\x7f\\x9b", "a\\x07b\\r\n\tc")


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    assert "pipe.jsonl is no regular file" in fault(tmp_path / "pipe.jsonl")
    assert "folder.jsonl is a folder" in fault(tmp_path / "folder.jsonl")
    assert "too many levels of symbolic links" in fault(tmp_path / "loop.jsonl")
    with pytest.raises(StoreError, match=r"folder\.jsonl is a folder"):
        read_runs(tmp_path)


def test_two_processes_write_one_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, replace = tmp_path / "report.md", Path.replace

    def replaced(partial: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        monkeypatch.setattr("os.getpid", lambda: 0)
        write_whole(path, "theirs")
        return replace(partial, target)

    monkeypatch.setattr(Path, "replace", replaced)
    write_whole(path, "ours")
    assert [one.read_text() for one in tmp_path.iterdir()] == ["ours"]
