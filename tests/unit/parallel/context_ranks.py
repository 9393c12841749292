"""One rank of several: the cases of context attention, held to one process's call of the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from flashmoe_science import checkpoint_context, flash_attn_varlen_func, flash_attn_with_kvcache
from flashmoe_science.measure.tolerance import check_output, expected
from flashmoe_science.parallel import ContextWorkspace, context_attention, positions, shard, unshard
from flashmoe_science.parallel.agree import agreed

Tensors = tuple[torch.Tensor, ...]


class Case(NamedTuple):
    seqlen: int
    layout: str = "head_tail"
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    documents: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    batch: int = 1
    exchange: str = "auto"
    heads: tuple[int, int] = (4, 2)

    def cu_seqlens(self) -> torch.Tensor | None:
        return torch.tensor([0, *self.documents]).cumsum(0, dtype=torch.int32) if self.documents else None

    def inputs(self) -> Tensors:
        """q, k, v, the gradient of the output and the sinks, the same on every rank; groups of heads, v narrower."""
        draw = torch.Generator().manual_seed(self.seqlen)
        lead = (self.seqlen,) if self.documents else (self.batch, self.seqlen)
        heads, keys = self.heads
        shapes = [(*lead, heads, 16), (*lead, keys, 16), (*lead, keys, 8), (*lead, heads, 8), (heads,)]
        return tuple(torch.randn(shape, generator=draw, dtype=torch.float64).to(self.dtype) for shape in shapes)

    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "window_size": self.window_size, "softcap": self.softcap}


CASES = {
    "even": Case(32, batch=2),
    "odd": Case(37, batch=2),
    "contiguous": Case(37, "contiguous"),
    "full": Case(37, causal=False, batch=2),
    "window": Case(61, window_size=(5, 0), batch=2),
    "wide window": Case(37, window_size=(30, 0)),
    "window on both sides": Case(61, causal=False, window_size=(4, 3), batch=2),
    "window to the right": Case(37, "contiguous", False, (-1, 2)),
    "sinks and soft cap": Case(37, softcap=3.0, sinks=True, batch=2),
    "packed": Case(48, documents=(3, 1, 20, 0, 13, 11)),
    "packed, one document": Case(37, "contiguous", documents=(37,)),
    "packed, full": Case(48, causal=False, documents=(30, 5, 13)),
    "packed, window, sinks": Case(48, window_size=(6, 0), sinks=True, documents=(30, 5, 13)),
    "packed, window on both sides": Case(48, causal=False, window_size=(6, 2), documents=(30, 5, 13)),
    "bf16": Case(200, dtype=torch.bfloat16),
    "fp32": Case(200, dtype=torch.float32),
}
BY_HEADS = ("odd", "contiguous", "full", "window on both sides", "sinks and soft cap", "packed, window, sinks", "bf16", "fp32")
CHOSEN = ("odd", "full", "sinks and soft cap", "bf16", "fp32")  # by heads where a rank receives fewer bytes so


def whole(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """One process's call."""
    cu_seqlens = case.cu_seqlens()
    if cu_seqlens is None:
        return flash_attn_with_kvcache(q, k, v, s_aux=sinks, **case.options())
    longest = max(case.documents)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, s_aux=sinks, **case.options())


def with_gradients(call: Callable[..., torch.Tensor], inputs: Tensors, sinks: bool) -> Tensors:
    """The output, and the gradients of q, k, v and the sinks."""
    *qkv, gradient, sink = inputs
    leaves = [one.detach().requires_grad_() for one in (*qkv, *[sink] * sinks)]
    out = call(*leaves, *[None] * (not sinks))
    return out, *torch.autograd.grad(out, leaves, gradient)


