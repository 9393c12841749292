"""Puts cases to the Gluon kernels of experts on the CPU: the forward that saves z, and the backward. Prints one JSON object.

Run as a script with TRITON_INTERPRET=1, which the other kernels of a call need.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from tests.unit import gluon_interpreter
from tests.unit.ops.moe.backward.cases import added_to, backward_inputs, kept, off, poisoned, reference
from tests.unit.ops.moe.cases import Case, inputs_of, z_off

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.ops.moe.backward.gluon_sm90 import kernel as backward
from flashmoe_science.ops.moe.backward.gluon_sm90 import launch as backward_launch
from flashmoe_science.ops.moe.products.gluon_sm90 import kernel as forward
from flashmoe_science.ops.moe.products.gluon_sm90 import launch as forward_launch

BACKWARD = (
    Case("moe t20 e4 k2 d136 f200 bf16"),
    Case("moe t30 e3 k2 d72 f40 fp16 bias clamped interleaved transposed"),
    Case("moe t20 e3 k2 d320 f192 bf16 gelu transposed"),
    Case("moe t9 e6 k3 d40 f72 fp16 interleaved", routing="foreign"),
    Case("moe t150 e4 k2 d136 f72 bf16", routing="crowded"),
)
FORWARD = (Case("moe t100 e3 k2 d136 f200 fp16 gelu"), Case("moe t20 e3 k2 d72 f40 bf16", routing="foreign"))
H200 = gpu_named("h200")


def install() -> None:
    """Let the launches of both kernels interpret them, in three programs."""
    for module in (forward_launch, backward_launch):
        module.Build = gluon_interpreter.Build  # type: ignore[misc,assignment]
        module.current_gpu = lambda device: replace(H200, sm_count=3)  # type: ignore[type-var]
    grouped, grouped_backward = forward.grouped, backward.grouped_backward
    forward.grouped = lambda inputs, config, up, down: grouped(
        inputs, config, gluon_interpreter.by_address(up), gluon_interpreter.by_address(down)
    )

    def bound(inputs: Any, block_m: int, columns: int, products: Any, needs: Any) -> Any:
        products = backward.Products(*[None if one is None else gluon_interpreter.by_address(one) for one in products])
        return grouped_backward(inputs, block_m, columns, products, needs)

    backward.grouped_backward = bound


def main() -> None:
    install()
    found: dict[str, list[str | None]] = {}
    for case in BACKWARD:
        inputs = backward_inputs(case, "cpu")
        of_backward = backward.KERNEL.configs(inputs.problem, H200)[0]
        with poisoned():
            got = backward.KERNEL.run(inputs, of_backward)
        wrong = off(got, inputs, reference(inputs)) + added_to(inputs, backward.KERNEL, of_backward, got)
        found[f"backward of {case}"] = [*wrong]
    for case in FORWARD:
        given = inputs_of(case, "cpu")
        config = forward.KERNEL.configs(given.problem, H200)[0]
        out, z = forward.KERNEL.run(replace(given, saves_z=True), config)  # type: ignore[misc]  # of inputs that save z
        same = torch.equal(out, forward.KERNEL.run(given, config))
        found[f"{case}"] = [z_off(z, given), None if same else "to save z changes the result"]
    found["what is kept"] = [*kept(backward.KERNEL, of_backward)]
    print(json.dumps({name: [one for one in wrong if one] for name, wrong in found.items()}))


if __name__ == "__main__":
    main()
