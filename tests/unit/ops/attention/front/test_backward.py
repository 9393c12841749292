"""The autograd rule: what serves a call whose inputs require gradients, and the operator of the backward, on the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.interpreter import Interpreter
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashmoe_science as fm
from flashmoe_science.dispatch.table import Entry, FasterPeer, Table
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops import choose as shared
from flashmoe_science.ops.attention.call.outputs import tokens_first
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.front.backward import choose, operator
from flashmoe_science.ops.attention.front.backward.choose import choose_backward
from flashmoe_science.ops.attention.front.backward.kernels import ours
from flashmoe_science.ops.attention.problem.backward import parse

OPERATOR = torch.ops.flashmoe.attention_backward.default
H200 = gpu_named("h200")


def t(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [t(*shape, seed=place, dtype=dtype).requires_grad_() for place, shape in enumerate(shapes)]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of [batch, rows, heads, width] in fp64, and its log-sum-exp."""
    q, k, v = (one.double().transpose(1, 2) for one in (q, k, v))
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril(k.shape[2] - q.shape[2]).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
def test_the_log_sum_exp_is_differentiable(causal: bool) -> None:
    """FlashAttention-3 drops this gradient."""
    inputs = leaves((2, 7, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    out, lse, _ = fm.flash_attn_func(*inputs, causal=causal, return_attn_probs=True)
    right, right_lse = plain(*inputs, causal)
    gradients = t(*out.shape, seed=7), t(*lse.shape, seed=8)
    for outputs, found in (((out, lse), (right, right_lse)), ((lse,), (right_lse,))):
        into = gradients[-len(outputs) :]
        got = torch.autograd.grad(outputs, inputs[: 3 if len(outputs) == 2 else 2], into, retain_graph=True)
        want = torch.autograd.grad(
            found, inputs[: 3 if len(outputs) == 2 else 2], [one.double() for one in into], retain_graph=True
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Input #")  # of fp32
def test_gradcheck_of_the_log_sum_exp_with_features() -> None:
    q, k, sinks = (t(*shape, seed=2).requires_grad_() for shape in ((5, 2, 4), (6, 2, 4), (2,)))
    cu_q, cu_k = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 4, 6], dtype=torch.int32)

    def call(*given: torch.Tensor) -> Any:
        q, k, sinks = given
        return fm.flash_attn_varlen_func(q, k, k, cu_q, cu_k, 3, 4, causal=True, s_aux=sinks, return_attn_probs=True)

    assert torch.autograd.gradcheck(call, (q, k, sinks), eps=1e-2, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False)])
@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_opcheck_of_the_operator(wanted: tuple[bool, ...], lse: bool) -> None:
    q, k, v = t(2, 4, 7, 16), t(2, 2, 9, 16, seed=1), t(2, 2, 9, 24, seed=2)
    out, of_rows = torch.ops.flashmoe.attention_forward.default(q, k, v, "causal", None, True)
    dlse = t(*of_rows.shape, seed=4) if lse else None
    arguments = (t(*out.shape, seed=3), dlse, q, k, v, out, of_rows, [*wanted, False, False], "causal", 0.3)
    torch.library.opcheck(OPERATOR, arguments, test_utils=("test_schema", "test_faketensor"))


def test_the_operator_by_pytorch_is_the_gradient_of_every_feature() -> None:
    inputs = leaves((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), (4,), (1, 4, 5, 6))
    q, k, v, sinks, bias = inputs
    forward = torch.ops.flashmoe.attention_forward.default
    features = {"sinks": sinks, "bias": bias.expand(2, 4, 5, 6), "window_left": 3, "softcap": 2.0}
    out, lse = forward(q, k, v, "causal", 0.5, True, None, **features)
    dout, dlse = t(*out.shape, seed=8), t(*lse.shape, seed=9)
    want = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    detached = {name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in features.items()}
    qkv = [one.detach() for one in (q, k, v)]
    got = OPERATOR(dout, dlse, *qkv, out.detach(), lse.detach(), [True] * 5, "causal", 0.5, None, **detached)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert got[4].shape == (1, 4, 5, 6)


def test_the_operator_refuses_results_of_another_call() -> None:
    q, dout = t(1, 2, 4, 8), t(1, 2, 4, 8)
    lse = t(1, 2, 4)
    with pytest.raises(ValueError, match=r"dout has shape \(1, 2, 3, 8\); it must be \(1, 2, 4, 8\)"):
        OPERATOR(dout[:, :, :3], None, q, q, q, q, lse, [True] * 3 + [False] * 2, "full")
    with pytest.raises(TypeError, match=r"lse has dtype torch.float64; it must be torch.float32"):
        OPERATOR(dout, None, q, q, q, q, lse.double(), [True] * 3 + [False] * 2, "full")


