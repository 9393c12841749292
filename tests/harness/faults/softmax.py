"""Faults of an attention that computes its softmax itself."""

import torch


def _scores(q, k, causal, softmax_scale, hidden=-torch.inf):
    """Scores [..., queries, keys]; ``hidden`` stands where the causal mask hides a key."""
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        masked = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(masked, hidden)
    return scores


def no_maximum(q, k, v, causal=False, softmax_scale=None):
    """Does not take the maximum off first: right on small scores, infinite on large ones."""
    weights = torch.exp(_scores(q, k, causal, softmax_scale))
    return (weights / weights.sum(-1, keepdim=True)) @ v


def maximum_from_zero(q, k, v, causal=False, softmax_scale=None):
    """Begins its running maximum at zero instead of minus infinity: where every score is far below zero, all weights vanish."""
    scores = _scores(q, k, causal, softmax_scale)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp_min(0.0))
    return (weights / weights.sum(-1, keepdim=True)) @ v


def mask_of_minus_100(q, k, v, causal=False, softmax_scale=None):
    """Masks with -100 where it means minus infinity: hidden keys are seen where every score is lower still."""
    return torch.softmax(_scores(q, k, causal, softmax_scale, hidden=-100.0), -1) @ v


def reads_beyond_its_tensors(q, k, v, causal=False, softmax_scale=None):
    """Reads V past its end, where there is memory behind it, and gives that no weight: not enough, as 0 times NaN is NaN."""
    weights, tile = torch.softmax(_scores(q, k, causal, softmax_scale), -1), 8
    end = v.storage_offset() + v.numel() + tile * v.stride(2)
    if v.untyped_storage().nbytes() >= end * v.itemsize:  # Python cannot read where there is none
        v = torch.as_strided(v, (*v.shape[:2], v.shape[2] + tile, v.shape[3]), v.stride(), v.storage_offset())
        weights = torch.nn.functional.pad(weights, (0, tile))
    return weights @ v


def claims_more_than_it_gives(q, k, v, causal=False, softmax_scale=None):
    """Right, a loop over queries in Python, and said to be 1.7 times as fast."""
    scores = _scores(q, k, causal, softmax_scale)
    return torch.cat([torch.softmax(scores[:, :, row : row + 1], -1) @ v for row in range(q.shape[2])], 2)


claims_more_than_it_gives.promises = {"speedup": 1.7}  # type: ignore[attr-defined]
