"""The cases that every backward of a mixture of experts must pass, and how a kernel is tested with one.

Run as a script with TRITON_INTERPRET=1 it puts them to the kernels in Triton's interpreter, and prints one JSON object: by case
and kernel what is wrong with the gradients.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tests.unit.ops.moe.cases import UNIT, Case, activated, inputs_of, saved_z
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.moe.backward.gluon_sm90 import kernel as gluon_sm90
from flashmoe_science.ops.moe.backward.grouped_triton import kernel as grouped_triton
from flashmoe_science.ops.moe.call.backward import (
    BackwardInputs,
    BackwardKernel,
    BackwardTensors,
    Gradients,
    Sums,
    Wanted,
)

KERNELS: tuple[BackwardKernel, ...] = (gluon_sm90.KERNEL, grouped_triton.KERNEL)
ROUNDINGS = 6  # of dz or s A, of a product, of a row of dX, of a result, and of z in the forward
FUNCTIONS = ("gelu", "gelu_tanh", "relu", "relu2", "clamped")
CASES = (
    Case("moe t1 e1 k1 d8 f8 fp32"),
    Case("moe t1 e8 k2 d24 f40 bf16"),
    Case("moe t9 e6 k3 d40 f72 fp16"),
    Case("moe t3 e5 k5 d17 f9 bf16"),
    Case("moe t40 e3 k2 d72 f136 bf16"),
    Case("moe t5 e20 k4 d24 f16 fp32"),
    *(Case(f"moe t4 e3 k1 d8 f8 fp32 {function}") for function in FUNCTIONS),
    *(Case(f"moe t4 e3 k1 d8 f8 fp32 {function} ungated") for function in ("silu", *FUNCTIONS)),
    Case("moe t9 e4 k2 d16 f8 bf16 bias clamped interleaved transposed"),
    Case("moe t9 e4 k2 d16 f8 fp16 bias"),
    Case("moe t3 e4 k2 d16 f8 fp32 bias interleaved"),
    Case("moe t3 e4 k2 d16 f8 fp32 bias ungated transposed"),
    Case("moe t9 e6 k3 d16 f8 bf16 bias", routing="foreign"),
    Case("moe t9 e6 k3 d16 f8 fp32 bias", routing="foreign64"),
    Case("moe t3 e4 k2 d16 f8 fp32 clamped", alpha=1.25, limit=1.5),
    Case("moe t40 e6 k3 d16 f8 fp16", routing="crowded"),
    Case("moe t9 e6 k3 d16 f8 fp32 bias", routing="twice"),
)


def backward_inputs(case: Case, device: str) -> BackwardInputs:
    inputs = inputs_of(case, device)
    x = inputs.tensors.x
    z, dout = saved_z(inputs).to(x.dtype), torch.randn(x.shape).to(device, x.dtype)
    limit = inputs.activation.limit  # some of z are at the limit, where a clamp passes the gradient on
    z.view(-1)[::5], z.view(-1)[3::10] = limit, -limit
    return BackwardInputs(inputs.problem, BackwardTensors(*inputs.tensors, z, dout), inputs.activation)


def reference(inputs: BackwardInputs) -> Gradients:
    """The gradients by autograd in fp64, expert by expert, through z as it was saved."""
    t, a = inputs.tensors, inputs.activation
    given = (t.x, t.w1, t.w2, t.topk_weights, t.gate_up_bias, t.down_bias)
    x, w1, w2, weights, bias1, bias2 = (None if one is None else one.double().requires_grad_() for one in given)
    assert x is not None
    assert w1 is not None
    assert w2 is not None
    assert weights is not None
    flat, row, total = t.topk_ids.flatten(), 0, torch.zeros((), dtype=torch.float64, device=t.x.device)
    for expert in range(len(w1)):
        pairs = torch.nonzero(flat == expert).flatten()
        if not len(pairs):
            continue
        tokens = pairs // t.topk_ids.shape[1]
        z = x[tokens] @ w1[expert].T
        z = z if bias1 is None else z + bias1[expert]
        z = z - z.detach() + t.z[row : row + len(pairs)].double()
        row += len(pairs)
        out = activated(z.T, a).T @ w2[expert].T
        out = out if bias2 is None else out + bias2[expert]
        total = total + (out * weights.flatten()[pairs, None] * t.dout[tokens].double()).sum()
    if total.requires_grad:
        total.backward()
    return Gradients(*[
        None if one is None else torch.zeros_like(one) if one.grad is None else one.grad
        for one in (x, w1, w2, weights, bias1, bias2)
    ])  # fmt: skip


def off(got: Gradients, inputs: BackwardInputs, right: Gradients) -> list[str]:
    """What is wrong with gradients, if anything is."""
    found = []
    for name, one, expected in zip(Gradients._fields, got, right, strict=True):
        if (one is None) != (expected is None):
            found.append(f"{name} is {'none' if one is None else 'there'}")
        elif one is not None and expected is not None:
            error = ((one.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).item()
            allowed = ROUNDINGS * UNIT[inputs.problem.dtype]
            if not error <= allowed:
                found.append(f"{name} is off by {error:.2e} of the largest, where {allowed:.2e} is allowed")
    return found


class Poison(TorchDispatchMode):
    """Fills new memory with what is no number, that of the package's operators too, in which no mode is on by itself."""

    filled = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "flashmoe":
            with self:
                return function._op_dk(getattr(torch.DispatchKey, args[0].device.type.upper()), *args, **(kwargs or {}))
        made = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):
            made.fill_(torch.nan if made.is_floating_point() else -1)
            Poison.filled += made.numel()
        return made


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory is full of what is no number."""
    with Poison():
        yield


def put(inputs: BackwardInputs, kernel: BackwardKernel, config: Config, only_all: bool = False) -> list[str]:
    """What is wrong with a kernel's gradients: all of them, in poisoned memory; unless ``only_all`` some of them too, and those
    that are added to others."""
    right = reference(inputs)
    try:
        with poisoned():
            got = kernel.run(inputs, config)
            again = kernel.run(inputs, config)
    except CannotServe:  # memory that the copy engine does not take
        return []
    found = off(got, inputs, right)
    found += [
        f"two {name} of one call differ"
        for name, one, other in zip(Gradients._fields, got, again, strict=True)
        if one is not None and not torch.equal(one, other)  # type: ignore[arg-type]
    ]
    if only_all:
        return found
    for number, name in enumerate(Wanted._fields):
        alone = Wanted(*[one == name for one in Wanted._fields])
        some = kernel.run(replace(inputs, wanted=alone), config)
        if [one is not None for one in some] != [n == number and got[n] is not None for n in range(6)]:
            found.append(f"asked for {name} alone it gives something else")
        elif got[number] is not None and not torch.equal(some[number], got[number]):  # type: ignore[arg-type]
            found.append(f"{name} alone differs")
    return found + added_to(inputs, kernel, config, got)


def added_to(inputs: BackwardInputs, kernel: BackwardKernel, config: Config, got: Gradients) -> list[str]:
    """What is wrong with dW1 in fp32 and dW2 in the weights' dtype, added to what there is."""
    t = inputs.tensors
    before = Sums(torch.randn_like(t.w1, dtype=torch.float32), torch.randn_like(t.w2))
    sums = Sums(*[one.clone() for one in before if one is not None])
    made = kernel.run(replace(inputs, sums=sums), config)
    found = [] if made.dw1 is sums.dw1 and made.dw2 is sums.dw2 else ["what it adds to is not what it gives"]
    for name in Sums._fields:
        one, was, alone = getattr(sums, name), getattr(before, name), getattr(got, name)
        error = (one.double() - was.double() - alone.double()).abs().max() / (one.abs().max() + alone.abs().max())
        if not error <= 2 * UNIT[inputs.problem.dtype]:
            found.append(f"{name} added to what there is is off by {error:.2e}")
    return found


