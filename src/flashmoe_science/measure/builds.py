"""The compile jobs of one call of our kernels, for a GPU that need not be here."""

from __future__ import annotations

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import AnyKernel, CompileJob, Config
from flashmoe_science.operations import operation
from flashmoe_science.problem import Problem


def compile_jobs(kernel: AnyKernel, problem: Problem, config: Config, gpu: Gpu) -> tuple[CompileJob, ...]:
    """The compile jobs of one call, the kernel itself first, then the kernels launched around it: its plan is bound to tensors
    of the problem that have no memory, and what would be compiled is collected."""
    import torch

    from flashmoe_science.ops.launch import collect_builds  # brings Triton, which may be missing

    contract = operation(kernel.op).contract()
    with collect_builds(gpu) as jobs:
        inputs = contract.inputs(problem, torch.device("meta"), torch.Generator())
        contract.planned(kernel, config, contract.for_kernel(problem, inputs))
    return tuple(jobs)
