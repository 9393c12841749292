"""The portable kernels in Triton's interpreter: every feature against autograd in fp64, equal bits, what others got wrong."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from tests.unit.interpreter import Interpreter
from tests.unit.ops.attention.backward.random_problems import LARGE, TINY, drawn
from tests.unit.ops.attention.backward.traps import NAMES

from flashmoe_science.hardware.gpus import GPUS, gpu_named
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.backward.tiled_triton.config import KEYS, keys_first, tile_of
from flashmoe_science.ops.attention.backward.tiled_triton.kernel import KERNEL
from flashmoe_science.ops.attention.problem.features import Features
from flashmoe_science.ops.attention.proof.backward.suites import SUITES, small
from flashmoe_science.problem import ProblemError

CASES, RANDOM = "ops/attention/backward/cases.py", "ops/attention/backward/random_problems.py"
TRAPS = "ops/attention/backward/traps.py"
SMALL = small()


def wrong(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {case: reasons for case, reasons in found.items() if reasons}


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=[pytest.mark.slow, pytest.mark.redundant]) for part in (1, 2))])
def test_small_problems_are_right(part: int, interpreted: Interpreter) -> None:
    texts = SMALL[part::3]
    found = interpreted(CASES, *texts)
    assert {case.partition(": ")[2] for case in found} == {*texts}
    assert part or any(case.startswith("bwd_short_triton") for case in found)
    assert wrong(found) == {}


@pytest.mark.parametrize(
    ("first", "count"),
    [
        ("100", "4"),
        ("364", "1"),  # a sink far below the scores, whose cap was below 0
        ("756", "1"),  # O below the normal numbers of fp16, whose rounding the sinks' cap did not count
        ("17517", "1"),  # a sink whose probabilities are flushed to 0, in all rows
        ("17936", "1"),  # keys whose probabilities are flushed to 0
        ("36417", "1"),  # a sink's one gradient, a sum that cancels
        pytest.param("0", "40", marks=[pytest.mark.slow, pytest.mark.redundant]),
        pytest.param("200", "200", marks=[pytest.mark.slow, pytest.mark.redundant]),
    ],
)
def test_random_problems_are_right(first: str, count: str, interpreted: Interpreter) -> None:
    found = interpreted(RANDOM, first, count)
    assert len({case.split(": ")[1] for case in found}) == int(count)
    assert wrong(found) == {}


@pytest.mark.parametrize("trap", [*NAMES, "asked"])
def test_what_others_got_wrong_is_right(trap: str, interpreted: Interpreter) -> None:
    found = interpreted(TRAPS, trap)
    assert found
    assert wrong(found) == {}


def test_every_feature_is_drawn() -> None:
    cases = [drawn(number, TINY) for number in range(300)]
    for one in fields(Features):
        if one.name not in ("page", "leftpad", "fp8_cache"):
            assert len({getattr(case.problem.features, one.name) for case in cases}) > 1, one.name


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(12))  # most of their time is one core's, which compiles
def test_random_problems_are_right_on_a_gpu(part: int) -> None:
    from tests.unit.ops.attention.backward.cases import PORTABLE, examine

    from flashmoe_science.hardware.probe import current_gpu

    gpu, device = current_gpu(), torch.device("cuda")
    assert gpu is not None
    found = {}
    for number in range(part, 60, 12):
        case = drawn(number, LARGE)
        for kernel in (one for one in PORTABLE if one.cannot(case.problem, gpu) is None):
            config, words = case.config(kernel, gpu), f"{kernel.name}: {number}: {case.problem} {case.distribution}"
            found[words] = examine(kernel, config, case.problem, case.contract, device, case.seed, case.distribution)
    assert wrong(found) == {}


@pytest.mark.parametrize("gpu", GPUS)
def test_there_is_a_tile_for_every_gpu(gpu: str) -> None:
    for text in (*SUITES["train"], "attnbwd b1 h1 q8 d256 fp32", "attnbwd b1 h1 q8 d1 fp16"):
        problem = parse_problem(text)
        assert KERNEL.cannot(problem, gpu_named(gpu)) is None
        assert KERNEL.configs(problem, gpu_named(gpu))  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [16, 64, 96, 128, 256])
def test_tiles_that_are_wrong_on_hopper_are_none_of_its_configs(dim: int) -> None:
    problem = parse_problem(f"attnbwd b1 h2 q512 d{dim} bf16")
    for config in KERNEL.configs(problem, gpu_named("h100")):  # type: ignore[arg-type]
        block_m, _, _, stages = tile = tile_of(config, KEYS)
        assert keys_first(tile) or (block_m, stages) != (32, 2)


@pytest.mark.parametrize("word", ["ragged", "packed page16", "ragged leftpad", "packed page16 fp8kv"])
def test_keys_in_a_cache_have_no_backward(word: str) -> None:
    with pytest.raises(ProblemError, match="a backward does not serve"):
        parse_problem(f"attnbwd b2 h2 q8 k16 d16 bf16 {word}")


def test_the_text_form_is_read_back_and_counts_five_products() -> None:
    text = "attnbwd b2 h4 hk2 q8 k16 d16 dv32 bf16 causal bshd left3 softcap5 sinks packed"
    problem, forward = parse_problem(text), parse_problem(text.replace("attnbwd", "attn"))
    assert str(problem) == text
    assert problem.op == "attention_backward"
    assert problem != forward
    assert problem.distance(forward) == float("inf") == forward.distance(problem)
    assert problem.flops() == forward.flops() // (16 + 32) * (3 * 16 + 2 * 32)
    square = parse_problem("attnbwd b1 h2 q64 d32 bf16")
    assert square.flops() == 10 * 64 * 64 * 32 * 2


def test_train_has_at_most_60_rows() -> None:
    assert 40 <= len(SUITES["train"]) <= 60
    assert len({parse_problem(text) for text in SUITES["train"]}) == len(SUITES["train"])
