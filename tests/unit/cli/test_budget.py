"""Budgets and prices as a user writes them."""

from __future__ import annotations

import pytest

from flashmoe_science.cli.options import PRICE_VARIABLE, price_per_hour, seconds_of_budget


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("600", 600), ("90s", 90), ("0.5", 0.5), (".5s", 0.5), ("5m", 300), ("5 min", 300), ("1.5h", 5400),
    ],
)  # fmt: skip
def test_a_budget_is_seconds_or_a_duration(text: str, seconds: float) -> None:
    assert seconds_of_budget(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "5 days", "-5", "1e3", "2usd", "$5", "nan", "inf", "2,5", "٣"])
def test_what_is_no_budget_is_told_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"--budget is .*; it must be seconds") as caught:
        seconds_of_budget(text)
    assert "\n" not in str(caught.value)


def test_the_price_is_the_environments_else_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRICE_VARIABLE, raising=False)
    assert price_per_hour() is None
    monkeypatch.setenv(PRICE_VARIABLE, "2.5")
    assert price_per_hour() == 2.5
    for wrong in ("cheap", "-1", "nan"):
        monkeypatch.setenv(PRICE_VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{PRICE_VARIABLE} is '{wrong}'"):
            price_per_hour()