def test_kernels_are_given_sums_of_rows_at_addresses_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled for such; the gradient of a concatenation is a part of another tensor."""
    kept: list[Any] = []
    monkeypatch.setattr(operator, "backward", lambda tensors, saved, *rest, **_: kept.append(saved) or [q, q, q, None, None])
    q, sums = t(1, 1, 5, 8), t(1, 1, 11)[..., 1:]
    OPERATOR(q, sums[..., 5:], q, q, q, q, sums[..., :5], [True] * 3 + [False] * 2, "full")
    (saved,) = kept
    for got, given in ((saved.lse, sums[..., :5]), (saved.dlse, sums[..., 5:])):
        assert given.data_ptr() % 16 > 0
        assert got.data_ptr() % 16 == 0
        assert torch.equal(got, given)


def test_a_second_derivative_is_refused_by_name_when_it_is_asked_for() -> None:
    q, dout, lse = t(1, 2, 4, 8).requires_grad_(), t(1, 2, 4, 8), t(1, 2, 4)
    dq, *_ = OPERATOR(dout, None, q, q, q, q.detach(), lse, [True] * 3 + [False] * 2, "full")
    with pytest.raises(NotImplementedError, match=r"once, or use kernel='sdpa' under .*sdpa_kernel\(SDPBackend.MATH\)"):
        dq.sum().backward()
    with sdpa_kernel(SDPBackend.MATH):  # as it says
        out = fm.scaled_dot_product_attention(q, q, q, kernel="sdpa")
        torch.autograd.grad(out.square().sum(), q, create_graph=True)[0].sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("asked", [{"deterministic": True}, {"kernel": "bwd_triton"}, {"kernel": "fwd_triton"}], ids=str)
def test_forward_mode_is_served_by_pytorch_and_by_no_kernel_that_is_named(asked: dict[str, Any]) -> None:
    q, other = t(1, 8, 2, 8), t(1, 8, 2, 8)
    with assume(H200), forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        assert forward_ad.unpack_dual(fm.flash_attn_func(dual, other, other, softcap=2.0)).tangent is not None
        with pytest.raises(CannotServe, match=r"gradients in forward mode or .*, which only 'sdpa' serves"):
            fm.flash_attn_func(dual, other, other, softcap=2.0, **asked)


def test_pages_are_attended_to_and_refused_when_a_gradient_is_asked_for() -> None:
    q, cache = t(1, 2, 4, 8).requires_grad_(), t(3, 5, 2, 8)
    table, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    out = fm.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, page_table=table)
    assert isinstance(out, torch.Tensor)
    with torch.no_grad():
        assert torch.equal(out, fm.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, page_table=table))
    with pytest.raises(NotImplementedError, match=r"page_table is given, and a cache in pages .*torch.no_grad\(\)"):
        out.sum().backward()


@pytest.mark.parametrize("scales", [{}, {"k_descale": torch.ones(1, 2), "v_descale": torch.ones(1, 2)}])
def test_a_cache_in_8_bits_is_refused_when_a_gradient_is_asked_for(scales: dict[str, torch.Tensor]) -> None:
    q, cache = t(1, 2, 4, 8).bfloat16().requires_grad_(), t(1, 5, 2, 8).to(torch.float8_e4m3fn)
    out = fm.flash_attn_with_kvcache(q, cache, cache, **scales)
    assert isinstance(out, torch.Tensor)
    with pytest.raises(NotImplementedError, match=r"k_cache is e4m3, and a cache in pages or in 8 bits .*torch.no_grad\(\)"):
        out.sum().backward()


def on_h200(**options: Any) -> Any:
    q, k, v = (one.transpose(1, 2) for one in leaves((1, 64, 2, 64), (1, 64, 2, 64), (1, 64, 2, 64), dtype=torch.bfloat16))
    with assume(H200):
        return fm.explain(q, k, v, **options)


@pytest.mark.parametrize("switch", [False, True])
def test_explain_names_what_serves_the_backward(switch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_science.ops.attention.front import choose

    monkeypatch.setattr(choose, "plan_call", lambda *given: (choose.Plan(decision_of(given[1]), lambda *rest: None), None))
    assert on_h200().kernel == "sdpa"
    assert "no record has a backward of ours faster" in on_h200().reason
    assert "its backward by bwd_short_triton" in choose_training(kernel="fwd_gluon_sm90").reason
    assert "its backward by bwd_short_triton" in choose_training(deterministic=True).reason
    torch.use_deterministic_algorithms(switch)
    try:
        assert ("its backward by bwd_short_triton" in choose_training().reason) is switch
    finally:
        torch.use_deterministic_algorithms(False)
    assert choose_training(kernel="sdpa").basis == "requested"
    with pytest.raises(CannotServe, match="deterministic is True and kernel is 'sdpa', which does not promise that"):
        choose_training(kernel="sdpa", deterministic=True)
    with pytest.raises(CannotServe, match=r"kernel 'fa4' cannot serve this call: .* it is a peer's"):
        choose_training(kernel="fa4")


@pytest.mark.parametrize("module", ["flashmoe_science", "flashmoe_science.integrations.flash_attn_interface"])
def test_each_function_with_the_word_serves_by_a_backward_of_ours(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_science.ops.attention.front import choose

    monkeypatch.setattr(choose, "plan_call", lambda *given: (choose.Plan(decision_of(given[1]), lambda *rest: None), None))
    functions = importlib.import_module(module)
    (q,) = leaves((2, 64, 4, 64), dtype=torch.bfloat16)
    qkv, rows, starts = q[:, :, None].expand(2, 64, 3, 4, 64), q.flatten(0, 1), torch.tensor([0, 64, 128], dtype=torch.int32)
    calls = {
        "flash_attn_func": (q, q, q),
        "flash_attn_varlen_func": (rows, rows, rows, starts, starts, 64, 64),
        "flash_attn_qkvpacked_func": (qkv,),
        "flash_attn_kvpacked_func": (q, qkv[:, :, 1:]),
        "flash_attn_varlen_qkvpacked_func": (qkv.flatten(0, 1), starts, 64),
        "flash_attn_varlen_kvpacked_func": (rows, qkv[:, :, 1:].flatten(0, 1), starts, starts, 64, 64),
    }
    for name in [one for one in functions.__all__ if one in calls]:
        with assume(H200):
            reason = fm.explain(getattr(functions, name), *calls[name], deterministic=True, softmax_scale=0.3).reason
        assert "deterministic is True" in reason, name


def decision_of(options: Any) -> Any:
    from flashmoe_science.dispatch.select import Decision
    from flashmoe_science.kernel import Config

    return Decision(options.kernel or "fwd", Config(), "chosen", "modelled")


def test_equal_bits_are_served_by_hoppers_kernel_where_it_can() -> None:
    q = torch.empty(2, 16, 512, 160, dtype=torch.bfloat16)  # of no record

    def chosen(**options: Any) -> str:
        with assume(H200):
            return choose_backward(Tensors(q, q, q), Options(**options)).kernel

    assert chosen() == "sdpa_bwd"
    assert chosen(deterministic=True) == "bwd_gluon_sm90"
    assert chosen(deterministic=True, softcap=5.0) == "bwd_gluon_sm90"
    assert chosen(softcap=5.0) == "bwd_gluon_sm90"  # PyTorch has no fused one
    assert chosen(kernel="bwd_gluon_sm90", softcap=5.0) == "bwd_gluon_sm90"
    with assume(H200), pytest.raises(CannotServe, match="ALiBi"):
        choose_backward(Tensors(q, q, q, alibi_slopes=torch.ones(2, 16)), Options(kernel="bwd_gluon_sm90"))


@pytest.mark.parametrize(
    ("rows", "head_dim", "options", "kernel"),
    [
        (1024, 64, Options(), "bwd_fused_gluon_sm90"),
        (1024, 64, Options(window_right=5), "bwd_fused_gluon_sm90"),
        (1024, 40, Options("causal"), "bwd_fused_gluon_sm90"),
        (512, 64, Options(), "bwd_gluon_sm90"),  # too short
        (1024, 32, Options(), "bwd_gluon_sm90"),  # half of its columns
        (1024, 72, Options(), "bwd_gluon_sm90"),
        (1024, 64, Options(window_left=99), "bwd_fused_gluon_sm90"),
        (1024, 64, Options(softcap=9.0), "bwd_gluon_sm90"),
        (100, 64, Options(), "bwd_short_triton"),
        (100, 192, Options(), "bwd_triton"),
    ],
)
def test_a_backward_of_hopper_is_chosen_by_shape_where_nothing_was_measured(
    rows: int, head_dim: int, options: Options, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "known_table", lambda: Table(()))
    monkeypatch.setattr(choose, "DECISIONS", {})
    q = torch.empty(2, 16, rows, head_dim, dtype=torch.bfloat16)
    with assume(H200):
        assert choose_backward(Tensors(q, q, q), options._replace(deterministic=True)).kernel == kernel
        with_sinks = Tensors(q, q, q, sinks=torch.zeros(16))
        of_sinks = "bwd_triton" if kernel == "bwd_short_triton" else kernel
        assert choose_backward(with_sinks, options._replace(deterministic=True)).kernel == of_sinks


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True), (False, False, True), (True, False, True)])
def test_what_is_frozen_is_computed_by_the_faster_kernel(
    wanted: tuple[bool, ...], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "known_table", lambda: Table(()))
    monkeypatch.setattr(choose, "DECISIONS", {})
    q, k, v = (torch.empty(2, 16, 2048, head_dim, dtype=torch.bfloat16, requires_grad=one) for one in wanted)
    one_side = not wanted[0] or (not any(wanted[1:]) and head_dim > 64)
    with assume(H200):
        every = choose_backward(Tensors(q, q, q), Options(deterministic=True))
        chosen = choose_backward(Tensors(q, k, v), Options(deterministic=True))
        named = choose_backward(Tensors(q, k, v), Options(kernel="bwd_fused_gluon_sm90"))
        of_sinks = Tensors(q.detach(), q.detach(), q.detach(), sinks=torch.zeros(16, requires_grad=True))
        assert choose_backward(of_sinks, Options(deterministic=True)).kernel == "bwd_gluon_sm90"
    assert every.kernel == named.kernel == "bwd_fused_gluon_sm90"
    assert (chosen.kernel, chosen.basis) == ("bwd_gluon_sm90" if one_side else "bwd_fused_gluon_sm90", every.basis)
    assert (
        "dQ alone, or none, is wanted; for all gradients bwd_fused_gluon_sm90: deterministic is" in chosen.reason
    ) == one_side


def test_a_record_of_other_tiles_is_not_taken_for_what_another_kernel_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = parse("attnbwd b2 h16 q2048 d128 bf16")
    (config,) = next(one for one in ours() if one.name == "bwd_gluon_sm90").configs(measured, H200)
    table = Table((Entry("h100", measured, "bwd_gluon_sm90", config, "r", 400_000, ()),))
    monkeypatch.setattr(shared, "known_table", lambda: table)
    monkeypatch.setattr(choose, "DECISIONS", {})
    q = torch.empty(2, 16, 2048, 64, dtype=torch.bfloat16)
    with assume(H200):
        assert choose_backward(Tensors(q, q, q), Options(deterministic=True)).kernel == "bwd_fused_gluon_sm90"


@pytest.mark.parametrize(
    ("rows", "head_dim", "peer", "kernel", "words"),
    [
        (512, 128, False, "bwd_gluon_sm90", "nearest measured problem, attnbwd b2 h16 q400 d128"),
        (512, 128, True, "sdpa_bwd", "1.20x the speed of ours (bwd_gluon_sm90) on attnbwd b2 h16 q400 d128 bf16 on h100"),
        (400, 128, True, "sdpa_bwd", "1.20x the speed of ours"),
        (512, 64, False, "sdpa_bwd", "no record has a backward of ours faster"),  # of other tiles
        (2048, 128, False, "sdpa_bwd", "no record has a backward of ours faster"),  # far from it
    ],
)
def test_the_nearest_record_of_like_tiles_says_which_backward_serves(
    rows: int, head_dim: int, peer: bool, kernel: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = parse("attnbwd b2 h16 q400 d128 bf16")
    (config,) = next(one for one in ours() if one.name == "bwd_gluon_sm90").configs(measured, H200)
    peers = (FasterPeer("sdpa_bwd", Config(), 1.2, measured),) if peer else ()
    table = Table((Entry("h100", measured, "bwd_gluon_sm90", config, "r", 400_000, peers),))
    monkeypatch.setattr(shared, "known_table", lambda: table)
    monkeypatch.setattr(choose, "DECISIONS", {})
    q = torch.empty(2, 16, rows, head_dim, dtype=torch.bfloat16)
    with assume(H200):
        decision = choose_backward(Tensors(q, q, q), Options())
    assert (decision.kernel, words in decision.reason) == (kernel, True)


@pytest.mark.parametrize("table", [Table(()), None], ids=["no records", "records"])
def test_what_pytorch_has_not_fused_is_served_by_ours(table: Table | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operators would hold all scores in fp32."""
    if table is not None:
        monkeypatch.setattr(shared, "known_table", lambda: table)
    monkeypatch.setattr(choose, "DECISIONS", {})
    q, lengths = torch.empty(2, 16, 900, 96, dtype=torch.bfloat16), torch.tensor([0, 400, 900], dtype=torch.int32)
    packed = Tensors(*(q[0].transpose(0, 1).contiguous().transpose(0, 1)[None],) * 3)._replace(
        cu_seqlens_q=lengths, cu_seqlens_k=lengths
    )
    bias = torch.empty(2, 16, 900, 900, dtype=torch.bfloat16)
    with assume(H200):
        assert choose_backward(Tensors(q, q, q), Options(window_left=99)).kernel == "bwd_gluon_sm90"
        assert "soft cap" in choose_backward(Tensors(q, q, q), Options(softcap=3.0)).reason
        assert choose_backward(packed, Options(max_seqlen_q=500, max_seqlen_k=500)).kernel == "bwd_gluon_sm90"
        assert choose_backward(Tensors(q, q, q, bias=bias), Options()).kernel == "sdpa_bwd"
        assert choose_backward(Tensors(q, q, q), Options(window_left=99), "sdpa_bwd_flash").kernel == "sdpa_bwd"


