"""How a sequence is cut into chunks over the ranks of a group; a rank has one or two."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashmoe_science.ops.attention.call.checks import check_table
from flashmoe_science.ops.attention.call.lengths import Lengths, check_lengths
from flashmoe_science.ops.attention.call.tensors import ArgNames
from flashmoe_science.ops.checks import check_count, checked_tensor
from flashmoe_science.parallel.agree import compares
from flashmoe_science.printable import shown

Layout = Literal["head_tail", "contiguous"]


class Cut(NamedTuple):
    """A sequence over the ranks of a group: the tokens of each rank's chunks, in the order in which its shard holds them."""

    group: dist.ProcessGroup
    seqlen: int
    chunks: list[list[range]]

    def own(self) -> list[range]:
        return self.chunks[self.group.rank()]

    def sizes(self) -> list[int]:
        """How many tokens each chunk of this rank has."""
        return [len(chunk) for chunk in self.own()]


def cut(seqlen: int, group: object, layout: str) -> Cut:
    """The cut of ``seqlen`` tokens. Of M chunks, chunk i has the tokens from i * seqlen // M to (i + 1) * seqlen // M.
    ``layout``: "head_tail": 2N chunks, rank r has r and 2N - 1 - r, so that all N ranks have equal work under a causal mask;
    "contiguous": N chunks. Raises TypeError, ValueError: no group that this rank is in, an unknown layout, fewer tokens than
    chunks."""
    ranks = process_group(group)
    if layout not in get_args(Layout):
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(get_args(Layout))}")
    count = ranks.size() * (2 if layout == "head_tail" else 1)
    check_count(seqlen, "seqlen", 0)
    if seqlen < count:
        raise ValueError(f"seqlen is {seqlen}; {layout!r} cuts it into {count} chunks, each of at least one token")
    chunks = [range(i * seqlen // count, (i + 1) * seqlen // count) for i in range(count)]
    if layout == "contiguous":
        return Cut(ranks, seqlen, [[chunk] for chunk in chunks])
    return Cut(ranks, seqlen, [[chunks[rank], chunks[-1 - rank]] for rank in range(ranks.size())])


def cut_of_shard(tokens: int, seqlen: int | None, group: object, layout: str) -> Cut:
    """The cut of a sequence whose shard on this rank has ``tokens``. ``seqlen``: of the whole sequence; None if all chunks are
    equally long. Raises TypeError, ValueError: as ``cut``, or a shard that this rank cannot have."""
    ranks = process_group(group)
    found = cut(tokens * ranks.size() if seqlen is None else seqlen, ranks, layout)
    if seqlen is None and len({len(chunk) for chunks in found.chunks for chunk in chunks}) > 1:
        raise ValueError(
            f"a shard has {tokens} tokens, which its {len(found.own())} chunks do not divide; seqlen must be given"
        )
    if tokens != sum(found.sizes()):
        held = (
            f"of seqlen {seqlen} in the layout {layout!r} rank {ranks.rank()} of {ranks.size()} must have {sum(found.sizes())}"
        )
        raise ValueError(f"a shard has {tokens} tokens; {held}")
    return found


def process_group(group: object) -> dist.ProcessGroup:
    """The group, or that of a 1-D DeviceMesh. Raises TypeError: neither, or a group that this rank is not in. Raises
    ValueError: a mesh of more dimensions."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group is a DeviceMesh of {group.ndim} dimensions; it must have 1, as mesh[name] has")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {group!r}; it must be a ProcessGroup that this rank is in, or a 1-D DeviceMesh")
    return group


def check_documents(cu_seqlens: torch.Tensor, seqlen: int, max_seqlen: int | None = None) -> None:
    """Raise ValueError unless documents begin at 0, never fall and end at ``seqlen``, none longer than ``max_seqlen``. The host
    waits."""
    starts = cu_seqlens.cpu()
    if not len(starts):
        raise ValueError("cu_seqlens has 0 entries; it must have one more than there are documents")
    if (last := int(starts[-1])) != seqlen:
        raise ValueError(f"cu_seqlens ends at {last}; it must be of the whole sequence and end at {seqlen}")
    check_lengths(Lengths(starts, tokens_q=seqlen, names=ArgNames(cu_seqlens_q="cu_seqlens")))
    for n, length in enumerate(starts.diff().tolist()):
        if max_seqlen is not None and length > max_seqlen:
            raise ValueError(f"max_seqlen is {max_seqlen} and document {n} has {length} tokens; it must be at least as many")


def length_of(x: torch.Tensor, dim: int) -> int:
    """The length of a dimension. Raises TypeError, ValueError: no tensor, or no dimension of that number."""
    checked_tensor("x", x)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim is {shown(dim)}; it must be an integer")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is {dim}; x has {x.dim()} dimensions")
    return x.shape[dim]


def shard(x: torch.Tensor, dim: int, group: object, layout: str = "head_tail") -> torch.Tensor:
    """This rank's tokens of ``x``, which holds the whole sequence in dimension ``dim``; never padding. Differentiable.

    Args:
        group: a ProcessGroup or a 1-D DeviceMesh.
        layout: "head_tail": of 2N chunks rank r has r and 2N - 1 - r; "contiguous": one chunk a rank.

    Raises:
        TypeError, ValueError: no group that this rank is in, an unknown layout, fewer tokens than chunks, no such dimension.
    """
    chunks = cut(length_of(x, dim), group, layout).own()
    return torch.cat([x.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)


def positions(
    seqlen: int,
    group: object,
    layout: str = "head_tail",
    *,
    cu_seqlens: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The positions of this rank's tokens, int64, for a rotary embedding of its shard.

    Args:
        seqlen, group, layout: as of ``shard``.
        cu_seqlens: int32 [documents + 1], as of ``context_attention``; positions begin at 0 in each document.
        device: by default that of ``cu_seqlens``.

    Raises:
        TypeError, ValueError: as ``shard``; on the CPU also documents that do not fill ``seqlen`` tokens.
    """
    check_count(seqlen, "seqlen", 0)
    if cu_seqlens is not None:
        check_table(cu_seqlens, "cu_seqlens", (None,), cu_seqlens)
        if compares(cu_seqlens) and not cu_seqlens.is_meta:
            check_documents(cu_seqlens, seqlen)
    own = shard(torch.arange(seqlen, device=device if cu_seqlens is None else cu_seqlens.device), 0, group, layout)
    if cu_seqlens is not None:
        own = own - cu_seqlens[torch.searchsorted(cu_seqlens, own, right=True) - 1]
    return own
