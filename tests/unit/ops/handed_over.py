"""Prints, of each kernel, whether a direct launch hands the driver the same as Triton's own Python does, and how many maps.

Run as a script: ``python handed_over.py FOLDER``. A library that stands in for the driver (no_driver.c) is made in the folder,
which LD_LIBRARY_PATH and TRITON_LIBCUDA_PATH must name.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashmoe_science.hardware.compiler import run_compiler
from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.kernel import CompileJob
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.operations import kernel_named, parse_problem
from flashmoe_science.ops import launch
from flashmoe_science.ops.direct import direct

PROBLEMS = {"fwd_gluon_sm90": "attn b1 h2 q512 d64 fp16 causal", "split_triton": "attn b1 h8 hk2 q1 k1024 d64 fp16"}
BYTES = {"i1": 4, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "fp16": 2, "bf16": 2, "fp32": 4}
MAP_BYTES, GRID, H200 = 128, (3, 2, 1), GPUS["h200"]


def stand_in(folder: Path) -> ctypes.CDLL:
    """The library, in which what Triton's driver.c calls besides does nothing."""
    sources, own = Path(nvidia.__file__).parent, Path(__file__).with_name("no_driver.c")
    called, made = ((path.read_text()) for path in (sources / "driver.c", own))
    names = {*re.findall(r"\b(cu[A-Z]\w+)\(", called)} - {*re.findall(r"^CUresult (cu\w+)\(", made, re.MULTILINE)}
    rest = folder / "rest.c"
    rest.write_text("".join(f"int {name}{of}(void) {{ return 0; }}\n" for name in sorted(names) for of in ("", "_v2")))
    whole = folder / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", f"-I{sources / 'include'}", "-o", whole, own, rest], check=True)
    (folder / "libcuda.so").symlink_to(whole)
    return ctypes.CDLL(str(whole), mode=ctypes.RTLD_GLOBAL)


def use_without_a_gpu() -> None:
    """Let Triton launch by the stand-in."""
    driver = object.__new__(nvidia.CudaDriver)
    driver.utils, driver.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
    driver.get_current_device, driver.get_current_stream = lambda: 0, lambda device: 77
    triton.runtime.driver.set_active(driver)
    torch.cuda.current_device = driver.get_current_device
    torch._C._cuda_getCurrentRawStream = driver.get_current_stream  # type: ignore[attr-defined]


def sizes(types: Any) -> Iterator[int]:
    """Bytes of each parameter that a kernel is launched with."""
    for one in types:
        if isinstance(one, tuple):
            yield from sizes(one)
        elif one.startswith("tensordesc"):
            dimensions = one[one.index("[") : one.index("]")].count(",") + 1
            yield from (MAP_BYTES, *[4] * dimensions, *[8] * dimensions)
        elif one != "constexpr":
            yield 8 if one.startswith("*") else BYTES[one]


def handed_over(job: CompileJob, driver: ctypes.CDLL) -> dict[str, Any]:
    compiled = run_compiler(job, H200)
    compiled._run, compiled.function, compiled.module = nvidia.CudaLauncher(compiled.src, compiled.metadata), 4660, None
    compiled._init_handles = lambda: None
    of_each = [*sizes(compiled.src.signature.values()), 8, 8]  # two of scratch memory
    ctypes.c_int.in_dll(driver, "parameters").value = len(of_each)
    (ctypes.c_int * 512).in_dll(driver, "sizes")[: len(of_each)] = of_each

    def given(start: Callable[[], None]) -> bytes:
        launches = ctypes.c_int.in_dll(driver, "launches")
        before = launches.value
        start()
        assert launches.value == before + 1
        return bytes((ctypes.c_ubyte * ctypes.c_int.in_dll(driver, "length").value).in_dll(driver, "given"))

    found = direct(compiled)
    assert found is not None
    ours: list[Any] = []
    theirs: list[Any] = []
    describe = iter(found.describe)
    for address, one in enumerate(job.arguments, 1):
        address *= 4096
        if isinstance(one, TensorDescriptor):
            ours += next(describe)(address, tuple(one.shape), tuple(one.strides))
            theirs += launch._described(one)(address, tuple(one.shape), tuple(one.strides))
        elif isinstance(one, launch.Pointer):
            ours.append(address)
            theirs.append(SimpleNamespace(data_ptr=lambda address=address: address))
        else:
            ours.append(one)
            theirs.append(one)
    expected = given(lambda: compiled[GRID](*theirs))
    starts = (lambda: found.launch(GRID, *ours), lambda: found.bound(GRID, *ours[5:])(*ours[:5]))
    return {"same": [given(start) == expected for start in starts], "maps": len(found.describe), "bytes": len(expected)}


def main(folder: Path) -> None:
    driver = stand_in(folder)
    use_without_a_gpu()
    found = {}
    for name, text in PROBLEMS.items():
        problem, kernel = parse_problem(text), kernel_named(name, "attention")
        for job in compile_jobs(kernel, problem, kernel.configs(problem, H200)[0], H200):
            found[job.function.__name__] = handed_over(job, driver)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
