"""``fused_moe`` on the CPU, where PyTorch serves it: right in every layout, differentiable, compilable; and what it refuses."""

from __future__ import annotations

import gc
import math
import re
import weakref
from typing import Any

import pytest
import torch
import torch.utils.flop_counter
from tests.unit.ops.moe.cases import CASES, Case, inputs_of, off, reference
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flashmoe_science as fm
from flashmoe_science.ops import calls
from flashmoe_science.ops.cache import Cache

E, H, F, K, T = 4, 16, 24, 2, 6


def call(inputs: Any, transposed: bool = False, **options: Any) -> torch.Tensor:
    """``fused_moe`` of a kernel's inputs."""
    a = inputs.activation
    x, w1, w2, weights, ids, gate_up_bias, down_bias, *_ = inputs.tensors
    w1, w2 = (one.transpose(1, 2) if transposed else one for one in (w1, w2))
    return fm.fused_moe(
        x, w1, w2, weights, ids, activation=a.function, gate_up_bias=gate_up_bias, down_bias=down_bias, transposed=transposed,
        interleaved=a.interleaved, alpha=a.alpha, limit=a.limit, **options,
    )  # fmt: skip


def arguments(dtype: torch.dtype = torch.float32, dim: int = H, hidden: int = F) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "hidden_states": torch.randn(T, dim, dtype=dtype),
        "gate_up_proj": torch.randn(E, 2 * hidden, dim, dtype=dtype) * dim**-0.5,
        "down_proj": torch.randn(E, dim, hidden, dtype=dtype) * hidden**-0.5,
        "top_k_weights": torch.rand(T, K),
        "top_k_ids": torch.stack([torch.randperm(E)[:K] for _ in range(T)]),
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_is_right(case: Case) -> None:
    inputs = inputs_of(case, "cpu")
    got = call(inputs, transposed=inputs.problem.transposed)
    assert got.dtype == inputs.tensors.x.dtype
    assert off(got, inputs) is None


def test_tokens_without_an_expert_here_get_zeros_and_touch_nothing() -> None:
    given = arguments()
    given["top_k_ids"][2] = torch.tensor([-1, E])
    whole = fm.fused_moe(**given)
    given["hidden_states"][2] = torch.nan
    assert torch.equal(fm.fused_moe(**given), whole)
    assert (whole[2] == 0).all()


def test_more_experts_a_token_than_there_are_here() -> None:
    """With expert parallelism most ids are of other ranks' experts."""
    given = arguments()
    whole = fm.fused_moe(**given)
    foreign = torch.tensor([-1, E, E + 7, 2**31 - 1]).expand(T, 4)
    given["top_k_ids"] = torch.cat((foreign, given["top_k_ids"]), 1)
    given["top_k_weights"] = torch.cat((torch.rand(T, 4), given["top_k_weights"]), 1)
    assert given["top_k_ids"].shape[1] > E
    torch.testing.assert_close(fm.fused_moe(**given), whole)


def test_leading_dimensions_strides_and_no_tokens() -> None:
    given = arguments()
    flat = fm.fused_moe(**given)
    for name in ("hidden_states", "top_k_weights", "top_k_ids"):
        given[name] = given[name].view(2, 3, -1)
    assert torch.equal(fm.fused_moe(**given), flat.view(2, 3, H))
    given["hidden_states"] = given["hidden_states"].mT.contiguous().mT
    assert torch.equal(fm.fused_moe(**given), flat.view(2, 3, H))
    for name in ("hidden_states", "top_k_weights", "top_k_ids"):
        given[name] = given[name][:0]
    assert fm.fused_moe(**given).shape == (0, 3, H)