def faults(case: Case, group: dist.ProcessGroup, attention: Callable[..., torch.Tensor] | None = None) -> list[str]:
    """What is wrong with this rank's results. Those by heads have one process's bits.

    Args:
        attention: in place of context attention, of this rank's q, k, v and the sinks.
    """
    inputs, given = case.inputs(), {"group": group, "layout": case.layout}

    def ours(*qkvs: torch.Tensor) -> torch.Tensor:
        lengths = {"seqlen": case.seqlen, "cu_seqlens": case.cu_seqlens()}
        if case.exchange == "heads" and case.documents:
            lengths["max_seqlen"] = max(case.documents)  # as one process is given
        return context_attention(*qkvs[:3], s_aux=qkvs[3], exchange=case.exchange, **given, **lengths, **case.options())

    own = (*(shard(one, -3, **given) for one in inputs[:4]), inputs[4])
    got, again = (with_gradients(attention or ours, own, case.sinks) for _ in range(2))
    wrong = [
        f"result {n} has other bits in a second call"
        for n, pair in enumerate(zip(got, again, strict=True))
        if not torch.equal(*pair)
    ]
    for total in got[4:]:
        dist.all_reduce(total, group=group)  # as gradients of parameters are
    by_heads = case.exchange == "heads" or (case.heads == (2 * group.size(), group.size()) and group.size() > 3)
    exact, plain = (with_gradients(lambda *qkvs: whole(case, *qkvs), each, case.sinks) for each in (double(inputs), inputs))
    if by_heads and not torch.equal(got[0], shard(plain[0].detach(), -3, **given)):
        wrong.append("out has other bits than one process's")
    for name, one, reference, usual in zip(("out", "dq", "dk", "dv", "dsinks"), got, exact, plain, strict=False):
        if name != "dsinks":
            reference, usual = (shard(each.detach(), -3, **given) for each in (reference, usual))
        if case.dtype != torch.float64:
            wrong += check_output(name, one.detach(), expected([reference], [usual], None)[0])[1]
        elif not (error := (one - reference).abs().max().item()) < 1e-13:
            wrong.append(f"{name} is off by {error}")
    return wrong


def double(tensors: Tensors) -> Tensors:
    return tuple(one.double() for one in tensors)


