"""What moe_grouped_gluon_sm90 serves, refuses in words and promises to launch. Its results need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.ops.moe.cases import changed

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.moe.call import MoEInputs
from flashmoe_science.ops.moe.products.gluon_sm90.kernel import KERNEL, configs, launches, plan
from flashmoe_science.ops.moe.proof.contract import CONTRACT

GPU = GPUS["h200"]
QWEN = "moe t{} e128 k8 d2048 f768 bf16"


def inputs() -> MoEInputs:
    problem = parse_problem("moe t5 e4 k2 d40 f24 bf16")
    return CONTRACT.for_kernel(problem, CONTRACT.inputs(problem, torch.device("cpu"), torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    ("text", "gpu", "words"),
    [
        (QWEN.format(4096), None, "need a GPU"),
        (QWEN.format(4096), GPUS["a100"], "compute capability 9.0"),
        (QWEN.format(4096), GPUS["b200"], "compute capability 9.0"),
        ("moe t4096 e8 k2 d64 f64 fp32", GPU, "not fp32"),
        ("moe t4096 e8 k2 d100 f64 bf16", GPU, "dim is 100"),
        ("moe t4096 e8 k2 d64 f36 bf16", GPU, "hidden is 36"),
        ("moe t4096 e5000 k2 d64 f64 bf16", GPU, "experts is 5000"),
        ("moe t4096 e8 k2 d64 f64 bf16 ungated", GPU, "not gated"),
        ("moe t4096 e8 k2 d64 f64 bf16 interleaved", GPU, "interleaved"),
        ("moe t4096 e8 k2 d64 f64 bf16 bias", GPU, "biases"),
        ("moe t4096 e8 k2 d64 f64 bf16 transposed", GPU, "transposed"),
    ],
)
def test_problems_that_it_does_not_serve(text: str, gpu: Any, words: str) -> None:
    assert words in str(KERNEL.cannot(parse_problem(text), gpu))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(5, 41, dtype=torch.bfloat16)[:, 1:]}, "hidden_states does not start"),
        ({"x": torch.zeros(5, 41, dtype=torch.bfloat16)[:, :40]}, "hidden_states has stride 41"),
        ({"w1": torch.zeros(4, 40, 48, dtype=torch.bfloat16).mT}, "w1 has stride 48 in its last dimension"),
        ({"w2": torch.zeros(1, 40, 24, dtype=torch.bfloat16).expand(4, 40, 24)}, "w2 has stride 0 in dimension 0"),
    ],
)
def test_tensors_that_it_leaves_to_the_portable_kernel(change: dict[str, Any], words: str) -> None:
    served = inputs()
    with pytest.raises(CannotServe, match=words):
        plan(changed(served, **change), configs(served.problem, GPU)[0])


@pytest.mark.parametrize(("tokens", "many"), [(767, False), (768, True), (16384, True)])
def test_it_suits_many_rows_an_expert(tokens: int, many: bool) -> None:
    assert KERNEL.suits(parse_problem(QWEN.format(tokens)), GPU) is many


@pytest.mark.parametrize(
    ("text", "programs"),
    [(QWEN.format(4096), (132, 132)), ("moe t100 e2 k1 d264 f136 bf16", (4, 4)), ("moe t1 e1 k1 d8 f8 bf16", (1, 1))],
)
def test_programs_are_persistent_and_no_more_than_tiles(text: str, programs: tuple[int, int]) -> None:
    problem = parse_problem(text)
    products = [one for one in launches(problem, configs(problem, GPU)[0], GPU) if "gluon" in one.name]
    assert [(one.grid, one.threads) for one in products] == [((number, 1, 1), 384) for number in programs]


def test_tiles_that_its_consumers_do_not_cover_are_refused() -> None:
    served = inputs()
    config = Config(**dict(configs(served.problem, GPU)[0]) | {"block_m": 192})
    with pytest.raises(CannotServe, match="block_m is 192; its two consumers take 128 rows"):
        plan(served, config)