def test_a_call_is_bound_once_and_sees_what_changes() -> None:
    given = arguments()
    calls.LAUNCHES.clear()
    first = fm.fused_moe(**given)
    again = fm.fused_moe(**{name: tensor.clone() for name, tensor in given.items()})
    assert torch.equal(first, again)
    assert len(calls.LAUNCHES) == 1
    other = given | {"hidden_states": 2 * given["hidden_states"], "top_k_ids": given["top_k_ids"].flip(0)}
    right = fm.fused_moe(**{name: tensor.double().float() if name != "top_k_ids" else tensor for name, tensor in other.items()})
    assert torch.equal(fm.fused_moe(**other), right)
    assert not torch.equal(right, first)
    part = {name: tensor[:4] if name not in ("gate_up_proj", "down_proj") else tensor for name, tensor in given.items()}
    torch.testing.assert_close(fm.fused_moe(**part), first[:4])
    for changed in ({"transposed": 0}, {"interleaved": 0}, {"alpha": True}):  # equal to what was allowed
        with pytest.raises(TypeError, match=next(iter(changed))):
            fm.fused_moe(**given, **changed)
    for changed in (
        {"activation": "gelu"},
        {"gate_up_bias": torch.randn(E, 2 * F)},
        {"limit": 0.1, "activation": "clamped_silu"},
    ):
        assert not torch.allclose(fm.fused_moe(**given, **changed), first)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_cached_launch_serves_no_other_that_looks_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features, transforms, traces, derivatives, subclasses and other memory take the slow path, and are right there."""

    def fail(*tensors: Any) -> torch.Tensor:
        raise AssertionError("the cached launch was called")

    monkeypatch.setattr(calls, "LAUNCHES", Cache(8))
    given = arguments()
    right = fm.fused_moe(**given)
    ((key, (cached,)),) = calls.LAUNCHES.items()
    tensors = tuple(given.values())

    def differs(*others: torch.Tensor, **options: Any) -> None:
        calls.LAUNCHES[key] = (cached._replace(launch=fail),)
        torch.testing.assert_close(fm.fused_moe(*others, **options), right)

    with pytest.raises(AssertionError, match="cached launch"):
        differs(*tensors)
    x, w1, w2, weights, ids = tensors
    differs(x, w1, torch._neg_view(-w2), weights, ids)
    differs(x, w1.mT.contiguous().mT, w2, weights, ids)
    differs(x, w1, w2, weights.T.contiguous().T, ids)
    differs(x, w1, w2, weights, ids.int())
    differs(x, w1, w2.clone().requires_grad_(), weights, ids)
    moved = torch.zeros(w2.numel() + 1)[1:].view_as(w2).copy_(w2)
    differs(x, w1, moved, weights, ids)
    wider = torch.zeros(E, H, F + 8)[:, :, :F].copy_(w2)
    differs(x, w1, wider, weights, ids)
    spare = torch.cat((w1, w1[:1])), torch.cat((w2, w2[:1]))
    differs(x, *spare, weights, ids)

    class Sub(torch.Tensor):
        pass

    differs(x, w1.as_subclass(Sub), w2, weights, ids)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        differs(*tensors)
    with torch.overrides.BaseTorchFunctionMode():
        differs(*tensors)
    with forward_ad.dual_level():
        differs(*tensors)
    with torch.no_grad():
        differs(*tensors)
    calls.LAUNCHES[key] = (cached._replace(launch=fail),)
    traced = torch.jit.trace(lambda x: fm.fused_moe(x, w1, w2, weights, ids), x, check_trace=False)
    torch.testing.assert_close(traced(2 * x), fm.fused_moe(2 * x, *tensors[1:], limit=6.0))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_in_words(layout: torch.layout) -> None:
    """Also where the call is cached but for them: they have no strides, at which PyTorch's guards end the process."""
    given = arguments()
    fm.fused_moe(**given)
    for name, tensor in given.items():
        nested = torch.nested.nested_tensor(list(tensor), layout=layout)
        with pytest.raises((TypeError, ValueError), match=f"^{name} is a nested tensor"):
            fm.fused_moe(**given | {name: nested})


def test_a_launch_is_cached_without_its_tensors() -> None:
    calls.LAUNCHES.clear()
    given = arguments()
    fm.fused_moe(**given)
    assert len(calls.LAUNCHES) == 1
    references = [weakref.ref(tensor) for tensor in given.values()]
    given.clear()
    gc.collect()
    assert not any(one() is not None for one in references)


