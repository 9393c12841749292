"""Attention of a sequence that is cut over ranks, whose keys and values pass from rank to rank: none ever holds all of them.

In step s of N, rank r has those of rank r - s, and sends them to rank r + 1 meanwhile. Partial results are merged by
log-sum-exp, in fp32 and in the order of the steps. In the backward the gradients of a rank's keys and values travel with them,
in fp32, and are home after N steps. Under a causal mask and in the layout "head_tail" all ranks have equal work in each step:
half of the queries see all keys of a later rank, all queries half of the keys of an earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.front.arguments import of_features
from flashmoe_science.ops.attention.front.backward.choose import choose_backward
from flashmoe_science.ops.attention.front.backward.kernels import FALLBACK
from flashmoe_science.ops.attention.front.backward.operator import OPERATOR
from flashmoe_science.ops.attention.front.flash import packed_view
from flashmoe_science.ops.attention.front.operator import attend
from flashmoe_science.ops.attention.front.pytorch import pytorch_attention
from flashmoe_science.ops.calls import autocast, needs_grad
from flashmoe_science.ops.explain import is_explaining
from flashmoe_science.parallel.agree import once_differentiable, waiting
from flashmoe_science.parallel.layout import Cut

_TOKENS = -3  # the dimension of [batch, tokens, heads, head_dim] and of packed [tokens, heads, head_dim]


class Part(NamedTuple):
    """Queries of this rank that see keys of another, as rows of the two shards; ``causal``: the last query sees the last key.
    ``tokens``: both in the whole sequence, if documents are packed."""

    queries: range
    keys: range
    causal: bool
    tokens: tuple[range, range] | None = None

    def is_first(self) -> bool:
        """Of this rank's own keys: whether it is the first part of its queries. It counts the sinks, which count once."""
        return self.tokens is None or self.tokens[0] == self.tokens[1]


class Ring(NamedTuple):
    """A call, without the tensors that have gradients."""

    cut: Cut
    options: Options
    softmax_scale: float | None
    cu_seqlens: torch.Tensor | None
    max_seqlen: int | None

    def parts(self, rank: int) -> list[Part]:
        """What this rank's queries see of the keys of a rank."""
        causal, me = self.options.mask == "causal", self.cut.group.rank()
        own, theirs = (_with_rows(self.cut.chunks[one]) for one in (me, rank))
        if self.cu_seqlens is not None:  # cumulative lengths need contiguous tokens, as in a chunk
            pairs = [
                Part(rows, keys, causal and chunk == other, (chunk, other))
                for chunk, rows in own for other, keys in theirs if not causal or other.start <= chunk.start
            ]  # fmt: skip
            return sorted(pairs, key=lambda one: not one.is_first())
        queries, keys = [rows for _, rows in own], [rows for _, rows in theirs]
        if causal and rank != me:
            # All of the queries come after some of the keys, or some of the queries after all of the keys.
            before = [rows for chunk, rows in theirs if chunk.start < own[0][0].start]
            after = [rows for chunk, rows in own if chunk.start > theirs[-1][0].start]
            queries, keys = (queries, before) if before else (after, keys)
        if not queries:
            return []
        return [Part(range(queries[0].start, queries[-1].stop), range(keys[0].start, keys[-1].stop), causal and rank == me)]

    def call(self, part: Part, qkv: Sequence[torch.Tensor], sinks: torch.Tensor | None) -> tuple[Tensors, Options]:
        """The attention of a part, of all queries of this rank and all keys of the other; heads come first."""
        q, k, v = (_rows(one, rows) for one, rows in zip(qkv, (part.queries, part.keys, part.keys), strict=True))
        options = self.options._replace(mask="causal" if part.causal else "full", return_lse=True)
        if part.tokens is None:
            return Tensors(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), sinks=sinks), options
        assert self.cu_seqlens is not None
        starts_q, starts_k = (self.cu_seqlens.clamp(one.start, one.stop) - one.start for one in part.tokens)
        most = self.cut.seqlen if self.max_seqlen is None else self.max_seqlen
        options = options._replace(max_seqlen_q=min(most, len(part.queries)), max_seqlen_k=min(most, len(part.keys)))
        return Tensors(packed_view(q), packed_view(k), packed_view(v), starts_q, starts_k, sinks=sinks), options


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, ring: Ring) -> torch.Tensor:
    """The attention of this rank's queries to the whole sequence. Every rank of the group calls it. Differentiable.

    Args:
        q, k, v: this rank's shards, as of ``context_attention``.
        sinks: [heads].

    Raises:
        CannotServe: before anything is sent, if no kernel computes the gradients.
    """
    q, k, v = autocast((q, k, v)) or (q, k, v)
    tensors, options = ring.call(ring.parts(ring.cut.group.rank())[0], (q, k, v), sinks)
    if is_explaining():
        attend(tensors, options, ring.softmax_scale)
    if options.deterministic and needs_grad(q, k, v, sinks):
        for mask in {options.mask, "full"}:
            choose_backward(tensors, options._replace(mask=mask))
    out: torch.Tensor = _Ring.apply(q, k, v, sinks, ring)  # type: ignore[no-untyped-call]
    return out


