"""Building for GPUs that are not here: what is read from a build, and what is said where there is none."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science.hardware.gpus import GPUS, KIB
from flashmoe_science.hardware.target import (
    Build,
    CompilerUnavailable,
    build_residency,
    compile_for,
    compile_many,
    fits,
    spills,
)
from flashmoe_science.kernel import CompileJob
from flashmoe_science.ops.launch import Pointer


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("tiny_kernels")


def job(function: Any, block: int = 128, warps: int = 4, dtype: torch.dtype = torch.int32) -> CompileJob:
    numbers = {"count": 17, "BLOCK": block}
    arguments = tuple(numbers.get(name, Pointer(dtype)) for name in function.arg_names)
    return CompileJob(function, arguments, {"num_warps": warps, "num_stages": 1})


@pytest.mark.parametrize("name", ["a100", "l4", "h200", "b200", "rtx5090"])
def test_every_architecture_builds_without_its_gpu(tiny: Any, name: str) -> None:
    gpu = GPUS[name]
    build = compile_for(job(tiny.copies, warps=8), gpu)
    assert (build.refusal, build.threads, build.spill_bytes, build.shared_bytes) == (None, 256, 0, 0)
    assert 0 < build.registers < 64
    assert fits(build, gpu) is None
    assert spills(build) is None


def test_gluon_builds_too(tiny: Any) -> None:
    build = compile_for(job(tiny.gluon_copies), GPUS["h200"])
    assert (build.refusal, build.threads) == (None, 128)


@pytest.mark.parametrize("name", ["a100", "h200"])
def test_static_shared_memory_is_the_kernels_own(tiny: Any, name: str) -> None:
    """From sm_90 on, the assembler counts the system's 1 KB as static; it is not the kernel's."""
    build = compile_for(job(tiny.takes_1000_static_bytes), GPUS[name])
    assert (build.shared_static, build.shared_dynamic) == (1000, 0)


def test_dynamic_shared_memory_and_residency(tiny: Any) -> None:
    gpu = GPUS["a100"]
    build = compile_for(job(tiny.multiplies, block=64, dtype=torch.float16), gpu)
    assert build.shared_dynamic >= 64 * 64 * 2
    assert build_residency(build, gpu).blocks >= 1


@pytest.mark.parametrize("name", ["l4", "a100", "h200"])
def test_160_kb_of_static_shared_memory_do_not_fit(tiny: Any, name: str) -> None:
    """Older assemblers refuse it; newer ones build it for sm_90, and then it is refused here."""
    reason = fits(compile_for(job(tiny.takes_160_static_kb), GPUS[name]), GPUS[name])
    assert reason is not None
    assert "too much shared data" in reason or "160 KB of static shared memory" in reason
    assert "\n" not in reason


def test_a_program_that_does_not_compile_is_refused_in_one_line(tiny: Any, capfd: pytest.CaptureFixture[str]) -> None:
    build = compile_for(job(tiny.tile_of_48_rows), GPUS["l4"])
    assert build.refusal == "the compiler refuses it: arange's range must be a power of 2"
    assert fits(build, GPUS["l4"]) == build.refusal
    assert capfd.readouterr() == ("", "")


def test_interpreting_is_an_error(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(CompilerUnavailable, match="TRITON_INTERPRET"):
        compile_for(job(tiny.copies), GPUS["l4"])


def test_no_triton_is_an_error(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(CompilerUnavailable, match="compiling needs Triton"):
        compile_for(job(tiny.copies), GPUS["l4"])


@pytest.mark.parametrize(("folder", "said"), [("{file}/cache", "cannot be written"), ("", "TRITON_CACHE_DIR is empty")])
def test_a_cache_that_cannot_be_written_is_no_fault_of_the_kernel(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, said: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", folder.format(file=tmp_path / "file"))
    with pytest.raises(CompilerUnavailable, match=said):
        compile_for(job(tiny.copies), GPUS["l4"])


def test_many_builds_keep_their_order_and_survive_a_crash(tiny: Any) -> None:
    jobs = [
        (job(tiny.copies), GPUS["l4"]),
        (job(tiny.aborts), GPUS["h200"]),
        (job(tiny.tile_of_48_rows), GPUS["a100"]),
        (job(tiny.gluon_copies), GPUS["h200"]),
    ]
    seen: dict[int, Build] = {}
    builds = compile_many(jobs, on_done=seen.__setitem__)
    assert [build.kernel for build in builds] == ["copies", "aborts", "tile_of_48_rows", "gluon_copies"]
    assert [build.gpu for build in builds] == ["l4", "h200", "a100", "h200"]
    assert [build.refusal for build in builds] == [
        None,
        "the compiler crashed and took its process down",
        "the compiler refuses it: arange's range must be a power of 2",
        None,
    ]
    assert [seen[index] for index in range(4)] == builds


def test_a_kernel_that_another_process_cannot_find_is_an_error(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    function = tiny.copies
    monkeypatch.setattr(tiny, "copies", None)
    with pytest.raises(ValueError, match="kernel copies is not found by that name in tiny_kernels"):
        compile_many([(job(function), GPUS["l4"])])


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Build("l4", "k", registers=64, shared_dynamic=58112, threads=128), None),
        (Build("l4", "k", registers=64, shared_dynamic=99 * KIB + 1, threads=128), "above the 99 KB"),
        (Build("l4", "k", registers=64, shared_static=49 * KIB, threads=128), "49 KB of static shared memory"),
        (Build("l4", "k", registers=64, threads=2048), "2048 threads"),
        (Build("l4", "k", registers=168, threads=512), "168 registers x 512 threads"),
        (Build("l4", "k", registers=64, threads=128, tensor_memory_columns=513), "513 columns of tensor memory"),
        (Build("l4", "k", registers=255, spill_bytes=4096, threads=128), None),
    ],
)
def test_fits(build: Build, reason: str | None) -> None:
    found = fits(build, GPUS["l4"])
    assert found is None if reason is None else found is not None and reason in found


def test_spills_are_a_warning_with_their_size() -> None:
    assert spills(Build("l4", "k", registers=255, spill_bytes=1304, threads=128)) == "spills 1304 bytes a thread"
