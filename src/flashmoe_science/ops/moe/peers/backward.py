"""The experts' backward by others: PyTorch's grouped products, and a step of training as users of each library write it."""

from __future__ import annotations

from functools import partial

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.ops.moe.call.backward import BackwardInputs, BackwardKernel, Gradients
from flashmoe_science.ops.moe.problem.backward import MoEBackwardProblem
from flashmoe_science.ops.moe.pytorch import pytorch_backward
from flashmoe_science.ops.peer import one_config


def _serves_all(problem: MoEBackwardProblem, device: Device) -> str | None:
    return None


def _launches_of_pytorch(problem: MoEBackwardProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    fused = problem.dtype == "bf16" and gpu.compute_capability == (9, 0)  # on others the dtype and the PyTorch decide
    return (Launch("GroupProblemShape"),) if fused else ()


def _from_saved(inputs: BackwardInputs, config: Config) -> Gradients:
    return pytorch_backward(inputs.tensors, inputs.activation, inputs.wanted)


_peer = partial(BackwardKernel, origin="peer", op="moe_backward", configs=one_config)
KERNELS: tuple[BackwardKernel, ...] = (
    _peer(
        name="grouped_mm_bwd",
        about="PyTorch's grouped matrix products, from the saved pre-activations",
        supports=_serves_all,
        run=_from_saved,
        launches=_launches_of_pytorch,
        on_cpu=True,
        replaces_ours="always",
    ),
)
