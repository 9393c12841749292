"""Gates and ups that are two tensors, as torchtitan's experts have them, on the CPU and by the interpreted kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashmoe_science as fm

E, H, F, K, T = 4, 16, 24, 2, 7
NAMES = ("x", "gate", "up", "down", "weights")


def given(dtype: torch.dtype = torch.float32, transposed: bool = False, one_memory: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    gate_up = torch.randn(E, 2 * F, H, dtype=dtype) * H**-0.5
    x, down, weights = torch.randn(T, H, dtype=dtype), torch.randn(E, H, F, dtype=dtype) * F**-0.5, torch.rand(T, K).to(dtype)
    if transposed:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    gate, up = gate_up.chunk(2, 2 if transposed else 1)
    parts = (gate, up) if one_memory else (gate.contiguous(), up.contiguous())
    return [one.detach().requires_grad_() for one in (x, *parts, down, weights)]


IDS = torch.tensor([[0, 1], [1, 0], [0, -1], [3, 0], [1, 1], [0, 3], [4, 1]])  # of expert 2 no row; some of other ranks


def apart(x: Any, gate: Any, up: Any, down: Any, weights: Any, **options: Any) -> torch.Tensor:
    return fm.fused_moe(x, (gate, up), down, weights, IDS, **options)


def whole(x: Any, gate: Any, up: Any, down: Any, weights: Any, **options: Any) -> torch.Tensor:
    both = torch.cat((gate, up), 2 if options.get("transposed") else 1)
    return fm.fused_moe(x, both, down, weights, IDS, **options)


def results(function: Any, tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    out = function(*tensors, **options)
    return [out, *torch.autograd.grad(out, tensors, torch.ones_like(out) + out.detach())]


@pytest.mark.parametrize("kernel", [None, "grouped_mm", "grouped_mm_bwd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("one_memory", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_result_and_gradients_are_those_of_one_tensor(
    kernel: str | None, dtype: torch.dtype, one_memory: bool, transposed: bool
) -> None:
    tensors = given(dtype, transposed, one_memory)
    options = {"kernel": kernel, "transposed": transposed, "recompute": kernel is None and dtype == torch.bfloat16}
    for name, got, want in zip(
        ("out", *NAMES), results(apart, tensors, **options), results(whole, tensors, **options), strict=True
    ):
        assert torch.equal(got, want), name
    if kernel != "grouped_mm_bwd":  # which is no kernel of the forward
        with torch.no_grad():
            assert torch.equal(apart(*tensors, **options), whole(*tensors, **options))


@pytest.mark.parametrize("one_memory", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_no_tensor_of_both_is_kept_between_the_passes(one_memory: bool, frozen: bool) -> None:
    tensors = given(torch.bfloat16, one_memory=one_memory)
    if frozen:
        tensors = [tensors[0], *(one.detach() for one in tensors[1:])]
    own, others = {one.untyped_storage().data_ptr() for one in (*tensors, IDS)}, []

    def pack(one: torch.Tensor) -> torch.Tensor:
        if one.untyped_storage().data_ptr() not in own:
            others.append(one.numel())
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        out = apart(*tensors)
    assert others == [T * K * 2 * F]
    assert out.requires_grad


def test_a_view_joins_those_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gate, up, down, weights = given(one_memory=True)
    explained = fm.explain(fm.fused_moe, x, (gate, up), down, weights, IDS).reason
    assert explained.endswith("gate_up_proj is two tensors, a view joins them")
    assert "gate_up_proj is two tensors, copied into one" in fm.explain(fm.fused_moe, x, (up, gate), down, weights, IDS).reason
    monkeypatch.setattr(torch, "cat", None)
    apart(x, gate, up, down, weights).sum().backward()
    with pytest.raises(TypeError):
        apart(x, up, gate, down, weights)


def test_one_of_both_may_be_frozen() -> None:
    tensors = given()
    want = results(whole, tensors)
    x, gate, up, down, weights = tensors
    for of_gate, of_up in ((True, False), (False, True)):
        parts = gate if of_gate else gate.detach(), up if of_up else up.detach()
        out = fm.fused_moe(x, parts, down, weights, IDS)
        (got,) = torch.autograd.grad(out, gate if of_gate else up, torch.ones_like(out) + out.detach())
        assert torch.equal(got, want[2 if of_gate else 3])


def test_gradients_are_added_to_one_tensor_of_both() -> None:
    tensors = given(torch.bfloat16)
    want = torch.autograd.grad(whole(*tensors).sum(), tensors)
    sums = torch.ones(E, 2 * F, H), torch.ones_like(tensors[3])
    found = torch.autograd.grad(apart(*tensors, weight_grads=sums).sum(), tensors, allow_unused=True)
    assert found[1:4] == (None, None, None)
    assert torch.equal(found[0], want[0])
    assert torch.equal(sums[0], torch.cat(want[1:3], 1).float() + 1)
    assert torch.equal(sums[1], want[3] + 1)


@pytest.mark.parametrize("how", ["compiled", "checkpointed", "autocast"])
def test_it_compiles_whole_is_checkpointed_and_autocast(how: str) -> None:
    tensors = given()
    want = results(whole, tensors)
    if how == "compiled":
        got = results(torch.compile(apart, fullgraph=True, backend="aot_eager"), tensors)
    elif how == "checkpointed":
        got = results(lambda *given: checkpoint(apart, *given, use_reentrant=False), tensors)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            got, want = results(apart, tensors), results(whole, tensors)
    for one, right in zip(got, want, strict=True):
        torch.testing.assert_close(one, right)


def test_rows_that_are_sorted_already() -> None:
    x, gate, up, down, _ = given()
    offsets = torch.tensor([2, 2, 4, 6])
    got = fm.grouped_moe(x, (gate, up), down, offsets)
    assert torch.equal(got, fm.grouped_moe(x, torch.cat((gate, up), 1), down, offsets))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gate_up_proj": ()}, "gate_up_proj has 0 tensors; it must be one tensor, or a pair"),
        ({"gate_up_proj": (torch.zeros(E, F, H), None)}, r"gate_up_proj\[1\] is a NoneType; it must be a torch.Tensor"),
        ({"gate_up_proj": (torch.zeros(F, H), torch.zeros(F, H))}, r"gate_up_proj\[0\] has shape \(24, 16\); it must have"),
        (
            {"gate_up_proj": (torch.zeros(E, F, H), torch.zeros(E, 8, H))},
            r"gate_up_proj\[0\] has shape \(4, 24, 16\) and gate_up_proj\[1\] \(4, 8, 16\); they must be the same",
        ),
        (
            {"gate_up_proj": (torch.zeros(E, F, H), torch.zeros(E, F, H).half())},
            r"gate_up_proj\[0\] has dtype torch.float32 and gate_up_proj\[1\] torch.float16; they must be the same",
        ),
        (
            {"gate_up_proj": (torch.zeros(E, F // 2, H), torch.zeros(E, F // 2, H))},
            "gate_up_proj is a pair of 12 gates and ups an expert and down_proj has 24 columns; there must be as many",
        ),
        ({"interleaved": True}, "interleaved is True and gate_up_proj is a pair of gates and ups; it must be"),
        ({"activation": "swish"}, "activation is 'swish'; it must be one of"),
    ],
)
def test_a_pair_that_is_not_allowed_is_refused(changed: dict[str, Any], message: str) -> None:
    x, gate, up, down, weights = given()
    names = ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights", "top_k_ids")
    call = dict(zip(names, (x, (gate, up), down, weights, IDS), strict=True)) | changed
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        fm.fused_moe(**call)
