"""LoRA on experts: low-rank adapters beside frozen weights, against one expert at a time of W + scaling b a, and PEFT's."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flashmoe_science as fm
from flashmoe_science.ops.moe import pytorch
from flashmoe_science.ops.moe.call import Activation, Tensors
from flashmoe_science.ops.moe.proof.oracle import assigned

E, H, F, K, T, RANK = 4, 16, 24, 2, 7, 3
SCALINGS = 0.5, 2.0
IDS = torch.tensor([[0, 1], [1, 0], [0, -1], [3, 0], [1, 1], [0, 3], [4, 1]])  # of expert 2 no row; some of other ranks


def given(
    dtype: torch.dtype = torch.float32, bias: bool = False, rank: int = RANK
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The arguments of a call but its adapters, and a1, b1, a2, b2."""
    torch.manual_seed(0)
    call = {
        "hidden_states": torch.randn(T, H, dtype=dtype).requires_grad_(),
        "gate_up_proj": torch.randn(E, 2 * F, H, dtype=dtype) * H**-0.5,
        "down_proj": torch.randn(E, H, F, dtype=dtype) * F**-0.5,
        "top_k_weights": torch.rand(T, K).to(torch.promote_types(dtype, torch.float32)).requires_grad_(),
        "top_k_ids": IDS,
    }
    if bias:
        call["gate_up_bias"] = torch.randn(E, 2 * F, dtype=dtype).requires_grad_()
        call["down_bias"] = torch.randn(E, H, dtype=dtype).requires_grad_()
    shapes = ((E, rank, H), (E, 2 * F, rank), (E, rank, F), (E, H, rank))
    return call, [(torch.randn(shape, dtype=dtype) * shape[2] ** -0.5).requires_grad_() for shape in shapes]


def adapted(call: dict[str, Any], parts: list[torch.Tensor], **options: Any) -> torch.Tensor:
    a1, b1, a2, b2 = parts
    return fm.fused_moe(**call, adapters=((a1, b1, SCALINGS[0]), (a2, b2, SCALINGS[1])), **options)


def by_expert(call: dict[str, Any], parts: list[torch.Tensor], activation: Activation) -> torch.Tensor:
    x, w1, w2, weights, ids, *biases = (call.get(name) for name in NAMES)
    assert x is not None
    a1, b1, a2, b2 = parts
    out = torch.zeros(T, H, dtype=x.dtype)
    for expert, tokens, place in assigned(Tensors(x, w1, w2, weights, ids)):  # type: ignore[arg-type]
        first = w1[expert] + SCALINGS[0] * b1[expert] @ a1[expert]  # type: ignore[index]
        second = w2[expert] + SCALINGS[1] * b2[expert] @ a2[expert]  # type: ignore[index]
        bias1, bias2 = (0.0 if one is None else one[expert] for one in biases)
        row = pytorch.activate(x[tokens] @ first.T + bias1, activation) @ second.T + bias2
        out = out.index_add(0, tokens, row * weights[tokens, place, None])  # type: ignore[index]
    return out


NAMES = ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights", "top_k_ids", "gate_up_bias", "down_bias")
LAYOUTS: dict[str, dict[str, Any]] = {
    "silu": {},
    "clamped, interleaved": {"activation": "clamped_silu", "interleaved": True, "limit": 1.5},
    "gelu": {"activation": "gelu"},
}


def leaves(call: dict[str, Any], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*(one for one in call.values() if one.requires_grad), *parts]


WAYS = ("keeps", "recomputes", "transposed", "compiled", "checkpointed")
COMPILED_ONCE = ("clamped, interleaved", True, "compiled")  # another layout or no bias compiles to as many operators


def marks_of(case: tuple[str, bool, str]) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.slow, pytest.mark.redundant) if case[2] == "compiled" and case != COMPILED_ONCE else ()


