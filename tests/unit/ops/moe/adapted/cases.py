"""The cases that experts with adapters on Hopper must pass, and how they are tested with one.

Run as a script with TRITON_INTERPRET=1 it puts them to the kernels on the CPU, and prints one JSON object: by case the faults.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from tests.unit.ops.moe import cases
from tests.unit.ops.moe.backward.cases import poisoned
from tests.unit.ops.moe.cases import UNIT, activated, inputs_of

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume, current_gpu
from flashmoe_science.moe import fused_moe
from flashmoe_science.ops.moe.adapted import backward, forward
from flashmoe_science.ops.moe.backward.gluon_sm90 import config as of_backward
from flashmoe_science.ops.moe.backward.gluon_sm90 import launch as backward_launch
from flashmoe_science.ops.moe.call import MoEInputs
from flashmoe_science.ops.moe.call.adapters import Adapters, LowRank, adapters_of, parts_of
from flashmoe_science.ops.moe.call.backward import BackwardInputs, BackwardTensors, Wanted, backward_problem_of
from flashmoe_science.ops.moe.front.adapted_sm90 import NAME
from flashmoe_science.ops.moe.products.gluon_sm90 import config as of_forward
from flashmoe_science.ops.moe.products.gluon_sm90 import launch as forward_launch
from flashmoe_science.ops.moe.proof.oracle import assigned

SCALINGS = 0.75, 2.0
ROUNDINGS = 6  # of what is activated, of u or g, of s u, of dz or s A, of a row, of a result
NAMES = ("out", "z", "dx", "dtopk_weights", "da1", "db1", "da2", "db2")


@dataclass(frozen=True)
class Case(cases.Case):
    """And the rank of each adapter, 0 where there is none."""

    ranks: tuple[int, int] = (8, 8)

    def __str__(self) -> str:
        return f"{super().__str__()} ranks {self.ranks}"


CASES = (
    Case("moe t20 e4 k2 d136 f200 bf16", ranks=(8, 16)),
    Case("moe t150 e3 k2 d72 f40 fp16 gelu", ranks=(72, 8), routing="crowded"),
    Case("moe t20 e3 k2 d200 f136 bf16 clamped", ranks=(8, 72), routing="foreign"),
    Case("moe t30 e6 k3 d40 f72 fp16", ranks=(16, 0), routing="twice"),
    Case("moe t9 e4 k2 d40 f72 bf16", ranks=(0, 128)),
)


def adapters_for(case: Case, inputs: MoEInputs) -> Adapters:
    x, w1, w2, *_ = inputs.tensors
    made = []
    for weights, rank, scaling in zip((w1, w2), case.ranks, SCALINGS, strict=True):
        experts, out, inner = weights.shape
        a, b = torch.randn(experts, rank, inner) * inner**-0.5, torch.randn(experts, out, rank) * max(rank, 1) ** -0.5
        made.append(LowRank(a.to(x), b.to(x), scaling) if rank else None)
    return made[0], made[1]


def reference(
    inputs: MoEInputs, adapters: Adapters, dout: torch.Tensor, saved: torch.Tensor
) -> list[torch.Tensor | None]:  # fmt: skip
    """The result, z and the gradients in fp64, expert by expert, through z as it was saved: a clamp's gradient jumps."""
    t = inputs.tensors
    given = (t.x, t.topk_weights, *parts_of(adapters))
    leaves = [None if one is None else one.double().requires_grad_() for one in given]
    x, weights, a1, b1, a2, b2 = leaves
    assert x is not None
    assert weights is not None
    out, exact, row = torch.zeros_like(x), saved.double(), 0
    for expert, tokens, place in assigned(t):
        z = x[tokens] @ t.w1[expert].double().T
        z = z if a1 is None or b1 is None else z + SCALINGS[0] * x[tokens] @ a1[expert].T @ b1[expert].T
        here = slice(row, row + len(z))
        exact[here], row = z.detach(), here.stop
        active = activated((z - z.detach() + saved[here].double()).T, inputs.activation).T
        down = active @ t.w2[expert].double().T
        down = down if a2 is None or b2 is None else down + SCALINGS[1] * active @ a2[expert].T @ b2[expert].T
        out = out.index_add(0, tokens, down * weights[tokens, place, None])
    (out * dout.double()).sum().backward()
    return [out.detach(), exact[:row], *(None if one is None else one.grad for one in leaves)]


