"""Exact attention of a sequence that is cut over ranks: keys and values are fetched, and each chunk of queries is one call.

A chunk of queries needs the keys up to its last token, or with a window those near it. They are fetched in the order of the
sequence: nothing is merged or rounded again. Or shards are exchanged for heads, and there is one call.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.call.checks import check_argument, check_table, checked_scale
from flashmoe_science.ops.attention.call.tensors import ArgNames, Options, Tensors
from flashmoe_science.ops.attention.front.flash import check_dimensions, checked_cap, mask_of, packed_view, window_of
from flashmoe_science.ops.attention.front.operator import attend
from flashmoe_science.ops.calls import is_plain, needs_grad
from flashmoe_science.ops.checks import check_count, check_flag
from flashmoe_science.ops.explain import Explained, is_explaining
from flashmoe_science.parallel.agree import agreed, compares
from flashmoe_science.parallel.choose import Exchange, Exchanges, Window
from flashmoe_science.parallel.copies import ContextWorkspace, sizes_of
from flashmoe_science.parallel.exchange import fetch
from flashmoe_science.parallel.heads import to_heads, to_tokens
from flashmoe_science.parallel.layout import Cut, check_documents, cut_of_shard, process_group
from flashmoe_science.parallel.ring import Ring, ring_attention

_NAMES = ArgNames(sinks="s_aux", cu_seqlens_q="cu_seqlens", cu_seqlens_k="cu_seqlens")


def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: object,
    layout: str = "head_tail",
    exchange: str = "auto",
    seqlen: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    s_aux: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    deterministic: bool = True,
    workspace: ContextWorkspace | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to the whole sequence. Every rank of the group calls it, with the same options.

    The result is that of ``flash_attn_func``, or ``flash_attn_varlen_func``, of the whole sequence up to rounding: a chunk may
    get other tiles than the whole. Equal calls give equal bits. Fetched keys and values are kept for the backward; under
    torch.utils.checkpoint they are fetched again. torch.compile cannot trace the call: put it in a function under
    torch.compiler.disable.

    Args:
        q, k, v: this rank's tokens, as ``shard`` gives them: [batch, tokens, heads, head_dim], or with ``cu_seqlens`` [tokens,
            heads, head_dim]. k and v may have fewer heads, v another head_dim. Rotary embeddings come before, at ``positions``.
        group: a ProcessGroup or a 1-D DeviceMesh.
        layout: how the sequence is cut: "head_tail", which gives ranks equal work under a causal mask, or "contiguous".
        exchange: "keys": each rank fetches the keys that its queries need. "heads" (Ulysses): ranks exchange their shards for
            all tokens of some heads, and the results back; N must divide the numbers of heads. "auto": "heads" if N divides
            them, a rank then receives fewer bytes and there is no workspace, else "keys". "ring": keys and values pass from
            rank to rank, and partial results are merged in fp32, with other bits than one process's. It saves memory: no rank
            holds all keys, or keeps other ranks' for the backward. Not for windows. ``explain`` tells bytes and memory.
        seqlen: tokens of the whole sequence; None if all chunks have equally many. No padding is needed.
        softmax_scale, causal, window_size, softcap: as of ``flash_attn_func``. With a window only keys near it are fetched.
        s_aux: [heads], a learned sink, the same on every rank. Its gradient is this rank's part: add it up over the ranks, like
            those of other parameters.
        cu_seqlens: int32 [documents + 1], where each packed document begins in the whole sequence, and its length.
        max_seqlen: no document is longer; by default ``seqlen``.
        deterministic: equal calls give equal bits in the gradients too, on a GPU by our backward; else the call is refused.
            With False PyTorch's backward may serve, on a GPU with a mask of a chunk's queries by its keys.
        workspace: copies keys and values between GPUs of one host, in place of NCCL; those that only the later chunk needs
            arrive while the earlier one is computed. Gradients go by NCCL. Not for ``exchange="heads"``.

    Returns:
        out in the shape of q with the width of v.

    Raises:
        TypeError, ValueError: an argument that is not allowed. On the CPU, and with FLASHMOE_CHECK=1 in the environment, each
            call compares the arguments of all ranks, and all raise; else a rank may raise alone, or wait forever.
    """
    ranks, checked = process_group(group), compares(q)
    with agreed(ranks, checked) as facts:
        options = _options(q, k, v, causal, window_size, softcap, cu_seqlens, deterministic)
        call = _Call(options, softmax_scale, s_aux, cu_seqlens, max_seqlen, exchange, workspace)
        cut = cut_of_shard(q.shape[-3], seqlen, ranks, layout)
        _check_shards(q, k, v, call, cut, checked)
        facts |= _facts(q, k, v, call, layout, seqlen) if checked else {}
    needed = [[_keys(chunk, cut.seqlen, options) for chunk in chunks] for chunks in cut.chunks]
    exchanges = Exchanges((q, k, v), cut, needed, workspace)
    try:
        if q.is_meta and is_explaining():
            raise Explained(
                Decision("context_attention", Config(), "tensors on meta, for which no kernel is chosen", "modelled")
            )
        chosen, _ = exchanges.chosen(exchange)
        if chosen == "ring":
            return ring_attention(q, k, v, s_aux, Ring(cut, options, softmax_scale, cu_seqlens, max_seqlen))
        if chosen == "heads":
            return _by_heads(q, k, v, call, cut)
        return _by_keys(q, k, v, call, cut, needed)
    except Explained as found:
        window = None if cu_seqlens is not None else _window(options)
        raise Explained(exchanges.explained(found.decision, exchange, window)) from None


