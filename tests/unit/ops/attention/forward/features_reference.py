"""Calls of every serving mode drawn at random, all memory that must not be read filled with NaN, and plain fp64 results.

Run as a script with TRITON_INTERPRET=1 it puts calls to split_triton in Triton's interpreter (which needs a process of its own)
and prints one JSON object: the complaints about each, by its description.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from tests.unit.ops.attention.calls import call_of

from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionOutput, Launcher
from flashmoe_science.ops.attention.call.tensors import ALL_KEYS
from flashmoe_science.ops.attention.problem import AttentionProblem, Mask
from flashmoe_science.ops.attention.problem.features import PLAIN, Features
from flashmoe_science.problem import Dtype

GARBAGE = 2**30 - 7  # a page number that nothing may follow
TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FP8 = torch.float8_e4m3fn
TOLERANCES = {"fp16": 6e-3, "bf16": 5e-2, "fp32": 4e-5}


@dataclass(frozen=True)
class Sizes:
    """The most that is drawn of each."""

    batch: int = 3
    heads_kv: int = 3
    group: int = 8
    queries: int = 20
    keys: int = 150
    widths: tuple[int, ...] = (1, 8, 16, 24, 40)


TINY = Sizes()
LARGE = Sizes(batch=5, heads_kv=4, group=16, queries=300, keys=3000, widths=(64, 64, 128, 128, 128, 72, 96, 192, 256, 17))


@dataclass
class Drawn:
    """A call, and of each of its sequences the queries, keys and values, [heads, length, width] each."""

    seed: int
    inputs: AttentionInputs
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def __str__(self) -> str:
        features = self.inputs.problem.features
        changed = {
            one.name: getattr(features, one.name) for one in fields(Features) if getattr(features, one.name) != one.default
        }
        lengths = [one.shape[1] for one in self.queries], [one.shape[1] for one in self.keys]
        return f"{self.seed}: {self.inputs.problem} {changed} lengths {lengths} splits {self.inputs.options.num_splits}"


class Draw:
    """Draws one call from a seed."""

    def __init__(self, seed: int, device: torch.device, sizes: Sizes, only: dict[str, Any] | None = None) -> None:
        self.seed, self.device, self.sizes, self.only = seed, device, sizes, only or {}
        self.rng = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)

    def chosen(self, name: str, *values: Any) -> Any:
        drawn = self.rng.choice(values)
        return self.only.get(name, drawn)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def call(self) -> Drawn:
        rng, sizes = self.rng, self.sizes
        self.batch, self.heads_kv = rng.randint(1, sizes.batch), rng.randint(1, sizes.heads_kv)
        self.group = rng.choice([one for one in (1, 2, 3, 4, 5, 8, 16) if one <= sizes.group])
        self.dtype: Dtype = self.chosen("dtype", "fp16", "bf16", "fp32")
        self.width, self.width_v = rng.choice(sizes.widths), rng.choice(sizes.widths)
        if rng.random() < 0.5:
            self.width_v = self.width
        mask: Mask = self.chosen("mask", "full", "causal", "causal", "causal-topleft")
        self.queries, self.capacity = rng.choice([1, 1, 2, rng.randint(1, sizes.queries)]), rng.randint(1, sizes.keys)
        features = self._modes(mask)
        if mask == "causal-topleft" and (
            features.lengths != "equal" or features.bias == "alibi" or features.window_left is not None
        ):
            mask = "causal"  # all these are aligned bottom-right
        heads = self.heads_kv * self.group
        lengths, widths = (self.queries, self.capacity), (self.width, self.width_v)
        problem = AttentionProblem(self.batch, heads, self.heads_kv, *lengths, *widths, self.dtype, mask, features=features)
        return self._filled(problem)

    def _modes(self, mask: Mask) -> Features:
        lengths = self.chosen("lengths", "equal", "ragged", "ragged", "packed")
        page = self.chosen("page", 0, 1, 3, 8, 16, 64) if lengths != "equal" else 0
        bias = self.chosen("bias", "none", "none", "alibi", "boolean", "additive")
        if lengths == "packed" and bias in ("boolean", "additive"):
            bias = "none"
        right = None if mask == "causal-topleft" else self.chosen("window_right", None, None, 0, 3, 40)
        prefix = self.chosen("prefix", 0, 0, 0, 1 + self.capacity // 3) if mask == "causal" else 0
        return Features(
            window_left=self.chosen("window_left", None, None, 0, 5, 64),
            window_right=right,
            softcap=self.chosen("softcap", 0, 0, 2),
            sinks=self.chosen("sinks", False, False, True),
            bias=bias,
            prefix=prefix,
            lengths=lengths,
            page=page,
            leftpad=self.chosen("leftpad", False, False, True) if lengths == "ragged" or page else False,
            fp8_cache=self.chosen("fp8_cache", False, False, True) if self.dtype != "fp32" else False,
        )

    def _filled(self, problem: AttentionProblem) -> Drawn:
        features, rng, dtype = problem.features, self.rng, TORCH_DTYPES[self.dtype]
        batch, heads = problem.batch, problem.heads
        keys_of = [self.capacity] * batch
        queries_of = [self.queries] * batch
        if features.lengths != "equal":
            keys_of = [rng.choice([0, 1, self.capacity, rng.randint(0, self.capacity)]) for _ in range(batch)]
        if features.lengths == "packed":
            queries_of = [rng.choice([0, 1, self.queries]) for _ in range(batch)]
            queries_of[-1] = self.queries
        queries = [self.randn(heads, count, problem.head_dim).to(dtype) for count in queries_of]
        of_cache = FP8 if features.fp8_cache else dtype
        keys = [self.randn(self.heads_kv, count, problem.head_dim).to(of_cache) for count in keys_of]
        values = [self.randn(self.heads_kv, count, problem.head_dim_v).to(of_cache) for count in keys_of]
        extras = self._extras(problem, queries_of, keys_of)
        k, v, more = self._cache(problem, keys, values, of_cache)
        extras = {**extras, **more}
        q = self._queries(problem, queries)
        scale = self.rng.choice([problem.softmax_scale] * 4 + [0.0, -0.5])
        out = None
        if rng.random() < 0.5:
            out = self._nan((q.shape[0], q.shape[2], q.shape[1], problem.head_dim_v), dtype).transpose(1, 2)
        inputs = call_of(problem, q, k, v, scale, rng.random() < 0.8, out, **extras)
        splits = rng.choice([0, 0, 1, 2, 3, 7])
        inputs = replace(inputs, options=inputs.options._replace(num_splits=splits))
        return Drawn(self.seed, inputs, queries, keys, values)

    def _queries(self, problem: AttentionProblem, queries: list[torch.Tensor]) -> torch.Tensor:
        if problem.features.lengths == "packed":
            joined = torch.cat([one.transpose(0, 1) for one in queries])  # [total, heads, width]
            return joined.contiguous().transpose(0, 1)[None]
        stacked = torch.stack(queries)
        return stacked.transpose(1, 2).contiguous().transpose(1, 2) if self.rng.random() < 0.5 else stacked

    def _extras(self, problem: AttentionProblem, queries_of: list[int], keys_of: list[int]) -> dict[str, Any]:
        features, rng, batch, heads = problem.features, self.rng, problem.batch, problem.heads
        extras: dict[str, Any] = {"max_seqlen_k": self.capacity}
        if features.lengths == "packed":
            starts = [sum(queries_of[:place]) for place in range(batch + 1)]
            extras |= {"cu_seqlens_q": self.int32(starts), "max_seqlen_q": self.queries + rng.choice([0, 0, 3])}
        if features.leftpad:
            extras["leftpad"] = self.int32([rng.randint(0, count) for count in keys_of])
        if features.softcap:
            extras["softcap"] = features.softcap + 0.25
        if features.sinks:
            extras["sinks"] = self.randn(heads) * 2
        if features.bias == "alibi":
            shared = rng.random() < 0.5
            slopes = self.randn(1 if shared else batch, heads).abs() * 0.1
            extras["alibi_slopes"] = slopes.expand(batch, heads)
        elif features.bias != "none":
            extras["bias"] = self._bias(problem)
        if features.prefix:
            extras["prefix"] = self.int32([rng.randint(0, features.prefix + 5) for _ in range(batch)])
        if features.fp8_cache:
            extras["k_scale"] = self.randn(batch, self.heads_kv).abs() + 0.1
            extras["v_scale"] = (self.randn(1, 1).abs() + 0.1).expand(batch, self.heads_kv)
        return extras

    def _bias(self, problem: AttentionProblem) -> torch.Tensor:
        full = (problem.batch, problem.heads, self.queries, self.capacity)
        some = tuple(self.rng.choice([1, extent]) for extent in full[:3])
        bias = self.randn(*some, self.capacity)
        if problem.features.bias == "boolean":
            return (bias > -0.5).expand(full)
        bias = bias.masked_fill(bias > 1.5, -torch.inf)
        return bias.to(TORCH_DTYPES[self.dtype]).expand(full)

    def _cache(
        self, problem: AttentionProblem, keys: list[torch.Tensor], values: list[torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        features, rng, batch = problem.features, self.rng, problem.batch
        lengths = self.int32([one.shape[1] for one in keys])
        if features.page:
            return self._pages(problem, keys, values, dtype)
        if features.lengths == "packed" and self.chosen("contiguous", True, False):
            starts = [sum(one.shape[1] for one in keys[:place]) for place in range(batch + 1)]
            k, v = (torch.cat([one.float() for one in ones], 1).to(dtype) for ones in (keys, values))
            nothing = self._nan((1, self.heads_kv, 8, 1), torch.float32)
            k, v = (torch.cat([one[None].float(), nothing.expand(-1, -1, -1, one.shape[2])], 2).to(dtype) for one in (k, v))
            return k, v, {"cu_seqlens_k": self.int32(starts)}
        more: dict[str, Any] = {} if features.lengths == "equal" else {"cache_seqlens": lengths}
        caches, places = batch, list(range(batch))
        if features.lengths == "ragged" and rng.random() < 0.4:
            caches = batch + 2
            places = rng.sample(range(caches), batch)
            more["cache_batch_idx"] = self.int32(places)
        room = self.capacity + (0 if features.lengths == "equal" else rng.choice([0, 5]))
        k = self._nan((caches, room + 3, self.heads_kv, problem.head_dim), dtype)[:, :room].transpose(1, 2)
        v = self._nan((caches, self.heads_kv, room + 3, problem.head_dim_v), dtype)[:, :, :room]
        for place, of_k, of_v in zip(places, keys, values, strict=True):
            k[place, :, : of_k.shape[1]] = of_k
            v[place, :, : of_v.shape[1]] = of_v
        return k, v, more

    def _pages(
        self, problem: AttentionProblem, keys: list[torch.Tensor], values: list[torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        page, rng = problem.features.page, self.rng
        most = -(-self.capacity // page) + rng.choice([0, 2])
        needed = [-(-one.shape[1] // page) for one in keys]
        free = list(range(sum(needed) + 3))
        rng.shuffle(free)
        k = self._nan((len(free), page, self.heads_kv, problem.head_dim), dtype).transpose(1, 2)
        v = self._nan((len(free), page, self.heads_kv, problem.head_dim_v), dtype).transpose(1, 2)
        table = torch.full((problem.batch, most + 1), GARBAGE, dtype=torch.int32, device=self.device)[:, :most]
        for sequence, (of_k, of_v) in enumerate(zip(keys, values, strict=True)):
            for place in range(needed[sequence]):
                number, rows = free.pop(), slice(place * page, min((place + 1) * page, of_k.shape[1]))
                table[sequence, place] = number
                k[number, :, : rows.stop - rows.start] = of_k[:, rows]
                v[number, :, : rows.stop - rows.start] = of_v[:, rows]
        return k, v, {"page_table": table, "cache_seqlens": self.int32([one.shape[1] for one in keys])}

    def _nan(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, torch.nan, device=self.device).to(dtype)


def visible(problem: AttentionProblem, queries: int, keys: int, leftpad: int, prefix: int | None) -> torch.Tensor:
    """Which key each query sees, [queries, keys], but for a boolean mask."""
    features = problem.features
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    diagonal = i + keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if problem.mask == "causal":
        seen &= j <= diagonal
    if problem.mask == "causal-topleft":
        seen &= j <= i
    if features.window_left is not None:
        seen &= j >= diagonal - features.window_left
    if features.window_right is not None:
        seen &= j <= diagonal + features.window_right
    if prefix is not None:
        seen |= j < prefix
    return seen & (j >= leftpad)


def reference(drawn: Drawn) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each sequence the output [heads, queries, head_dim_v] and the log-sum-exp [heads, queries], in fp64."""
    results = []
    inputs, problem, x = drawn.inputs, drawn.inputs.problem, drawn.inputs.tensors
    group = problem.heads // problem.heads_kv
    for place, (q, k, v) in enumerate(zip(drawn.queries, drawn.keys, drawn.values, strict=True)):
        q, k, v = q.double(), k.double().repeat_interleave(group, 0), v.double().repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) * inputs.softmax_scale
        if x.k_scale is not None and x.v_scale is not None:
            scores = scores * x.k_scale[place].double().repeat_interleave(group)[:, None, None]
            v = v * x.v_scale[place].double().repeat_interleave(group)[:, None, None]
        if cap := inputs.options.softcap:
            scores = cap * torch.tanh(scores / cap)
        queries, keys = q.shape[1], k.shape[1]
        if x.alibi_slopes is not None:
            i, j = torch.arange(queries, device=q.device)[:, None], torch.arange(keys, device=q.device)[None, :]
            scores = scores - x.alibi_slopes[place].double()[:, None, None] * (i + keys - queries - j).abs()
        leftpad = 0 if x.leftpad is None else int(x.leftpad[place])
        seen = visible(problem, queries, keys, leftpad, None if x.prefix is None else int(x.prefix[place])).to(q.device)
        if x.bias is not None and x.bias.dtype == torch.bool:
            seen = seen & x.bias[place, :, :, :keys]
        elif x.bias is not None:
            scores = scores + x.bias[place, :, :, :keys].double()
        scores = torch.where(seen, scores, -torch.inf)
        if x.sinks is not None:
            scores = torch.cat([scores, x.sinks.double()[:, None, None].expand(-1, queries, 1)], 2)
            v = torch.cat([v, v.new_zeros(v.shape[0], 1, v.shape[2])], 1)
        lse = torch.logsumexp(scores, 2) if scores.shape[2] else scores.new_full(scores.shape[:2], -torch.inf)
        weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
        results.append((weights @ v, lse))
    return results