def put(case: Case, device: str) -> list[str]:
    """What is wrong with the result and the gradients of a case, in poisoned memory."""
    inputs = inputs_of(case, device)
    adapters, dout = adapters_for(case, inputs), torch.randn(inputs.tensors.x.shape).to(inputs.tensors.x)
    with poisoned():
        got, again = (compute(inputs, adapters, dout) for _ in range(2))
    found, allowed = [], ROUNDINGS * UNIT[inputs.problem.dtype]
    assert got[1] is not None
    for name, one, other, right in zip(NAMES, got, again, reference(inputs, adapters, dout, got[1]), strict=True):
        if one is None or other is None or right is None:
            found += [] if one is None and right is None else [f"{name} is {'none' if one is None else 'there'}"]
            continue
        one, other = one[: len(right)], other[: len(right)]  # rows of z past the last expert's may have anything
        error = ((one.double() - right).abs().max() / right.abs().max()).item()
        if not error <= allowed:
            found.append(f"{name} is off by {error:.2e} of the largest, where {allowed:.2e} is allowed")
        if not torch.equal(one, other):
            found.append(f"two {name} differ")
    return found


def compute(inputs: MoEInputs, adapters: Adapters, dout: torch.Tensor) -> list[torch.Tensor | None]:
    """The result, z and the gradients; those that are asked for alone are the same, and nothing else is computed."""
    gpu = current_gpu(inputs.tensors.x.device)
    given = replace(inputs, saves_z=True)
    config = of_forward.configs(given.problem, gpu)[0]
    out, z, u1, u2 = forward.plan(given, adapters, config)(given)(given.tensors, adapters)
    assert torch.equal(out, forward.plan(inputs, adapters, config)(inputs)(inputs.tensors, adapters).out)
    tensors = BackwardTensors(*given.tensors, z, dout)
    of_call = BackwardInputs(backward_problem_of(given.problem), tensors, given.activation)
    tiles = of_backward.configs(given.problem, gpu)[0]

    def gradients(*wanted: bool) -> backward.AdaptedGradients:
        asked = replace(of_call, wanted=Wanted(dx=wanted[0], dw1=False, dw2=False, dtopk_weights=wanted[1]))
        start = backward.plan(asked, adapters, tiles)(asked)
        return start(tensors, adapters, (u1, u2))

    every = gradients(True, True)
    for wanted in ((True, False), (False, True)):
        for asked, one, other in zip((*wanted, *4 * [True]), gradients(*wanted), every, strict=True):
            assert (one is not None) == (asked and other is not None)
            assert one is None or other is None or torch.equal(one, other)
    return [out, z, *every]


def by_fused_moe(case: Case, device: str) -> list[str]:
    """What differs between ``fused_moe`` and its gradients, asked for by name, and the launches themselves."""
    inputs = inputs_of(case, device)
    t, given = inputs.tensors, adapters_for(case, inputs)
    dout = torch.randn(t.x.shape).to(t.x)
    every = (t.x, t.topk_weights, *parts_of(given))
    x, weights, *parts = (None if one is None else one.detach().requires_grad_() for one in every)
    adapters = adapters_of(parts, SCALINGS)
    call: dict[str, Any] = {"adapters": adapters, "kernel": NAME, "activation": inputs.activation.function}
    with torch.no_grad():
        alone = fused_moe(x, t.w1, t.w2, weights, t.topk_ids, **call)
    out = fused_moe(x, t.w1, t.w2, weights, t.topk_ids, **call)
    leaves = [one for one in (x, weights, *parts) if one is not None]
    got = [out, alone, *torch.autograd.grad(out, leaves, dout)]
    want, _, *right = compute(inputs, given, dout)
    of = [want, want, *(one for one in right if one is not None)]
    return [f"{nth} differs" for nth, (one, other) in enumerate(zip(got, of, strict=True)) if not torch.equal(one, other)]


def interpret() -> None:
    """Let the launches of Hopper's products interpret them, in three programs."""
    from tests.unit import gluon_interpreter
    from tests.unit.ops.moe.backward.gluon_cases import H200

    def by_addresses(build: Any) -> Any:
        return lambda *args, **options: gluon_interpreter.by_address(build(*args, **options))

    for module in (forward_launch, backward_launch):
        module.Build = gluon_interpreter.Build  # type: ignore[misc,assignment]
        module.current_gpu = lambda device: replace(H200, sm_count=3)  # type: ignore[type-var]
    forward.up, forward.down = by_addresses(forward.up), by_addresses(forward.down)
    backward.hidden, backward.rows = by_addresses(backward.hidden), by_addresses(backward.rows)


def main() -> None:
    interpret()
    with assume(gpu_named("h200")):
        found = {str(case): put(case, "cpu") for case in CASES}
        found["fused_moe"] = by_fused_moe(CASES[1], "cpu") + by_fused_moe(CASES[3], "cpu")
        print(json.dumps(found))


if __name__ == "__main__":
    main()
