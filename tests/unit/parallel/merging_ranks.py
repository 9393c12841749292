"""One rank of several that merge parts by interpreted kernels, through files that all map (by interpreted_ranks.py)."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from tests.unit.parallel import decode_ranks
from tests.unit.parallel.context_ranks import refused
from tests.unit.parallel.shared_ranks import Mapped
from triton.runtime import interpreter

from flashmoe_science.contract import built_in
from flashmoe_science.measure.inputs import Case, make
from flashmoe_science.ops.attention.peers.merge import merged
from flashmoe_science.ops.attention.problem import parse
from flashmoe_science.ops.attention.proof import ranks_decode
from flashmoe_science.parallel import DecodeWorkspace, decode, merge, parts

CALLS, LATE = 8, 0.05


def repeats(group: dist.ProcessGroup) -> list[str]:
    """What is wrong with calls of changing sizes, of ranks that are late at random and at times have no keys."""
    workspace, wrong, chance = DecodeWorkspace(group, 5, 3, 40, torch.float32), list[str](), random.Random(group.rank())
    for call in range(CALLS):
        draw = torch.Generator().manual_seed(call)
        rows, width, dtype = ((5, 3), 40, torch.float32) if call % 2 else ((1 + call // 2, 1), 24, torch.bfloat16)
        results = torch.randn(group.size(), *rows, width, generator=draw).to(dtype)
        lse = torch.randn(group.size(), *rows, generator=draw)
        lse[call % group.size(), 0] = -torch.inf
        results[call % group.size(), 0] = torch.nan
        if call % 3 == 0:
            lse[:, -1], results[:, -1] = -torch.inf, torch.nan
        right = merged(results.float().unbind(), lse.unbind())[0].to(dtype)
        time.sleep(chance.random() * LATE)
        found = workspace.merge(results[group.rank()], lse[group.rank()])
        if not torch.allclose(found, right, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6):
            wrong.append(f"call {call}")
        part = parts.Part.of(lse[0].numel(), width, dtype)
        behind = torch.stack([part.filled(*one) for one in zip(results, lse, strict=True)])
        merge.merge_gathered(behind, by_collective := torch.empty_like(found))
        if not torch.equal(found, by_collective):
            wrong.append(f"call {call} has other bits than behind a collective")
    return wrong


def check_refusals(group: dist.ProcessGroup) -> list[str]:
    case, wrong = decode_ranks.CASES["a cache"], list[str]()
    small, alone = DecodeWorkspace(group, 1, 1, 8), dist.new_group([group.rank()], use_local_synchronization=True)
    large = DecodeWorkspace(group, 9, 9, 99)
    for workspace, words in (
        (small, "the part of a rank has 3696 bytes; the workspace is for at most 32"),
        (DecodeWorkspace(alone, 9, 9, 99), "workspace is of a group of ranks"),
        ("none", "workspace is 'none'; it must be a DecodeWorkspace"),
        (
            None if group.rank() else DecodeWorkspace(alone, 9, 9, 99),
            "workspace is of a group of ranks [0], and group is another",
        ),
        (large if group.rank() else None, "workspace is None is"),
    ):
        wrong += refused(partial(decode_ranks.faults, case, group, workspace=workspace), words)
    return wrong


def check_proof(group: dist.ProcessGroup) -> list[str]:
    """What is wrong with the ways to make a step that ``flashmoe prove`` compares."""
    problem, wrong = parse("attn b2 h4 hk2 q1 k31 d16 dv32 fp32 ragged"), list[str]()
    inputs = make(built_in(problem.op), problem, torch.device("cpu"), Case(0))
    found = {(one.name, one.config): one for one in ranks_decode.implementations(problem, inputs, group)}
    (right,) = found["one_gpu", "flash_attn_with_kvcache"].prepare()()
    for name in (("context_decode", "collectives"), ("context_decode", "symmetric"), ("all_gather", "flash_attn_with_kvcache")):
        (out,) = found[name].prepare()()
        wrong += [] if torch.allclose(out, right, rtol=1e-4, atol=1e-5) else [f"{name} is off"]
    return wrong


def check_late(group: dist.ProcessGroup) -> list[str]:
    """What is wrong with the end of a wait for a rank that does not come."""
    workspace, builder = DecodeWorkspace(group, 1, 1, 8), interpreter.interpreter_builder
    if group.rank():
        return []
    with mock.patch.object(builder, "options", replace(builder.options, debug=True)):
        try:
            workspace.merge(torch.zeros(1, 8).bfloat16(), torch.zeros(1))
        except interpreter.InterpreterError as error:
            return [] if "a rank was later than the time limit" in str(error) else [f"it ends with {error}"]
    return ["it does not wait"]


def main(group: dist.ProcessGroup, file: str) -> None:
    found: dict[str, list[str]] = {}
    patches = {"Symmetric": Mapped, "PROGRAMS": 3, "_ELEMENTS": 64, "globaltimer": time.monotonic_ns, "TIME_LIMIT_MS": 20_000}
    with mock.patch.multiple(merge, **patches), mock.patch.object(parts, "why_no_symmetric", return_value=""):
        for name in ("sinks", "a new token", "a new token, rotary", "pages", "bf16"):
            case = decode_ranks.CASES[name]
            workspace = DecodeWorkspace(group, len(decode_ranks.LENGTHS), decode_ranks.HEADS, decode_ranks.DIM, case.dtype)
            with mock.patch.object(decode, "_has_kernels", return_value=True):
                found[name] = decode_ranks.faults(case, group, workspace=workspace)
        half = DecodeWorkspace(group, len(decode_ranks.LENGTHS), decode_ranks.HEADS, decode_ranks.DIM)
        with torch.autocast("cpu", torch.bfloat16):
            found["autocast"] = decode_ranks.faults(decode_ranks.CASES["a cache"], group, workspace=half)
        found["repeats"] = repeats(group)
        found["proof"] = check_proof(group)
        found["refusals"] = check_refusals(group)
        with mock.patch.object(merge, "TIME_LIMIT_MS", 100):
            found["late"] = check_late(group)
    assert not any(found.values()), found
    os._exit(0)
