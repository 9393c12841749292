"""``warmup``: builds what the calls of a model will launch, so that none of them compiles in the middle of serving.

``explain`` binds a call for every class of lengths and each variant of a build, on tensors without memory. What it would
compile is then compiled, or found in Triton's cache: ``~/.triton/cache``, or TRITON_CACHE_DIR.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from flashmoe_science.attention import explain, flash_attn_func, scaled_dot_product_attention
from flashmoe_science.dispatch.tuned import known_table
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import CompileJob
from flashmoe_science.moe import fused_moe, route
from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.attention.call.tensors import DTYPES
from flashmoe_science.ops.attention.problem import KEY_CLASS, AttentionProblem
from flashmoe_science.ops.checks import check_count, check_flag
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.problem import check_extent, check_word
from flashmoe_science.serving import flash_attn_varlen_func, flash_attn_with_kvcache

Call = tuple[Callable[..., Any], dict[str, Any]]

_ALL, _SOME = 64, 1024  # up to which every length, and every 16th, is walked; above it every KEY_CLASS-th
_LINE_EVERY_S = 5.0
_PARTS = {"heads": ("heads_kv", "head_dim", "head_dim_v"), "experts": ("top_k", "hidden", "intermediate", "max_tokens")}


def dtype_named(word: str) -> torch.dtype:
    """The dtype of that word, such as bf16. Raises ValueError where there is none."""
    words: dict[str, torch.dtype] = {word: dtype for dtype, word in DTYPES.items()}
    check_word("dtype", word, words)
    return words[word]


class Warmed(NamedTuple):
    """What ``warmup`` did: the number of kernels of the model's calls, how many were new to this process, and the time."""

    kernels: int
    new: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.kernels} kernels are ready, {self.new} of them new to this process, in {self.seconds:.1f} s"


