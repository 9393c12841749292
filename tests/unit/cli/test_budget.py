"""Budgets, shards and prices as a user writes them."""

from __future__ import annotations

import pytest

from flashmoe_science.cli.options import PRICE_VARIABLE, price_per_hour, seconds_of_budget, shard_of


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


def test_a_shard_is_one_of_so_many() -> None:
    assert (shard_of("1/4"), shard_of(" 4/4 ")) == ((1, 4), (4, 4))
    for wrong in ("", "0/4", "5/4", "1", "1/0", "-1/4", "1.0/4", "a/b"):
        with pytest.raises(ValueError, match=r"--shard is .*; it must be K/N with K from 1 to N"):
            shard_of(wrong)


def test_the_price_is_the_environments_else_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRICE_VARIABLE, raising=False)
    assert price_per_hour() is None
    monkeypatch.setenv(PRICE_VARIABLE, "2.5")
    assert price_per_hour() == 2.5
    for wrong in ("cheap", "-1", "nan"):
        monkeypatch.setenv(PRICE_VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{PRICE_VARIABLE} is '{wrong}'"):
            price_per_hour()
