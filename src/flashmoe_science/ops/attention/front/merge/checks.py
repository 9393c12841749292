"""What a merge of attention to parts of the keys is given, checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashmoe_science.ops.checks import check_device, checked_tensor
from flashmoe_science.printable import shown


def parts_of(name: str, parts: object) -> list[torch.Tensor]:
    """The parts, otherwise unchecked. Raises TypeError unless they are a sequence or one tensor."""
    if isinstance(parts, Sequence) or (isinstance(parts, torch.Tensor) and parts.dim()):
        return [*parts]
    raise TypeError(f"{name} is {shown(parts)}; it must be a sequence of tensors, or one tensor of all")


def check_parts(outs: Sequence[object], lses: Sequence[object]) -> None:
    """Raise TypeError, ValueError unless there are as many outs [..., tokens, heads, head_dim] of one shape, dtype and device
    as lses [..., heads, tokens] there, fp32 or fp64, and at least one."""
    if len(outs) != len(lses):
        raise ValueError(f"outs has {len(outs)} parts and lses {len(lses)}; they must have as many")
    if not outs:
        raise ValueError("outs has no part; there must be at least one")
    wide = torch.float32, torch.float64
    for kind, parts, dtypes in (("outs", outs, (torch.float16, torch.bfloat16, *wide)), ("lses", lses, wide)):
        for n, one in enumerate(checked := [checked_tensor(f"{kind}[{n}]", one) for n, one in enumerate(parts)]):
            first = checked[0]
            if one.dtype not in dtypes:
                raise TypeError(f"{kind}[{n}] has dtype {one.dtype}; it must be {' or '.join(map(str, dtypes))}")
            for what, own, others in (
                ("shape", tuple(one.shape), tuple(first.shape)),
                ("dtype", one.dtype, first.dtype),
                ("device", one.device, first.device),
            ):
                if own != others:
                    raise TypeError(f"{kind}[{n}] has {what} {own} and {kind}[0] {others}; they must be equal")
    out, lse = outs[0], lses[0]
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    check_device("lses[0]", lse, "outs[0]", out)
    if out.dim() < 3:
        raise ValueError(f"outs[0] has shape {tuple(out.shape)}; it must be [..., tokens, heads, head_dim]")
    wanted = (*out.shape[:-3], out.shape[-2], out.shape[-3])
    if tuple(lse.shape) != wanted:
        raise ValueError(f"lses[0] has shape {tuple(lse.shape)}; it must be {wanted}, [..., heads, tokens]")