def complaints(drawn: Drawn, got: AttentionOutput) -> list[str]:
    """What is wrong with a result; empty where nothing is."""
    problem, x = drawn.inputs.problem, drawn.inputs.tensors
    tolerance = TOLERANCES[problem.dtype] * (1.0 if x.v_scale is None else max(1.0, float(x.v_scale.max())))
    found, first = [], 0
    for place, (out, lse) in enumerate(reference(drawn)):
        queries = out.shape[1]
        if x.cu_seqlens_q is not None:
            part = slice(first, first + queries)
            own, own_lse = got.out[0, :, part], None if got.lse is None else got.lse[0, :, part]
            first += queries
        else:
            own, own_lse = got.out[place], None if got.lse is None else got.lse[place]
        if not torch.allclose(own.double(), out, rtol=tolerance, atol=tolerance):
            found.append(f"out of sequence {place}: off by {(own.double() - out).abs().max():.3g}")
        close = 2e-5 if x.k_scale is None else 2e-4
        if own_lse is not None and not torch.allclose(own_lse.double(), lse, rtol=2e-5, atol=close):
            found.append(f"lse of sequence {place}: off by {(own_lse.double() - lse).abs().max():.3g}")
    if drawn.inputs.out is not None and got.out is not drawn.inputs.out:
        found.append("the given output was not written")
    if drawn.inputs.return_lse != (got.lse is not None):
        found.append("lse: given and not asked for, or the other way round")
    return found


