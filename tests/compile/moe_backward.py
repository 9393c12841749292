"""The builds of a backward of a mixture of experts: all that a call launches, for a GPU that need not be here."""

from __future__ import annotations

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import CompileJob, Config
from flashmoe_science.operations import operation
from flashmoe_science.ops.launch import collect_builds
from flashmoe_science.ops.moe.call.backward import BackwardInputs, BackwardKernel, BackwardTensors
from flashmoe_science.ops.moe.problem import MoEProblem, parse


def problem_of(text: str) -> MoEProblem:
    return parse(f"moe {text}")


def jobs_of(kernel: BackwardKernel, problem: MoEProblem, config: Config, gpu: Gpu) -> list[CompileJob]:
    """The compile jobs of a call that asks for every gradient."""
    contract = operation("moe").contract()
    with collect_builds(gpu) as jobs:
        forward = contract.for_kernel(problem, contract.inputs(problem, torch.device("meta"), torch.Generator()))
        t = forward.tensors
        z = t.x.new_empty(problem.pairs(), t.w1.shape[1])
        inputs = BackwardInputs(problem, BackwardTensors(*t, z, torch.empty_like(t.x)), forward.activation)
        assert kernel.plan is not None
        kernel.plan(inputs, config)(inputs)
    return jobs