def rotated(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """x [batch, tokens, heads, head_dim] by a rotary embedding at the positions."""
    half = x.shape[-1] // 2
    turns = at[:, None, None] * 10.0 ** -torch.arange(half)
    one, other = x.split(half, -1)
    return torch.cat((one * turns.cos() - other * turns.sin(), one * turns.sin() + other * turns.cos()), -1)


def check_positions(group: dist.ProcessGroup) -> list[str]:
    """Rotated shards give what the rotated sequence gives; positions that are not permuted do not."""
    case = Case(37, batch=2)
    q, k, v, *_ = case.inputs()
    right = shard(whole(case, *(rotated(one, torch.arange(37)) for one in (q, k)), v, None), 1, group)

    def error(at: torch.Tensor) -> float:
        own_q, own_k = (rotated(shard(one, 1, group), at) for one in (q, k))
        return float(
            (context_attention(own_q, own_k, shard(v, 1, group), group=group, seqlen=37, causal=True) - right).abs().max()
        )

    own, count = positions(37, group), group.size()
    head_tail = [2 * group.rank(), 2 * group.rank() + 1, 4 * count - 2 * group.rank() - 2, 4 * count - 2 * group.rank() - 1]
    assert positions(4 * count, group).tolist() == head_tail
    wrong = [] if error(own) < 1e-13 else ["positions are wrong"]
    wrong += [] if error(torch.arange(len(own))) > 1e-3 else ["positions that are not permuted are not noticed"]
    starts = torch.tensor([0, 5, 5, 30, 37], dtype=torch.int32)
    of_documents = shard(torch.cat([torch.arange(size) for size in starts.diff().tolist()]), 0, group)
    return wrong if torch.equal(positions(37, group, cu_seqlens=starts), of_documents) else [*wrong, "positions in documents"]


def check_local(group: dist.ProcessGroup) -> list[str]:
    """A shard that attends to itself alone is noticed by this very test."""
    case = CASES["even"]
    found = faults(case, group, lambda q, k, v, sinks: whole(case, q, k, v, sinks))
    return [] if any("out is off" in one for one in found) else ["a local shard used as global is not noticed"]


def check_halo(group: dist.ProcessGroup) -> list[str]:
    """Of a window its keys near are received, and nothing else."""
    received, batch = [], dist.batch_isend_irecv

    def counted(messages: list[dist.P2POp]) -> list[dist.Work]:
        received.append(sum(one.tensor.shape[0] for one in messages if one.op is dist.irecv))
        return batch(messages)

    dist.batch_isend_irecv = counted
    try:
        q = torch.randn(1, 16, 2, 8)
        context_attention(q, q, q, group=group, layout="contiguous", causal=True, window_size=(3, 0))
    finally:
        dist.batch_isend_irecv = batch
    return [] if received == [2 * 3 * (group.rank() > 0)] else [f"{received} rows of keys and values are received"]


def check_unshard(group: dist.ProcessGroup) -> list[str]:
    x = torch.arange(3.0 * 37).view(3, 37).requires_grad_()
    back = unshard(shard(x, 1, group), 1, group, seqlen=37)
    (gradient,) = torch.autograd.grad(back, x, x.detach())
    sums = unshard(shard(gradient, 1, group), 1, group, seqlen=37)
    wrong = [] if torch.equal(back, x) and torch.equal(sums, group.size() * x) else ["unshard is no inverse of shard"]
    # A sum in bf16 would stay at 1.
    parts = torch.tensor([1.0] + [2.0**-8] * (group.size() - 1))
    own = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    (unshard(own, 0, group).sum() * parts[group.rank()]).backward()
    return wrong if torch.equal(own.grad, parts.sum().bfloat16().expand(2)) else [*wrong, "gradients are not added up in fp32"]


def check_without_gradients(group: dist.ProcessGroup) -> list[str]:
    """Chunks are written into one result where no gradient is asked for, and joined elsewhere: the same bits."""
    wrong = []
    for name in ("odd", "contiguous", "packed", "window", "sinks and soft cap"):
        case = CASES[name]._replace(batch=1)
        q, k, v, _, sinks = (one if one.dim() == 1 else shard(one, -3, group, case.layout) for one in case.inputs())
        given = {"group": group, "layout": case.layout, "seqlen": case.seqlen, "cu_seqlens": case.cu_seqlens()}
        call = partial(context_attention, k=k, v=v, s_aux=sinks if case.sinks else None, **given, **case.options())
        wrong += [] if torch.equal(call(q), call(q.clone().requires_grad_())) else [f"{name}: other bits without gradients"]
    return wrong


def check_checkpoint(group: dist.ProcessGroup) -> list[str]:
    """Keys and values are fetched again where activations are not kept, and the gradients have the same bits."""
    inputs = [torch.randn(1, 16, 2, 8, requires_grad=True) for _ in range(3)]

    def block(*qkv: torch.Tensor) -> torch.Tensor:
        return context_attention(*(one * 2.0 for one in qkv), group=group, causal=True)

    wrong = []
    for exchange in ("keys", "heads", "ring"):
        qkv = (one.repeat(1, 1, group.size(), 1) for one in inputs)
        out = context_attention(*qkv, group=group, causal=True, exchange=exchange).sum()
        wrong += refused(partial(torch.autograd.grad, out, inputs, create_graph=True), "create_graph is True; it must be False")
    kept = torch.autograd.grad(block(*inputs).sum(), inputs)
    outs = [checkpoint(block, *inputs, use_reentrant=False, **more) for more in ({}, {"context_fn": checkpoint_context})]
    again = [torch.autograd.grad(out.sum(), inputs) for out in outs]
    return wrong if all(map(torch.equal, [*kept, *kept], [*again[0], *again[1]])) else ["a checkpoint has other gradients"]


def check_groups(group: dist.ProcessGroup) -> list[str]:
    """Groups other than that of all ranks: a mesh, and ranks in an order of their own."""
    world = dist.get_world_size()
    q = torch.randn(1, 16, 2, 8)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("context",))
    alike = [context_attention(q, q, q, group=one, causal=True) for one in (group, mesh)]
    wrong = [] if torch.equal(*alike) else ["a mesh is not its group"]
    members = [1] if world == 2 else [1, 3]
    some = dist.new_group(members)
    if dist.get_rank() in members:
        return [*wrong, *faults(CASES["odd"], some)]
    return [*wrong, *refused(lambda: context_attention(q, q, q, group=some), "must be a ProcessGroup that this rank is in")]