def attend(inputs: AttentionInputs, num_splits: int | None = None) -> AttentionOutput:
    """split_triton with its first config, planned anew."""
    from flashmoe_science.ops.attention.forward.splitkv import kernel as split_triton

    config = split_triton.configs(inputs.problem, None)[0]
    return bound(split_triton.plan(inputs, config), inputs, num_splits)


def bound(launcher: Launcher, inputs: AttentionInputs, num_splits: int | None = None) -> AttentionOutput:
    """A call of a launcher, bound anew."""
    splits = inputs.options.num_splits if num_splits is None else num_splits
    launch = launcher.bind(inputs.tensors, inputs.options._replace(num_splits=splits), inputs.out)
    result = launch(inputs.tensors, inputs.softmax_scale, ALL_KEYS, inputs.out, None)
    assert result is not None
    return AttentionOutput(*result)


def grown() -> dict[str, list[str]]:
    """Calls with a cache that grows by a token, as slices of a longer one and copied anew: what is wrong with each length."""
    from flashmoe_science.ops.attention.forward.splitkv import kernel as split_triton

    torch.manual_seed(0)
    q, cache = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 140, 16)
    found, plan = {}, None
    for way in ("slices", "anew"):
        for length in range(60, 140):
            k = cache[:, :, :length] if way == "slices" else cache[:, :, :length].clone()
            problem = AttentionProblem(1, 4, 2, 1, length, 16, 16, "fp32", "causal")
            inputs = call_of(problem, q, k, k, 0.25, return_lse=True)
            drawn = Drawn(length, inputs, [q[0]], [k[0]], [k[0]])
            plan = plan or split_triton.plan(inputs, split_triton.configs(problem, None)[0])
            found[f"{way} {length}"] = complaints(drawn, bound(plan, inputs))
    assert plan is not None
    found["builds"] = [] if 0 < len(plan._builds) <= 8 else [str(len(plan._builds))]
    return found


