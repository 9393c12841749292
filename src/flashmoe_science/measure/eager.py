"""What a user writes: the call that the eager clock times."""

from __future__ import annotations

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.measure.bench import Call, Candidate
from flashmoe_science.ops.attention.inputs import AttentionInputs
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.problem import Problem


def goes_through_the_library(candidate: Candidate, problem: Problem, gpu: Gpu | None) -> bool:
    """Whether the public function, asked for this kernel by name, would run this very config on this problem."""
    from flashmoe_science.dispatch.select import select
    from flashmoe_science.dispatch.table import committed_table

    kernel = candidate.kernel
    if not isinstance(problem, AttentionProblem):
        return False
    if gpu is None or kernel.origin != "ours" or (problem.mask == "causal" and problem.seqlen_q != problem.seqlen_k):
        return False  # PyTorch's signature has no bottom-right mask
    return select(problem, gpu, committed_table(), [kernel], requested=kernel).config == candidate.config


def user_call(candidate: Candidate, planned: Call, problem: Problem, gpu: Gpu | None) -> Call:
    """The public function for ours, where it would run the candidate's config; else the planned call.

    A peer is called as its own users call it, which is what its planned call is.
    """
    if not isinstance(problem, AttentionProblem) or not goes_through_the_library(candidate, problem, gpu):
        return planned
    from flashmoe_science.attention import scaled_dot_product_attention

    name, causal, grouped = candidate.name, problem.causal, problem.heads != problem.heads_kv

    def call(inputs: AttentionInputs) -> object:
        return scaled_dot_product_attention(
            inputs.q, inputs.k, inputs.v, is_causal=causal, scale=inputs.softmax_scale, enable_gqa=grouped, kernel=name
        )

    return call
