"""The products of moe_bwd_gluon_sm90 build for Hopper, and copy and multiply by the instructions meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import machine_code
import pytest
from tests.compile.moe_backward import jobs_of, problem_of

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.ops.moe.backward.gluon_sm90.kernel import KERNEL

GPU = GPUS["h200"]
QWEN, UNEVEN = "t4096 e128 k8 d2048 f768 bf16", "t700 e16 k3 d520 f200 fp16 bias gelu"
GPT_OSS = "t4096 e32 k4 d2880 f2880 bf16 bias clamped interleaved transposed"
DIVIDED = pytest.param(QWEN, marks=pytest.mark.one_triton)
PRODUCTS = ("dhidden", "dweights", "dweights", "down")  # in the order of ``launch.Products``


def builds_of(text: str) -> list[tuple[Any, ...]]:
    """What builds the four products of a problem, with the first config: dweights first of dW1, then of dW2."""
    problem = problem_of(text)
    config = KERNEL.configs(problem, GPU)[0]
    jobs = [job for job in jobs_of(KERNEL, problem, config, GPU) if job.function.__name__.endswith("gluon_sm90")]
    return [(job, GPU, KERNEL.name, problem, f"{number}: {config}") for number, job in enumerate(jobs)]


# Bytes a thread, by the assembler of Triton 3.6 and by the newest: of the clamp's epilogue, after the product.
CLAMPED = 56 if machine_code.VERSION == "3.6" else 112


@pytest.mark.parametrize(
    ("text", "spills"),
    [
        pytest.param(QWEN, 0, marks=pytest.mark.one_triton),
        (UNEVEN, 0),
        pytest.param(GPT_OSS, CLAMPED, marks=pytest.mark.one_triton),
    ],
)
def test_all_products_build_and_fit(text: str, spills: int, built: Callable[..., Build]) -> None:
    found = [built(*one) for one in builds_of(text)]
    assert sorted(build.kernel for build in found) == sorted(f"flashmoe_moe_{name}_gluon_sm90" for name in PRODUCTS)
    for build in found:
        assert (build.refusal, build.registers, build.threads, fits(build, GPU)) == (None, 168, 384, None), build.kernel
        assert build.spill_bytes <= spills, build.kernel


@pytest.mark.parametrize("text", [DIVIDED, UNEVEN])
def test_operands_are_copied_by_16_bytes_and_transposed_in_shared_memory(text: str, compiled: Callable[..., Any]) -> None:
    for one in builds_of(text):
        asm, name = compiled(*one).asm, one[0].function.__name__
        columns = 128 if "dhidden" in name else 256
        assert asm["ptx"].count(f"wgmma.mma_async.sync.aligned.m64n{columns}k16") == 2 * 4, name  # of two consumers, 64 deep
        assert "cp.async.ca" not in asm["ptx"], name
        # No operand goes through registers. Of dhidden's layouts two differ in nothing that a thread sees.
        assert asm["ttgir"].count("ttg.convert_layout") == (4 if "dhidden" in name else 0), name
        if "dweights" in name:
            gathered = asm["ptx"].count("cp.async.cg.shared.global")
            assert gathered in (8, 16), name  # 64 rows of 128 columns for dW2, of 256 for dW1, by 128 threads