def unequal() -> dict[str, list[str]]:
    """Calls whose programs take the longest sequence first: what is wrong with each, or differs from the order of the batch."""
    from flashmoe_science.ops.attention.forward.splitkv import kernel as split_triton

    found = {}
    for seed, batch in ((0, 9), (3, 9), (5, 40)):
        sizes = Sizes(batch=batch, heads_kv=1, group=4, queries=1, keys=300, widths=(16,))
        only = {"lengths": "ragged", "page": 8 * (seed % 2), "window_left": None, "bias": "none"}
        drawn = _less_than_none(Draw(seed, torch.device("cpu"), sizes, only).call())
        plans = [split_triton.plan(drawn.inputs, split_triton.configs(drawn.inputs.problem, None)[0]) for _ in range(2)]
        plans[1]._uneven = False
        for splits in (1, 3):
            results = []
            for plan in plans:
                got = bound(plan, drawn.inputs, splits)
                results.append(AttentionOutput(got.out.clone(), got.lse))
            wrong = complaints(replace(drawn, inputs=replace(drawn.inputs, out=None)), results[0])
            if not torch.equal(results[0].out, results[1].out):
                wrong.append("the order changes bits")
            ordered = any(variant.batches and variant.split == (splits > 1) for variant in plans[0]._builds)
            found[f"{drawn} {splits} splits, {'LPT order' if ordered else 'as they come'}"] = wrong
    return found


