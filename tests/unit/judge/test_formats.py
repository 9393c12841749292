"""Numbers keep what a reader needs of them, however small or large."""

from __future__ import annotations

import pytest

from flashmoe_science.judge.formats import ratio, with_interval, within
from flashmoe_science.judge.report.write import markdown_cell


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.23456, "1.235"), (0.1, "0.100"), (0.012345, "0.0123"), (1.2345e-6, "1.23e-06"), (612.5, "612.500"),
        (20_010.4, "20010"), (3e12, "3e+12"), (0.0, "0.000"), (None, ""),
    ],
)  # fmt: skip
def test_a_ratio_keeps_three_digits_that_count(value: float | None, text: str) -> None:
    assert ratio(value) == text


def test_an_interval_never_reads_as_zero() -> None:
    assert with_interval(1e-4, 9.9e-5, 1.01e-4) == "0.0001x [9.9e-05, 0.000101]"
    assert within(0.0123, 0.0125) == "0.0123 to 0.0125"
    assert within(None, None) == ""


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("a|b", "a\\|b"),
        ("a\\|b", "a\\\\\\|b"),  # one backslash would leave the bar to end the cell
        ("![x](http://a)", "![x]\\(http://a)"),
        ("`rm` <b> &amp;\n1.2 [1.1, 1.3]", "\\`rm\\` &lt;b> &amp;amp; 1.2 [1.1, 1.3]"),
    ],
)
def test_a_markdown_cell_stays_a_cell(text: str, cell: str) -> None:
    assert markdown_cell(text) == cell
