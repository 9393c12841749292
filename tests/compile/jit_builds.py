"""Builds both kernels through Triton's JIT as a launch does, for an H200 that need not be here, and prints them.

Run as a script: it makes a driver active that only names the GPU. One JSON object a build: the kernel, the arguments that are
known multiples of 16, the tensor descriptors' signatures, the PTX, and whether the build as a CompileJob has the same.
"""

from __future__ import annotations

import gc
import json
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from flashmoe_science.hardware.compiler import run_compiler
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume
from flashmoe_science.kernel import CompileJob
from flashmoe_science.ops import launch
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, Launcher
from flashmoe_science.ops.attention.call.tensors import Options, Tensors, problem_of
from flashmoe_science.ops.attention.forward import tiled_triton as fwd_triton
from flashmoe_science.ops.attention.forward.prefill_sm90 import kernel as fwd_gluon_sm90
from flashmoe_science.ops.attention.forward.prefill_sm90 import launch as fwd_launcher

H200 = gpu_named("h200")
OPTIONS = Options(return_lse=True)


class OnlyCompiled(launch.Build):
    """A build that is never launched."""

    def __init__(self, function: Any, arguments: Any, **options: Any) -> None:
        compiled = function.warmup(*arguments, grid=(1, 1, 1), enable_fp_fusion=True, **options)
        alike = run_compiler(CompileJob(function, tuple(arguments), options), H200).asm["ptx"] == compiled.asm["ptx"]
        names = function.arg_names
        signature = {name: str(kind) for name, kind in compiled.src.signature.items() if "tensordesc" in str(kind)}
        aligned = [names[path[0]] for path, attributes in compiled.src.attrs.items() if attributes]
        found = {"kernel": function.__name__, "aligned": aligned, "descriptors": signature, "ptx": compiled.asm["ptx"]}
        print(json.dumps(found | {"alike": alike}), flush=True)
        self.launch = lambda grid, *args: None
        self.bound = lambda grid, *last: lambda *args: None

    def encoder(self, *args: Any) -> launch.Encoder:
        return lambda tensor: ()


def bound(launcher: Launcher, q: torch.Tensor, keys: int, width: int = 64) -> None:
    k = torch.zeros(2, 2, keys, width, dtype=q.dtype)[..., :64]
    launcher.bind(Tensors(q, k, k), OPTIONS)


def main() -> None:
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    )
    kept = []
    fwd_triton.Build = fwd_launcher.Build = OnlyCompiled  # type: ignore[misc]
    for kernel in (fwd_triton, fwd_gluon_sm90):
        q = torch.zeros(2, 4, 100, 64, dtype=torch.bfloat16)
        k = torch.zeros(2, 2, 130, 64, dtype=torch.bfloat16)
        problem = problem_of(Tensors(q, k, k), OPTIONS)  # compiles sooner than with a mask
        config = kernel.configs(problem, H200)[-1]
        with assume(H200):
            launcher = kernel.KERNEL.plan(AttentionInputs(problem, Tensors(q, k, k), OPTIONS, 0.125), config)
        for keys in (130, 131, 257):  # one build
            bound(launcher, q, keys)
        bound(launcher, q, 256)  # another: a multiple of the tile
        bound(launcher, q, 130, width=72)  # another of the portable kernel: strides that are no multiples of 16
        alive = [weakref.ref(one) for one in (q, k)]
        del q, k
        gc.collect()
        kept.append(launcher)
        assert [one() for one in alive] == [None, None], "a plan holds a tensor of its first call"


if __name__ == "__main__":
    main()