class _Call(NamedTuple):
    """What is the same for every chunk of a call."""

    options: Options
    softmax_scale: float | None
    sinks: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    max_seqlen: int | None
    exchange: str
    workspace: ContextWorkspace | None


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, heads, head_dim] as [tokens, batch, heads, head_dim], and back; packed tokens as they are."""
    return x.transpose(0, 1) if x.dim() == 4 else x


def _window(options: Options) -> Window:
    return options.window_left, 0 if options.mask == "causal" else options.window_right


def _keys(chunk: range, seqlen: int, options: Options) -> range:
    """The keys that a chunk of queries needs."""
    left, right = _window(options)
    first = 0 if left is None else max(0, chunk.start - left)
    return range(first, seqlen if right is None else min(seqlen, chunk.stop + right))


def _new_output(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call) -> torch.Tensor | None:
    """The result, into which chunks are written; None if they are joined instead: for gradients, under autocast, and if a chunk
    of the result is not contiguous."""
    joined = needs_grad(q, k, v, call.sinks) or torch.is_autocast_enabled(q.device.type) or not is_plain(q, k, v)
    dense = q.is_contiguous() and (q.dim() == 3 or q.shape[0] == 1)
    return None if joined or not dense else q.new_empty(*q.shape[:-1], v.shape[-1])


def _attend(
    chunk: range, keys: range, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The attention of a chunk of queries to its keys, tokens first; in ``out`` if given."""
    options, starts = call.options, call.cu_seqlens
    windowed = options.window_left is not None or options.window_right is not None
    # A window counts from the last key: queries are padded up to it, and their results dropped.
    behind = keys.stop - chunk.stop if windowed else 0
    q = F.pad(q, (0, 0, 0, 0, 0, behind)) if behind else q
    if starts is None:
        tensors = Tensors(q.transpose(1, 2), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3), sinks=call.sinks)
    else:
        # A document's keys end with its queries of this chunk. Documents of other chunks have no queries.
        starts_q = starts.clamp(chunk.start, chunk.stop + behind) - chunk.start
        starts_k = starts.clamp(keys.start, keys.stop) - keys.start
        tensors = Tensors(packed_view(q), packed_view(k), packed_view(v), starts_q, starts_k, sinks=call.sinks)
        most = k.shape[0] if call.max_seqlen is None else call.max_seqlen
        options = options._replace(max_seqlen_q=min(most, q.shape[0]), max_seqlen_k=min(most, k.shape[0]))
    place = out if out is not None and not behind and out.data_ptr() % 16 == 0 else None
    found = attend(tensors, options, call.softmax_scale, out=place)[0]
    found = found.narrow(-3, 0, len(chunk)) if behind else found
    return found if out is None or found is out else out.copy_(found)


def _by_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call, cut: Cut, needed: list[list[range]]
) -> torch.Tensor:
    """The attention of each of this rank's chunks to the keys that it needs."""
    of_k, of_v = fetch([_tokens_first(k), _tokens_first(v)], cut, needed, call.workspace)
    whole, queries = _new_output(q, k, v, call), q.split(cut.sizes(), -3)
    parts = queries if whole is None else whole.split(cut.sizes(), -3)
    found = []
    for n, (chunk, keys) in enumerate(zip(cut.own(), needed[cut.group.rank()], strict=True)):
        if call.workspace is not None:
            call.workspace.wait(keys)
        found.append(_attend(chunk, keys, queries[n], of_k[n], of_v[n], call, None if whole is None else parts[n]))
    return torch.cat(found, -3) if whole is None else whole


def _by_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call, cut: Cut) -> torch.Tensor:
    """Attention of all tokens in this rank's heads, returned as this rank's tokens in all heads."""
    sinks, heads, whole = call.sinks, q.shape[-2] // cut.group.size(), range(cut.seqlen)
    call = call._replace(sinks=None if sinks is None else sinks.narrow(0, cut.group.rank() * heads, heads))
    of_q, of_k, of_v = (to_heads(_tokens_first(one), cut) for one in (q, k, v))
    out = _attend(whole, whole, _tokens_first(of_q), of_k, of_v, call)
    return _tokens_first(to_tokens(_tokens_first(out), cut))