def ranges() -> dict[str, list[str]]:
    """Calls whose programs take equal ranges of all sequences' keys or splits of each, as the longest sequence is longer than a
    bound or not: what is wrong with each, or depends on anything else."""
    from flashmoe_science.ops.attention.forward.splitkv import config as split_configs
    from flashmoe_science.ops.attention.forward.splitkv import kernel as split_triton
    from flashmoe_science.ops.attention.forward.splitkv import launch as split_launcher

    split_configs.STREAM_K_KEYS = split_configs.STREAM_K_WHOLE = 0
    chosen, found = split_launcher.splits_for, {}
    for seed in range(11):
        sizes = Sizes(batch=(3, 9)[seed % 2], heads_kv=2, group=4, queries=3, keys=2500, widths=(16, 24))
        only = {"window_left": None, "lengths": ("ragged", "packed")[seed % 5 == 4], "page": (0, 0, 16, 64, 8)[seed % 5]}
        drawn = _less_than_none(Draw(seed, torch.device("cpu"), sizes, only).call())
        if drawn.inputs.problem.batch == 1:
            continue
        config = split_triton.configs(drawn.inputs.problem, None)[0]
        longest = _most_tiles(drawn.inputs, config["block_n"])
        results, bounds = {}, {"ranges": -1.0, "splits": 2.0**30}
        at_the_bound = {"just ranges": longest - 1.0, "just splits": float(longest)} if seed % 3 == 0 else {}
        for name, least in (bounds | at_the_bound).items():
            split_launcher.splits_for = lambda *a, least=least: chosen(*a)._replace(even_slope=0.0, even_least=least)
            plan = split_triton.plan(drawn.inputs, config)
            plan._sm_count = (3, 8, 20)[seed % 3]
            got = bound(plan, drawn.inputs, 0)
            results[name] = AttentionOutput(got.out.clone(), got.lse)
            if not all(variant.stream_k for variant in plan._builds):
                found[f"{drawn} {name}"] = ["this build has no stream-K"]
        split_launcher.splits_for = chosen
        for name in ("ranges", "splits"):
            wrong = complaints(replace(drawn, inputs=replace(drawn.inputs, out=None)), results[name])
            if at_the_bound and not torch.equal(results[name].out, results[f"just {name}"].out):
                wrong.append("other bits at the bound")
            found.setdefault(f"{drawn} {name}", []).extend(wrong)
    return found