def _with_rows(chunks: list[range]) -> list[tuple[range, range]]:
    """Each chunk of a shard, and its rows in the shard."""
    found, first = [], 0
    for chunk in chunks:
        found.append((chunk, range(first, first + len(chunk))))
        first += len(chunk)
    return found


def _rows(x: torch.Tensor, rows: range) -> torch.Tensor:
    return x.narrow(_TOKENS, rows.start, len(rows))


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# What passes round ------------------------------------------------------------------------------------------------------------


class _Coming(NamedTuple):
    """Tensors on their way from the previous rank, and those sent to the next."""

    group: dist.ProcessGroup
    tensors: list[torch.Tensor]
    sent: list[torch.Tensor]
    works: list[dist.Work]

    def arrived(self) -> list[torch.Tensor]:
        with waiting(self.group, "passing keys and values round"):
            for work in self.works:
                work.wait()
        return self.tensors


def _passed(cut: Cut, sent: list[torch.Tensor], rank: int) -> _Coming:
    """Send tensors [..., tokens, heads, head_dim] to the next rank, and receive such ones, of the tokens of ``rank``."""
    group, me, ranks = cut.group, cut.group.rank(), cut.group.size()
    tokens = sum(map(len, cut.chunks[rank]))
    taken = [one.new_empty(*one.shape[:_TOKENS], tokens, *one.shape[_TOKENS + 1 :]) for one in sent]
    messages = [dist.P2POp(dist.isend, one, group=group, group_peer=(me + 1) % ranks) for one in sent]
    messages += [dist.P2POp(dist.irecv, one, group=group, group_peer=(me - 1) % ranks) for one in taken]
    with waiting(group, "passing keys and values round"):
        return _Coming(group, taken, sent, dist.batch_isend_irecv(messages))


