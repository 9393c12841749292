"""What experts' calls still take from here, until they are on ops/calls.py and ops/choose.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.cache import MAX_CALLS as MOST_CALLS
from flashmoe_science.ops.cache import MAX_PLANS as MOST_PLANS
from flashmoe_science.ops.cache import Cache
from flashmoe_science.ops.calls import PLAIN, alignment, device_guard, guards_of, is_plain, is_undisturbed
from flashmoe_science.ops.choose import NO_BACKWARD

__all__ = [
    "MOST_CALLS", "MOST_PLANS", "NO_BACKWARD", "PLAIN", "Cache", "alignment", "check_kernel_with_gradients", "could_be_known",
    "device_guard", "guards_of", "is_plain", "is_undisturbed", "with_launch_path",
]  # fmt: skip


def could_be_known(tensors: Sequence[torch.Tensor]) -> bool:
    return (
        not torch._C._is_torch_function_mode_enabled()
        and forward_ad._current_level < 0
        and not any(one.is_nested for one in tensors)
    )


def check_kernel_with_gradients(kernel: str | None, framework: str) -> None:
    if kernel not in (None, framework):
        raise CannotServe(
            f"kernel {kernel!r} cannot serve this call: {NO_BACKWARD}; {framework!r} can, or call it under torch.no_grad()"
        )


def with_launch_path(decision: Decision) -> Decision:
    from dataclasses import replace

    from flashmoe_science.ops.launch import launch_path

    path = launch_path()
    return decision if path is None else replace(decision, reason=f"{decision.reason}; {path}")


_ = Config
