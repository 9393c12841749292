"""The experts' autograd rule and the operator of their backward, on the CPU: right, small, compilable; what it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing
from tests.unit.forked import on_ranks
from tests.unit.ops.moe.cases import CASES, Case, changed, inputs_of, reference
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashmoe_science as fm
import flashmoe_science.moe  # which defines the operators
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume
from flashmoe_science.ops.moe.call import Activation, Tensors
from flashmoe_science.ops.moe.call.backward import INPUTS
from flashmoe_science.ops.moe.front.backward.choose import choose_backward
from flashmoe_science.ops.moe.front.backward.operator import OPERATOR

SILU = ("silu", True, False, 1.702, 7.0)
E, H, F, K, T = 4, 16, 24, 2, 6
ORDER = ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights", "top_k_ids", "gate_up_bias", "down_bias")
LEAVES = ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights", "gate_up_bias", "down_bias")


def arguments(dtype: torch.dtype = torch.float32, dim: int = H, hidden: int = F, bias: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    of_weights = dtype if dtype == torch.float64 else torch.float32
    made = {
        "hidden_states": torch.randn(T, dim, dtype=dtype),
        "gate_up_proj": torch.randn(E, 2 * hidden, dim, dtype=dtype) * dim**-0.5,
        "down_proj": torch.randn(E, dim, hidden, dtype=dtype) * hidden**-0.5,
        "top_k_weights": torch.rand(T, K, dtype=of_weights),
        "top_k_ids": torch.stack([torch.randperm(E)[:K] for _ in range(T)]),
    }
    biases = {"gate_up_bias": torch.randn(E, 2 * hidden, dtype=dtype), "down_bias": torch.randn(E, dim, dtype=dtype)}
    return made | (biases if bias else {})


def leaves(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [given[name].requires_grad_() for name in LEAVES if name in given]


def saved(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The arguments of the backward's operator but dout and what is wanted, of arguments that need no gradient."""
    tensors = [*(given.get(name) for name in ORDER), *6 * [None]]
    return *tensors, torch.ops.flashmoe.moe_forward_saving.default(*tensors, *SILU)[1]  # type: ignore[return-value]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_is_right(case: Case, recompute: bool) -> None:
    inputs = inputs_of(case, "cpu")
    a, dout = inputs.activation, torch.randn(inputs.tensors.x.shape).to(inputs.tensors.x.dtype)
    given = {name: one for name in INPUTS if (one := getattr(inputs.tensors, name)) is not None}
    ours = {name: one.detach().requires_grad_() for name, one in given.items()}
    x, w1, w2, weights, *_ = ours.values()
    out = fm.fused_moe(
        x, w1, w2, weights, inputs.tensors.topk_ids, activation=a.function, gate_up_bias=ours.get("gate_up_bias"),
        down_bias=ours.get("down_bias"), interleaved=a.interleaved, alpha=a.alpha, limit=a.limit, recompute=recompute,
    )  # fmt: skip
    got = torch.autograd.grad(out, list(ours.values()), dout)
    exact = {name: one.double().requires_grad_() for name, one in given.items()}
    right = reference(changed(inputs, **exact))
    want = torch.autograd.grad(right, list(exact.values()), dout.double(), allow_unused=True, materialize_grads=True)
    allowed = {"fp32": 2e-5, "bf16": 3e-2, "fp16": 4e-3}[inputs.problem.dtype]
    for name, one, other in zip(given, got, want, strict=True):
        assert (one.dtype, one.stride()) == (given[name].dtype, torch.empty_like(given[name]).stride())
        assert (one.double() - other).abs().max() <= allowed * other.abs().max().clamp(min=1e-3), name


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_silu"])
def test_gradcheck_in_fp64(activation: str, recompute: bool) -> None:
    given = arguments(torch.float64, 5, 3, bias=True)
    given["top_k_ids"][1, 0], given["top_k_ids"][2], given["top_k_ids"][4] = -1, 1, E

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        replaced = given | dict(zip(LEAVES, tensors, strict=True))
        return fm.fused_moe(**replaced, activation=activation, limit=0.7, interleaved=True, recompute=recompute)

    assert torch.autograd.gradcheck(call, leaves({name: one.clone() for name, one in given.items()}))