def _options(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window_size: tuple[int, int], softcap: float,
    cu_seqlens: torch.Tensor | None, deterministic: bool,
) -> Options:  # fmt: skip
    """The options. Raises unless they and the dimensions of the tensors are right."""
    packed = cu_seqlens is not None
    dimensions = ("tokens, heads, head_dim", 3) if packed else ("batch, tokens, heads, head_dim", 4)
    check_dimensions((("q", q), ("k", k), ("v", v)), (dimensions,) * 3)
    left, right = window_of(window_size, causal)
    check_flag(deterministic, "deterministic")
    check_table(cu_seqlens, "cu_seqlens", (None,), q)
    return Options(
        mask_of(causal), window_left=left, window_right=right, softcap=checked_cap(softcap), num_splits=int(packed),
        deterministic=deterministic and q.device.type != "cpu",  # PyTorch's operators on the CPU always are
        tokens_first=True, names=_NAMES,
    )  # fmt: skip


def _check_shards(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call, cut: Cut, checked: bool) -> None:
    for name, one in (("k", k), ("v", v)):
        if one.shape[:-2] != q.shape[:-2]:
            raise ValueError(f"{name} has shape {tuple(one.shape)} and q {tuple(q.shape)}; they must have the same tokens")
    if call.exchange not in ("auto", *get_args(Exchange)):
        raise ValueError(f"exchange is {call.exchange!r}; it must be one of auto, {', '.join(get_args(Exchange))}")
    if call.exchange == "ring" and not call.options.window_left is call.options.window_right is None:
        raise ValueError("exchange is 'ring' and there is a window; it must be 'keys', which receives those near it alone")
    ranks = cut.group.size()
    if call.workspace is not None:
        _check_workspace(call.workspace, k, v, call, cut)
    for name, one in (("q", q), ("k", k), ("v", v)):
        if checked and one.is_meta:
            raise ValueError(f"{name} is on device meta; it must be on a CPU or a CUDA device")
        if call.exchange == "heads" and one.shape[-2] % ranks:
            raise ValueError(
                f"exchange is 'heads', and {name} has {one.shape[-2]} heads; they must be a multiple of {ranks} ranks"
            )
    checked_scale(call.softmax_scale, "softmax_scale")
    if call.sinks is not None:
        check_argument(call.sinks, "s_aux", (q.shape[-2],), q, (torch.float32, q.dtype))
    if call.max_seqlen is not None:
        check_count(call.max_seqlen, "max_seqlen", 0)
    if checked and call.cu_seqlens is not None:
        check_documents(call.cu_seqlens, cut.seqlen, call.max_seqlen)


def _check_workspace(workspace: object, k: torch.Tensor, v: torch.Tensor, call: _Call, cut: Cut) -> None:
    if not isinstance(workspace, ContextWorkspace):
        raise TypeError(f"workspace is {workspace!r}; it must be a ContextWorkspace or None")
    if call.exchange in ("heads", "ring"):
        raise ValueError(f"workspace is given and exchange is {call.exchange!r}; it must be 'keys' or 'auto'")
    if (ranks := dist.get_process_group_ranks(workspace.group)) != dist.get_process_group_ranks(cut.group):
        raise ValueError(f"workspace is of a group of ranks {ranks}, and group is another")
    if (size := sum(sizes_of([_tokens_first(k), _tokens_first(v)], cut))) > workspace.max_bytes:
        raise ValueError(f"k and v take {size} bytes on a rank; the workspace is for at most {workspace.max_bytes}")


def _facts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call, layout: str, seqlen: int | None
) -> dict[str, object]:
    """What must be the same on every rank, by name: else messages do not fit, or ranks compute different things."""
    facts: dict[str, object] = {"layout": layout, "exchange": call.exchange, "seqlen": seqlen}
    facts["workspace is None"] = call.workspace is None
    if seqlen is None:
        facts["the number of tokens of a shard without seqlen"] = q.shape[-3]
    for name, one in (("q", q), ("k", k), ("v", v)):
        facts[f"{name}.dtype"] = str(one.dtype)
        facts[f"the shape of {name} but for its tokens"] = (*one.shape[:-3], *one.shape[-2:])
        facts[f"{name}.requires_grad"] = one.requires_grad
    names = ("mask", "window_left", "window_right", "softcap", "deterministic")
    facts.update({name: getattr(call.options, name) for name in names})
    facts |= {"softmax_scale": call.softmax_scale, "s_aux is None": call.sinks is None, "max_seqlen": call.max_seqlen}
    facts["s_aux.requires_grad"] = call.sinks is not None and call.sinks.requires_grad
    kind = q.device.type  # under autocast other bytes travel
    facts["the dtype of torch.autocast"] = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
    facts["cu_seqlens"] = None if call.cu_seqlens is None else call.cu_seqlens.tolist()
    return facts