def test_a_tensor_given_twice_is_cached_too() -> None:
    calls.LAUNCHES.clear()
    square = torch.randn(E, H, H)
    given = arguments(hidden=H) | {"gate_up_proj": square, "down_proj": square}
    one = fm.fused_moe(**given)
    assert [*map(len, calls.LAUNCHES.values())] == [1]
    assert torch.equal(fm.fused_moe(**given), one)
    assert [*map(len, calls.LAUNCHES.values())] == [1]
    torch.testing.assert_close(fm.fused_moe(**given | {"down_proj": square.clone()}), one)
    assert [*map(len, calls.LAUNCHES.values())] == [2]


@pytest.mark.parametrize(("dim", "hidden"), [(16, 24), (9, 5)])  # whose strides PyTorch's grouped product takes, and does not
def test_gradients_are_those_of_the_formula(dim: int, hidden: int) -> None:
    given = arguments(dim=dim, hidden=hidden)
    given["top_k_ids"][1, 0] = E
    leaves = [given[name].requires_grad_() for name in ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights")]
    mixed = torch.randn(T, dim)
    got = torch.autograd.grad((fm.fused_moe(**given) * mixed).sum(), leaves)
    x, w1, w2, weights = (leaf.double() for leaf in leaves)
    out = []
    for token in range(T):
        row = torch.zeros(dim, dtype=torch.float64)
        for place, expert in enumerate(given["top_k_ids"][token].tolist()):
            if expert < E:
                gate, up = (w1[expert] @ x[token]).chunk(2)
                row = row + weights[token, place] * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
        out.append(row)
    right = torch.autograd.grad((torch.stack(out) * mixed).sum(), leaves)
    for one, other in zip(got, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grad", [False, True])
def test_it_compiles_whole(grad: bool) -> None:
    given = arguments()
    for name in ("hidden_states", "gate_up_proj"):
        given[name].requires_grad_(grad)
    compiled = torch.compile(lambda kwargs: fm.fused_moe(**kwargs), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(given), fm.fused_moe(**given))
    if grad:
        compiled(given).sum().backward()
        assert given["gate_up_proj"].grad is not None


def test_it_compiles_whole_with_sizes_and_numbers_that_change() -> None:
    given = arguments()

    def experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        return fm.fused_moe(
            x, given["gate_up_proj"], given["down_proj"], weights, ids, activation="clamped_silu", alpha=alpha, limit=limit
        )

    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens, alpha, limit in ((6, 1.702, 7.0), (4, 1.5, 0.5)):
        inputs = [given[name][:tokens] for name in ("hidden_states", "top_k_weights", "top_k_ids")]
        torch.testing.assert_close(compiled(*inputs, alpha, limit), experts(*inputs, alpha, limit))
    layer = fm.FlashMoELayer(H, F, E, K, activation="clamped_silu", alpha=1.5, scaling_factor=2.5, shared_intermediate_size=8)
    x = torch.randn(5, H)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")(x), layer(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by opcheck of PyTorch 2.14
def test_the_operator_is_as_pytorch_wants_one() -> None:
    inputs = inputs_of(CASES[1], "cpu")
    rest = (*inputs.tensors[1:], "silu", True, False, 1.702, 7.0)
    for grad in (False, True):
        x = inputs.tensors.x.clone().requires_grad_(grad)
        torch.library.opcheck(torch.ops.flashmoe.moe_forward.default, (x, *rest))


def test_explain_says_what_serves_a_call() -> None:
    given = arguments()
    decision = fm.explain(fm.fused_moe, **given)
    assert (decision.kernel, decision.basis) == ("grouped_mm", "required")
    assert "CPU" in decision.reason
    given["hidden_states"].requires_grad_()
    assert "an input requires gradients, its backward by grouped_mm_bwd" in fm.explain(fm.fused_moe, **given).reason
    with pytest.raises(ValueError, match="moe_gemv_triton"):
        fm.fused_moe(**given, kernel="moe_gemv_triton")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_states": [1.0]}, "hidden_states is a list; it must be a torch.Tensor"),
    ({"hidden_states": torch.zeros(T, H, dtype=torch.int32)}, "hidden_states has dtype torch.int32"),
    ({"hidden_states": torch.zeros(T, H).double()}, "gate_up_proj has dtype torch.float32 and hidden_states torch.float64"),
    ({"top_k_weights": torch.zeros(T, K).double()}, "top_k_weights has dtype torch.float64"),
    ({"gate_up_proj": torch.zeros(E, 2 * F, H).half()}, "gate_up_proj has dtype torch.float16 and hidden_states torch.float32"),
    ({"gate_up_proj": torch.zeros(2 * F, H)}, "gate_up_proj has shape (48, 16); it must have three dimensions"),
    ({"gate_up_proj": torch.zeros(E, H, 2 * F)}, "transposed=True"),
    ({"gate_up_proj": torch.zeros(E, 3 * F, H)}, "gate_up_proj has 72 rows an expert and down_proj 24 columns"),
    ({"down_proj": torch.zeros(E + 1, H, F)}, "gate_up_proj has 4 experts and down_proj 5"),
    ({"top_k_ids": torch.zeros(T, K)}, "top_k_ids has dtype torch.float32; it must be int32 or int64"),
    ({"top_k_ids": torch.zeros(T, K + 1).int()}, "top_k_weights has shape (6, 2) and top_k_ids (6, 3)"),
    ({"top_k_weights": torch.zeros(T + 1, K)}, "top_k_weights has shape (7, 2); it must be [6, top_k]"),
    ({"top_k_weights": torch.zeros(T, K).int()}, "top_k_weights has dtype torch.int32"),
    ({"activation": "swish"}, "activation is 'swish'; it must be one of 'silu'"),
    ({"interleaved": 1}, "interleaved is 1; it must be True or False"),
    ({"transposed": None}, "transposed is None; it must be True or False"),
    ({"alpha": "2"}, "alpha is '2'; it must be a number"),
    ({"limit": float("nan")}, "limit is nan; it must be a number"),
    ({"alpha": float("inf")}, "alpha is inf; it must be finite"),
    ({"limit": -1.0}, "limit is -1.0; it must be at least 0"),
    ({"gate_up_bias": torch.zeros(E, F)}, "gate_up_bias has shape (4, 24); it must be (4, 48)"),
    ({"down_bias": torch.zeros(E, H).int()}, "down_bias has dtype torch.int32"),
    ({"kernel": ["moe"]}, "kernel is ['moe']; it must be the name of one, or None"),
    ({"gate_up_proj": torch.zeros(E, 2 * F, H).to_sparse()}, "gate_up_proj is a torch.sparse_coo tensor; it must be dense"),
    ({"top_k_ids": [[0, 1]]}, "top_k_ids is a list; it must be a torch.Tensor"),
    ({"down_proj": torch.zeros(E, H, F, device="meta")}, "down_proj is on meta and hidden_states on cpu"),
    ({"top_k_ids": torch.zeros(T, K, device="meta").int()}, "top_k_ids is on meta and hidden_states on cpu"),
    ({name: one.to("meta") for name, one in arguments().items()}, "hidden_states is on device meta; it must be on a CPU or a"),
    ({"kernel": "nothing"}, "kernel is 'nothing'; it must be one of"),
    ({"kernel": "moe_grouped_triton"}, "kernel 'moe_grouped_triton' cannot serve"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=lambda value: None if isinstance(value, dict) else value[:40])
def test_what_is_not_allowed_is_refused_in_one_line(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        fm.fused_moe(**arguments() | changed)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensors_without_memory_are_refused_in_words() -> None:
    without = {name: one.to("meta") for name, one in arguments().items() if isinstance(one, torch.Tensor)}
    with pytest.raises(ValueError, match="hidden_states is on device meta; it must be on a CPU or a CUDA device"):
        fm.fused_moe(**arguments() | without)
    layer = fm.FlashMoELayer(H, F, E, K, device="meta")
    with pytest.raises(ValueError, match="router_logits is on device meta; it must be on a CPU or a CUDA device"):
        layer(torch.zeros(3, H, device="meta"))


def test_the_layer_is_its_router_its_experts_and_its_shared_expert() -> None:
    torch.manual_seed(1)
    layer = fm.FlashMoELayer(H, F, E, K, scoring="sigmoid", selection_bias=True, scaling_factor=2.5, shared_intermediate_size=8)
    layer.selection_bias.copy_(torch.tensor([5.0, 0.0, 0.0, 0.0]))
    x = torch.randn(3, 2, H)
    weights, ids = fm.route(
        layer.router_logits(x), K, scoring="sigmoid", normalize="sum", selection_bias=layer.selection_bias, scaling_factor=2.5
    )
    assert (ids == 0).any(-1).all()  # what the bias prefers
    gate, up = (x @ layer.shared_gate_up_proj[0].T).chunk(2, -1)
    shared = (torch.nn.functional.silu(gate) * up) @ layer.shared_down_proj[0].T
    right = fm.fused_moe(x, layer.gate_up_proj, layer.down_proj, weights, ids) + shared
    torch.testing.assert_close(layer(x), right)
    layer(x).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    again = fm.FlashMoELayer(H, F, E, K, scoring="sigmoid", selection_bias=True, scaling_factor=2.5, shared_intermediate_size=8)
    again.load_state_dict(layer.state_dict())
    torch.testing.assert_close(again(x), layer(x))
    with pytest.raises(ValueError, match="top_k is 9; it must be at most num_experts, 4"):
        fm.FlashMoELayer(H, F, E, 9)


def test_a_layer_without_memory_is_refused_by_name_under_autocast_too() -> None:
    layer, x = fm.FlashMoELayer(H, F, E, K, device="meta"), torch.empty(T, H, device="meta")
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on), pytest.raises(ValueError, match="is on device meta; it must"):
            layer(x)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "hidden_states is a int; it must be a torch.Tensor"),
        (torch.zeros(T, H + 1), "hidden_states has shape (6, 17); its last dimension must be hidden_size, 16"),
        (torch.tensor(1.0), "hidden_states has shape (); its last dimension must be hidden_size, 16"),
    ],
    ids=["no tensor", "another width", "no dimension"],
)
def test_a_layer_refuses_states_that_are_not_its_own_by_name(given: Any, message: str) -> None:
    layer = fm.FlashMoELayer(H, F, E, K)
    for call in (layer, layer.router_logits):
        with pytest.raises((TypeError, ValueError)) as caught:
            call(given)
        assert message in str(caught.value)


