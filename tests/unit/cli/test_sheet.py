"""Tables fit the width that there is, and lose no row, no reason and no column that is needed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flashmoe_science.cli.sheet import print_table, print_wrapped
from flashmoe_science.judge.report.blocks import Cell, Row, Table, columns

COLUMNS = columns("problem", "k:kernel", "n:us", "n:rate", "v:verdict")


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
    return [line.rstrip() for line in out.file.getvalue().splitlines()]


def test_the_group_stands_above_its_rows() -> None:
    assert shown(60) == [
        "quick on h200",
        "  kernel     us  rate  verdict",
        "attn b1 h1 q64 d64 fp16",
        "  fwd      1.50  10.2  faster",
        "  sdpa    12.00   1.3  slower",
        "attn b1 h1 q128 d64 fp16",
        "  fwd                  refused",
        "      call path: promised a kernel named 'fwd'; saw 'old'",
    ]


@pytest.mark.parametrize("width", [25, 30, 40, 60, 200])
def test_no_line_is_wider_than_there_is_room_and_reasons_are_whole(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    assert "call path: promised a kernel named 'fwd'; saw 'old'" in " ".join(" ".join(lines).split())


def test_names_that_leave_no_room_stand_above_their_row_and_no_number_is_cut() -> None:
    assert shown(30) == [
        "quick on h200",
        "     us  rate  verdict",
        "attn b1 h1 q64 d64 fp16",
        "  fwd",
        "   1.50  10.2  faster",
        "  sdpa",
        "  12.00   1.3  slower",
        "attn b1 h1 q128 d64 fp16",
        "  fwd",
        "               refused",
        "      call path: promised a",
        "      kernel named 'fwd'; saw",
        "      'old'",
    ]


def test_colour_is_for_terminals() -> None:
    assert any("\x1b[32mfaster" in line for line in shown(60, colour=True))
    assert not any("\x1b" in line for line in shown(60))


def test_what_a_terminal_would_obey_is_written_out_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    print_wrapped(Console(width=80), "wrong: \x1b[2J\x1b[32mall good")
    assert capsys.readouterr().out.rstrip() == "wrong: \\x1b[2J\\x1b[32mall good"
