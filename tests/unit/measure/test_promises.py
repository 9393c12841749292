"""What a function promises, against what was seen."""

from __future__ import annotations

import math

import pytest

from flashmoe_science.measure.launches.promised import broken_launches
from flashmoe_science.measure.promises import Promises, borrowed, checked
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


@pytest.mark.parametrize(
    ("promised", "words"),
    [
        ({"kernel": "fast", "threads": 384}, "promised threads a block 384, saw 128"),
        ({"kernel": "fast", "grid": [8, 1, 1]}, "promised grid (8, 1, 1), saw (4, 1, 1)"),
        ({"kernel": "slow"}, "promised a kernel named 'slow'; saw 'fast_kernel'"),
    ],
)
def test_a_broken_promise_is_named(promised: dict[str, object], words: str) -> None:
    assert words in "; ".join(broken(Promises.of(promised), seen()))


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
        (["fast"], "it must be a dict with some of kernel, grid"),
        ({"speed": 2}, "it must be a dict with some of kernel, grid"),
        ({"threads": "many"}, "promises['threads'] is 'many'; it must be a whole number from 1 to 2147483647"),
        ({"threads": True}, "it must be a whole number"),
        ({"threads": -128}, "it must be a whole number"),
        ({"shared_bytes": 10**30}, "it must be a whole number from 0 to"),
        ({"grid": [1, 2]}, "promises['grid'] is [1, 2]; it must be three whole numbers"),
        ({"grid": None}, "promises['grid'] is None; it must be three whole numbers"),
        ({"kernel": "fast["}, "it must be a pattern of at most 500 characters"),
        ({"kernel": "k" * 501}, "it must be a pattern of at most 500 characters"),
        ({"deterministic": 1}, "it must be True or False"),
        ({"speedup": math.nan}, "promises['speedup'] is nan; it must be a number above 0, at most 1e+06"),
        ({"speedup": 10**400}, "it must be a number above 0"),
        ({"speedup": 0}, "it must be a number above 0"),
    ],
)
def test_a_promise_that_is_none_is_refused_in_one_line(said: object, message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        checked(said)
    assert message in str(refused.value)


def test_work_that_strays_is_named_where_nothing_was_promised() -> None:
    strayed = seen().model_copy(update={"strayed": "on stream 13, where its caller's is 7"})
    assert broken(Promises(), seen(), strayed) == ["launched 'fast_kernel' on stream 13, where its caller's is 7"]


def test_attention_that_is_somebody_elses_is_remarked() -> None:
    assert borrowed([seen("cudnn_generated_fort_native_sdpa_sm90")], FAMILIES) == [
        "a part of its work is done by cuDNN: cudnn_generated_fort_native_sdpa_sm90"
    ]
    assert borrowed([seen()], FAMILIES) == []
