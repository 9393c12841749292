"""What a kernel or a function is compared with."""

from __future__ import annotations

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.measure.request import of_function, rivals_of
from flashmoe_science.operations import parse_problem

H200 = gpu_named("h200")


def names(op: str, own: tuple[str, ...] = (), named: tuple[str, ...] = (), every: bool = False, gpu: bool = False) -> list[str]:
    return [one.who for one in rivals_of(op, own, named, every, H200 if gpu else None, [of_function("x.py:fn")])]


def test_by_default_the_peers_that_are_worth_their_time() -> None:
    assert names("attention") == ["sdpa", "sdpa_math"]
    on_gpu = names("attention", gpu=True)
    assert {"sdpa", "sdpa_flash", "fa3"} <= set(on_gpu)
    assert not {"sdpa_math", "flex", "fwd_triton"} & set(on_gpu)
    assert {"sdpa_math", "flex"} <= set(names("attention", every=True, gpu=True))


def test_an_operation_of_ones_own_has_its_own_rivals_or_the_plain_maths() -> None:
    assert names("row_softmax", ("torch",)) == ["torch"]
    assert names("row_softmax") == ["plain"]


def test_named_rivals_may_be_ours_or_functions() -> None:
    found = rivals_of("attention", (), ("fwd_triton", "y.py:fn"), False, H200, [])
    assert [one.origin for one in found] == ["ours", "candidate"]
    assert found[0].chosen_config(parse_problem("attn b1 h16 q4096 d128 bf16 causal"), H200)
    assert found[1].chosen_config(parse_problem("attn b1 h16 q4096 d128 bf16 causal"), H200) == ""
