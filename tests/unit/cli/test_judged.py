"""What was judged is kept by a digest of the records and the program, to the last digit, and nothing else is taken for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.unit.fabricated import LONGER, Fabricate

from flashmoe_science.cli import judged
from flashmoe_science.judge.standing import JudgedRun, standing
from flashmoe_science.judge.summary import groups
from flashmoe_science.store import RunWriter, read_runs

Flashmoe = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flashmoe-science" / "judged"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two GPUs and suites, and a user's kernel."""
    ours = Fabricate("ours").control().timed("fwd_triton", 20_000, "fa3", 24_000).timed("fwd_triton", 20_000, "sdpa", 30_000)
    ours.control(problem=LONGER, off=1.03).timed("fwd_triton", 40_000, "fa3", 41_000, problem=LONGER)
    mine = Fabricate("mine", gpu=None, suite="custom").control("mine.py:fn", clock="eager", cache="warm")
    mine.timed("mine.py:fn", 50_000, "sdpa", 30_000, clock="eager", cache="warm").refused("correctness", "off", "sdpa_math")
    for run in (ours, mine):
        with RunWriter(tmp_path / "records" / f"{run.name}.jsonl") as writer:
            for row in (run.header, *run.done().rows):
                writer.append(row)
    return tmp_path / "records"