@pytest.mark.parametrize("shape", [(T, E - 1), (T, E + 1), (T - 1, E), (1, T, E)])
def test_a_layer_refuses_logits_of_other_tokens_or_experts_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"^router_logits has shape {re.escape(str(shape))}; it must be .{T}, {E}., of tokens"):
        fm.FlashMoELayer(H, F, E, K)(torch.zeros(T, H), torch.zeros(shape))


@pytest.mark.parametrize("way", ["eager", "checkpointed", "compiled", "autocast"])
def test_the_layer_gives_the_losses_of_its_router(way: str) -> None:
    torch.manual_seed(2)
    layer, x = fm.FlashMoELayer(H, F, E, K), torch.randn(3, 2, H)

    def loss(function: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        out, (balance, z) = function(x)
        assert (balance.dtype, z.dtype) == (torch.float32, torch.float32)
        total = out.square().mean() + 0.01 * balance + 0.001 * z
        return total, [*torch.autograd.grad(total, list(layer.parameters()))]

    def apart(x: torch.Tensor) -> Any:
        logits = layer.router_logits(x)
        ids = fm.route(logits, K, normalize="sum")[1]
        return layer(x, logits), (fm.balance_loss(logits, ids), fm.z_loss(logits))

    ways: dict[str, Any] = {
        "checkpointed": lambda x: checkpoint(layer, x, return_losses=True, use_reentrant=False),
        "compiled": torch.compile(lambda x: layer(x, return_losses=True), fullgraph=True, backend="aot_eager"),
    }
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        found, right = loss(ways.get(way, lambda x: layer(x, return_losses=True))), loss(apart)
    torch.testing.assert_close(found, right)


LAYER_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"activation": "swish"}, "activation is 'swish'; it must be one of 'silu'"),
    ({"alpha": "2"}, "alpha is '2'; it must be a number"),
    ({"limit": float("nan")}, "limit is nan; it must be a number"),
    ({"alpha": float("inf")}, "alpha is inf; it must be finite"),
    ({"limit": -1.0}, "limit is -1.0; it must be at least 0"),
    ({"dtype": torch.int8}, "dtype is torch.int8; it must be float16, bfloat16, float32 or float64"),
    ({"dtype": "bf16"}, "dtype is 'bf16'; it must be float16, bfloat16, float32 or float64"),
    ({"scoring": "argmax"}, "scoring is 'argmax'; it must be one of 'softmax', 'softmax_topk', 'sigmoid'"),
    ({"normalize": "max"}, "normalize is 'max'; it must be one of 'none', 'sum'"),
    ({"scoring": "sigmoid", "groups": 3, "top_k_groups": 1}, "groups is 3 and there are 4 experts; the first must divide"),
    ({"scoring": "sigmoid", "groups": 2}, "top_k_groups is None; it must be an integer from 1 to 2"),
    ({"scoring": "sigmoid", "groups": 4, "top_k_groups": 1}, "top_k is 2; it must be at most 1, the experts of 1 of 4 groups"),
    ({"groups": 2, "top_k_groups": 1}, "groups is given and scoring is 'softmax'; it must be 'sigmoid' then"),
    ({"selection_bias": True}, "selection_bias is given and scoring is 'softmax'; it must be 'sigmoid' then"),
    ({"selection_bias": "yes"}, "selection_bias is 'yes'; it must be True or False"),
    ({"scaling_factor": float("inf")}, "scaling_factor is inf; it must be finite"),
    ({"scaling_factor": "2.5"}, "scaling_factor is '2.5'; it must be a real number"),
    ({"shared_intermediate_size": -8}, "shared_intermediate_size is -8; it must be an integer of at least 0"),
    ({"shared_intermediate_size": 2.0}, "shared_intermediate_size is 2.0; it must be an integer of at least 0"),
    ({"num_experts": 0}, "num_experts is 0; it must be an integer above 0"),
]