@pytest.mark.parametrize("interleaved", [False, True])
def test_where_the_clamp_saturates_the_gradient_is_zero_and_at_its_bound_it_is_not(interleaved: bool) -> None:
    limit = 1.5
    points = torch.tensor([-2.0, -limit, 0.5, limit, 2.0])
    gate, up = torch.cartesian_prod(points, points).T
    z = torch.stack((gate, up), -1).flatten() if interleaved else torch.cat((gate, up))
    x, width = torch.ones(1, 1), len(gate)
    w1, w2, ids = torch.zeros(1, 2 * width, 1), torch.ones(1, 1, width), torch.zeros(1, 1, dtype=torch.int32)
    options = ("clamped_silu", True, interleaved, 1.702, limit)
    wanted = [False, True, False, False, False, False]
    _, dw1, *_ = OPERATOR(x, w1, w2, torch.ones(1, 1), ids, *8 * [None], z[None], torch.ones(1, 1), wanted, *options)
    of_gate, of_up = dw1[0, :, 0].unflatten(0, (width, 2)).T if interleaved else dw1[0, :, 0].chunk(2)
    assert torch.equal(of_gate == 0, (gate > limit) | (up == -1.0))  # no up is -1 here
    assert torch.equal(of_up == 0, up.abs() > limit)


def test_only_pre_activations_are_kept_besides_the_calls_own_tensors() -> None:
    given = arguments(torch.bfloat16, bias=True)
    transposed = {name: given[name].mT.contiguous() for name in ("gate_up_proj", "down_proj")}
    call = given | transposed
    leaves(call)
    own = {one.untyped_storage().data_ptr() for one in call.values()}
    for recompute, kept in ((False, [T * K * 2 * F]), (True, [])):
        others: list[int] = []

        def pack(one: torch.Tensor, others: list[int] = others) -> torch.Tensor:
            if one.untyped_storage().data_ptr() not in own:
                others.append(one.numel())
            return one

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            fm.fused_moe(**call, transposed=True, recompute=recompute)
        assert others == kept


OF_W1, OF_W2 = 2 * T * K * 2 * F * H, 2 * T * K * F * H
PRODUCTS = {  # by what has a gradient: dA, then dx, dW1 and dW2 where they are asked for
    LEAVES: 2 * OF_W1 + 2 * OF_W2,
    ("hidden_states",): OF_W2 + OF_W1,
    ("hidden_states", "top_k_weights"): OF_W2 + OF_W1,
    ("gate_up_proj",): OF_W2 + OF_W1,
    ("down_proj",): OF_W2,
    ("top_k_weights",): OF_W2,
    ("gate_up_bias",): OF_W2,
    ("down_bias",): 0,
}


@pytest.mark.parametrize("names", PRODUCTS, ids=",".join)
def test_frozen_tensors_cost_no_product(names: tuple[str, ...]) -> None:
    given = arguments(bias=True)
    every = leaves(given)
    whole = dict(zip(LEAVES, torch.autograd.grad(fm.fused_moe(**given).sum(), every), strict=True))
    for name in LEAVES:
        given[name].requires_grad_(name in names)
    with FlopCounterMode(display=False) as counter:
        fm.fused_moe(**given).sum().backward()
    counts = {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}
    assert counts["flashmoe.moe_backward"] == PRODUCTS[names]
    assert counts["flashmoe.moe_forward_saving"] == OF_W1 + OF_W2
    for name in LEAVES:
        assert (given[name].grad is not None) == (name in names)
        assert name not in names or torch.equal(given[name].grad, whole[name])


@pytest.fixture
def uninitialised_is_nan() -> Any:
    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dim", [H, 9])  # whose strides PyTorch's grouped product takes, and does not
@pytest.mark.usefixtures("uninitialised_is_nan")
def test_an_expert_without_tokens_and_pairs_without_an_expert_have_gradients_of_zero(dim: int) -> None:
    """Among them a token that is not a number, and pre-activations that no forward wrote."""
    given = arguments(dim=dim, bias=True)
    given["top_k_ids"].clamp_(max=E - 2)
    given["top_k_ids"][0], given["top_k_ids"][1] = -1, torch.tensor([E, 2**31 - 1])
    given["hidden_states"][0] = torch.nan
    given["top_k_weights"][1, 1] = torch.nan
    *tensors, z = saved(given)
    assert z is not None
    z[-4:] = torch.nan
    dout = torch.randn(T, dim)
    dout[0] = torch.nan
    dx, dw1, dw2, dweights, *biases = OPERATOR(*tensors, z, dout, [True] * 6, *SILU)
    assert all(one.isfinite().all() for one in (dx, dw1, dw2, dweights, *biases))
    for one in (dw1[-1], dw2[-1], *(bias[-1] for bias in biases), dx[:2], dweights[:2]):
        assert not one.any()
    assert all(one[0].any() for one in (dw1, dw2, *biases))


@pytest.mark.usefixtures("uninitialised_is_nan")
def test_anomaly_detection_meets_no_rows_that_pytorchs_grouped_product_left_unwritten() -> None:
    given = arguments()
    given["top_k_ids"][1, 0] = -1
    every = leaves(given)
    with torch.autograd.set_detect_anomaly(True):
        fm.fused_moe(**given).sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in every)


