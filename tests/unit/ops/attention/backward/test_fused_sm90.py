"""bwd_fused_gluon_sm90: what it serves, random problems as its source computes them, and on a GPU as it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from tests.unit import gluon_interpreter
from tests.unit.ops.attention.backward import traps
from tests.unit.ops.attention.backward.random_problems import Most, RandomCase, drawn

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume
from flashmoe_science.ops.attention.backward import copied
from flashmoe_science.ops.attention.backward.fused_sm90 import program
from flashmoe_science.ops.attention.backward.fused_sm90.kernel import KERNEL
from flashmoe_science.ops.attention.problem.backward import parse
from flashmoe_science.ops.attention.problem.features import PLAIN
from flashmoe_science.ops.attention.proof.backward.contract import CONTRACT

H100 = gpu_named("h100")
DIMS = (64, 128, 8, 40, 96)
SMALL, LARGE = Most(3, 4, 4, 300, 400, DIMS), Most(5, 5, 8, 1200, 1300, DIMS)


def served(number: int, most: Most) -> RandomCase:
    """The random case of a number, with what the kernel serves."""
    case, chance = drawn(number, most), Random(number)
    asked = {name: getattr(case.problem.features, name) for name in ("window_left", "window_right", "lengths", "sinks")}
    features = replace(PLAIN, **asked)
    return replace(case, problem=replace(case.problem, features=features, dtype=chance.choice(("bf16", "fp16"))))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("b1 h2 q128 d64 fp32", "fp16 and bf16, not fp32"),
        ("b1 h2 q128 d192 bf16", "head dimensions up to 128, not 192"),
        ("b1 h2 q128 d128 dv136 bf16", "head dimensions up to 128, not 136"),
        ("b1 h2 q128 d64 bf16 causal softcap5", "a soft cap"),
        ("b2 h2 q128 d64 bf16 causal packed prefix9", "a prefix"),
    ],
)
def test_what_it_does_not_serve_is_refused_in_words(text: str, reason: str) -> None:
    said = KERNEL.cannot(parse(f"attnbwd {text}"), H100)
    assert said is not None
    assert reason in said


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run on the CPU, by Python, few heads of keys together."""
    monkeypatch.setattr(copied, "Build", gluon_interpreter.Build)
    monkeypatch.setattr(program, "TOGETHER", 4)
    with assume(H100):
        yield


@pytest.mark.parametrize(
    "text",
    [
        "b1 h1 q256 d64 bf16",
        "b2 h2 hk1 q300 k200 d64 bf16 causal",
        "b1 h9 q130 k300 d40 dv24 fp16 bshd",  # more heads than start together
        "b2 h6 hk3 q300 k410 d64 bf16 causal",
        "b1 h2 q400 k130 d64 bf16 causal",  # rows that see no key
        "b1 h2 q100 k400 d64 bf16 causal-topleft",  # keys that no query sees
        "b2 h2 hk1 q200 k300 d64 bf16 causal sinks",
        "b1 h2 hk1 q400 k401 d64 bf16 causal left70",
        "b2 h2 q200 k500 d64 fp16 left70 right60",
        "b1 h5 q700 d64 bf16 causal left300 sinks",  # wider than a tile, more heads than start together
        "b1 h2 q300 k200 d40 dv24 fp16 right30",
        "b3 h2 hk1 q400 d64 bf16 causal bshd sinks packed",
        "b3 h4 hk2 q300 k400 d64 bf16 packed",
        "b3 h2 q300 k400 d40 dv64 fp16 left50 right100 packed",
        "b2 h4 hk2 q300 k410 d128 bf16 causal",
        "b1 h9 q150 k130 d96 fp16 bshd",
        "b1 h2 q260 k130 d72 dv128 bf16 causal sinks",  # rows that see no key, columns of half a tile
        "b1 h2 hk1 q330 k331 d128 dv64 bf16 causal left70",  # a window that begins within a tile
        "b3 h4 hk2 q200 k300 d128 bf16 causal packed",
        "b2 h2 hk1 q200 k300 d80 bf16 causal packed",
    ],
)
def test_the_source_is_right(text: str, uncompiled: None) -> None:
    from tests.unit.ops.attention.backward.cases import examine

    problem = parse(f"attnbwd {text}")
    assert examine(KERNEL, KERNEL.configs(problem, H100)[0], problem, CONTRACT, torch.device("cpu")) == []


@pytest.mark.slow  # its source is run by Python: no PyTorch or Triton changes it
@pytest.mark.parametrize("trap", [traps.lowest, traps.unused, traps.tiles, traps.overflow])
def test_what_others_got_wrong_is_right(trap: traps.Trap, uncompiled: None) -> None:
    served = [(case, inputs) for case, inputs in trap() if KERNEL.cannot(inputs.problem, H100) is None]
    assert served
    assert {case: found for case, inputs in served if (found := traps.complaints(inputs, traps.run(inputs, KERNEL)))} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "seqused"), traps.ODD)
def test_sequences_may_be_empty(words: str, seqused: bool, uncompiled: None) -> None:
    inputs = traps.odd_lengths(words, seqused, torch.device("cpu"))
    assert traps.complaints(inputs, traps.run(inputs, KERNEL)) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("words", "seqused"), traps.ODD)
def test_sequences_may_be_empty_on_a_gpu(words: str, seqused: bool) -> None:
    inputs = traps.odd_lengths(words, seqused, torch.device("cuda"))
    assert traps.complaints(inputs, traps.run(inputs, KERNEL)) == []


@pytest.mark.slow
@pytest.mark.redundant
@pytest.mark.parametrize("number", range(60))
def test_the_source_is_right_for_random_problems(number: int, uncompiled: None) -> None:
    from tests.unit.ops.attention.backward.cases import examine

    case = served(number, SMALL)
    config = KERNEL.configs(case.problem, H100)[0]
    assert examine(KERNEL, config, case.problem, case.contract, torch.device("cpu"), case.seed, case.distribution) == []


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(8))
def test_random_problems_are_right_on_a_gpu(part: int) -> None:
    from tests.unit.ops.attention.backward.cases import examine

    from flashmoe_science.hardware.probe import current_gpu

    gpu, found, device = current_gpu(), {}, torch.device("cuda")
    assert gpu is not None
    for number in range(part, 160, 8):
        case = served(number, LARGE)
        if KERNEL.cannot(case.problem, gpu) is None:
            config = KERNEL.configs(case.problem, gpu)[0]
            reasons = examine(KERNEL, config, case.problem, case.contract, device, case.seed, case.distribution)
            found[f"{number}: {case.problem} {case.distribution}"] = reasons
    assert len(found) > 10
    assert {case: reasons for case, reasons in found.items() if reasons} == {}