def kept(kernel: BackwardKernel, config: Config) -> list[str]:
    """Which tensors a plan, or a launch that is bound, keeps."""
    inputs = backward_inputs(CASES[1], "cpu")
    tensors = {name: weakref.ref(one) for name, one in inputs.tensors._asdict().items() if one is not None}
    assert kernel.plan is not None
    bind = kernel.plan(inputs, config)
    bound = bind, bind(inputs)
    del inputs
    gc.collect()
    return [name for name, one in tensors.items() if one() is not None and bound]


def main() -> None:
    gpu = gpu_named("h200")  # whose configs are interpreted; the tensors are on the CPU
    found = {}
    for case in CASES[int(sys.argv[1]) :: int(sys.argv[2])]:
        for kernel in KERNELS:
            inputs = inputs_of(case, "cpu")
            if kernel.interpretable and kernel.supports(inputs.problem, gpu) is None:
                config = kernel.configs(inputs.problem, gpu)[-1]
                # Some of the gradients alone, of a few cases: most of the time.
                only_all = case.routing == "random" and not case.problem.endswith("transposed")
                found[f"{case}: {kernel.name}"] = put(backward_inputs(case, "cpu"), kernel, config, only_all)
    config = grouped_triton.KERNEL.configs(inputs_of(CASES[1], "cpu").problem, gpu)[-1]
    found["what is kept"] = kept(grouped_triton.KERNEL, config)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
