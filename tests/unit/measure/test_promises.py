"""What a function promises, against what was seen."""

from __future__ import annotations

import math

import pytest

from flashmoe_science.measure.promises import Promises, broken_launches
from flashmoe_science.operations import operation
from flashmoe_science.records import SeenLaunch

FAMILIES = operation("attention").contract().families


def seen(name: str = "fast_kernel", threads: int = 128, stream: int = 7) -> SeenLaunch:
    return SeenLaunch(name=name, grid=(4, 1, 1), block=(threads, 1, 1), shared_bytes=1024, stream=stream)


def broken(promises: Promises, *launches: SeenLaunch) -> list[str]:
    return broken_launches(promises.launches, [launches], "candidate", FAMILIES)


def test_a_kept_promise_is_kept_beside_kernels_that_were_not_promised() -> None:
    promises = Promises.of({"kernel": "fast", "threads": 128, "grid": [4, 1, 1], "shared_bytes": 1024})
    assert broken(promises, seen("fill"), seen()) == []


@pytest.mark.parametrize(("measured", "missed"), [(0.12, True), (0.84, True), (0.86, False), (1.7, False), (3.5, True)])
def test_a_speed_up_may_be_half_to_twice_what_was_expected(measured: float, missed: bool) -> None:
    own = [1000, 1010, 990]
    reason = Promises(speedup=1.7).speedup_missed(own, [round(one * measured) for one in own], "sdpa")
    assert (reason is not None) == missed
    if missed:
        assert f"measured against sdpa: {measured:.3g} times" in str(reason)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (["fast"], "promises is ['fast']: Input should be a valid dictionary"),
        ({"speed": 2}, "promises['speed'] is 2: Extra inputs are not permitted"),
        ({"threads": "many"}, "promises['threads'] is 'many': Input should be a valid integer"),
        ({"threads": True}, "Input should be a valid integer"),
        ({"threads": -128}, "Input should be greater than or equal to 1"),
        ({"shared_bytes": 10**30}, "Input should be less than 2147483648"),
        ({"grid": [1, 2]}, "promises['grid'][2] is (1, 2): Field required"),
        ({"kernel": "fast["}, "it is no pattern"),
        ({"kernel": "k" * 501}, "String should have at most 500 characters"),
        ({"deterministic": 1}, "Input should be a valid boolean"),
        ({"speedup": math.nan}, "promises['speedup'] is nan: Input should be"),
        ({"speedup": 10**400}, "promises['speedup'] is 1000"),
        ({"speedup": True}, "Input should be a valid number"),
        ({"speedup": 0}, "Input should be greater than 0"),
    ],
)
def test_a_promise_that_is_none_is_refused_in_one_line(said: object, message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        Promises.of(said)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