@pytest.mark.parametrize(
    ("layout", "bias", "way"), [pytest.param(*one, marks=marks_of(one)) for one in product(LAYOUTS, (False, True), WAYS)]
)
def test_the_result_and_gradients_are_those_of_the_summed_weights(layout: str, bias: bool, way: str) -> None:
    call, parts = given(torch.float64, bias)
    options = dict(LAYOUTS[layout])
    activation = Activation(options.get("activation", "silu"), True, "interleaved" in options, limit=options.get("limit", 7.0))
    want, every, function = by_expert(call, parts, activation), leaves(call, parts), adapted
    if way == "recomputes":
        options["recompute"] = True
    if way == "transposed":
        options["transposed"] = True
        call = call | {name: call[name].mT.contiguous() for name in ("gate_up_proj", "down_proj")}
    if way == "compiled":
        function = torch.compile(adapted, fullgraph=True, backend="aot_eager")
    if way == "checkpointed":
        out = checkpoint(adapted, call, parts, use_reentrant=False, **options)
    else:
        out = function(call, parts, **options)
    torch.testing.assert_close(out, want)
    into = torch.randn(T, H, dtype=torch.float64)
    for got, right in zip(torch.autograd.grad(out, every, into), torch.autograd.grad(want, every, into), strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [3, 8])
def test_results_and_gradients_are_within_their_rounding(dtype: torch.dtype, rank: int, device: str) -> None:
    call, parts = given(dtype, rank=rank)
    wide = {name: one.detach().double() if one.is_floating_point() else one for name, one in call.items()}
    wide |= {name: wide[name].requires_grad_() for name in ("hidden_states", "top_k_weights")}
    wider = [one.detach().double().requires_grad_() for one in parts]
    call = {name: one.detach().to(device).requires_grad_(one.requires_grad) for name, one in call.items()}
    parts = [one.detach().to(device).requires_grad_() for one in parts]
    want, out = by_expert(wide, wider, Activation()), adapted(call, parts)
    unit, into = torch.finfo(dtype).eps, torch.randn(T, H).to(dtype)
    assert out.dtype == dtype
    got = torch.autograd.grad(out, leaves(call, parts), into.to(device))
    right = torch.autograd.grad(want, leaves(wide, wider), into.double())
    for one, exact in zip((out, *got), (want, *right), strict=True):
        assert (one.cpu().double() - exact).abs().max() <= 8 * unit * exact.abs().max()
    again = torch.autograd.grad(adapted(call, parts), leaves(call, parts), into.to(device))
    assert all(map(torch.equal, got, again))


def test_gradcheck_in_fp64() -> None:
    call, parts = given(torch.float64, bias=True)
    names = [name for name, one in call.items() if one.requires_grad]

    def function(*every: torch.Tensor) -> torch.Tensor:
        return adapted(call | dict(zip(names, every, strict=False)), list(every[-4:]))

    assert torch.autograd.gradcheck(function, leaves(call, parts))


