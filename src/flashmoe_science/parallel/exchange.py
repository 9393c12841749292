"""Tokens of a sequence that is cut over ranks, fetched from the ranks that have them; gradients go back and are added up there.

Messages go from rank to rank, straight into place: the lengths determine which rank needs what from which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_science.ops.explain import is_explaining
from flashmoe_science.parallel.agree import agreed, compares, once_differentiable, waiting
from flashmoe_science.parallel.copies import ContextWorkspace
from flashmoe_science.parallel.layout import Cut, cut_of_shard, length_of, process_group

Tensors = Sequence[torch.Tensor]


def unshard(x: torch.Tensor, dim: int, group: object, layout: str = "head_tail", *, seqlen: int | None = None) -> torch.Tensor:
    """The whole sequence from the shards ``x``, cut in dimension ``dim``, on every rank.

    Differentiable: the gradient of a token is the sum of all ranks' gradients of it.

    Args:
        group, layout: as of ``shard``.
        seqlen: of the whole sequence; None if all chunks have equally many tokens.

    Raises:
        TypeError, ValueError: as ``shard``, or a shard that this rank cannot have. On the CPU, and with FLASHMOE_CHECK=1 in the
            environment, each call compares the arguments of all ranks, and all raise.
    """
    ranks = process_group(group)
    with agreed(ranks, compares(x)) as facts:
        found = cut_of_shard(length_of(x, dim), seqlen, ranks, layout)
        shape = x.movedim(dim, 0).shape[1:]
        facts |= {"layout": layout, "seqlen": found.seqlen, "x.dtype": str(x.dtype), "the other dimensions of x": tuple(shape)}
        facts |= {"x.requires_grad": x.requires_grad, "x.device.type": x.device.type}
    ((whole,),) = fetch((x.movedim(dim, 0),), found, [[range(found.seqlen)]] * len(found.chunks))
    return whole.movedim(0, dim)


def fetch(
    shards: Tensors, held: Cut, wanted: list[list[range]], workspace: ContextWorkspace | None = None
) -> list[list[torch.Tensor]]:
    """The tokens that this rank wants: for each shard, one tensor for each range. Every rank of the group calls it.

    Differentiable. The gradients of a token are added up in fp32, in the order of the ranks that wanted it: equal calls give
    equal bits.

    Args:
        shards: this rank's, [tokens, ...].
        wanted: of each rank, none empty. Overlaps of a rank's ranges are fetched once.
        workspace: what copies the tokens in place of messages; its ``wait`` must be called for each range before it is read.
    """
    flat = _Fetch.apply(held, wanted, workspace, *shards)  # type: ignore[no-untyped-call]
    count = len(wanted[held.group.rank()])
    return [list(flat[first : first + count]) for first in range(0, len(flat), count)]


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, held: Cut, wanted: list[list[range]], workspace: ContextWorkspace | None, *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = held, wanted
        in_order = [joined(ranges) for ranges in wanted]
        own = in_order[held.group.rank()]
        buffers = [[shard.new_empty(len(one), *shard.shape[1:]) for one in own] for shard in shards]
        if is_explaining():
            pass
        elif workspace is not None:
            workspace.start(shards, held, own, buffers)
        else:
            chunks = [shard.contiguous().split(held.sizes()) for shard in shards]
            _move(
                held.group, held.chunks, in_order,
                lambda n, rows: [_rows(of[n], rows) for of in chunks],
                lambda n, rows: [_rows(of[n], rows) for of in buffers],
            )  # fmt: skip
        return tuple(_found(of, own, one) for of in buffers for one in wanted[held.group.rank()])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        held, wanted = ctx.call
        count = len(wanted[held.group.rank()])
        of_shards = [gradients[first : first + count] for first in range(0, len(gradients), count)]
        parts: list[tuple[int, range, Tensors]] = []

        def take(n: int, rows: range) -> Tensors:
            parts.append((n, rows, [of[0].new_empty(len(rows), *of[0].shape[1:]) for of in of_shards]))
            return parts[-1][2]

        _move(held.group, wanted, held.chunks, lambda n, rows: [_rows(of[n], rows).contiguous() for of in of_shards], take)
        found = []
        for i, (first, *_) in enumerate(of_shards):
            exact = torch.promote_types(first.dtype, torch.float32)
            total = first.new_zeros(sum(held.sizes()), *first.shape[1:], dtype=exact)
            chunks = total.split(held.sizes())
            for n, rows, part in parts:
                _rows(chunks[n], rows).add_(part[i])
            found.append(total.to(first.dtype))
        return None, None, None, *found


def joined(ranges: list[range]) -> list[range]:
    """The ranges in order, those that overlap or touch as one."""
    found: list[range] = []
    for one in sorted(ranges, key=lambda each: each.start):
        if found and one.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, one.stop))
        else:
            found.append(one)
    return found


def _found(buffers: Tensors, held: list[range], wanted: range) -> torch.Tensor:
    """The part of the buffers that is ``wanted``."""
    n = next(n for n, one in enumerate(held) if one.start <= wanted.start < one.stop)
    return _rows(buffers[n], range(wanted.start - held[n].start, wanted.stop - held[n].start))


def _rows(tensor: torch.Tensor, rows: range) -> torch.Tensor:
    return tensor[rows.start : rows.stop]


def _move(
    group: dist.ProcessGroup,
    sources: list[list[range]],
    targets: list[list[range]],
    give: Callable[[int, range], Tensors],
    take: Callable[[int, range], Tensors],
) -> None:
    """Copy the overlaps of ``sources`` with ``targets``, both ranges by rank, from source to target.

    Two ranks enumerate the same ranges in the same order, which matches their messages. ``give``, ``take``: the number of a
    range of this rank, rows within it -> contiguous tensors to send, or to receive into.
    """
    me, messages = group.rank(), []
    for rank in range(group.size()):
        given = [
            each for n, one in enumerate(sources[me]) for other in targets[rank]
            if (rows := _common(one, other)) for each in give(n, rows)
        ]  # fmt: skip
        taken = [
            each for other in sources[rank] for n, one in enumerate(targets[me])
            if (rows := _common(one, other)) for each in take(n, rows)
        ]  # fmt: skip
        if rank == me:
            for place, each in zip(taken, given, strict=True):
                place.copy_(each)
        else:
            messages += [dist.P2POp(dist.isend, each, group=group, group_peer=rank) for each in given]
            messages += [dist.P2POp(dist.irecv, each, group=group, group_peer=rank) for each in taken]
    with waiting(group, "fetching tokens of the others"):
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()


def _common(one: range, other: range) -> range:
    """What two ranges have in common, counted from the start of ``one``."""
    return range(max(one.start, other.start) - one.start, min(one.stop, other.stop) - one.start)
