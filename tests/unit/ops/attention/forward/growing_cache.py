"""A key-value cache that grows by a token a call, in Triton's interpreter (run as a script with TRITON_INTERPRET=1).

Prints one JSON object: how many plans and builds 300 lengths took, the largest error against the oracle, how one plan serves
all lengths of its class whichever came first, and how many tensors are left alive.
"""

from __future__ import annotations

import gc
import json
import weakref

import torch
from tests.unit.ops.attention.calls import call_of

import flashmoe_science as fm
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.ops import calls, launch
from flashmoe_science.ops.attention.call.tensors import Options, Tensors, problem_of
from flashmoe_science.ops.attention.forward import tiled_triton as fwd_triton
from flashmoe_science.ops.attention.forward.splitkv import launch as split_launcher
from flashmoe_science.ops.attention.front import choose
from flashmoe_science.ops.attention.proof.oracle import attention_oracle

LENGTHS = range(1, 301)
COMPUTED = frozenset((1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 128, 129, 200, 256, 257, 300))  # the others are planned only


def error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, causal: bool) -> float:
    problem = problem_of(Tensors(q, k, v), Options("causal" if causal else "full"))
    oracle, _ = attention_oracle(call_of(problem, q, k, v, problem.softmax_scale))
    return (out.double() - oracle).abs().max().item()


def grow(slices: bool, kernel: str = "fwd_triton") -> dict[str, object]:
    """Decode into slices of one preallocated cache, or into tensors that are concatenated anew at each token."""
    forget()
    built_before = len(BUILT)
    cache = torch.randn(2, 1, 1, LENGTHS[-1], 16)
    q = torch.randn(1, 2, 1, 16)
    alive: list[weakref.ref[torch.Tensor]] = []
    errors = []
    for length in LENGTHS:
        k, v = (one[:, :, :length] if slices else one[:, :, :length].clone() for one in cache)
        CountedBuild.launches = length in COMPUTED
        out = fm.scaled_dot_product_attention(q, k, v, enable_gqa=True, kernel=kernel)
        if CountedBuild.launches:
            errors.append(error(q, k, v, out, causal=False))
        alive += [weakref.ref(k), weakref.ref(v), weakref.ref(out)]
    decisions = {str(plan.decision.config) for plan in choose.PLANS.values()}
    counted = {"plans": len(choose.PLANS), "launchers": len(choose.LAUNCHERS), "builds": len(BUILT) - built_before}
    del k, v, out
    gc.collect()
    return counted | {"error": max(errors), "configs": len(decisions), "alive": sum(ref() is not None for ref in alive)}


def one_kind(lengths: list[int], causal: bool) -> dict[str, object]:
    """Calls of lengths of one class, in this order, whole tiles of keys and others; NaN lies behind each tensor's last row."""
    CountedBuild.launches = True
    forget()
    errors = []
    for keys in lengths:
        for queries in (17, 20):
            q, k, v = (followed_by_nan(rows, width) for rows, width in ((queries, 16), (keys, 16), (keys, 8)))
            errors.append(error(q, k, v, fm.flash_attention_science(q, k, v, causal), causal))
    (plan,) = choose.PLANS.values()
    return {"errors": errors, "kernel": plan.decision.kernel, "config": str(plan.decision.config)}


def forget() -> None:
    """Drop all that calls have stored."""
    for held in (calls.LAUNCHES, choose.PLANS, choose.LAUNCHERS):
        held.clear()


def followed_by_nan(rows: int, width: int) -> torch.Tensor:
    held = torch.full((1, 2, 160, width), torch.nan)
    held[:, :, :rows] = torch.randn(1, 2, rows, width)
    return held[:, :, :rows]


BUILT: list[object] = []


class CountedBuild(launch.Build):
    """A build that counts itself, and launches only while ``launches``."""

    launches = True

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        BUILT.append(None)
        start = self.launch
        self.launch = lambda *args: start(*args) if self.launches else None


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fwd_triton.Build = split_launcher.Build = CountedBuild  # type: ignore[misc]
    # Whose configs are interpreted; the tensors are on the CPU.
    choose.gpu_of = split_launcher.gpu_of = lambda q: gpu_named("l4")
    found = {"slices": grow(True), "anew": grow(False), "split": grow(True, "split_triton")}
    for causal in (False, True):
        for order, lengths in (("upwards", [113, 120, 127, 128]), ("downwards", [128, 127, 120, 113])):
            found[f"{order} {causal}"] = one_kind(lengths, causal)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