def _most_tiles(inputs: AttentionInputs, block_n: int) -> int:
    """How many tiles have keys of the longest sequence."""
    x = inputs.tensors
    assert x.cache_seqlens is not None
    pads = torch.zeros_like(x.cache_seqlens) if x.leftpad is None else x.leftpad
    return int((-(-x.cache_seqlens.clamp(min=0) // block_n) - pads // block_n).max())


def _less_than_none(drawn: Drawn) -> Drawn:
    """The call with lengths of -3 in place of 0, which mean the same: past the sequences there must be nothing longer."""
    tensors = drawn.inputs.tensors
    assert tensors.cache_seqlens is not None
    tensors = tensors._replace(cache_seqlens=torch.where(tensors.cache_seqlens == 0, -3, tensors.cache_seqlens))
    return replace(drawn, inputs=replace(drawn.inputs, tensors=tensors))


def columns() -> dict[str, list[str]]:
    """Calls of so few rows that several programs merge each: what is wrong with each."""
    found, sizes = {}, Sizes(batch=1, heads_kv=1, group=4, queries=1, keys=300, widths=(40, 72))
    for seed in range(4):
        drawn = Draw(seed, torch.device("cpu"), sizes, {"lengths": "ragged", "page": 0, "dtype": "fp32"}).call()
        found[str(drawn)] = complaints(drawn, attend(drawn.inputs, 3))
    return found


def main() -> None:
    """Arguments: the first seed, how many, and as JSON what not to draw; or "grown", "unequal", "ranges" or "columns"."""
    torch.set_num_threads(1)
    alone = {"grown": grown, "unequal": unequal, "ranges": ranges, "columns": columns}.get(sys.argv[1])
    if alone is not None:
        print(json.dumps(alone()))
        return
    first, count = int(sys.argv[1]), int(sys.argv[2])
    only = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    found = {}
    for seed in range(first, first + count):
        drawn = Draw(seed, torch.device("cpu"), TINY, only).call()
        found[str(drawn)] = complaints(drawn, attend(drawn.inputs))
    print(json.dumps(found))


__all__ = ["LARGE", "PLAIN", "TINY", "Draw", "Drawn", "complaints", "reference"]

if __name__ == "__main__":
    main()
