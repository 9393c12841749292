"""Kernels of attention that are the oracle, or what a test makes of it."""

from __future__ import annotations

from typing import Any

from flashmoe_science.kernel import Config, Kernel, Launch
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionOutput
from flashmoe_science.ops.attention.proof.oracle import attention_oracle


def honest(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    out, lse = attention_oracle(inputs)
    return AttentionOutput(out.to(inputs.q.dtype), lse.float() if inputs.return_lse else None)


def kernel(name: str = "planted", origin: str = "ours", **changes: Any) -> Kernel:
    """A kernel that serves every problem with one config and promises one launch of its own name, but for ``changes``."""
    fields: dict[str, Any] = {
        "op": "attention",
        "about": name,
        "supports": lambda problem, device: None,
        "configs": lambda problem, device: (Config(block=1),),
        "run": honest,
        "launches": lambda problem, config, gpu: (Launch(f"^{name}$"),),
    }
    return Kernel(name=name, origin=origin, **(fields | changes))