def test_a_second_derivative_is_refused_in_words_but_of_pytorchs_own_operators() -> None:
    """Refused also by torch.autograd.grad of a sum of which another term leads to the adapter."""
    call, parts = given(torch.float64)
    out = adapted(call, parts).square().sum()
    (da,) = torch.autograd.grad(out, parts[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiate such experts once, or use kernel='grouped_mm'"):
        torch.autograd.grad(da.sum() + parts[0].sum(), parts[0])

    def function(x: torch.Tensor, *every: torch.Tensor) -> torch.Tensor:
        return adapted(call | {"hidden_states": x[:, :]}, list(every), kernel="grouped_mm")[:2]

    assert torch.autograd.gradgradcheck(function, (call["hidden_states"], *parts), fast_mode=True)


def test_an_expert_without_rows_and_one_adapter_alone() -> None:
    call, parts = given()
    gradients = torch.autograd.grad(adapted(call, parts).sum(), parts)
    assert not any(one[2].any() for one in gradients)
    assert all(one[0].any() for one in gradients)
    a1, b1, a2, b2 = parts
    zero = torch.zeros_like(b2)
    alone = fm.fused_moe(**call, adapters=((a1, b1, SCALINGS[0]), None))
    torch.testing.assert_close(alone, adapted(call, [a1, b1, a2, zero]))
    torch.testing.assert_close(fm.fused_moe(**call, adapters=(None, None)), fm.fused_moe(**call))
    with torch.no_grad():
        torch.testing.assert_close(adapted(call, parts), adapted(call, parts).detach())


class Made(TorchDispatchMode):
    """Records the shapes of all that is made in new memory, without the order of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
            self.shapes.append(sorted(made.shape))
        return made


def test_nothing_of_the_size_of_the_weights_is_kept_or_made() -> None:
    call, parts = given()
    with Made() as forward:
        adapted(call, parts)
    others: list[int] = []
    own = {one.untyped_storage().data_ptr() for one in call.values()}

    def pack(one: torch.Tensor) -> torch.Tensor:
        if one.untyped_storage().data_ptr() not in own:
            others.append(one.numel())
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        out = adapted(call, parts)
    low = [E * 8 * H, E * 2 * F * 8, E * 8 * F, E * H * 8]  # ranks are filled up to 8
    assert sorted(others) == sorted([*low, T * K * 2 * F])
    with Made() as backward:
        torch.autograd.grad(out.sum(), leaves(call, parts))
    made = forward.shapes + backward.shapes
    assert sorted((E, 8, H)) in made
    assert not any(sorted(call[name].shape) in made for name in ("gate_up_proj", "down_proj"))


def test_autocast_and_adapters_of_fp32_beside_weights_of_bf16() -> None:
    call, parts = given(torch.bfloat16)
    wide = [one.detach().float().requires_grad_() for one in parts]
    out = adapted(call, wide)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, adapted(call, parts))
    assert all(one.dtype == torch.float32 for one in torch.autograd.grad(out.sum(), wide))
    call, parts = given()
    with torch.autocast("cpu", torch.bfloat16):
        out = adapted(call, parts)
    assert out.dtype == torch.bfloat16
    assert all(one.dtype == torch.float32 for one in torch.autograd.grad(out.sum(), parts))


def test_no_tokens_and_rows_that_are_sorted_already() -> None:
    call, parts = given()
    none = call | {name: call[name][:0] for name in ("hidden_states", "top_k_weights", "top_k_ids")}
    out = adapted(none, parts)
    assert out.shape == (0, H)
    assert not any(one.any() for one in torch.autograd.grad(out.sum(), parts))
    low = ((parts[0], parts[1], 1.0), None)
    w1, w2, offsets = call["gate_up_proj"], call["down_proj"], torch.tensor([2, 2, 4, 6])
    got = fm.grouped_moe(call["hidden_states"], w1, w2, offsets, adapters=low)
    whole = w1 + parts[1] @ parts[0]
    torch.testing.assert_close(got, fm.grouped_moe(call["hidden_states"], whole, w2, offsets))


def test_leading_dimensions_and_experts_without_a_gate() -> None:
    call, (a1, b1, a2, b2) = given(torch.float64)
    batched = {name: call[name].unflatten(0, (1, T)) for name in ("hidden_states", "top_k_weights", "top_k_ids")}
    flat = adapted(call, [a1, b1, a2, b2])
    assert torch.equal(adapted(call | batched, [a1, b1, a2, b2]), flat[None])
    ungated = call | {"gate_up_proj": call["gate_up_proj"][:, :F], "activation": "relu2"}
    whole = ungated | {"gate_up_proj": ungated["gate_up_proj"] + 0.5 * b1[:, :F] @ a1}
    out, right = fm.fused_moe(**ungated, adapters=((a1, b1[:, :F], 0.5), None)), fm.fused_moe(**whole)
    torch.testing.assert_close(out, right)
    for got, want in zip(*(torch.autograd.grad(one.square().sum(), (a1, b1)) for one in (out, right)), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("adapters", "options", "message"),
    [
        (3, {}, "adapters must be a pair, for gate_up_proj and down_proj"),
        ((torch.zeros(1), None), {}, r"adapters\[0\] must be \(a, b, scaling\), or None"),
        ((None, (1, 2, 3)), {}, r"a of adapters\[1\] is a int; it must be a torch.Tensor"),
        ((None, (torch.ones(E, 3, F).to_sparse(), torch.zeros(E, H, 3), 1.0)), {}, r"a of adapters\[1\] is a torch.sparse_coo"),
        (
            (None, (torch.zeros(E, 3, H), torch.zeros(E, H, 3), 1.0)),
            {},
            r"adapters\[1\] has a of shape \(4, 3, 16\); it must be",
        ),
        ((None, (torch.zeros(E, 3, F), torch.zeros(E, H, 4), 1.0)), {}, r"adapters\[1\] has b of .* must be \(4, 16, 3\)"),
        ((None, (torch.zeros(E, 0, F), torch.zeros(E, H, 0), 1.0)), {}, r"adapters\[1\] has a of shape \(4, 0, 24\)"),
        ((None, (torch.zeros(E, 3, F).int(), torch.zeros(E, H, 3), 1.0)), {}, r"adapters\[1\] has a of torch.int32 on cpu"),
        ((None, (torch.zeros(E, 3, F), torch.zeros(E, H, 3), "1")), {}, r"adapters\[1\] has scaling '1'; it must be a number"),
        ((None, (torch.zeros(E, 3, F), torch.zeros(E, H, 3), math.nan)), {}, r"adapters\[1\] has scaling nan; it must be f"),
        ((None, None), {"weight_grads": (None, None)}, "adapters and weight_grads are given"),
        (
            (None, None),
            {"kernel": "moe_grouped_triton"},
            "kernel 'moe_grouped_triton' cannot serve this call: adapters are given",
        ),
    ],
)
def test_what_is_not_allowed_is_refused(adapters: Any, options: dict[str, Any], message: str) -> None:
    call, _ = given()
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        fm.fused_moe(**call, adapters=adapters, **options)


def test_weights_that_are_trained_or_a_pair_are_refused_and_explain_names_what_serves() -> None:
    call, (a1, b1, _, _) = given()
    low = ((a1, b1, 1.0), None)
    trained = call | {"gate_up_proj": call["gate_up_proj"].clone().requires_grad_()}
    with pytest.raises(ValueError, match=r"^adapters\[0\] is given and the weights beside it require a gradient"):
        fm.fused_moe(**trained, adapters=low)
    pair = call | {"gate_up_proj": call["gate_up_proj"].chunk(2, 1)}
    with pytest.raises(ValueError, match=r"^adapters are given and gate_up_proj is a pair"):
        fm.fused_moe(**pair, adapters=low)
    reason = "adapters are given, which PyTorch's grouped products serve: an expert has 3.5 rows on average"
    assert fm.explain(fm.fused_moe, **call, adapters=low).reason.startswith(reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpointed_step_compiles_whole(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, w1, w2 = (torch.randn(shape, dtype=dtype) for shape in ((6, 16), (4, 48, 16), (4, 16, 24)))
    a, b = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in ((4, 2, 16), (4, 48, 2)))
    weights, ids = torch.rand(6, 2), torch.randint(0, 4, (6, 2))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return fm.fused_moe(x, w1, w2, weights, ids, adapters=((a, b, 0.5), None))

    def step(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(layer, x, use_reentrant=False)
        return made.float().square().mean()

    found = [torch.autograd.grad(one(x), (a, b)) for one in (step, torch.compile(step, fullgraph=True, backend="aot_eager"))]
    for got, right in zip(*found, strict=True):
        assert (got - right).norm() <= (2**-5 if dtype == torch.bfloat16 else 1e-5) * right.norm()
