"""The peer of triton_kernels: what it refuses, and what it asks of that package.

The package needs a GPU: in its place stand functions of the same arguments, computed by PyTorch's operators.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.ops.moe.proof.test_contract import CONTRACT, drawn, wrong

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.measure.worker.callers import KernelCaller
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.formats import Weights, dequantized
from flashmoe_science.ops.moe.peers import triton_kernels
from flashmoe_science.ops.moe.peers.routers import by_pytorch


@dataclass
class _Layout:
    """Of values or of scales: every bit the other, in place of another order."""

    shape: list[int]
    mx_axis: int
    num_warps: int = 0


@dataclass
class _Storage:
    data: torch.Tensor
    layout: _Layout | None = None


@dataclass
class _Tensor:
    storage: _Storage
    dtype: Any
    shape: list[int]


def _wrapped(data: torch.Tensor, dtype: Any = torch.uint8) -> _Tensor:
    assert data.stride(1) == 1
    experts, depth, width = data.shape
    return _Tensor(_Storage(data), dtype, [experts, depth * (2 if dtype == "fp4" else 1), width])


def _converted(tensor: _Tensor, layout: type[_Layout], **options: Any) -> _Tensor:
    made = layout(list(tensor.storage.data.shape), **options)
    return _Tensor(_Storage(~tensor.storage.data, made), tensor.dtype, tensor.shape)


def _routing(logits: torch.Tensor, top_k: int) -> tuple[Any, Any, Any]:
    weights, ids = by_pytorch(logits, top_k)
    by_expert, order = ids.flatten().sort(stable=True)
    rows = SimpleNamespace(gate_scal=weights.flatten()[order], experts=by_expert, top_k=top_k)
    return rows, SimpleNamespace(src_indx=order), SimpleNamespace(src_indx=order.argsort())


def _matmul_ogs(
    x: torch.Tensor, w: _Tensor, bias: torch.Tensor, rows: Any, *, gather_indx: Any = None, scatter_indx: Any = None,
    precision_config: dict[str, Any], fused_activation: tuple[Any, ...] | None = None, gammas: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    scale = precision_config["weight_scale"]
    (experts, depth, width), axis = w.shape, {"mx_axis": 1}
    assert (w.dtype, scale.dtype, bias.dtype) == ("fp4", torch.uint8, torch.float32)
    assert w.storage.layout == _Layout([experts, depth // 2, width], **axis)
    assert scale.storage.layout == _Layout([experts, depth // 32, width], **axis, num_warps=8)
    assert list(scale.shape) == [experts, depth // 32, width]
    weights = dequantized(Weights(~w.storage.data.mT, ~scale.storage.data.mT), torch.float32)
    given = x if gather_indx is None else x[gather_indx.src_indx // rows.top_k]
    out = torch.einsum("pk,pnk->pn", given.float(), weights[rows.experts]) + bias[rows.experts]
    if fused_activation is not None:
        specs, (alpha, limit), by = fused_activation
        assert (specs, by) == (("swiglu", "swiglu_fn", ("alpha", "limit")), 2)
        gate, up = out[:, 0::2].clamp(max=limit), out[:, 1::2].clamp(-limit, limit)
        out = gate * torch.sigmoid(alpha * gate) * (up + 1)
    out = out if gammas is None else out * gammas[:, None]
    if scatter_indx is not None:
        out = out[scatter_indx.src_indx].view(-1, rows.top_k, width).sum(1)
    return out.bfloat16()


@pytest.fixture
def constraints(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The stand-in is there; what was asked of its tiles."""
    asked: dict[str, Any] = {}
    members: dict[str, dict[str, Any]] = {
        "triton_kernels": {},
        "triton_kernels.matmul_ogs": {
            "FnSpecs": lambda *given: given,
            "FusedActivation": lambda *given: given,
            "FlexCtx": dict,
            "PrecisionConfig": dict,
            "matmul_ogs": _matmul_ogs,
        },
        "triton_kernels.matmul_ogs_details": {},
        "triton_kernels.matmul_ogs_details.opt_flags": {"update_opt_flags_constraints": asked.update},
        "triton_kernels.numerics": {"InFlexData": dict},
        "triton_kernels.routing": {"routing": _routing},
        "triton_kernels.swiglu": {"swiglu_fn": "swiglu_fn"},
        "triton_kernels.tensor": {
            "FP4": "fp4",
            "Storage": _Storage,
            "Tensor": _Tensor,
            "convert_layout": _converted,
            "wrap_torch_tensor": _wrapped,
        },
        "triton_kernels.tensor_details": {},
        "triton_kernels.tensor_details.layout": {"HopperMXScaleLayout": _Layout, "HopperMXValueLayout": _Layout},
    }
    for name, values in members.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return asked


@pytest.mark.parametrize(("split_k", "asked"), [(1, 1), (0, None)])
@pytest.mark.parametrize("tokens", [1, 9])
def test_what_it_asks_for_are_gpt_oss_s_experts(
    tokens: int, split_k: int, asked: int | None, constraints: dict[str, Any]
) -> None:
    problem, inputs = drawn(f"moe t{tokens} e4 k2 d96 f64 bf16 w:mxfp4 bias clamped interleaved logits")
    got = KernelCaller(CONTRACT, problem, None, triton_kernels.KERNEL, Config(split_k=split_k)).bind(inputs, "exam")()
    assert wrong(problem, inputs, got) == []
    assert constraints == {"split_k": asked}


@pytest.mark.parametrize(
    ("text", "gpu", "reason"),
    [
        ("k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved logits", None, "triton_kernels needs a GPU"),
        ("k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved logits", "l4", "triton_kernels is called here on Hopper; .*"),
        ("k4 d2880 f2880 bf16 w:int4_g32 clamped interleaved logits", "h200", ".* with bf16 and weights in mxfp4"),
        ("k4 d2880 f2880 bf16 w:mxfp4 logits", "h200", ".* activates as gpt-oss does: clamped, gates and ups interleaved"),
        ("k4 d2880 f2880 bf16 w:mxfp4 clamped interleaved", "h200", ".* is measured from router logits: .*"),
        ("k6 d2880 f2880 bf16 w:mxfp4 clamped interleaved logits", "h200", "top_k is 6; .* takes a power of two"),
        ("k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved logits", "h200", None),
    ],
)
def test_it_refuses_in_words(text: str, gpu: str | None, reason: str | None) -> None:
    said = triton_kernels.KERNEL.cannot(parse_problem(f"moe t8 e32 {text}"), None if gpu is None else gpu_named(gpu))
    assert said is None if reason is None else re.fullmatch(reason, str(said))


def test_it_says_so_where_the_package_is_missing_or_another_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_kernels", ModuleType("triton_kernels"))
    assert triton_kernels.KERNEL.absent() == "triton_kernels (of vLLM's wheel) is not installed"
