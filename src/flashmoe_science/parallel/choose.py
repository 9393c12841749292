"""Which exchange serves a call of context attention, and what either costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.parallel.copies import ContextWorkspace
from flashmoe_science.parallel.cost import (
    COPIES,
    FLOPS,
    MERGE,
    MESSAGES,
    MISFIT,
    Cost,
    in_time,
    pairs,
    received_by_heads,
    received_by_keys,
)
from flashmoe_science.parallel.exchange import joined
from flashmoe_science.parallel.layout import Cut

Exchange = Literal["keys", "heads", "ring"]
Window = tuple[int | None, int | None]  # how many keys a query sees before it and after it; None: all


class Exchanges(NamedTuple):
    """This rank's tensors, how the sequence is cut, and the keys that each chunk of each rank needs."""

    qkv: Sequence[torch.Tensor]
    cut: Cut
    needed: list[list[range]]
    workspace: ContextWorkspace | None

    def chosen(self, asked: str) -> tuple[Exchange, str]:
        """The exchange, and why."""
        ranks = len(self.cut.chunks)
        for one in get_args(Exchange):
            if asked == one:
                return one, "asked for by name"
        if self.workspace is not None:
            return "keys", "which the workspace copies"
        if uneven := [f"{one.shape[-2]} of {name}" for name, one in zip("qkv", self.qkv, strict=True) if one.shape[-2] % ranks]:
            return "keys", f"as {ranks} ranks do not divide the heads, {uneven[0]}"
        heads, keys = (one.shape[-2] for one in self.qkv[:2])
        if ranks * keys > heads + keys and self.received("heads") < self.received("keys"):  # the same but for windows
            return "heads", "as a rank receives fewer bytes so"
        return "keys", "as by heads a rank receives no fewer bytes"

    def received(self, exchange: Exchange) -> int:
        """Bytes that a rank receives at most in a forward."""
        q, k, v, out = self._of_token()
        if exchange == "keys":
            return received_by_keys(self.cut, self.needed, k + v)
        if exchange == "ring":
            return received_by_keys(self.cut, [[range(self.cut.seqlen)]] * len(self.cut.chunks), k + v)
        return received_by_heads(self.cut, q + k + v, out)

    def held(self, exchange: Exchange) -> int:
        """The most bytes that a rank holds in a forward besides its arguments and its result. A ring keeps none for a
        backward."""
        q, k, v, out = self._of_token()
        if exchange == "ring":  # what has arrived and what is to arrive, and results in fp32
            most = max(sum(map(len, chunks)) for chunks in self.cut.chunks)
            wide = torch.promote_types(self.qkv[0].dtype, torch.float32).itemsize
            return most * (2 * (k + v) + out * wide // self.qkv[0].element_size())
        if exchange == "keys":
            return max(sum(map(len, joined(wanted))) for wanted in self.needed) * (k + v)
        return self.cut.seqlen * (q + k + v + out) // len(self.cut.chunks)

    def _of_token(self) -> tuple[int, int, int, int]:
        """Bytes of a token's queries, keys, values and results."""
        q, k, v = (one[..., 0, :, :].numel() * one.element_size() for one in self.qkv)
        return q, k, v, v * self.qkv[0].shape[-2] // self.qkv[2].shape[-2]

    def cost(self, exchange: Exchange, known: bool) -> Cost:
        """A forward's exchange cost; ``known``: whether its time is known."""
        link = COPIES if exchange == "keys" and self.workspace is not None else MESSAGES
        if exchange == "ring":
            link = link._replace(start=link.start * (len(self.cut.chunks) - 1))
        return Cost.by(link if known else None, self.received(exchange))

    def explained(self, decision: Decision, asked: str, window: Window | None) -> Decision:
        """The decision with the bytes of each exchange, and their times if records of such GPUs have them. ``window``: None if
        it depends on documents."""
        q, (exchange, why) = self.qkv[0], self.chosen(asked)
        known = q.is_meta or (q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0))
        words: dict[Exchange, str] = {}
        for one in get_args(Exchange):
            kept = "not for" if one == "ring" else "also for"
            words[one] = f"{self.cost(one, known)}, {self.held(one) / 1e6:.1f} MB held, {kept} a backward"
        if known and window is not None and q.element_size() == 2:
            off = f"calls of two GPUs on record are up to {100 * MISFIT[exchange]:.0f}% off"
            words[exchange] += f", attention{in_time(self.seconds(exchange, window))}; {off}"
        reason = f"{decision.reason}; exchange is {exchange!r}, {why}: {words.pop(exchange)}"
        others = tuple((f"exchange {one!r}", told) for one, told in words.items())
        return replace(decision, reason=reason, others=(*decision.others, *others))

    def seconds(self, exchange: Exchange, window: Window) -> float:
        """Seconds of 16-bit attention on the rank with the most work, and of a ring's merges."""
        seqlen, (q, _, v) = self.cut.seqlen, self.qkv
        of_ranks = [sum(pairs(chunk, seqlen, *window) for chunk in chunks) for chunks in self.cut.chunks]
        most = sum(of_ranks) / len(of_ranks) if exchange == "heads" else max(of_ranks)
        merged = (len(of_ranks) - 1) * q[..., 0].numel() * v.shape[-1] if exchange == "ring" else 0
        return 2 * most * (q.shape[-1] + v.shape[-1]) * q[..., 0, :, 0].numel() / FLOPS + merged * MERGE
