"""Prints, for each of PyTorch's private names that the package looks up, what comes of calls where it is gone.

Run as a script: PyTorch is imported once; each name is gone in a process of its own while the package looks names up, and
there again for PyTorch's own use of it.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from triton.experimental.gluon.language.nvidia import hopper  # noqa: F401

SOURCE = Path(__file__).parents[3] / "src/flashmoe_science"


def names() -> list[str]:
    """What the package's source gives ``private``."""
    found = {name for path in SOURCE.rglob("*.py") for name in re.findall(r'\bprivate\(\s*f?"([^"]+)"', path.read_text())}
    return sorted({name.replace("{device}", device) for name in found for device in ("cpu", "cuda")})


def looked_up() -> Callable[[], tuple[Any, ...]]:
    """Imports what looks names up, and does what does so later; gives an allocator of a workspace."""
    from flashmoe_science.integrations import torch_sdpa, transformers_masks  # noqa: F401
    from flashmoe_science.measure.sandbox import settings  # noqa: F401
    from flashmoe_science.ops import launch, private

    private.empty_strided(True)
    private.raw_stream()
    return launch.workspace_allocator(False, ((5, torch.float32), (9, torch.bfloat16)))


def wrong(take: Callable[[], tuple[Any, ...]]) -> list[str]:
    """The calls that are not right, each by another way, in words."""
    import flashmoe_science as fms
    from flashmoe_science.integrations.torch_sdpa import _Active
    from flashmoe_science.integrations.transformers_masks import StructuredMask, Visible
    from flashmoe_science.measure.sandbox.settings import Settings

    torch.manual_seed(0)
    q, k, v, d = (torch.randn(1, 2, 5, 16) for _ in range(4))
    leaves = [one.clone().requires_grad_() for one in (q, k, v)]
    reference = F.scaled_dot_product_attention(*leaves, is_causal=True)
    gradients = torch.autograd.grad(reference, leaves, d, retain_graph=True)
    ours = fms.scaled_dot_product_attention(*leaves, is_causal=True)
    found: dict[str, Any] = {"forward": (ours, reference)}
    found["gradients"] = torch.autograd.grad(ours, leaves, d), gradients
    for count in range(3):
        found[f"call {count}"] = flash(q, k, v), reference
    out, lse = torch.ops.flashmoe.attention_forward(q, k, v, "causal", None, True)
    found["operator"] = out, reference
    wanted = [True, True, True, False, False]
    found["backward"] = torch.ops.flashmoe.attention_backward(d, None, q, k, v, out, lse, wanted, "causal")[:3], gradients
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = fms.scaled_dot_product_attention(q, k, v).dtype, torch.bfloat16
    with FakeTensorMode() as mode:
        fake = fms.scaled_dot_product_attention(*map(mode.from_tensor, (q, k, v)))
        found["fake"] = (type(fake).__name__, fake.shape), ("FakeTensor", q.shape)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(flash(forward_ad.make_dual(q, d), k, v, softcap=2.0)).tangent
    (of_q,) = torch.autograd.grad(flash(*leaves, softcap=2.0).sum(), leaves[:1])
    found["forward mode"] = tangent.sum(), (of_q * d).sum()
    weights, ids = fms.route(torch.randn(3, 4), 2)
    x, up, down = torch.randn(3, 8), torch.randn(4, 16, 8), torch.randn(4, 8, 8)
    found["experts"] = fms.fused_moe(x, up, down, weights, ids), fms.fused_moe(x.requires_grad_(), up, down, weights, ids)
    experts = [fms.fused_moe(x, up, down, weights, ids, kernel=kernel) for kernel in (None, "grouped_mm")]
    found["experts' gradients"] = tuple(torch.autograd.grad(one.square().sum(), x) for one in experts)
    (_, one, other), (_, again, _) = kept = take(), take()
    found["workspace"] = len({one, other, again}), len(kept) + 1
    mask = StructuredMask((1, 1, 2, 4), "cpu", Visible(4, causal=False), lambda: torch.ones(1, 1, 2, 4, dtype=torch.bool))
    found["mask"] = (type(~mask), (~mask).any().item()), (torch.Tensor, False)
    found["settings"] = Settings().left(), []
    _Active().remove()
    return [name for name, pair in found.items() if not alike(*pair)]


def flash(*heads_first: torch.Tensor, **options: Any) -> torch.Tensor:
    import flashmoe_science as fms

    out = fms.flash_attn_func(*(one.transpose(1, 2) for one in heads_first), causal=True, **options)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2)


def alike(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        return torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    if isinstance(want, tuple) and isinstance(want[0], torch.Tensor):
        return all(map(alike, got, want))
    return bool(got == want)


def without(name: str) -> dict[str, Any]:
    """What is wrong, and what is warned of, where a name is gone."""
    owner, _, attribute = name.rpartition(".")
    above = attrgetter(owner)(torch) if owner else torch
    was = vars(above).get(attribute)
    if was is not None:
        delattr(above, attribute)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            take = looked_up()
            if was is not None:
                setattr(above, attribute, was)
            found = wrong(take)
        except Exception:
            found = [traceback.format_exc()[-1500:]]
    return {"wrong": found, "warned": [str(one.message) for one in warned if "is gone" in str(one.message)]}


def main() -> None:
    with FakeTensorMode(), forward_ad.dual_level():  # PyTorch imports what it needs for them
        forward_ad.make_dual(torch.ones(2), torch.ones(2))
    gc.freeze()  # a third of what the processes would take
    found = {}
    for name in names():
        reads, writes = os.pipe()
        if not (child := os.fork()):
            os.write(writes, json.dumps(without(name)).encode())
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as pipe:
            found[name] = json.loads(pipe.read() or "null")
        os.waitpid(child, 0)
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