@pytest.fixture
def judging(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs were read, each time that they were."""
    read: list[int] = []

    def judged_under(folder: Path) -> list[JudgedRun]:
        read.append(len(runs := read_runs(folder)))
        return [JudgedRun(run) for run in runs]

    monkeypatch.setattr(judged, "judged_under", judged_under)
    return read


def test_what_is_kept_is_what_was_judged_to_the_last_digit(folder: Path, judging: list[int]) -> None:
    fresh = standing([JudgedRun(run) for run in read_runs(folder)])
    for _ in range(2):
        found = judged.standing_under(folder).verdicts
        assert found == fresh
        assert [one.interval for one in found] == [one.interval for one in fresh]
        means, expected = ([group.mean for group in groups(rows)] for rows in (found, fresh))
        assert means == expected
        assert all(np.array_equal(a.resamples, b.resamples) for a, b in zip(means, expected, strict=True) if a and b)
        assert [group.corrected for group in groups(found)] == [group.corrected for group in groups(fresh)]
    assert judging == [2]


def test_one_gpu_and_suite_are_told_of_the_same_judgement(folder: Path, judging: list[int]) -> None:
    assert {row.gpu for row in judged.standing_under(folder, "cpu").verdicts} == {"cpu"}
    assert {row.suite for row in judged.standing_under(folder, None, "documents").verdicts} == {"documents"}
    assert judged.standing_under(folder, "l4") == ([], [])
    with pytest.raises(ValueError, match="--suite is 'long'; it must be one of custom, documents"):
        judged.standing_under(folder, None, "long")
    assert judging == [2]


def test_a_record_or_words_that_are_others_are_judged_anew(
    folder: Path, judging: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def words(*given: str) -> None:
        judged.cached(folder, given, lambda runs: (list(given), np.zeros(0)))

    words("claims", "a")
    words("claims", "b")
    words("claims", "a")
    assert judging == [2, 2]
    with (folder / "ours.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match=r"ours\.jsonl"):  # a line that is no row
        words("claims", "a")
    monkeypatch.setattr(judged, "_PROGRAM", folder)
    (folder / "program.py").touch()
    (folder / "ours.jsonl").unlink()
    words("claims", "a")
    assert judging == [2, 2, 1]


def test_an_equal_program_elsewhere_is_served_and_one_of_equal_size_and_time_is_not(
    folder: Path, tmp_path: Path, judging: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def by(checkout: str, text: str) -> None:
        program = tmp_path / checkout / "judge.py"
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        os.utime(program, (0, 0))
        monkeypatch.setattr(judged, "_PROGRAM", program.parent)
        judged.standing_under(folder)

    by("one", "LIMIT = 1")
    by("clone", "LIMIT = 1")
    assert judging == [2]
    by("clone", "LIMIT = 2")
    assert judging == [2, 2]


@pytest.mark.parametrize("spoil", [lambda one: one.write_bytes(b"PK nonsense"), lambda one: one.write_bytes(b"")])
def test_a_file_that_is_spoilt_is_judged_again(
    spoil: Callable[[Path], object], folder: Path, cache: Path, judging: list[int]
) -> None:
    first = judged.standing_under(folder).verdicts
    (kept,) = cache.iterdir()
    spoil(kept)
    assert judged.standing_under(folder).verdicts == first
    assert judging == [2, 2]


def test_a_torn_run_is_told_each_time_and_a_cache_that_cannot_be_written_is_no_error(
    folder: Path, cache: Path, flashmoe: Flashmoe
) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where the folder would be")
    assert flashmoe("verdicts", "--evidence", folder)[0] == 0
    cache.parent.unlink()
    with (folder / "ours.jsonl").open("a") as file:
        file.write('{"kind": "timi')
    for _ in range(2):
        assert "set aside" in flashmoe("verdicts", "--evidence", folder)[2]
    assert not cache.exists()


def test_old_files_go(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged, "_MAX_KEPT", 2)
    for word in "abcd":
        judged.cached(folder, (word,), lambda runs: (None, np.zeros(0)))
    assert len(list(cache.iterdir())) == 2


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Forty problems of ours, one slower; nothing is measured of a second clock."""
    run = Fabricate("large", suite="long")
    for length in range(1, 41):
        problem = f"attn b1 h1 q{64 * length} d64 fp16"
        run.control(problem=problem).timed("fwd_triton", 20_000, "fa3", 24_000 if length > 1 else 10_000, problem=problem)
        run.timed("fwd_triton", 20_000, "sdpa", 40_000, problem=problem)
    with RunWriter(tmp_path / "large" / "run.jsonl") as writer:
        for row in (run.header, *run.done().rows):
            writer.append(row)
    return tmp_path / "large"


def lines_of(flashmoe: Flashmoe, *words: str | Path) -> list[str]:
    code, out, _ = flashmoe(*words)
    assert code in (0, 1)
    return out.splitlines()


def test_many_verdicts_are_a_line_a_suite_and_rows_on_request(large: Path, flashmoe: Flashmoe) -> None:
    shown = lines_of(flashmoe, "verdicts", "--evidence", large)
    assert len(shown) < 12
    assert [line.split() for line in shown[:2]] == [["h200"], ["suite", "graph", "mean", "least", "eager"]]
    assert shown[2].split()[:2] == ["long", "39/0/1/0"]
    assert shown[2].split()[3] == "0.50x"
    assert "1 of 40 problems; the worst, 0.50x of fa3: attn b1 h1 q64 d64 fp16" in " ".join(shown)
    assert shown[-1] == "120 verdicts; one by one: flashmoe verdicts --rows (--suite NAME)"
    rows = lines_of(flashmoe, "verdicts", "--rows", "--evidence", large)
    assert sum("attn b1 h1" in line for line in rows) == 40


def test_a_users_kernel_has_a_line_for_each_suite_that_it_was_proved_on(tmp_path: Path, flashmoe: Flashmoe) -> None:
    (tmp_path / "mine").mkdir()
    for suite in ("documents", "long"):
        run = Fabricate(suite, suite=suite)
        for length in range(1, 41):
            problem = f"attn b1 h1 q{64 * length} d64 fp16"
            run.control("mine.py:fn", problem=problem).timed("mine.py:fn", 20_000, "fa3", 24_000, problem=problem)
        with RunWriter(tmp_path / "mine" / f"{suite}.jsonl") as writer:
            for row in (run.header, *run.done().rows):
                writer.append(row)
    shown = lines_of(flashmoe, "verdicts", "--evidence", tmp_path / "mine")
    assert [line.split()[1] for line in shown if line.startswith("mine.py:fn")] == ["40/0/0/0"] * 2


def test_versions_are_a_line_each_and_rows_on_request(large: Path, flashmoe: Flashmoe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = lines_of(flashmoe, "compare", "fa3", "sdpa", "--evidence", large)
    assert shown[0] == "speed over fa3"
    assert shown[2] == "h200, graph clock, cold cache"
    assert shown[3].split()[:3] == ["sdpa", "40", "0/0/40/0"]
    assert shown[-1] == "40 rows, one by one: flashmoe compare --rows (--suite NAME)"
    assert len(lines_of(flashmoe, "compare", "fa3", "sdpa", "--rows", "--evidence", large)) > 80


def test_claims_that_hold_are_counted_and_every_figure_has_its_unit(large: Path, flashmoe: Flashmoe) -> None:
    def claim(name: str, problem: str, threshold: str) -> str:
        return f"""[[claim]]
id = "{name}"
text = "{name}"
gpu = "h200"
clock = "graph"
problem = "{problem}"
problems = 1
statistic = "max"
{threshold}
"""

    problems = [f"attn b1 h1 q{64 * length} d64 fp16" for length in range(2, 9)]
    time = 'quantity = "time_ns"\nat_most = 15000'
    texts = [claim(f"ratio-{place}", problem, "at_least = 1.1") for place, problem in enumerate(problems)]
    file = large / "claims.toml"
    file.write_text("\n".join([*texts, claim("slow", problems[0], time)]))
    shown = lines_of(flashmoe, "claims", "--evidence", large)
    assert "  max <= 15 us  20." in "\n".join(shown)
    assert " us, the near end of its interval, misses 15 us by a factor of 1.3" in " ".join(" ".join(shown).split())
    assert shown[-2:] == [
        "7 claims that hold, one by one: flashmoe claims --rows",
        "wrong: 8 claims: 7 hold, 1 fail, 0 have no record",
    ]
    assert not any("ratio-" in line for line in shown)
    rows = lines_of(flashmoe, "claims", "--rows", "--evidence", large)
    assert "  max >= 1.1x" in "\n".join(rows)


def test_records_are_judged_where_there_is_no_home(folder: Path, judging: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(judged, "user_cache", none)
    assert judged.standing_under(folder).verdicts
    assert judging == [2]


def test_a_pipe_among_records_is_refused_and_not_waited_for(folder: Path) -> None:
    judged.standing_under(folder)
    os.mkfifo(folder / "pipe.jsonl")
    with pytest.raises(ValueError, match="no regular file"):
        judged.standing_under(folder)
