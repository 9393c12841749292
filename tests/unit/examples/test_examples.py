"""The examples are right: on the CPU, in Triton's interpreter, and as built for an H100; and each is what it says it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.unit.examples.example_files import EXAMPLES, faults, load
from tests.unit.interpreter import Interpreter

from flashmoe_science.contract import DISTRIBUTIONS, contract_of
from flashmoe_science.hardware.compiler import run_compiler
from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import compile_for, fits
from flashmoe_science.kernel import CompileJob
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.launch import Pointer

MOE = ("moe t1 e8 k2 d64 f32 bf16", "moe t37 e16 k3 d96 f160 fp32", "moe t64 e4 k4 d32 f64 fp16")
TRITON = {"v1_attention": "v1_attention_kernel", "online_softmax_attention": "online_softmax_kernel"}


ON_RANKS = {EXAMPLES / "context_parallel.py", EXAMPLES / "expert_parallel.py"}  # docs/several-gpus.md runs it


@pytest.mark.parametrize("path", sorted({*EXAMPLES.glob("*.py")} - ON_RANKS), ids=lambda path: path.stem)
def test_an_example_says_how_it_is_proved_and_holds_that_function(path: Path) -> None:
    module = load(path.stem)
    named = re.findall(rf"flashmoe prove examples/{path.name}:(\w+)", module.__doc__ or "")
    assert named
    for name in named:
        assert callable(getattr(module, name))
        assert contract_of(getattr(module, name)).name in ("attention", "moe", "row_softmax")


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(
    "text",
    ["attn b1 h2 q33 d32 fp32 causal", "attn b2 h4 hk2 q17 k40 d24 dv16 bf16 causal", "attn b1 h1 q40 k9 d16 fp32 causal"],
)
def test_attention_on_the_cpu(text: str, distribution: str) -> None:
    assert faults(load("cpu_attention").attention, text, distribution) == []


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("text", MOE)
def test_experts(text: str, distribution: str) -> None:
    assert faults(load("moe_grouped").experts, text, distribution) == []


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_an_operation_of_ones_own(distribution: str) -> None:
    softmax = load("row_softmax").row_softmax
    own = contract_of(softmax)
    problems = [own.problem(dtype, rows=7, cols=33) for dtype in ("fp32", "fp16", "bf16")]
    assert [problem.min_bytes() for problem in problems] == [2 * 7 * 33 * 4, 2 * 7 * 33 * 2, 2 * 7 * 33 * 2]
    for problem in problems:
        assert parse_problem(str(problem)) == problem
        assert faults(softmax, str(problem), distribution) == []


def test_triton_attention_in_the_interpreter(interpreted: Interpreter) -> None:
    functions = (*(f"{name}:attention" for name in TRITON), "v1_attention:attention_v2")
    assert interpreted("examples/interpreted.py", *functions) == []


def job(name: str) -> CompileJob:
    """The kernel as its launcher would build it for fp16 and a head dimension of 64."""
    module = load(name)
    function = getattr(module, TRITON[name])
    tile = (module.BLOCK_M, module.BLOCK_N) if name == "v1_attention" else (64, 64)
    values = {"scale_log2": 0.5, "D": 64, "DV": 64, "BLOCK_D": 64, "BLOCK_DV": 64, "BLOCK_M": tile[0], "BLOCK_N": tile[1]}
    values |= dict.fromkeys(("q_base", "k_base", "v_base", "out_base"), Pointer(torch.float16))
    values |= {argument: 64 for argument in function.arg_names if argument.startswith("stride")}
    values |= {"CAUSAL": True, "INTERPRETED": False}
    return CompileJob(function, tuple(values.get(argument, 17) for argument in function.arg_names), {"num_warps": 4})


@pytest.mark.parametrize(("name", "tensor_cores"), [("v1_attention", False), ("online_softmax_attention", True)])
def test_triton_attention_builds_for_an_h100_with_the_threads_it_promises(name: str, tensor_cores: bool) -> None:
    gpu, built = GPUS["h100"], job(name)
    build = compile_for(built, gpu)
    assert fits(build, gpu) is None
    assert build.spill_bytes == 0
    promise = load(name).attention.promises
    assert (promise["kernel"], promise["threads"]) == (build.kernel, build.threads)
    assert bool(re.search(r"\b(wgmma|mma)\.", run_compiler(built, gpu).asm["ptx"])) is tensor_cores