class Model(NamedTuple):
    """The description of a model; ``warmup`` says what each field is."""

    heads: int | None = None
    heads_kv: int | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    batch: int | Sequence[int] = 1
    max_seqlen: int = 4096
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    page_size: int | None = None
    append: bool = False
    rotary_dim: int = 0
    rotary_interleaved: bool = True
    experts: int | None = None
    top_k: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    activation: str = "silu"
    expert_bias: bool = False
    transposed: bool = False
    interleaved: bool = False
    max_tokens: int | None = None

    def calls(self) -> Iterator[Call]:
        """Every call that may build something new.

        Raises:
            TypeError, ValueError: the description is not a model, in one line.
        """
        if self.heads is self.experts is None:
            raise ValueError("heads and experts are None; at least one of them must be given")
        if self.dtype not in DTYPES:
            raise TypeError(f"dtype is {self.dtype}; it must be one of {', '.join(map(str, DTYPES))}")
        check_extent("max_seqlen", self.max_seqlen)
        for of, names in _PARTS.items():
            for name in names:
                if getattr(self, name) is not None:
                    _given(of, getattr(self, of), name)
        for name in ("sinks", "append", "rotary_interleaved", "expert_bias"):
            check_flag(getattr(self, name), name)
        check_count(self.rotary_dim, "rotary_dim", 0)
        if self.heads is not None:
            yield from self._attention()
        if self.experts is not None:
            yield from self._experts()

    def _attention(self) -> Iterator[Call]:
        heads, width = self.heads or 0, _given("head_dim", self.head_dim, "heads")
        heads_kv = heads if self.heads_kv is None else self.heads_kv
        width_v = width if self.head_dim_v is None else self.head_dim_v
        check_extent("head_dim", width)
        if self.rotary_dim % 16 or self.rotary_dim > width:
            raise ValueError(f"rotary_dim is {self.rotary_dim}; it must be a multiple of 16, from 0 to head_dim {width}")
        if self.rotary_dim and not self.append:
            raise ValueError(f"rotary_dim is {self.rotary_dim} and append is False; only appended keys are rotated")
        batches = self.batch if isinstance(self.batch, Sequence) else (self.batch,)
        if not batches:
            raise ValueError("batch has no number; it must have at least one")
        for batch in batches:
            check_extent("batch", batch)
            # Refuses sizes that no attention has, in words.
            AttentionProblem(batch, heads, heads_kv, 1, 1, width, width_v, DTYPES[self.dtype])
            for length in walked(self.max_seqlen):
                at = _Sizes(batch, heads, heads_kv, length, width, width_v)
                for rows in dict.fromkeys((length, 1)):
                    yield from self._plain(at, rows)
                    yield from self._packed(at, rows)
                yield from self._cached(at)

    def _plain(self, at: _Sizes, rows: int) -> Iterator[Call]:
        """Sequences of one length, with plain keys and values."""
        if self.sinks:
            return
        q, k, v = (self._empty(at.batch, *shape) for shape in at.shapes(rows))
        window = {"window_size": self.window_size, "softcap": self.softcap}
        yield flash_attn_func, {"q": q, "k": k, "v": v, "causal": self.causal, **window}
        if self.window_size == (-1, -1) and self.softcap == 0.0:
            query, key, value = (self._empty(at.batch, heads, n, width) for n, heads, width in at.shapes(rows))
            flags = {"is_causal": self.causal and rows > 1, "enable_gqa": at.heads != at.heads_kv}
            yield scaled_dot_product_attention, {"query": query, "key": key, "value": value, **flags}

    def _packed(self, at: _Sizes, rows: int) -> Iterator[Call]:
        """Packed queries, of keys that are packed too, or in pages."""
        (_, *of_q), (_, *of_k), (_, *of_v) = at.shapes(rows)
        starts = {"cu_seqlens_q": self._numbers(at.batch + 1), "max_seqlen_q": rows, "max_seqlen_k": at.keys}
        starts |= self._features()
        q = self._empty(at.batch * rows, *of_q)
        if self.page_size is None:
            keys = {"k": self._empty(at.batch * at.keys, *of_k), "v": self._empty(at.batch * at.keys, *of_v)}
            yield flash_attn_varlen_func, {"q": q, **keys, "cu_seqlens_k": self._numbers(at.batch + 1), **starts}
        else:
            k, v, table = self._cache(at)
            used = {"cu_seqlens_k": None, "seqused_k": self._numbers(at.batch), "block_table": table}
            yield flash_attn_varlen_func, {"q": q, "k": k, "v": v, **used, **starts}

    def _cached(self, at: _Sizes) -> Iterator[Call]:
        """One new query of each sequence, and a cache with room for ``at.keys``."""
        k_cache, v_cache, table = self._cache(at)
        of_q, of_k, of_v = at.shapes(1)
        cache = {"q": self._empty(at.batch, *of_q), "k_cache": k_cache, "v_cache": v_cache, "page_table": table}
        given = {**cache, "cache_seqlens": self._numbers(at.batch), **self._features()}
        yield flash_attn_with_kvcache, given
        yield flash_attn_with_kvcache, {**given, "cache_seqlens": at.keys}
        if not self.append:
            return
        new = {"k": self._empty(at.batch, 1, *of_k[1:]), "v": self._empty(at.batch, 1, *of_v[1:])}
        if self.rotary_dim:
            angles = self._empty(at.keys, self.rotary_dim // 2)
            new |= {"rotary_cos": angles, "rotary_sin": angles}
        yield flash_attn_with_kvcache, {**given, **new, "rotary_interleaved": self.rotary_interleaved}

    def _cache(self, at: _Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """K and V of a cache of as many rows, and its table if it is paged."""
        _, of_k, of_v = at.shapes(1)
        if self.page_size is None:
            return self._empty(at.batch, *of_k), self._empty(at.batch, *of_v), None
        check_extent("page_size", self.page_size)
        pages = -(-at.keys // self.page_size)
        k, v = (self._empty(at.batch * pages, self.page_size, *shape[1:]) for shape in (of_k, of_v))
        return k, v, self._numbers(at.batch, pages)

    def _features(self) -> dict[str, Any]:
        sinks = self._empty(self.heads or 0) if self.sinks else None
        return {"causal": self.causal, "window_size": self.window_size, "softcap": self.softcap, "s_aux": sinks}

    def _experts(self) -> Iterator[Call]:
        experts, top_k = self.experts or 0, _given("top_k", self.top_k, "experts")
        dim, hidden = _given("hidden", self.hidden, "experts"), _given("intermediate", self.intermediate, "experts")
        check_extent("hidden", dim)
        check_extent("intermediate", hidden)
        MoEProblem(1, experts, top_k, dim, hidden, DTYPES[self.dtype])  # refuses sizes that no experts have, in words
        of_up, of_down = (experts, 2 * hidden, dim), (experts, dim, hidden)
        up, down = (self._empty(e, *((b, a) if self.transposed else (a, b))) for e, a, b in (of_up, of_down))
        biases = {"gate_up_bias": self._empty(*of_up[:2]), "down_bias": self._empty(*of_down[:2])} if self.expert_bias else {}
        options = {"activation": self.activation, "transposed": self.transposed, "interleaved": self.interleaved, **biases}
        most = self.max_seqlen if self.max_tokens is None else self.max_tokens
        check_extent("max_tokens", most)
        for tokens in walked(most):
            routing = {
                "top_k_weights": torch.empty(tokens, top_k, dtype=torch.float32, device="meta"),
                "top_k_ids": self._numbers(tokens, top_k),
            }
            x = self._empty(tokens, dim)
            yield fused_moe, {"hidden_states": x, "gate_up_proj": up, "down_proj": down, **routing, **options}
            yield route, {"router_logits": self._empty(tokens, experts), "top_k": top_k}

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")


class _Sizes(NamedTuple):
    """The sizes of one call: ``keys`` of each sequence."""

    batch: int
    heads: int
    heads_kv: int
    keys: int
    width: int
    width_v: int

    def shapes(self, rows: int) -> tuple[tuple[int, int, int], ...]:
        """(tokens, heads, width) of Q with that many rows, of K and of V."""
        return (rows, self.heads, self.width), (self.keys, self.heads_kv, self.width), (self.keys, self.heads_kv, self.width_v)


def _given(name: str, value: int | None, of: str) -> int:
    if value is None:
        raise ValueError(f"{name} is None and {of} is given; it must be given too")
    return value


def walked(longest: int) -> list[int]:
    """Lengths that build all that lengths up to ``longest`` do: for each class of lengths, and each KEY_CLASS keys in it, one
    length that tiles divide and one that they do not; and all measured lengths, which may be classes of their own."""
    steps = (*range(16, min(longest, _SOME) + 16, 16), *range(KEY_CLASS, longest + KEY_CLASS, KEY_CLASS))
    problems = [entry.problem for entry in known_table().entries]
    names = ("seqlen_q", "seqlen_k", "tokens")
    measured = [getattr(problem, name) for problem in problems for name in names if hasattr(problem, name)]
    every = {*range(1, _ALL), *steps, *(step - 1 for step in steps), *measured, longest}
    return sorted(length for length in every if 0 < length <= longest)


def jobs_of(model: Model, gpu: Gpu, step: Callable[[], None] = lambda: None) -> list[CompileJob]:
    """Every build that calls of the model need on ``gpu``, which need not be here; each once. Compiles nothing. ``step`` is
    called after each of the model's calls: they take milliseconds each, and are thousands if sequences are long.

    Raises:
        TypeError, ValueError, NotImplementedError: what ``Model.calls`` and the calls themselves refuse; Triton is missing.
    """
    if TRITON_MISSING:
        raise ValueError(TRITON_MISSING)
    from flashmoe_science.hardware.compiler import build_key  # brings Triton, as does the next
    from flashmoe_science.ops.launch import collect_builds

    with collect_builds(gpu) as jobs:
        for function, arguments in model.calls():
            explain(function, **arguments)
            step()
    return list({build_key(job, gpu): job for job in jobs}.values())


def warmup(
    *,
    heads: int | None = None,
    heads_kv: int | None = None,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    batch: int | Sequence[int] = 1,
    max_seqlen: int = 4096,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: bool = False,
    page_size: int | None = None,
    append: bool = False,
    rotary_dim: int = 0,
    rotary_interleaved: bool = True,
    experts: int | None = None,
    top_k: int | None = None,
    hidden: int | None = None,
    intermediate: int | None = None,
    activation: str = "silu",
    expert_bias: bool = False,
    transposed: bool = False,
    interleaved: bool = False,
    max_tokens: int | None = None,
    device: torch.device | str | int | None = None,
    report: Callable[[str], None] = print,
) -> Warmed:
    """Build what the inference of a model launches: prefill and decoding of 1 to ``max_seqlen`` tokens, and its experts.

    These calls then compile nothing: ``scaled_dot_product_attention`` and ``flash_attn_func`` with as many queries as keys, and
    with one query; ``flash_attn_varlen_func``; ``flash_attn_with_kvcache`` with one query a sequence; ``route`` and
    ``fused_moe``. Tensors must be contiguous and aligned to 16 bytes, and no log-sum-exp asked for. Nothing is launched, and
    only the kernels take device memory. What Triton compiled stays in its cache on disk (~/.triton/cache, or TRITON_CACHE_DIR),
    where the next process finds it in milliseconds; the folder can be copied to machines with the same GPU, Triton and version
    of this package.

    Args:
        heads, heads_kv, head_dim, head_dim_v: the sizes of attention; heads None for no attention.
        dtype: of queries, keys and values, and of the experts' weights.
        batch: sequences of a call, or several such numbers: the kernel depends on it.
        max_seqlen: no sequence is longer, and no cache has more room.
        causal, window_size, softcap: as of ``flash_attn_func``. sinks: whether calls give ``s_aux``.
        page_size: rows of a page of the cache; None for a contiguous one.
        append: whether ``flash_attn_with_kvcache`` is given new keys. rotary_dim: the width of their rotary embedding.
        rotary_interleaved: as in ``flash_attn_with_kvcache``.
        experts, top_k, hidden, intermediate: experts, experts of a token, width of the model, width of an expert.
        activation, transposed, interleaved: as of ``fused_moe``. expert_bias: whether both biases are given.
        max_tokens: the most tokens of a call of the experts; ``max_seqlen`` by default.
        device: by default the current one.
        report: called with a line of progress every five seconds, and with the result.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument that is not allowed, or no NVIDIA GPU, in one line.
    """
    started = time.monotonic()
    model = Model(
        heads, heads_kv, head_dim, head_dim_v, dtype, batch, max_seqlen, causal, window_size, softcap, sinks, page_size, append,
        rotary_dim, rotary_interleaved, experts, top_k, hidden, intermediate, activation, expert_bias, transposed, interleaved,
        max_tokens,
    )  # fmt: skip
    gpu = current_gpu(None if device is None else torch.device(device))
    if gpu is None:
        raise ValueError("there is no NVIDIA GPU here; `flashmoe warmup --gpu` compiles for one elsewhere")
    shown = started

    def show(words: str) -> None:
        nonlocal shown
        if (now := time.monotonic()) - shown >= _LINE_EVERY_S:
            shown = now
            report(f"{words}, after {now - started:.0f} s")

    jobs = jobs_of(model, gpu, lambda: show("listing what the calls launch"))
    from flashmoe_science.ops.launch import Build, kernels_loaded  # brings Triton

    before = kernels_loaded()
    with torch.cuda.device(device):
        for index, job in enumerate(jobs):
            Build(job.function, job.arguments, **job.options)
            show(f"{index + 1} of {len(jobs)} kernels are built")
    warmed = Warmed(len(jobs), kernels_loaded() - before, time.monotonic() - started)
    report(str(warmed))
    return warmed