def refused(call: Callable[[], object], words: str) -> list[str]:
    try:
        call()
    except (NotImplementedError, TypeError, ValueError) as error:
        return [] if words in str(error) else [f"{error!r} does not say {words!r}"]
    return [f"it is not refused: {words}"]


def check_other_errors(group: dist.ProcessGroup) -> list[str]:
    """Whether all ranks hear of an error that is no refusal, and has no words."""
    for error in (RuntimeError("out of memory"), KeyError()):
        try:
            with agreed(group):
                if group.rank() == 1:
                    raise error
        except (ValueError, type(error)) as found:
            words = f"rank 1 of the group refuses the call: {str(error) or type(error).__name__}"
            if found is not error and words not in str(found):
                return [f"{found!r} does not say {words!r}"]
        else:
            return [f"{error!r} is not heard of"]
    return []


def check_refusals(group: dist.ProcessGroup) -> list[str]:
    """What is refused, by every rank: none waits for another."""
    rank, ranks = group.rank(), group.size()
    q, k = torch.randn(1, 16, 4, 8), torch.randn(1, 16, 2, 8)
    flat, three = q[0], torch.randn(1, 16, 3, 8)
    uneven = torch.randn(1, 16 + 4 * rank, 2, 8)
    starts = torch.tensor([0, 16], dtype=torch.int32)
    whole_starts, other = torch.tensor([0, 5 + rank, 16 * ranks], dtype=torch.int32), "it must be the same on every rank"
    falling, one_sink = torch.tensor([0, 9, 4, 16 * ranks]).int(), torch.zeros(4) if rank == 1 else None
    mesh = DeviceMesh("cpu", torch.arange(ranks).view(1, -1), mesh_dim_names=("data", "context"))
    calls: list[tuple[str, Tensors, dict[str, Any]]] = [
        ("group is None; it must be a ProcessGroup", (q, k, k), {"group": None}),
        ("a DeviceMesh of 2 dimensions", (q, k, k), {"group": mesh}),
        ("layout is 'ring'; it must be one of head_tail, contiguous", (q, k, k), {"layout": "ring"}),
        ("which its 2 chunks do not divide; seqlen must be given", (q[:, 1:], k[:, 1:], k[:, 1:]), {}),
        (f"seqlen is 3; 'head_tail' cuts it into {2 * ranks} chunks", (q, k, k), {"seqlen": 3}),
        ("seqlen is '3'; it must be an integer", (q, k, k), {"seqlen": "3"}),
        ("a shard has 16 tokens; of seqlen 1000 in the layout", (q, k, k), {"seqlen": 1000}),
        ("they must have the same tokens", (q, k[:, 1:], k), {}),
        ("the number of tokens of a shard without seqlen is 20 on rank 1", (uneven, uneven, uneven), {}),
        ("rank 0 of the group refuses" if rank else "k has shape", (q, k[:, 1:] if rank == 0 else k, k), {}),
        (f"softcap is 1.0 on rank 1 of the group and 0.0 on rank 0; {other}", (q, k, k), {"softcap": float(rank)}),
        (other, (q, k.bfloat16() if rank else k, k), {}),
        (
            f"cu_seqlens ends at 16; it must be of the whole sequence and end at {16 * ranks}",
            (flat,) * 3,
            {"cu_seqlens": starts},
        ),
        (other, (flat,) * 3, {"cu_seqlens": whole_starts}),
        ("cu_seqlens has 0 entries", (flat,) * 3, {"cu_seqlens": starts[:0]}),
        ("cu_seqlens begins at 2; it must begin at 0", (flat,) * 3, {"cu_seqlens": (starts * ranks).clamp(min=2)}),
        ("cu_seqlens falls from 9 to 4 at sequence 1", (flat,) * 3, {"cu_seqlens": falling}),
        ("max_seqlen is 3 and document 0 has", (flat,) * 3, {"cu_seqlens": starts * ranks, "max_seqlen": 3}),
        ("q has 3 dimensions; it must have 4", (flat,) * 3, {}),
        ("max_seqlen", (flat,) * 3, {"cu_seqlens": starts * ranks, "max_seqlen": 1.5}),
        ("softcap is -1.0", (q, k, k), {"softcap": -1.0}),
        ("s_aux has shape (3,)", (q, k, k), {"s_aux": torch.zeros(3)}),
        ("exchange is 'rings'; it must be one of auto, keys, heads, ring", (q, k, k), {"exchange": "rings"}),
        ("workspace is 3; it must be a ContextWorkspace or None", (q, k, k), {"workspace": 3}),
        (f"k has 3 heads; they must be a multiple of {ranks}", (q.repeat(1, 1, 6, 1), three, three), {"exchange": "heads"}),
        # By rank 1 alone.
        ("window_size is 'x'", (q, k, k), {"window_size": "x" if rank == 1 else (-1, -1)}),
        ("causal is 'yes'", (q, k, k), {"causal": "yes" if rank == 1 else True}),
        ("q is a list", (q.tolist() if rank == 1 else q, k, k), {}),
        ("q has 3 dimensions; it must have 4", (flat if rank == 1 else q, k, k), {}),
        ("q is on device meta; it must be on a CPU", (q.to("meta") if rank == 1 else q, k, k), {}),
        ("cu_seqlens is a list", (flat,) * 3, {"cu_seqlens": [0, 16] if rank == 1 else starts * ranks}),
        ("s_aux is a list", (q, k, k), {"s_aux": [0.0] * 4 if rank == 1 else torch.zeros(4)}),
        ("s_aux has dtype torch.int32", (q, k, k), {"s_aux": torch.zeros(4).to(torch.int32 if rank == 1 else torch.float32)}),
        (f"s_aux is None is False on rank 1 of the group and True on rank 0; {other}", (q, k, k), {"s_aux": one_sink}),
        ("s_aux.requires_grad is True on rank 1", (q, k, k), {"s_aux": torch.zeros(4).requires_grad_(rank == 1)}),
    ]
    wrong = refused(lambda: ContextWorkspace(group, 1 << 20), "the group's backend is gloo, and not nccl")
    wrong += refused(lambda: ContextWorkspace(group, 0), "max_bytes")
    wrong += refused(lambda: unshard(q, -5 if rank == 1 else 1, group), "dim is -5; x has 4 dimensions")
    wrong += refused(lambda: unshard(q[0, rank == 1 :], 0, group), "which its 2 chunks do not divide; seqlen must be given")
    wrong += refused(lambda: unshard(q.half() if rank == 1 else q, 1, group), "x.dtype is torch.float16 on rank 1")
    wrong += refused(lambda: unshard(q.to("meta") if rank == 1 else q, 1, group), "x.device.type is meta on rank 1")
    wrong += refused(lambda: unshard(q, torch.ones(2) if rank == 1 else 1, group), "it must be an integer")
    for words, qkv, more in calls:
        wrong += refused(partial(context_attention, *qkv, **{"group": group, **more}), words)
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
        wrong += refused(
            lambda: context_attention(q, k, k, group=group), "autocast is torch.bfloat16 on rank 1 of the group and None"
        )
    return wrong


def found(group: dist.ProcessGroup) -> dict[str, list[str]]:
    """What is wrong, by case."""
    heads = 2 * group.size(), group.size()
    by_heads = {f"{name}, by heads": CASES[name]._replace(exchange="heads", heads=heads) for name in BY_HEADS}
    chosen = {f"{name}, chosen": CASES[name]._replace(heads=heads) for name in CHOSEN} if group.size() > 3 else {}
    results = {name: faults(case, group) for name, case in (CASES | by_heads | chosen).items()}
    checks = [check_positions, check_local, check_halo, check_unshard, check_without_gradients]
    checks += [check_groups, check_other_errors, check_refusals]
    if group.size() == 2:  # a checkpoint imports PyTorch's compiler
        checks.append(check_checkpoint)
    return results | {check.__name__: check(group) for check in checks}
