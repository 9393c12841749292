"""What merges the parts of a call, and why: our kernel, or PyTorch's operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.kernel import AnyKernel, Config
from flashmoe_science.ops.attention.call.merge import MergeInputs, Result
from flashmoe_science.ops.attention.call.tensors import DTYPES
from flashmoe_science.ops.attention.front.merge.checks import check_parts
from flashmoe_science.ops.attention.peers.merge import at_once
from flashmoe_science.ops.attention.problem.merge import AttentionMergeProblem
from flashmoe_science.ops.calls import find_launch, guards_of, is_plain, needs_grad, store_launch
from flashmoe_science.ops.choose import GRADIENTS, choose, choose_fallback
from flashmoe_science.ops.explain import Explained, is_explaining
from flashmoe_science.problem import MAX_EXTENT

Parts = Sequence[torch.Tensor]
MergeLaunch = Callable[[Parts, Parts], Result]


def merge(outs: Parts, lses: Parts) -> Result:
    """``merge_attention`` of parts that nothing has checked. PyTorch's operators serve what is traced, which can fuse them."""
    launch: MergeLaunch | None = None
    key: Hashable = None
    if not torch.compiler.is_compiling():
        try:
            key = ("merge", outs[0].shape, len(outs), torch.is_grad_enabled())
            launch = find_launch(key, (*outs, *lses))
        except (AttributeError, IndexError, RuntimeError, TypeError):  # no part, no tensor, a nested one
            pass
    if launch is None:
        check_parts(outs, lses)
        if is_explaining():
            raise Explained(_decide(outs, lses)[0])
        if not is_plain(*outs, *lses):
            return at_once(outs, lses)
        launch = _decide(outs, lses)[1]
        store_launch(key, guards_of((*outs, *lses), aligned=True), launch)
    return launch(outs, lses)


def _decide(outs: Parts, lses: Parts) -> tuple[Decision, MergeLaunch]:
    """The decision for checked parts, and what computes parts like these."""
    (*batch, tokens, heads, width), op = outs[0].shape, AttentionMergeProblem.op
    decision = choose_fallback(op, None, _why_pytorch(outs, lses))
    if decision is not None:
        return decision, at_once
    problem = AttentionMergeProblem(len(outs), math.prod(batch) * tokens, heads, width, DTYPES[outs[0].dtype])
    like = MergeInputs(outs, lses)

    def bind(kernel: AnyKernel, config: Config) -> MergeLaunch:
        assert kernel.plan is not None
        return kernel.plan(like, config)  # type: ignore[no-any-return]

    decision, launch = choose(problem, gpu_of(outs[0]), None, bind)
    return decision, launch or at_once


def _why_pytorch(outs: Parts, lses: Parts) -> str | None:
    """Why PyTorch's operators must serve a call, in words; None if a kernel may."""
    if needs_grad(*outs, *lses):
        return GRADIENTS
    if torch.float64 in (outs[0].dtype, lses[0].dtype):
        return "a part has dtype torch.float64, which the kernel does not take"
    if not 0 < outs[0].numel() <= MAX_EXTENT * outs[0].shape[-1]:
        return f"outs[0] has shape {tuple(outs[0].shape)}; the kernel takes from 1 to {MAX_EXTENT} rows"
    return None
