"""What decoding on several ranks launches around attention builds without spills, and its flags are what other GPUs see."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.kernel import CompileJob
from flashmoe_science.ops.launch import stand_in
from flashmoe_science.parallel import merge, own_tokens

CASES = [(2, 128, torch.bfloat16, True), (8, 64, torch.float16, True), (2, 128, torch.bfloat16, False)]


def launched(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[CompileJob]:
    """What is built in place of the launches of a module."""
    jobs: list[CompileJob] = []

    def launch(function: Any, grid: Any, pointers: Any, integers: Any, constexprs: Any, **options: Any) -> None:
        arguments = (*map(stand_in, pointers), *[2] * len(integers), *constexprs)
        jobs.append(CompileJob(function, arguments, {"num_warps": 4, **options}))

    monkeypatch.setattr(module, "launch", launch)
    return jobs


def job_of(ranks: int, width: int, dtype: torch.dtype, exchanges: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """What builds the merge, of a call in which ranks exchange their parts or not."""
    jobs = launched(merge, monkeypatch)
    results, lse = torch.empty(4, 8, width, dtype=dtype, device="meta"), torch.empty(4, 8, device="meta")
    if exchanges:
        slots = object.__new__(merge.Slots)
        slots._rank, slots._ranks, slots.size = 0, ranks, 1 << 16
        memory = torch.empty(1 << 18, dtype=torch.uint8, device="meta")
        slots._memory = SimpleNamespace(own=memory, addresses=torch.empty(ranks, dtype=torch.int64, device="meta"))
        slots.merge(results, lse, torch.empty_like(results))
    else:
        merge.merge_gathered(torch.empty(ranks, 1 << 16, dtype=torch.uint8, device="meta"), torch.empty_like(results))
    words = f"{ranks} ranks d{width} {dtype}".replace("torch.", "")
    return *jobs, GPUS["h200"], "merge_ranks", words, "exchanged" if exchanges else "gathered"


@pytest.mark.parametrize(("ranks", "width", "dtype", "exchanges"), CASES)
def test_it_builds_and_fits(
    ranks: int, width: int, dtype: torch.dtype, exchanges: bool, monkeypatch: pytest.MonkeyPatch, built: Callable[..., Build]
) -> None:
    build = built(*job_of(ranks, width, dtype, exchanges, monkeypatch))
    assert (fits(build, GPUS["h200"]), build.spill_bytes, build.kernel) == (None, 0, "flashmoe_merge_ranks")


@pytest.mark.parametrize("new", ["none", "packed", "written", "in pages"])
def test_own_tokens_build_and_fit(new: str, monkeypatch: pytest.MonkeyPatch, built: Callable[..., Build]) -> None:
    jobs, cache = launched(own_tokens, monkeypatch), torch.empty(64, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    lengths = torch.empty(4, dtype=torch.int32, device="meta")
    if new in ("none", "packed"):
        own_tokens.own_tokens(lengths, *([cache[:4, :1] if new == "packed" else None] * 2), 0, 2)
    else:
        table = torch.empty(4, 9, dtype=torch.int32, device="meta") if new == "in pages" else None
        own_tokens.write_own(lengths, cache[:4, :1], cache[:4, :1], cache, cache, table, 0, 2)
    build = built(*jobs, GPUS["h200"], "own_tokens", f"hk8 d128 bf16 {new}", "")
    assert (fits(build, GPUS["h200"]), build.spill_bytes, build.kernel) == (None, 0, "flashmoe_own_tokens")


def test_flags_are_released_to_the_system_and_waited_for_with_a_limit(
    monkeypatch: pytest.MonkeyPatch, compiled: Callable[..., Any]
) -> None:
    ptx = compiled(*job_of(3, 128, torch.bfloat16, True, monkeypatch)).asm["ptx"]
    assert ptx.count("atom.global.sys.release.exch") == 2
    assert ptx.count("ld.global.sys.acquire") == 4, "of each other rank once before the loop and once in it"
    assert ptx.count("call.uni __assertfail") == 2
    assert "st.global.v4" in ptx
    assert "multimem" not in ptx
