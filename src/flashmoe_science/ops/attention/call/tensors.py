"""The arguments of one attention call: Tensors in one order from the public functions to the kernels, and Options."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from flashmoe_science.ops.attention.problem import AttentionProblem, Layout, Mask
from flashmoe_science.ops.attention.problem.features import Bias, Features, Lengths
from flashmoe_science.ops.calls import needs_grad
from flashmoe_science.problem import Dtype, ProblemError

DTYPES: dict[torch.dtype, Dtype] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
E4M3 = torch.float8_e4m3fn
MaybeTensor = torch.Tensor | None
Given = tuple[MaybeTensor, ...]  # in the order of Tensors, or the first three if the rest is None
ALL_KEYS = 2**31 - 1  # the length if no sequence ends before the keys


class Tensors(NamedTuple):
    """The tensors of a call, None where one is absent.

    q, k, v: [batch, heads, seqlen, head_dim] views of any strides with a contiguous last dimension; problem/features.py
        describes caches, pages and packed keys.
    cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], where each packed sequence begins, and the total.
    cache_seqlens: int32 [batch], keys of each sequence. Packed queries need ``cu_seqlens_k`` or this.
    page_table: int32 [batch, max pages]; entries past a sequence's length are never read as addresses.
    cache_batch_idx: int32 [batch], the row of the cache of each sequence (not with pages).
    leftpad: int32 [batch], the first valid key of each sequence.
    sinks: [heads], fp32 or the input dtype.
    alibi_slopes: fp32 [batch, heads] (a batch stride of 0 where they are shared).
    bias: bool or the input dtype, a [batch, heads, seqlen_q, seqlen_k] view of any strides, 0 among them.
    prefix: int32 [batch], keys that all queries of a sequence see.
    k_scale, v_scale: fp32 [batch, heads_kv] of an e4m3 cache.
    new_k, new_v: [batch, heads_kv, new, head_dim], written to the cache behind ``cache_seqlens`` before it is attended to.
    rotary_cos, rotary_sin: [positions, half of the rotated width], by which new keys and queries are rotated.
    rotary_seqlens: int32 [batch], positions in place of ``cache_seqlens``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    cache_seqlens: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    prefix: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    new_k: torch.Tensor | None = None
    new_v: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    rotary_seqlens: torch.Tensor | None = None

    def of_features(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors of features, between q, k, v and what is appended, in the order of the kernels' arguments."""
        return self[3:15]

    def appended(self) -> tuple[torch.Tensor | None, ...]:
        """What is appended, and its rotary tables, in the order of the kernels' arguments."""
        return self[15:]

    def needs_grad(self) -> bool:
        """Whether a gradient may be asked for."""
        return needs_grad(self.q, self.k, self.v, self.sinks, self.alibi_slopes, self.bias)


NO_FEATURES = (None,) * (len(Tensors._fields) - 3)  # what follows q, k and v of a plain call


class ArgNames:
    """A public function's names for fields of Tensors and ``scale``, for its messages. Compared by identity, so that a key with
    Options stays cheap."""

    def __init__(self, **names: str) -> None:
        self._names = names

    def __getattr__(self, field: str) -> str:
        return self._names.get(field, "softmax_scale" if field == "scale" else field)


DEFAULT_NAMES = ArgNames()


class Options(NamedTuple):
    """A call's arguments that are not tensors and decide how it is served. Hashable.

    mask: of AttentionProblem; causal masks are aligned in each sequence.
    return_lse: also return the log-sum-exp (sinks included), fp32, natural logarithm.
    kernel: serve by this kernel or raise; None for the automatic choice.
    window_left, window_right: of Features.
    softcap: the cap itself; 0.0 for none.
    num_splits: the number of splits of a sequence's keys; 0 for the kernel's choice, 1 for a result that does not depend on the
        batch.
    max_seqlen_q, max_seqlen_k: of packed queries, and of keys of unequal lengths: no sequence is longer; 0 if not given.
    deterministic: equal calls give equal bits in the backward too, or it is refused; the forward always does.
    gqa: whether K and V may have fewer heads than Q.
    allow_empty: whether a batch, head count or length of 0 is served (zeros, and -inf in the log-sum-exp).
    rotary_interleaved: pairs (0, 1), (2, 3)... of a head are rotated; else (i, i + half).
    rotary_per_query: each query is rotated by its own position; else all by the first new key's.
    one_length: each call gives one length for all sequences in place of ``cache_seqlens``, to a kernel that takes it.
    tokens_first: the output is [batch, seqlen_q, heads, head_dim_v], for packed queries [total_q, heads, head_dim_v] with a
        log-sum-exp of [heads, total_q]; else heads come first and packed queries are a batch of one.
    """

    mask: Mask = "full"
    return_lse: bool = False
    kernel: str | None = None
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0  # no 0.0: with torch.compile(dynamic=True) a second checkpointed region fails by a float default
    num_splits: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    deterministic: bool = False
    gqa: bool = True
    allow_empty: bool = True
    rotary_interleaved: bool = True
    rotary_per_query: bool = False
    one_length: bool = False
    tokens_first: bool = False
    names: ArgNames = DEFAULT_NAMES

    def is_plain(self) -> bool:
        """Whether the options ask for no feature."""
        return self.window_left is self.window_right is None and not self.softcap


def sequences(tensors: Tensors) -> int:
    """The number of sequences."""
    return tensors.q.shape[0] if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.shape[0] - 1


def max_keys(tensors: Tensors, options: Options) -> int:
    """The most keys that a sequence can have, as far as sizes are known."""
    k, table = tensors.k, tensors.page_table
    most = k.shape[2] if table is None else table.shape[1] * k.shape[2]
    return min(most, options.max_seqlen_k) if options.max_seqlen_k else most


def features_of(tensors: Tensors, options: Options) -> Features:
    """The features that a call asks for."""
    bias: Bias = "none"
    if tensors.alibi_slopes is not None:
        bias = "alibi"
    elif tensors.bias is not None:
        bias = "boolean" if tensors.bias.dtype == torch.bool else "additive"
    lengths: Lengths = "equal"
    if tensors.cu_seqlens_q is not None:
        lengths = "packed"
    elif tensors.cache_seqlens is not None:
        lengths = "ragged"
    page = 0 if tensors.page_table is None else tensors.k.shape[2]
    make = _features if type(page) is int and not torch.compiler.is_compiling() else Features  # a symbolic size has no hash
    return make(
        options.window_left, options.window_right, math.ceil(options.softcap), tensors.sinks is not None, bias,
        int(tensors.prefix is not None), lengths, page, tensors.leftpad is not None, tensors.k.dtype == E4M3,
    )  # fmt: skip


_features = lru_cache(maxsize=512)(Features)


def problem_of(tensors: Tensors, options: Options) -> AttentionProblem:
    """The AttentionProblem of a call that has been checked. Raises ProblemError: a head dimension above 256, a size of 0, or
    fp64."""
    q, k, v = tensors.q, tensors.k, tensors.v
    if q.dtype not in DTYPES:
        raise ProblemError(f"dtype is {q.dtype}; it must be torch.float16, torch.bfloat16 or torch.float32")
    layout: Layout = "bshd" if q.stride(1) < q.stride(2) else "bhsd"
    rows = q.shape[2] if tensors.cu_seqlens_q is None else options.max_seqlen_q
    return AttentionProblem(
        sequences(tensors), q.shape[1], k.shape[1], rows, max_keys(tensors, options), q.shape[3], v.shape[3], DTYPES[q.dtype],
        options.mask, layout, features_of(tensors, options),
    )  # fmt: skip


def options_of(problem: AttentionProblem) -> Options:
    """The options of a problem's call, every output asked for: what ``features_of`` reads back, and the longest lengths."""
    features = problem.features
    longest = (0, 0) if features.lengths == "equal" else (problem.seqlen_q, problem.seqlen_k)
    return Options(problem.mask, True, None, features.window_left, features.window_right, float(features.softcap), 0, *longest)
