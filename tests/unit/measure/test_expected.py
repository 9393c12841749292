"""The tolerance rule for an operation of a user's own."""

from __future__ import annotations

import pytest
import torch

from flashmoe_science.measure.tolerance import Errors, check_output, expected, general_cap


def test_the_general_cap_is_sixteen_roundings_of_the_largest_result() -> None:
    cap = general_cap(torch.tensor([-8.0, 1.0], dtype=torch.float64), torch.float16)
    assert cap.max == 16 * 2**-11 * 8


def test_a_poor_plain_result_loosens_nothing_beyond_the_cap() -> None:
    value = torch.ones(64, dtype=torch.float64)
    poor = torch.full((64,), 1.5, dtype=torch.float16)
    (one,) = expected((value,), (poor,), None)
    assert one.bound == general_cap(value, torch.float16)


def test_where_the_plain_result_is_not_finite_the_cap_alone_decides() -> None:
    value = torch.ones(4, dtype=torch.float64)
    cap = Errors(0.1, 0.1, 0.1)
    (one,) = expected((value,), (torch.full((4,), torch.inf, dtype=torch.float16),), (cap,))
    assert one.bound == cap
    _, reasons = check_output("out", torch.full((4,), 1.2), one.value, one.bound)
    assert reasons[0].startswith("out: maximum error 0.2 is above 0.1")


def test_integers_are_right_or_wrong() -> None:
    (one,) = expected((torch.tensor([3.0, 4.0]),), (torch.tensor([3, 4]),), None)
    assert check_output("ids", torch.tensor([3, 4]), one.value, one.bound)[1] == []
    assert check_output("ids", torch.tensor([3, 5]), one.value, one.bound)[1]


def test_plain_results_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="they must agree"):
        expected((torch.zeros(2),), (torch.zeros(3),), None)