def test_no_tokens_give_gradients_of_zero() -> None:
    torch._dynamo.reset()  # other tests compile it too, for eight formats of weights
    given = arguments(bias=True)
    none = given | {name: given[name][:0] for name in ("hidden_states", "top_k_weights", "top_k_ids")}
    every = leaves(none)
    for function in (fm.fused_moe, torch.compile(fm.fused_moe, fullgraph=True, backend="aot_eager")):
        for one, gradient in zip(every, torch.autograd.grad(function(**none).sum(), every), strict=True):
            assert gradient.shape == one.shape
            assert not gradient.any()


def test_no_tokens_of_width_1_give_gradients_of_zero() -> None:
    """PyTorch gives their rows a stride of 0, which its grouped product does not take."""
    none = torch.empty(0, 1), torch.randn(E, 1, 2 * F), torch.randn(E, F, 1), torch.rand(0, K)
    every = [one.requires_grad_() for one in none]
    out = fm.fused_moe(*every, torch.zeros(0, K, dtype=torch.int64), transposed=True, kernel="grouped_mm")
    for one, gradient in zip(every, torch.autograd.grad(out.sum(), every), strict=True):
        assert gradient.shape == one.shape
        assert not gradient.any()


def test_equal_calls_give_equal_bits() -> None:
    given = arguments(torch.bfloat16, bias=True)
    every = leaves(given)
    first = torch.autograd.grad(fm.fused_moe(**given).sum(), every)
    for _ in range(20):
        assert all(map(torch.equal, first, torch.autograd.grad(fm.fused_moe(**given).sum(), every)))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_and_backward_compile_whole_for_any_number_of_tokens(backend: str, recompute: bool) -> None:
    torch._dynamo.reset()
    given = arguments(bias=True)
    of_weights = leaves({name: given[name] for name in LEAVES if name not in ("hidden_states", "top_k_weights")})

    def loss(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        call = given | {"hidden_states": x, "top_k_weights": weights, "top_k_ids": ids}
        return fm.fused_moe(**call, recompute=recompute).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (6, 4, 3):
            x, weights = (given[name][:tokens].clone().requires_grad_() for name in ("hidden_states", "top_k_weights"))
            routed = x, weights, given["top_k_ids"][:tokens].clone()
            both = (torch.autograd.grad(one(*routed), [x, weights, *of_weights]) for one in (loss, compiled))
            for one, other in zip(*both, strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("keep", ["nothing", "experts"])
def test_a_checkpointed_layer_has_the_same_gradients(keep: str) -> None:
    given = arguments(torch.bfloat16)
    every = leaves(given)
    options: dict[str, Any] = {"context_fn": fm.checkpoint_context} if keep == "experts" else {}

    def block(x: torch.Tensor) -> torch.Tensor:
        return fm.fused_moe(**given | {"hidden_states": x.sin()})

    want = torch.autograd.grad(block(given["hidden_states"]).sum(), every)
    got = torch.autograd.grad(checkpoint(block, given["hidden_states"], use_reentrant=False, **options).sum(), every)
    assert all(map(torch.equal, want, got))


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_trains_weights_of_fp32(inside: bool) -> None:
    given = arguments(bias=True)
    every = leaves(given)
    half = {name: given[name].detach().bfloat16() for name in LEAVES[:3]}
    same = [*(half[name].requires_grad_() for name in LEAVES[:3]), *every[3:]]
    want = torch.autograd.grad(fm.fused_moe(**given | half).sum(), same)
    with torch.autocast("cpu", torch.bfloat16):
        out = fm.fused_moe(**given)
        got = torch.autograd.grad(out.sum(), every) if inside else None
    got = got or torch.autograd.grad(out.sum(), every)
    for one, other, like in zip(got, want, every, strict=True):
        assert one.dtype == like.dtype
        assert torch.equal(one, other.to(like.dtype))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wanted", [[True] * 6, [False, True, False, True, False, False]])
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck_of_the_operators(wanted: list[bool], bias: bool) -> None:
    given = arguments(bias=bias)
    wanted = wanted if bias else [*wanted[:4], False, False]
    *tensors, z = saved(given)
    for of_forward in (z, None):
        call = (*tensors, of_forward, torch.randn(T, H), wanted, *SILU)
        torch.library.opcheck(OPERATOR, call, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(torch.ops.flashmoe.moe_forward_saving.default, (*tensors, *SILU), test_utils="test_faketensor")
    leaves(given)
    for recompute in (False, True):
        torch.library.opcheck(torch.ops.flashmoe.moe_forward.default, (*tensors, *SILU, None, False, recompute))


def test_a_second_derivative_is_refused_by_name_but_of_pytorchs_own_operators() -> None:
    given = arguments()
    x, *_ = leaves(given)
    (dx,) = torch.autograd.grad(fm.fused_moe(**given).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="moe_backward are asked for, which has none: differentiate experts once"):
        dx.sum().backward()
    (dx,) = torch.autograd.grad(fm.fused_moe(**given, kernel="grouped_mm").sum(), x, create_graph=True)
    dx.sum().backward()
    of_transform = torch.func.grad(lambda x: fm.fused_moe(**given | {"hidden_states": x}).sum())
    torch.testing.assert_close(of_transform(x.detach()), dx.detach())


def test_the_operator_refuses_what_another_forward_saved() -> None:
    *tensors, z = saved(arguments())
    with pytest.raises(ValueError, match=r"z has shape \(11, 48\); it must be \(12, 48\)"):
        OPERATOR(*tensors, z[1:], torch.randn(T, H), [True] * 6, *SILU)
    with pytest.raises(TypeError, match=r"dout has dtype torch.float64; it must be torch.float32"):
        OPERATOR(*tensors, z, torch.randn(T, H).double(), [True] * 6, *SILU)


def test_explain_names_what_serves_the_backward() -> None:
    given = arguments(torch.bfloat16)
    leaves(given)
    assert (
        "its backward by grouped_mm_bwd: PyTorch's operators serve tensors on the CPU"
        in fm.explain(fm.fused_moe, **given).reason
    )
    assert "its backward by grouped_mm_bwd: asked for" in fm.explain(fm.fused_moe, **given, kernel="grouped_mm_bwd").reason
    with assume(gpu_named("b200")):
        decision = choose_backward(Tensors(*(given.get(name) for name in ORDER)), Activation(), None)
        assert "no record has a backward of ours faster than PyTorch's" in decision.reason
    with pytest.raises(ValueError, match="kernel 'grouped_mm_train' cannot serve this call: it is a peer's"):
        fm.fused_moe(**given, kernel="grouped_mm_train")


@pytest.mark.parametrize("recompute", [False, True])
def test_a_result_is_no_view(recompute: bool) -> None:
    """Of one FSDP2 warns: an operation in place on it would drop the hook that gathers weights for the backward."""
    given = arguments()
    leaves(given)
    batched = {name: given[name].unflatten(0, (2, -1)) for name in ("hidden_states", "top_k_weights", "top_k_ids")}
    for of_call, shape in ((given, (T, H)), (given | batched, (2, T // 2, H))):
        out = fm.fused_moe(**of_call, recompute=recompute)
        assert out.shape == shape
        assert not out._is_view()
        out.mul_(2)


class Apart(torch.nn.Module):
    """A layer whose gates and ups are two parameters, or that has adapters beside frozen weights."""

    def __init__(self, adapted: bool) -> None:
        super().__init__()
        shapes = {"gate": (E, F, H), "up": (E, F, H), "down": (E, H, F)}
        if adapted:
            shapes = {"both": (E, 2 * F, H), "down": (E, H, F), "a": (E, 8, H), "b": (E, 2 * F, 8)}
        for name, shape in shapes.items():
            frozen = adapted and len(name) > 1
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape) * shape[2] ** -0.5, requires_grad=not frozen))
        self.adapted = adapted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = fm.route(x[..., :E], K)
        if self.adapted:
            return fm.fused_moe(x, self.both, self.down, weights, ids, adapters=((self.a, self.b, 0.5), None))  # type: ignore[arg-type]
        return fm.fused_moe(x, (self.gate, self.up), self.down, weights, ids)  # type: ignore[arg-type]


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "layer": lambda: fm.FlashMoELayer(H, F, E, K),
    "apart": lambda: Apart(adapted=False),
    "adapted": lambda: Apart(adapted=True),
}


def train_sharded(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for make in LAYERS.values():
        train_layers(rank, make)
    torch.distributed.barrier()
    os._exit(0)  # an ordinary end aborts now and then: a thread of PyTorch's is still there ("terminate called")


def train_layers(rank: int, make: Callable[[], torch.nn.Module]) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, H)
    layers, whole = (torch.nn.Sequential(make(), make()) for _ in range(2))
    whole.load_state_dict(layers.state_dict())
    whole(x).square().sum().backward()
    for layer in layers:
        fully_shard(layer)
    fully_shard(layers)
    (2 * layers(x[rank]).square().sum()).backward()  # ranks' gradients are averaged
    for one, other in zip(layers.parameters(), whole.parameters(), strict=True):
        if other.requires_grad:
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)  # type: ignore[union-attr]


def test_weights_that_fsdp2_frees_between_the_passes(tmp_path: Any) -> None:
    on_ranks(2, train_sharded, str(tmp_path / "store"))
