"""Prints, by the name of a call that was seen before, the kernels that it launches and the Python frames that it takes.

Run as a script, in a process of its own: tensors on the CPU are taken for an H200's, and launches compute nothing.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from types import FrameType
from typing import Any

import torch

import flashmoe_science as fms
from flashmoe_science import ops
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.ops import launch

LAUNCHED: list[str] = []
H200 = gpu_named("h200")


class Recorded(launch.Build):
    """A build whose launches are noted, each in the one frame that a launch takes."""

    def __init__(self, function: Any, arguments: Any, **options: Any) -> None:
        name = function.__name__
        self.launch = lambda grid, *given: LAUNCHED.append(name)
        self.bound = lambda grid, *last: lambda *given: LAUNCHED.append(name)

    def encoder(self, index: int, template: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> launch.Encoder:
        return lambda tensor: (tensor,)


STAND_INS = {
    "Build": Recorded,
    "can_start_early": lambda device: True,
    "current_gpu": lambda device=None: H200,
    "gpu_of": lambda tensor: H200,
    "_is_on_nvidia": lambda tensor: True,
}


def take_the_cpu_for_a_gpu() -> None:
    # A result lies where the one before lay, as those of a model's steps do on a GPU: what is kept by addresses is found.
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cpu = lru_cache(guards._empty_strided_cpu)
    one_of_each = lru_cache(partial(torch.empty_strided, dtype=torch.bfloat16))
    torch.Tensor.new_empty_strided = staticmethod(one_of_each)  # type: ignore[assignment]
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        importlib.import_module(module.name)
    for name, loaded in list(sys.modules.items()):
        if name.startswith(ops.__name__):
            for attribute in STAND_INS.keys() & vars(loaded).keys():
                setattr(loaded, attribute, STAND_INS[attribute])


def frames(call: Callable[..., object], given: dict[str, Any]) -> tuple[list[str], int]:
    """What a call launches that was seen before, and its Python frames."""
    for _ in range(3):
        call(**given)
    LAUNCHED.clear()
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    call(**given)
    sys.setprofile(None)
    return LAUNCHED.copy(), count


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def calls() -> dict[str, tuple[Callable[..., object], dict[str, Any]]]:
    heads_first = {name: zeros(2, 16, 2048, 64) for name in ("query", "key", "value")}
    tokens_first = {"q": zeros(2, 2048, 16, 64), "k": zeros(2, 2048, 4, 64), "v": zeros(2, 2048, 4, 64), "causal": True}
    caches = {"k_cache": zeros(2, 8192, 2, 64), "v_cache": zeros(2, 8192, 2, 64), "cache_seqlens": i32(3000, 9)}
    decode = {"q": zeros(2, 1, 8, 64), "causal": True, **caches}
    starts = {"cu_seqlens_q": i32(0, 1500, 2048), "cu_seqlens_k": i32(0, 1500, 2048)}
    packed = {"q": zeros(2048, 16, 64), "k": zeros(2048, 4, 64), "v": zeros(2048, 4, 64), "causal": True, **starts}
    return {
        "scaled_dot_product_attention": (fms.scaled_dot_product_attention, heads_first),
        "scaled_dot_product_attention, boolean mask": (
            fms.scaled_dot_product_attention,
            heads_first | {"attn_mask": zeros(2, 1, 2048, 2048, dtype=torch.bool)},
        ),
        "scaled_dot_product_attention, bias": (
            fms.scaled_dot_product_attention,
            heads_first | {"attn_mask": zeros(2, 1, 2048, 2048)},
        ),
        "flash_attn_func": (fms.flash_attn_func, tokens_first),
        "flash_attn_func, window": (fms.flash_attn_func, tokens_first | {"window_size": (255, 0)}),
        "flash_attn_varlen_func": (fms.flash_attn_varlen_func, packed | {"max_seqlen_q": 1500, "max_seqlen_k": 1500}),
        "flash_attn_with_kvcache": (fms.flash_attn_with_kvcache, decode),
        "flash_attn_with_kvcache, append": (
            fms.flash_attn_with_kvcache,
            decode | {"k": zeros(2, 1, 2, 64), "v": zeros(2, 1, 2, 64)},
        ),
        "fused_moe, a token": (fms.fused_moe, experts(1)),
        "fused_moe, a token, int4": (fms.fused_moe, experts(1) | fms.quantize_experts(*random_weights(), "int4_g128")),
        "fused_moe": (fms.fused_moe, experts(1024)),
    }


def experts(tokens: int) -> dict[str, Any]:
    weights = {"gate_up_proj": zeros(8, 512, 256), "down_proj": zeros(8, 256, 256)}
    routing = {"top_k_weights": torch.rand(tokens, 2), "top_k_ids": zeros(tokens, 2, dtype=torch.int64)}
    return {"hidden_states": zeros(tokens, 256), **weights, **routing}


def random_weights() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(8, 512, 256), torch.rand(8, 256, 256)


if __name__ == "__main__":
    take_the_cpu_for_a_gpu()
    print(json.dumps({name: frames(*call) for name, call in calls().items()}))
