"""What the first call of its kind works out and later calls reuse: checked inputs, a Decision, a compiled kernel, a Runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from flashmoe_science.dispatch.select import Decision, select
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import CannotServe, Config, Kernel
from flashmoe_science.operations import TRITON_MISSING, kernel_named
from flashmoe_science.ops.attention.fallback import NO_BACKWARD, check_kernel_with_gradients, pytorch_attention
from flashmoe_science.ops.attention.inputs import AttentionInputs, Launcher, output_strides
from flashmoe_science.ops.attention.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.attention.kernels import ours
from flashmoe_science.ops.attention.problem import AttentionProblem, Mask
from flashmoe_science.ops.attention.shapes import problem_of
from flashmoe_science.ops.attention.spec import Names, check_memory, check_sizes, check_tensors

# What Inductor's own code allocates by, on the current device: 1.2 us less than new_empty_strided (docs/notes/launch-cost.md).
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]

# (q, k, v, softmax_scale or None for the default, lse to fill or None for a new one) -> (out, lse or None)
Runner = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float | None, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]
]


@dataclass(frozen=True, slots=True)
class Request:
    """All that decides a plan: tensors as [batch, heads, seqlen, head_dim] views, and how they are to be attended.

    ``gqa`` allows K and V fewer heads than Q; ``needs_grad`` says that the result must be differentiable.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: Mask
    softmax_scale: float | None
    return_lse: bool
    kernel: str | None
    gqa: bool
    needs_grad: bool
    names: Names


@dataclass(frozen=True, slots=True)
class Plan:
    """How calls of one kind are served: why by this kernel, and the function that does it."""

    decision: Decision
    run: Runner


def make_plan(request: Request) -> Plan:
    """Check the inputs, choose the kernel and compile it.

    Raises:
        TypeError, ValueError: the inputs (ops/checks.py), or an unknown kernel.
        CannotServe: the kernel asked for cannot serve them; the message says why and what could.
    """
    check_tensors(request.q, request.k, request.v, request.names)
    check_sizes(request.q, request.k, request.v, request.names, request.gqa)
    check_memory(request.q, request.k, request.v, request.names)
    problem = problem_of(request.q, request.k, request.v, request.mask)
    requested = None if request.kernel is None else kernel_named(request.kernel, problem.op)
    if requested is not None and requested.name == PYTORCH:
        return _pytorch_plan(request, Decision(PYTORCH, Config(), "asked for by name", "requested"))
    if request.needs_grad:
        check_kernel_with_gradients(request.kernel)
        return _pytorch_plan(request, Decision(PYTORCH, Config(), NO_BACKWARD, "required"))
    gpu = _gpu_of(request.q)
    if request.q.is_cuda and gpu is None and requested is None:
        reason = f"{request.q.device} is not an NVIDIA GPU, and our kernels need one"
        return _pytorch_plan(request, Decision(PYTORCH, Config(), reason, "required"))
    unable = {"ours": TRITON_MISSING} if TRITON_MISSING else {}
    while True:
        decision = select(problem, gpu, committed_table(), ours(), PYTORCH, requested, unable)
        if decision.kernel == PYTORCH:
            return _pytorch_plan(request, decision)
        kernel = requested or kernel_named(decision.kernel, problem.op)
        try:
            return Plan(decision, _kernel_runner(request, problem, kernel, decision.config))
        except CannotServe as refusal:
            # The next turn of select() passes this kernel over, or says why where it was asked for by name.
            unable[kernel.name] = str(refusal)


def _gpu_of(q: torch.Tensor) -> Gpu | None:
    return current_gpu(q.device) if q.is_cuda else None


def _pytorch_plan(request: Request, decision: Decision) -> Plan:
    mask, return_lse = request.mask, request.return_lse

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, new_lse = pytorch_attention(q, k, v, mask, scale, return_lse)
        return out, new_lse if lse is None or new_lse is None else lse.copy_(new_lse)

    return Plan(decision, run)


def _kernel_runner(request: Request, problem: AttentionProblem, kernel: Kernel, config: Config) -> Runner:
    q, k, v = request.q, request.k, request.v
    scale = problem.softmax_scale if request.softmax_scale is None else request.softmax_scale
    if kernel.plan is None:
        return partial(_run_peer, kernel, config, problem, request.return_lse)
    shape = (*q.shape[:3], v.shape[3])
    strides = output_strides(q, v.shape[3])
    with torch.cuda.device_of(q):
        out = q.new_empty_strided(shape, strides)
        launcher = kernel.plan(AttentionInputs(problem, q, k, v, scale, request.return_lse, out), config)
    run = _runner(launcher, shape, strides, request.return_lse, problem.softmax_scale)
    if not q.is_cuda or torch.cuda.device_count() == 1:
        return run
    return partial(_run_on_device, run, q.get_device())


def _runner(
    launcher: Launcher, shape: tuple[int, ...], strides: tuple[int, ...], return_lse: bool, default_scale: float
) -> Runner:
    lse_shape = shape[:3]

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = empty_strided_cuda(shape, strides, q.dtype) if q.is_cuda else q.new_empty_strided(shape, strides)
        if return_lse and lse is None:
            lse = q.new_empty(lse_shape, dtype=torch.float32)
        launcher(q, k, v, out, lse, default_scale if scale is None else scale)
        return out, lse

    return run


def _run_on_device(
    run: Runner, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch on the tensors' own device where another one is current."""
    if torch.cuda.current_device() == index:
        return run(q, k, v, scale, lse)
    with torch.cuda.device(index):
        return run(q, k, v, scale, lse)


def _run_peer(
    kernel: Kernel,
    config: Config,
    problem: AttentionProblem,
    return_lse: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    inputs = AttentionInputs(problem, q, k, v, problem.softmax_scale if scale is None else scale, return_lse)
    result = kernel.run(inputs, config)
    if not return_lse:
        return result.out, None
    if result.lse is None:
        raise CannotServe(f"kernel {kernel.name!r} gives no log-sum-exp; ours and {PYTORCH} do")
    return result.out, result.lse if lse is None else lse.copy_(result.lse)
