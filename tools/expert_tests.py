"""A plugin for pytest that runs others' own tests of experts on this package's functions, and counts what comes of them.

    PYTHONPATH=tools:CLONE pytest -p expert_tests --of liger -c /dev/null --rootdir CLONE --counts FILE CLONE/TESTS

CLONE is one of the repository; its package is installed. TESTS of liger: test/transformers/test_fused_moe.py, and with
-k mixtralexperts test_swiglu.py. Of torchtitan, on a GPU: tests/unit_tests/test_compile_moe.py, and with a newer PyTorch than
2.11 test_moe_parallelism.py -k "forward or backward" of torchtitan/experiments/transformers_modeling_backend/tests. Of
sonicmoe, on a GPU, with none of its kernels' packages: tests/moe_test.py. References are theirs.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashmoe_science import fused_moe, grouped_moe, route

pytest_plugins = ["upstream_tests"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--of", choices=("liger", "torchtitan", "sonicmoe"), required=True, help="whose tests they are")


def pytest_configure(config: pytest.Config) -> None:
    """Put our functions in the place of the package's."""
    match config.getoption("--of"):
        case "liger":
            import liger_kernel.ops
            import liger_kernel.ops.fused_moe
            import liger_kernel.transformers.swiglu

            liger_kernel.ops.LigerFusedMoEFunction = liger_kernel.transformers.swiglu.LigerFusedMoEFunction = _Liger
            liger_kernel.ops.fused_moe.compute_routing_metadata = _private
        case "torchtitan":
            from torchtitan.models.common.moe import GroupedExperts

            GroupedExperts.forward = _grouped
        case "sonicmoe":
            _stand_in("sonicmoe.count_cumsum", count_cumsum=_counts)
            _stand_in("sonicmoe.functional", moe_TC_softmax_topk_layer=_sonic, enable_quack_gemm=lambda _: nullcontext())


def _stand_in(name: str, **functions: Any) -> None:
    vars(sys.modules.setdefault(name, ModuleType(name))).update(functions)


class _Liger:
    """Liger's autograd function of experts."""

    @staticmethod
    def apply(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return fused_moe(x, up, down, weights, ids)


def _private(*_: object) -> None:
    raise ImportError("a private name of Liger's is called: the tables of its own kernels")


def _grouped(self: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """torchtitan's ``GroupedExperts.forward``, which computes in bf16."""
    gate, down, up = (one.bfloat16() for one in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
    return grouped_moe(x.bfloat16(), (gate, up), down, counts.cumsum(0, dtype=torch.int32)).type_as(x)


def _counts(ids: torch.Tensor, experts: int, do_cumsum: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """SonicMoE's ``count_cumsum``: rows of each expert, and of it and all before."""
    counts = ids.flatten().bincount(minlength=experts)
    return counts, counts.cumsum(0)


def _sonic(
    x: torch.Tensor,
    router: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    top_k: int,
    stream: object,
    activation: Any,
    inference: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SonicMoE's layer, experts last; its kernels do not see torch.autocast. Gates and ups alternate."""
    if getattr(activation, "value", activation) != "swiglu":
        raise NotImplementedError(f"activation is {activation}; it must be swiglu")
    logits = F.linear(x, router)
    weights, ids = route(logits, top_k, scoring="softmax_topk")
    with torch.autocast(x.device.type, enabled=False):
        y = fused_moe(
            x,
            up.permute(2, 0, 1),
            down.permute(2, 0, 1),
            weights,
            ids,
            interleaved=True,
            gate_up_bias=up_bias,
            down_bias=down_bias,
        )
    return y, logits, _counts(ids, router.shape[0], False)[0]
