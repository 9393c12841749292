"""A plugin for pytest that runs Liger's and torchtitan's own tests of experts on this package's functions, and counts them.

    PYTHONPATH=tools:CLONE/src:CLONE pytest -p expert_tests -c /dev/null --rootdir CLONE --counts FILE CLONE/TESTS

CLONE is one of a repository, or what its sdist holds. TESTS of Liger: test/transformers/test_fused_moe.py, and test_swiglu.py
with -k mixtralexperts. Of torchtitan, on a GPU, in torchtitan/experiments/transformers_modeling_backend/tests:
test_moe_parallelism.py -k "forward or backward". References are theirs.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from flashmoe_science import fused_moe, grouped_moe

pytest_plugins = ["upstream_tests"]


def pytest_configure() -> None:
    """Put our functions in the place of those of the packages that are found."""
    if find_spec("liger_kernel") is not None:
        import liger_kernel.ops
        import liger_kernel.ops.fused_moe
        import liger_kernel.transformers.swiglu

        liger_kernel.ops.LigerFusedMoEFunction = liger_kernel.transformers.swiglu.LigerFusedMoEFunction = _Liger
        liger_kernel.ops.fused_moe.compute_routing_metadata = _private
    if find_spec("torchtitan") is not None:
        from torchtitan.models.common.moe import GroupedExperts

        GroupedExperts.forward = _grouped


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