@pytest.mark.parametrize(
    ("changed", "message"), LAYER_REFUSED, ids=lambda value: None if isinstance(value, dict) else value[:40]
)
def test_a_layer_that_cannot_be_is_refused_when_it_is_made(changed: dict[str, Any], message: str) -> None:
    sizes = {"hidden_size": H, "intermediate_size": F, "num_experts": E, "top_k": K}
    with pytest.raises((TypeError, ValueError)) as caught:
        fm.FlashMoELayer(**(sizes | changed))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_in_half_precision_chooses_by_an_fp32_bias(dtype: torch.dtype) -> None:
    layer = fm.FlashMoELayer(H, F, E, K, scoring="sigmoid", selection_bias=True)
    bias = torch.tensor([1.0 + 2**-20, 1.0, 1.0 - 2**-20, 0.5])
    layer.selection_bias.copy_(bias)
    layer = torch.nn.Sequential(layer).to(dtype)[0]
    assert layer.gate_up_proj.dtype == dtype
    assert torch.equal(layer.selection_bias, bias)
    assert torch.equal(layer.state_dict()["selection_bias"], bias)
    assert layer(torch.randn(3, H, dtype=dtype)).dtype == dtype
    layer = layer.to("meta", dtype=torch.float32)
    assert (layer.selection_bias.device.type, layer.selection_bias.dtype) == ("meta", torch.float32)
    assert layer.to_empty(device="cpu").selection_bias.device.type == "cpu"


def test_a_layer_made_without_memory_is_drawn_anew() -> None:
    layer = fm.FlashMoELayer(H, F, E, K, scoring="sigmoid", selection_bias=True, device="meta").to_empty(device="cpu")
    for tensor in layer.state_dict().values():
        tensor.fill_(math.nan)
    layer.reset_parameters()  # as FSDP2 wants it
    assert not layer.state_dict()["selection_bias"].any()
    assert all(parameter.isfinite().all() and parameter.any() for parameter in layer.parameters())


def test_the_reference_is_not_the_fallback() -> None:
    """A wrong activation is off by more than a case allows: the cases can fail."""
    inputs = inputs_of(CASES[0], "cpu")
    assert off(1.01 * reference(inputs).float(), inputs) is not None
