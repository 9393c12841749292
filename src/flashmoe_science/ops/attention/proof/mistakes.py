"""What common mistakes in attention compute, in fp64: a wrong result that matches one is named by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from flashmoe_science.contract import Mistake
from flashmoe_science.ops.attention.call.kernel import AttentionInputs
from flashmoe_science.ops.attention.problem.features import PLAIN
from flashmoe_science.ops.attention.proof import modes_oracle
from flashmoe_science.ops.attention.proof.modes_mistakes import wrong_modes
from flashmoe_science.ops.attention.proof.oracle import CHUNK_SCORES, attention_oracle


def mistakes(inputs: AttentionInputs) -> Iterator[Mistake]:
    """The results of other masks, softmax scales and shared heads, each only where it is another than the right one."""
    if inputs.problem.modes != PLAIN:
        for one in wrong_modes(inputs):
            yield Mistake(one.code, f"it is right {one.words}", modes_oracle.exact(one.inputs, one.rules))
    masks = _masks(inputs) if inputs.problem.modes == PLAIN else ()
    for code, words, wrong in (*masks, *_scales(inputs), *_heads(inputs)):
        yield Mistake(code, words, attention_oracle(wrong))
    yield from _rows(inputs)


def _masks(inputs: AttentionInputs) -> Iterator[tuple[str, str, AttentionInputs]]:
    problem = inputs.problem
    if problem.causal:
        if problem.seqlen_q != problem.seqlen_k:
            top, bottom = ("bottom-right", "causal") if problem.mask == "causal-topleft" else ("top-left", "causal-topleft")
            other = replace(problem, mask=bottom)  # type: ignore[arg-type]  # one of the two, as is checked
            yield f"mask-{top}", f"it is right for a causal mask aligned {top}", replace(inputs, problem=other)
        yield "mask-missing", "it is right for no mask", replace(inputs, problem=replace(problem, mask="full"))
    else:
        yield "mask-not-asked", "it is right for a causal mask", replace(inputs, problem=replace(problem, mask="causal"))


def _scales(inputs: AttentionInputs) -> Iterator[tuple[str, str, AttentionInputs]]:
    usual = inputs.problem.softmax_scale
    if inputs.softmax_scale != usual:
        yield "scale-default", "it is right for the default softmax scale", replace(inputs, softmax_scale=usual)
    if inputs.softmax_scale != 1.0:
        yield "scale-missing", "it is right for a softmax scale of 1", replace(inputs, softmax_scale=1.0)
    if inputs.softmax_scale < 0.0:
        positive = replace(inputs, softmax_scale=-inputs.softmax_scale)
        yield "scale-sign", "it is right for the softmax scale without its sign", positive


def _heads(inputs: AttentionInputs) -> Iterator[tuple[str, str, AttentionInputs]]:
    heads, heads_kv = inputs.problem.heads, inputs.problem.heads_kv
    if not 1 < heads_kv < heads:
        return
    index = torch.arange(heads, device=inputs.q.device)
    for code, words, of_kv in (
        ("heads-interleaved", "it is right where query head h reads key/value head h % heads_kv", index % heads_kv),
        ("heads-first", "it is right where every query head reads the first key/value head", index * 0),
        ("heads-clamped", "it is right where query head h reads key/value head h, or the last", index.clamp(max=heads_kv - 1)),
    ):
        shared = replace(inputs.problem, heads_kv=heads)
        tensors = inputs.tensors._replace(k=inputs.k[:, of_kv], v=inputs.v[:, of_kv])
        if tensors.k_scale is not None and tensors.v_scale is not None:
            tensors = tensors._replace(k_scale=tensors.k_scale[:, of_kv], v_scale=tensors.v_scale[:, of_kv])
        yield code, words, replace(inputs, problem=shared, tensors=tensors)


def _rows(inputs: AttentionInputs) -> Iterator[Mistake]:
    """Rows that see no key, and the division that a softmax ends with."""
    out, lse = attention_oracle(inputs)
    empty = (lse == -torch.inf)[..., None]
    if bool(empty.any()):
        nan = torch.where(empty, torch.nan, out)
        yield Mistake("empty-rows", "it is right but for queries that see no key, which must be zeros and are NaN", (nan, lse))
        if inputs.problem.modes != PLAIN:
            return
        group = inputs.problem.heads // inputs.problem.heads_kv
        mean = torch.where(empty, inputs.v.mean(-2, keepdim=True).repeat_interleave(group, 1), out)
        words = "it is right but for queries that see no key, which must be zeros and are the mean of all values"
        yield Mistake("empty-rows", words, (mean, lse))
    elif inputs.problem.modes == PLAIN and not inputs.problem.causal and inputs.problem.scores() <= CHUNK_SCORES:
        keys = inputs.k.repeat_interleave(inputs.problem.heads // inputs.problem.heads_kv, 1)
        largest = (inputs.q @ keys.transpose(-1, -2) * inputs.softmax_scale).amax(-1)
        wrong = out * torch.exp(lse - largest)[..., None]
        yield Mistake("not-normalised", "it is right but for the division by the sum of the exponentials", (wrong, lse))