def test_of_sizes_that_are_not_known_yet_the_portable_kernel_is_asked() -> None:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    q = mode.from_tensor(torch.empty(2, 4, 300, 64, dtype=torch.bfloat16))
    with assume(H200):
        assert choose_backward(Tensors(q, q, q), Options(deterministic=True)).kernel == "bwd_triton"


def choose_training(**options: Any) -> Any:
    from flashmoe_science.ops.attention.front.choose import plan_training

    shape = (1, 2, 64, 64)
    with assume(H200):
        return plan_training(Tensors(*leaves(shape, shape, shape, dtype=torch.bfloat16)), Options(**options), None)[0].decision


def test_what_no_backward_of_ours_takes_is_refused_where_the_same_bits_are_asked_for() -> None:
    from flashmoe_science.ops.attention.front.choose import plan_training

    q = leaves((1, 2, 8, 272))[0]
    with assume(H200):
        assert plan_training(Tensors(q, q, q), Options(), None)[0].decision.kernel == "sdpa"
        with pytest.raises(
            CannotServe, match=r"deterministic is True and an input requires gradients: head_dim is 272.*'sdpa' can"
        ):
            plan_training(Tensors(q, q, q), Options(deterministic=True), None)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_and_backward_compile_whole(backend: str) -> None:
    torch._dynamo.reset()

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        out, lse, _ = fm.flash_attn_func(*inputs, causal=True, return_attn_probs=True)
        return out.square().sum() + lse.sin().sum()

    both = []
    for function in (loss, torch.compile(loss, backend=backend, fullgraph=True)):
        inputs = leaves((2, 7, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
        function(*inputs).backward()
        both.append([one.grad for one in inputs])
    for a, b in zip(*both, strict=True):
        assert a is not None
        torch.testing.assert_close(a, b)


RULE: dict[str, Callable[[dict[str, Any]], bool]] = {
    "eager": lambda found: (
        all(one < 1e-5 for one in found["errors"]) and found["bits"] and found["node"] == "_AttentionBackward"
    ),
    "compiled": lambda found: all(one < 1e-5 for one in found["errors"]) and "attention_backward" in found["graphs"],
    "dynamic": lambda found: all(one < 1e-5 for one in found["errors"]),
    "transformed": lambda found: all(one < 1e-5 for one in found["errors"]) and "transform of torch.func" in found["refusal"],
    "autocast": lambda found: all(one < 0.2 for one in found["errors"]) and set(found["dtypes"]) == {"torch.float32"},
    "again": lambda found: all(one < 2e-5 for one in found["errors"].values()),
    "around": lambda found: found["bits"] and found["again"],
    "lengths": lambda found: found["compiled"][2:] == [0, 0],  # after one of few and one of more
    "operator": lambda found: found["bits"],
    "checkpointed": lambda found: found["bits"],
    "features": lambda found: all(one < 2e-5 for one in found["errors"]),
    "launches": lambda found: found["none"] == found["without"],
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "dynamic")) for case in RULE])
def test_the_rule_by_our_kernels(case: str, interpreted: Interpreter) -> None:
    found = interpreted("ops/attention/front/trained.py", case)
    assert RULE[case](found), found


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_results_with_tokens_first_are_not_copied(packed: bool) -> None:
    out, lse = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(1, 2, 5, requires_grad=True)
    results = [one for one in tokens_first((out, lse), packed) if one is not None]
    into = [torch.randn_like(one) for one in results]
    found = torch.autograd.grad(results, (out, lse), into)
    assert [one.data_ptr() for one in found] == [one.data_ptr() for one in into]
