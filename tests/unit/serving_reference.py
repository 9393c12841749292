"""Attention with features in fp64, a sequence, a head and a row at a time: what the functions for serving are held to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class Row:
    """What one sequence's attention may ask for. Lengths are those of the tensors given."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    leftpad: int = 0
    chunk: int = 0
    prefix: int = 0


def sequence_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    asked: Row,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [queries, heads, d], k and v [keys, heads_kv, ...], bias [heads, queries, keys]: (out [queries, heads, dv], lse [heads,
    queries])."""
    q, k, v = q.double(), k.double(), v.double()
    queries, heads, width = q.shape
    keys, heads_kv = k.shape[0], k.shape[1]
    scale = width**-0.5 if scale is None else scale
    out, lse = torch.zeros(queries, heads, v.shape[2], dtype=torch.float64), torch.full((heads, queries), -math.inf).double()
    for head in range(heads):
        own = head // (heads // heads_kv)
        for i in range(queries):
            position = i + keys - queries
            logits, seen = [], []
            for j in range(asked.leftpad, keys):
                if not _visible(asked, position, j):
                    continue
                s = float(q[i, head] @ k[j, own]) * scale
                if asked.softcap:
                    s = asked.softcap * math.tanh(s / asked.softcap)
                if slopes is not None:
                    s -= float(slopes[head]) * abs(position - j)
                if bias is not None:
                    if bias.dtype == torch.bool:
                        if not bias[head, i, j]:
                            continue
                    else:
                        s += float(bias[head, i, j])
                logits.append(s)
                seen.append(j)
            everything = logits if sinks is None else [*logits, float(sinks[head])]
            if not everything or max(everything) == -math.inf:
                continue
            total = torch.tensor(everything, dtype=torch.float64).logsumexp(0)
            lse[head, i] = total
            for s, j in zip(logits, seen, strict=True):
                out[i, head] += math.exp(s - float(total)) * v[j, own]
    return out, lse


def _visible(asked: Row, position: int, j: int) -> bool:
    left, right = asked.window
    near = not (asked.causal and j > position)
    near = near and not (right >= 0 and j > position + right) and not (left >= 0 and j < position - left)
    near = near or j < asked.prefix
    pad = asked.leftpad
    return near and not (asked.chunk and (j - pad) // asked.chunk != (position - pad) // asked.chunk)
