"""A run's header keeps what its machine costs an hour, where the user says so."""

from __future__ import annotations

import os

import pytest
import torch
from flashmoe_science.measure.ledger import Ledger
from flashmoe_science.measure.price import PRICE_VARIABLE, set_price
from flashmoe_science.measure.session import begin

from flashmoe_science.measure.bench import Bench
from flashmoe_science.records import Row, RunRow


class Rows(list[Row]):
    """A sink that keeps what it is given."""


def recorded_price() -> float | None:
    rows = Rows()
    begin(Ledger("r1", rows), Bench(torch.device("cpu"), None), "cpu", ("flashmoe", "prove"), 0)
    (row,) = rows
    assert isinstance(row, RunRow)
    return row.price_per_hour


def test_no_price_is_recorded_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRICE_VARIABLE, raising=False)
    assert recorded_price() is None


def test_the_environments_price_is_recorded_and_an_options_comes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRICE_VARIABLE, "3.5")
    assert recorded_price() == 3.5
    set_price(None)
    assert recorded_price() == 3.5
    set_price(7.25)  # monkeypatch restores what the environment was
    assert (recorded_price(), os.environ[PRICE_VARIABLE]) == (7.25, "7.25")


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, price: float) -> None:
    monkeypatch.delenv(PRICE_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="it must be USD an hour, from 0 to 1,000,000"):
        set_price(price)
    assert PRICE_VARIABLE not in os.environ