def _merge(total: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, of_out: torch.Tensor, first: bool) -> None:
    """Add a part's result [..., tokens, heads, head_dim] and log-sum-exp [..., heads, tokens] to those of the parts before;
    ``first``: there are none."""
    if first:
        total.copy_(out)
        lse.copy_(of_out)
        return
    both = torch.logaddexp(lse, of_out.to(lse.dtype))
    finite = torch.where(both == -torch.inf, 0.0, both)
    before, weight = (torch.exp(one - finite).to(total.dtype).transpose(-1, -2)[..., None] for one in (lse, of_out))
    total.mul_(before).addcmul_(out, weight)
    lse.copy_(both)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, ring: Ring
    ) -> torch.Tensor:
        me, ranks = ring.cut.group.rank(), ring.cut.group.size()
        total = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=_wide(q))
        # In fp64, as an fp32 one of some 8 is off by 5e-7, which is a weight's error, once more in each step.
        lse = q.new_empty(*q.shape[:_TOKENS], q.shape[-2], q.shape[_TOKENS], dtype=torch.float64)
        block = [k.contiguous(), v.contiguous()]
        for step in range(ranks):
            coming = _passed(ring.cut, block, (me - step - 1) % ranks) if step + 1 < ranks else None
            for part in ring.parts((me - step) % ranks):
                first, rows = step == 0 and part.is_first(), part.queries
                tensors, options = ring.call(part, (q, *block), sinks if first else None)
                found, of_found = attend(tensors, options, ring.softmax_scale)
                assert of_found is not None
                _merge(_rows(total, rows), lse[..., rows.start : rows.stop], found, of_found, first)
            if coming is not None:
                block = coming.arrived()
        out = total.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        ring, (q, k, v, sinks, out, lse) = ctx.ring, ctx.saved_tensors
        me, ranks = ring.cut.group.rank(), ring.cut.group.size()
        dq = torch.zeros_like(q, dtype=_wide(q))
        dsinks = q.new_zeros(q.shape[-2], dtype=_wide(q))
        block, back, totals = [k.contiguous(), v.contiguous()], None, []
        for step in range(ranks):
            coming = _passed(ring.cut, block, (me - step - 1) % ranks) if step + 1 < ranks else None
            found = []
            for part in ring.parts((me - step) % ranks):
                of_part = sinks if step == 0 and part.is_first() else None
                made = _gradients(ring, part, (q, *block), of_part, out, lse, dout)
                _rows(dq, part.queries).add_(made[0])
                found.append((part.keys, made[1:3]))
                if of_part is not None:
                    dsinks.add_(made[3])
            totals = [torch.zeros_like(one, dtype=_wide(one)) for one in block] if back is None else back.arrived()
            for keys, gradients in found:
                for total, one in zip(totals, gradients, strict=True):
                    _rows(total, keys).add_(one)
            back = _passed(ring.cut, totals, (me - step - 1) % ranks) if ranks > 1 else None
            if coming is not None:
                block = coming.arrived()
        dk, dv = totals if back is None else back.arrived()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None if sinks is None else dsinks.to(sinks.dtype), None


# The gradients of a part -----------------------------------------------------------------------------------------------------


def _gradients(
    ring: Ring, part: Part, qkv: Sequence[torch.Tensor], sinks: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients of a part's queries, keys, values and sinks, from the merged results. Our kernels take these as they are: a
    key's weight is exp(score - lse)."""
    tensors, options = ring.call(part, qkv, sinks)
    packed = part.tokens is not None
    rows = slice(part.queries.start, part.queries.stop)
    out, dout = (
        packed_view(one) if packed else one.transpose(1, 2) for one in (_rows(one, part.queries) for one in (out, dout))
    )
    lse = lse[None, ..., rows] if packed else lse[..., rows]
    kernel = choose_backward(tensors, options).kernel
    if kernel == FALLBACK:
        made = _by_autograd(tensors, options, ring.softmax_scale, out, lse, dout)
    else:
        wanted, rest = [True, True, True, sinks is not None, False], of_features(tensors, options)
        made = OPERATOR(dout, None, *tensors[:3], out, lse.float(), wanted, options.mask, ring.softmax_scale, kernel, *rest)
    return [*(one[0].transpose(0, 1) if packed else one.transpose(1, 2) for one in made[:3]), *made[3:]]


def _by_autograd(
    tensors: Tensors, options: Options, scale: float | None, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """By PyTorch's operators, which compute the part again: its result has the share exp(its lse - lse) of the whole."""
    leaves = [None if one is None else one.detach().requires_grad_() for one in (*tensors[:3], tensors.sinks)]
    q, k, v, sinks = leaves
    with torch.enable_grad():
        found, of_found = pytorch_attention(tensors._replace(q=q, k=k, v=v, sinks=sinks), options, scale)  # type: ignore[arg-type]
    assert of_found is not None
    share = torch.where(lse == -torch.inf, 0.0, torch.exp(of_found.detach() - lse)).to(_wide(found))
    of_lse = share * ((found.detach() - out).to(share.dtype) * dout).sum(-1)
    into = (found, (share[..., None] * dout).to(found.dtype)), (of_found, of_lse.to(of_found.dtype))
    seen = [one for one in into if one[0].requires_grad]  # a log-sum-exp is constant where no document has keys here
    results, gradients = zip(*seen, strict=True)
    given = [one for one in leaves if one is not None]
    return torch.autograd.grad(results, given, gradients, materialize_grads=True)
