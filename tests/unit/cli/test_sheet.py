"""Tables fit the width that there is, and lose no row, no reason and no column that is needed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flashmoe_science.cli.sheet import console, print_table, put_wrapped
from flashmoe_science.judge.report.blocks import Cell, Row, Table, columns

COLUMNS = columns("problem", "kernel", "n:us", "n:rate", "v:verdict")


def row(problem: str, *texts: str, note: str | None = None) -> Row:
    *others, verdict = texts
    return Row((Cell(problem), *map(Cell, others), Cell(verdict, note, verdict)), "ours")


LINES = (
    row("attn b1 h1 q64 d64 fp16", "fwd", "1.50", "10.2", "faster"),
    row("attn b1 h1 q64 d64 fp16", "sdpa", "12.00", "1.3", "slower"),
    row("attn b1 h1 q128 d64 fp16", "fwd", "", "", "refused", note="call path: promised a kernel named 'fwd'; saw 'old'"),
)


def shown(width: int, colour: bool = False) -> list[str]:
    out = Console(
        file=io.StringIO(), width=width, highlight=False, force_terminal=colour, color_system="standard" if colour else None
    )
    print_table(out, Table("t", "quick on h200", COLUMNS, LINES))
    return out.file.getvalue().splitlines()


def test_where_there_is_room_the_group_is_a_column() -> None:
    assert shown(60) == [
        "quick on h200",
        "problem                   kernel     us  rate  verdict",
        "attn b1 h1 q64 d64 fp16   fwd      1.50  10.2  faster",
        "                          sdpa    12.00   1.3  slower",
        "attn b1 h1 q128 d64 fp16  fwd                  refused",
        "      call path: promised a kernel named 'fwd'; saw 'old'",
    ]


def test_where_there_is_less_the_group_is_a_line_of_its_own() -> None:
    assert shown(40)[1:5] == [
        "  kernel     us  rate  verdict",
        "attn b1 h1 q64 d64 fp16",
        "  fwd      1.50  10.2  faster",
        "  sdpa    12.00   1.3  slower",
    ]


def test_where_there_is_too_little_what_is_least_needed_is_left_out() -> None:
    assert "  fwd      1.50  faster" in shown(25)
    assert "  fwd     faster" in shown(20)
    assert "  fwd     faster" in shown(5)  # what is needed is never left out


def test_names_go_above_their_row_before_anything_is_left_out() -> None:
    headings = columns("problem", "k:kernel", "n:us", "k:rival", "v:verdict")
    lines = (row("p", "file.py:a_long_name", "1.50", "sdpa", "faster"), row("p", "sdpa", "2.00", "", "slower"))
    out = Console(file=io.StringIO(), width=32)
    print_table(out, Table("t", "t", headings, lines))
    assert out.file.getvalue().splitlines() == [
        "t", "    us  verdict", "p", "  file.py:a_long_name, rival", "  sdpa", "  1.50  faster", "  sdpa", "  2.00  slower",
    ]  # fmt: skip


def test_the_name_of_one_kernel_does_not_push_the_others_out_of_sight() -> None:
    out = Console(file=io.StringIO(), width=200)
    print_table(out, Table("t", "", COLUMNS, (row("p", "k" * 3000, "1", "2", "faster"), LINES[0])))
    lines = out.file.getvalue().splitlines()
    assert max(map(len, lines)) < 150
    assert "k" * 77 + "..." in lines[2]


@pytest.mark.parametrize("width", [25, 30, 40, 60, 200])
def test_no_line_is_wider_than_there_is_room_and_reasons_are_whole(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    assert "call path: promised a kernel named 'fwd'; saw 'old'" in " ".join(" ".join(lines).split())


def test_colour_is_for_terminals() -> None:
    assert any("\x1b[32mfaster" in line for line in shown(60, colour=True))
    assert not any("\x1b" in line for line in shown(60))


def test_a_pipe_is_100_columns_wide_unless_it_is_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console().width == 100
    monkeypatch.setenv("COLUMNS", "72")
    assert console().width == 72


def test_words_are_wrapped_at_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    put_wrapped(Console(width=24), "saw 'a_name_that_is_much_longer_than_the_line' instead", indent=4)
    assert capsys.readouterr().out.splitlines() == ["    saw", "    'a_name_that_is_much_longer_than_the_line'", "    instead"]


def test_what_a_terminal_would_obey_is_written_out_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    put_wrapped(Console(width=80), "wrong: \x1b[2J\x1b[32mall good")
    assert capsys.readouterr().out == "wrong: \\x1b[2J\\x1b[32mall good\n"
