"""The experts' backward by others: PyTorch's grouped products, and a step of training as users of each library write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.moe.call import Activation, Tensors
from flashmoe_science.ops.moe.call.backward import (
    ALL,
    INPUTS,
    BackwardInputs,
    BackwardKernel,
    BackwardTensors,
    Gradients,
    StepInputs,
)
from flashmoe_science.ops.moe.peers import sonicmoe
from flashmoe_science.ops.moe.peers.pytorch import grouped_mm, launches_grouped
from flashmoe_science.ops.moe.peers.routers import by_pytorch
from flashmoe_science.ops.moe.problem.backward import MoEBackwardProblem
from flashmoe_science.ops.moe.pytorch import pytorch_backward, saving_moe
from flashmoe_science.ops.peer import one_config

Experts = Callable[[Tensors, Activation], torch.Tensor]
Router = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def _serves_steps(problem: MoEBackwardProblem, device: Device) -> str | None:
    if problem.routing == "ids":
        return "it is measured on steps of training, from router logits: its backward is not called by itself"
    return None


def _from_saved(inputs: BackwardInputs | StepInputs, config: Config) -> Gradients:
    """The backward by itself; a step of training is PyTorch's router, the forward that saves, the backward."""
    if isinstance(inputs, BackwardInputs):
        return pytorch_backward(inputs.tensors, inputs.activation, inputs.wanted)
    logits = inputs.router_logits.detach().requires_grad_()
    with torch.enable_grad():
        weights, ids = by_pytorch(logits, inputs.problem.top_k)
    tensors = inputs.routed(weights.detach(), ids)
    _, z = saving_moe(tensors, inputs.activation)
    made = pytorch_backward(BackwardTensors(*tensors, z, inputs.dout), inputs.activation, ALL)
    with torch.autograd.set_multithreading_enabled(False):
        (of_logits,) = torch.autograd.grad(weights, logits, made.dtopk_weights)
    return made._replace(dtopk_weights=of_logits)


def _by_autograd(router: Router, experts: Experts, inputs: Any, config: Config) -> Gradients:
    """A step of training, differentiated as a user's is."""
    of_step = {"router_logits" if name == "topk_weights" else name: f"d{name}" for name in INPUTS}
    given = {name: getattr(inputs, name) for name in of_step}
    leaves = {name: one.detach().requires_grad_() for name, one in given.items() if one is not None}
    step = replace(inputs, **leaves)
    with torch.enable_grad():
        out = experts(step.routed(*router(step.router_logits, step.problem.top_k)), step.activation)
    with torch.autograd.set_multithreading_enabled(False):  # work on another thread would count as strayed
        made = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), inputs.dout), strict=True))
    return Gradients(**{gradient: made.get(name) for name, gradient in of_step.items()})


_peer = partial(BackwardKernel, origin="peer", op="moe_backward", configs=one_config)
GROUPED_MM = _peer(
    name="grouped_mm_bwd",
    about="PyTorch's grouped matrix products, from the saved pre-activations",
    supports=lambda problem, device: None,
    run=_from_saved,
    launches=launches_grouped,
    on_cpu=True,
    replaces_ours="always",
)
GROUPED_MM_TRAIN = _peer(
    name="grouped_mm_train",
    about="PyTorch's grouped matrix products under autograd, as transformers trains",
    supports=_serves_steps,
    run=partial(_by_autograd, by_pytorch, grouped_mm),
    launches=launches_grouped,
    on_cpu=True,
)
SONICMOE = _peer(
    name="sonicmoe_train",
    about="SonicMoE (sonic-moe) under autograd, its router too",
    supports=lambda problem, device: sonicmoe.supports(problem, device) or _serves_steps(problem, device),
    run=partial(_by_autograd, sonicmoe.route, sonicmoe.train),
    launches=sonicmoe.launches,
    slow=True,
    absent=sonicmoe.absent,
    on_disk=sonicmoe.ON_DISK,
)
KERNELS: tuple[BackwardKernel, ...] = (GROUPED_MM, GROUPED_MM_TRAIN, SONICMOE)
