"""Our own kernels on weights that were dequantised at load, the choice of dispatch: what a user does who has the memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from flashmoe_science.dispatch.select import select
from flashmoe_science.dispatch.tuned import known_table
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.operations import kernel_named, operation
from flashmoe_science.ops.choose import choose
from flashmoe_science.ops.moe.call import Bind, MoEInputs, MoEKernel, MoELaunch, Shape, Tensors, activation_of, run_of
from flashmoe_science.ops.moe.call.formats import OF_FORMAT
from flashmoe_science.ops.moe.peers import peer_kernel
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.pytorch import dequantised, pytorch_moe

NAME = "dequantised_at_load"


def supports(problem: MoEProblem, device: Device) -> str | None:
    return None if problem.weight_format else f"the problem's weights are {problem.dtype}: there is nothing to dequantise"


def load(problem: MoEProblem, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    given = Tensors(*(inputs.get(name) for name in Tensors._fields))  # type: ignore[arg-type]  # of routing it may have none
    _, w1, w2, *_ = dequantised(given, activation_of(problem))
    return {name: one for name, one in inputs.items() if name not in OF_FORMAT} | {"w1": w1, "w2": w2}


def plan(inputs: MoEInputs, config: Config) -> Bind:
    def made(kernel: MoEKernel, config: Config) -> Bind:
        assert kernel.plan is not None  # of ours
        bind: Bind = kernel.plan(_loaded(inputs), config)
        return bind

    _, bind = choose(_plain(inputs.problem), gpu_of(inputs.tensors.x), None, made)
    return lambda like, shape: (bind or _by_pytorch)(_loaded(like), shape)


def _by_pytorch(like: MoEInputs, shape: Shape) -> MoELaunch:
    """What the choice falls back to, as on a CPU."""
    return lambda *tensors: pytorch_moe(Tensors(*tensors), like.activation).view(shape)


def _loaded(inputs: MoEInputs) -> MoEInputs:
    """Inputs whose weights are dequantised, described as what they are."""
    return replace(inputs, problem=_plain(inputs.problem), activation=replace(inputs.activation, w8a8=False))


def _plain(problem: MoEProblem) -> MoEProblem:
    return replace(problem, weight_format=None)


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    plain, op = _plain(problem), operation(problem.op)
    chosen = select(plain.from_ids(), gpu, known_table(), op.ours(), op.fallback())
    return kernel_named(chosen.kernel, op.name).launches(plain, chosen.config, gpu)


KERNEL = peer_kernel(
    name=NAME,
    about="our kernels for weights of the dtype, which they were dequantised to at load",
    supports=supports,
    run=run_of(plan),
    launches=launches,
    plan=plan,
    load=load,
    slow=True,
)
