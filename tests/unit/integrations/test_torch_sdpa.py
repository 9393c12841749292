"""Our kernels in PyTorch's registry of FlashAttentions: what an activation changes and undoes, and what its operators return.

The operators are called directly, on the CPU; that ``scaled_dot_product_attention`` reaches them is proved on a GPU
(test_torch_sdpa_on_gpu.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    register_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import varlen_attn

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume
from flashmoe_science.integrations import torch_sdpa
from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.front.backward.choose import choose_backward
from flashmoe_science.ops.attention.front.backward.kernels import FLASH
from flashmoe_science.ops.attention.front.backward.operator import OPERATOR

KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
DENSE, PACKED, PACKED_OUT = torch_sdpa._DENSE, torch_sdpa._PACKED, torch_sdpa._PACKED_OUT
DENSE_BACKWARD, PACKED_BACKWARD = torch_sdpa._DENSE_BACKWARD, torch_sdpa._PACKED_BACKWARD
MAKERS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    DENSE: torch_sdpa._dense,
    PACKED: torch_sdpa._packed,
    PACKED_OUT: torch_sdpa._packed_out,
    DENSE_BACKWARD: torch_sdpa._dense_backward,
    PACKED_BACKWARD: torch_sdpa._packed_backward,
}


@pytest.fixture(autouse=True)
def nothing_active_afterwards() -> Iterator[None]:
    if torch.cuda.is_available():  # PyTorch's first choice of a backend in a process sets the order
        one = torch.ones(1, 1, 1, 8, dtype=torch.float16, device="cuda")
        F.scaled_dot_product_attention(one, one, one)
    order = torch._C._get_sdp_priority_order()
    yield
    assert current_flash_attention_impl() is None
    assert torch._C._get_sdp_priority_order() == order


def on_cuda(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"))


# Activation ------------------------------------------------------------------------------------------------------------------


def test_an_activation_registers_operators_and_undoes_it() -> None:
    before = {name: on_cuda(name) for name in MAKERS}
    order = torch._C._get_sdp_priority_order()
    flash = int(SDPBackend.FLASH_ATTENTION)
    with torch_sdpa.activated():
        assert current_flash_attention_impl() == "flashmoe"
        assert all(on_cuda(name) for name in before)
        assert torch._C._get_sdp_priority_order() == [flash, *(one for one in order if one != flash)]
        with torch_sdpa.activated():
            assert current_flash_attention_impl() == "flashmoe"
        assert current_flash_attention_impl() == "flashmoe"
        assert all(on_cuda(name) for name in before)
    assert {name: on_cuda(name) for name in before} == before


def test_cudnn_is_tried_after_flash_and_before_it_again() -> None:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        order = torch._C._get_sdp_priority_order()
        with torch_sdpa.activated():
            now = torch._C._get_sdp_priority_order()
            assert now.index(int(SDPBackend.FLASH_ATTENTION)) < now.index(int(SDPBackend.CUDNN_ATTENTION))
        assert torch._C._get_sdp_priority_order() == order


def test_pytorchs_own_names_activate_and_restore() -> None:
    torch_sdpa.register()
    assert "flashmoe" in list_flash_attention_impls()
    assert current_flash_attention_impl() is None
    activate_flash_attention_impl("flashmoe")
    assert current_flash_attention_impl() == "flashmoe"
    restore_flash_attention_impl()


def test_another_implementation_is_active_again_after_the_context() -> None:
    class Handle:
        def remove(self) -> None:
            pass

    register_flash_attention_impl("another", register_fn=Handle)
    activate_flash_attention_impl("another")
    try:
        with torch_sdpa.activated():
            assert current_flash_attention_impl() == "flashmoe"
        assert current_flash_attention_impl() == "another"
    finally:
        restore_flash_attention_impl()


def test_an_error_within_undoes_it_too() -> None:
    with pytest.raises(ZeroDivisionError), torch_sdpa.activated():
        raise ZeroDivisionError


# Operators -------------------------------------------------------------------------------------------------------------------


def made(name: str, original: Any = None) -> Callable[..., Any]:
    return MAKERS[name](original or torch_sdpa._Original(name))


@pytest.mark.parametrize("name", MAKERS)
def test_parameters_are_those_of_the_schema(name: str) -> None:
    """But for ALiBi's slopes, with which a call is PyTorch's own."""
    schema = getattr(torch.ops.aten, name).default._schema
    packed = {PACKED: torch_sdpa._attend_packed, PACKED_OUT: torch_sdpa._attend_packed}
    function = {**packed, PACKED_BACKWARD: torch_sdpa._differentiate_packed}.get(name) or made(name)
    found = [(one.name, one.kind is one.KEYWORD_ONLY) for one in inspect.signature(function).parameters.values()]
    expected = [(one.name, one.kwarg_only) for one in schema.arguments if one.name != "alibi_slopes"]
    assert [one for one in found if one[0] not in ("keys", "others")] == expected[name == PACKED_OUT :]


def drawn(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float32) for _ in range(3)]


def reference(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """The log-sum-exp."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
def test_the_dense_operator_returns_what_pytorchs_returns(causal: bool) -> None:
    q, k, v = drawn(2, 9, 4, 16)
    q, k, v = q.transpose(1, 2), k[:, :, :2].transpose(1, 2), v[:, :, :2].transpose(1, 2)
    returned = made(DENSE)(KEYS, q.requires_grad_(), k, v, 0.0, causal, False, scale=0.3)
    out, lse, starts_q, starts_k, longest_q, longest_k, state, unused, debug = returned
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True))
    torch.testing.assert_close(lse, reference(q, k, causal, 0.3))
    assert not out.requires_grad
    assert out.stride() == torch.empty_like(q).stride()
    assert (starts_q, starts_k, longest_q, longest_k) == (None, None, 9, 9)
    assert (state.shape, state.dtype, unused.dtype, debug.numel()) == ((2,), torch.uint64, torch.uint64, 0)
    assert len(returned) == len(getattr(torch.ops.aten, DENSE).default._schema.returns)


STARTS = torch.tensor([0, 5, 5, 9], dtype=torch.int32)
OPTIONS = {"scale": 0.3, "window_size_left": -1, "window_size_right": -1, "seqused_k": None, "block_table": None}


def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Attention of each packed sequence by itself."""
    pieces = []
    for first, last in zip(STARTS[:-1].tolist(), STARTS[1:].tolist(), strict=True):
        rows, keys, values = (one[first:last].transpose(0, 1) for one in (q, k, v))
        seen = band(torch.ones(last - first, last - first, dtype=torch.bool))
        piece = F.scaled_dot_product_attention(rows[None], keys[None], values[None], seen, scale=0.3, enable_gqa=True)
        pieces.append(piece[0].transpose(0, 1))
    return torch.cat(pieces)


BANDS = pytest.mark.parametrize(
    ("causal", "window", "band"),
    [
        (False, (-1, -1), lambda ones: ones),
        (True, (-1, -1), torch.tril),
        (False, (-1, 0), torch.tril),  # as varlen_attn says causal
        (False, (1, 0), lambda ones: ones.tril() & ones.triu(-1)),
    ],
)


@BANDS
def test_the_packed_operators_attend_each_sequence(causal: bool, window: tuple[int, int], band: Any) -> None:
    q, k, v = drawn(9, 4, 16)
    k, v = k[:, :2], v[:, :2]
    options = {**OPTIONS, "window_size_left": window[0], "window_size_right": window[1]}
    rest = (STARTS, STARTS, 5, 5, 0.0, causal, False)
    out, lse, state, unused, debug = made(PACKED)(KEYS, q, k, v, *rest, **options)
    expected = one_by_one(q, k, v, band)
    torch.testing.assert_close(out, expected)
    assert out.is_contiguous()
    assert lse.shape == (4, 9)
    assert (state.shape, unused.dtype, debug.numel()) == ((2,), torch.uint64, 0)
    into = torch.full_like(q, torch.nan)
    torch.testing.assert_close(made(PACKED_OUT)(KEYS, into, q, k, v, *rest, **options), lse)
    torch.testing.assert_close(into, expected)


def test_the_packed_operator_reads_pages() -> None:
    q, k, v = drawn(6, 2, 16)
    starts, used = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)
    table = torch.tensor([[2, 0], [1, 99]], dtype=torch.int32)  # 99 lies past the second length
    pages = [one.reshape(3, 2, 2, 16) for one in (k, v)]
    options = {**OPTIONS, "block_table": table, "seqused_k": used, "num_splits": 1}
    out, lse, *_ = made(PACKED)(KEYS, q[:2], *pages, starts, None, 1, 4, 0.0, False, False, **options)
    for row, rows in enumerate(([4, 5, 0], [2, 3])):
        keys, values = (one[rows].transpose(0, 1)[None] for one in (k, v))
        expected = F.scaled_dot_product_attention(q[row][None, :, None], keys, values, scale=0.3)
        torch.testing.assert_close(out[row], expected[0, :, 0])
    assert lse.shape == (2, 2)


def held_to(gradients: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], *leaves: torch.Tensor) -> None:
    """Right, and as PyTorch's fake says that they lie, on which compiled code relies."""
    assert len(gradients) == 3
    for got, right, leaf in zip(gradients, expected, leaves, strict=True):
        torch.testing.assert_close(got, right)
        assert (got.shape, got.stride(), got.dtype) == (leaf.shape, torch.empty_like(leaf).stride(), leaf.dtype)
        assert not got.requires_grad


@pytest.fixture
def by_our_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward of ours is chosen on the CPU too, where PyTorch's operators serve it."""
    decision = Decision("ours", Config(), "", "modelled")
    monkeypatch.setattr(torch_sdpa, "choose_backward", lambda *call: decision)
    monkeypatch.setattr(torch_sdpa, "BACKWARD", lambda *given: OPERATOR(*given[:10], None, *given[11:]))


@pytest.mark.usefixtures("by_our_operator")
@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_dense_backward_is_of_what_the_dense_operator_returned(causal: bool, sliced: bool) -> None:
    q, k, v = drawn(2, 9, 4, 16)
    q, k, v = q.transpose(1, 2), k[:, :, :2].transpose(1, 2), v[:, :, :2].contiguous().transpose(1, 2)
    if sliced:  # of one product, as of a model's fused projection
        q, k, v = torch.randn(2, 9, 8, 16).transpose(1, 2).split((4, 2, 2), 1)
    leaves = [one.requires_grad_() for one in (q, k, v)]
    out, lse, *rest = made(DENSE)(KEYS, *leaves, 0.0, causal, False, scale=0.3)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True)
    dout = torch.ones(()).expand_as(out)  # of a sum
    got = made(DENSE_BACKWARD)(KEYS, dout, *leaves, out, lse, *rest[:4], 0.0, causal, *rest[4:6], scale=0.3)
    held_to(got, torch.autograd.grad(right, leaves, dout), *leaves)


@pytest.mark.usefixtures("by_our_operator")
@BANDS
def test_the_packed_backward_is_of_each_sequence(causal: bool, window: tuple[int, int], band: Any) -> None:
    q, k, v = drawn(9, 4, 16)
    leaves = [q.requires_grad_(), k[:, :2].contiguous().requires_grad_(), v[:, :2].contiguous().requires_grad_()]
    window_sizes = {"window_size_left": window[0], "window_size_right": window[1]}
    rest = (STARTS, STARTS, 5, 5, 0.0, causal)
    out, lse, *random = made(PACKED)(KEYS, *leaves, *rest, False, **{**OPTIONS, **window_sizes})
    dout = drawn(9, 4, 16)[1]
    got = made(PACKED_BACKWARD)(KEYS, dout, *leaves, out, lse, *rest, *random[:2], scale=0.3, **window_sizes)
    held_to(got, torch.autograd.grad(one_by_one(*leaves, band), leaves, dout), *leaves)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """PyTorch's dispatcher finds our operators for tensors on the CPU, where it has none of its own."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    for name in MAKERS:
        library.impl(name, made(name), "CPU", with_keyset=True)
    yield
    library._destroy()


@pytest.mark.usefixtures("by_our_operator", "on_cpu")
@pytest.mark.parametrize("compiled", [False, True])
def test_pytorchs_functions_train_through_both_operators(compiled: bool) -> None:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        packed = varlen_attn(q, k, v, STARTS, STARTS, 5, 5, scale=0.3, window_size=(1, 0), enable_gqa=True)
        assert isinstance(packed, torch.Tensor)
        rows = [one.transpose(0, 1)[None] for one in (q, k, v)]
        dense = torch.ops.aten._scaled_dot_product_flash_attention(*rows, 0.0, True, scale=0.3)[0]
        return (packed + dense[0].transpose(0, 1)).sin().sum()

    def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = [one.transpose(0, 1)[None] for one in (q, k, v)]
        dense = F.scaled_dot_product_attention(*rows, is_causal=True, scale=0.3, enable_gqa=True)
        return (one_by_one(q, k, v, lambda ones: ones.tril() & ones.triu(-1)) + dense[0].transpose(0, 1)).sin().sum()

    q, k, v = drawn(9, 4, 16)
    leaves = [q.requires_grad_(), k[:, :2].contiguous().requires_grad_(), v[:, :2].contiguous().requires_grad_()]
    function = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    for got, expected in zip(*(torch.autograd.grad(one(*leaves), leaves) for one in (function, right)), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_backward_that_is_not_ours_is_pytorchs_own() -> None:
    asked: list[Any] = []

    def original(keys: Any, *args: Any, **options: Any) -> str:
        asked.append((args, options))
        return "theirs"

    q = drawn(2, 4, 9, 16)[0]
    lse, none = q[..., 0], q.new_empty(0)
    dense = (q, q, q, q, q, lse, None, None, 9, 9, 0.5, True, none, none)
    packed = (*(q[0].transpose(0, 1),) * 5, lse[0], STARTS, STARTS, 5, 5, 0.5, True, none, none)
    windows = {"window_size_left": 2, "window_size_right": 0}
    for dropout in (0.5, 0.0):  # without it PyTorch's operators serve tensors on the CPU
        for name, given, more in ((DENSE_BACKWARD, dense, {}), (PACKED_BACKWARD, packed, windows)):
            arguments = (*given[:10], dropout, *given[11:])
            assert made(name, original)(KEYS, *arguments, scale=0.3, **more) == "theirs"
            args, options = asked.pop()
            assert all(one is other for one, other in zip(args, arguments, strict=True))
            assert options == {"scale": 0.3, **more}


def test_flashattention_2_is_what_a_backward_of_ours_has_to_be_no_slower_than() -> None:
    q, v = (torch.empty(4, 16, 4096, dim, dtype=torch.bfloat16, device="meta") for dim in (192, 128))
    tensors, plain = Tensors(q, q, v), Options(mask="causal")
    with assume(gpu_named("h100")):
        assert choose_backward(tensors, plain).kernel == "sdpa_bwd"  # cuDNN's
        assert choose_backward(tensors, plain, FLASH).kernel == "bwd_gluon_sm90"
        assert choose_backward(tensors, plain._replace(window_left=9), FLASH).kernel == "sdpa_bwd"


def test_fake_tensors_are_pytorchs_own() -> None:
    with torch_sdpa.activated(), FakeTensorMode():
        q, k, v = (torch.empty(2, 9, 4, 16, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
        out, *rest = getattr(torch.ops.aten, DENSE)(q, k, v, 0.0, True)
        made = getattr(torch.ops.aten, DENSE_BACKWARD)(out, q, k, v, out, *rest[:5], 0.0, True, *rest[5:7])
        assert [(one.shape, one.stride()) for one in made] == 3 * [(q.shape, q.stride())]


def test_what_is_not_served_is_given_to_pytorchs_own_kernel() -> None:
    asked: list[Any] = []

    def original(keys: Any, *args: Any, **options: Any) -> str:
        asked.append((args, options))
        return "theirs"

    q, k, v = drawn(2, 4, 9, 16)
    assert made(DENSE, original)(KEYS, q, k, v, 0.5, True, scale=0.3) == "theirs"
    args, options = asked.pop()
    assert (args[0] is q, args[3:], options) == (True, (0.5, True, False), {"scale": 0.3})
    rest = (STARTS, STARTS, 5, 5, 0.0, True, False)
    assert made(PACKED, original)(KEYS, q[0], k[0], v[0], *rest, **OPTIONS, alibi_slopes=torch.ones(4)) == "theirs"
    args, options = asked.pop()
    assert (args[4] is STARTS, args[5:], set(options)) == (True, (5, 5, 0.0, True, False), {*OPTIONS, "alibi_slopes"})
    assert made(PACKED, original)(KEYS, q, k, v, None, None, 9, 9, *rest[4:], **OPTIONS) == "theirs"
    assert made(PACKED_OUT, original)(KEYS, q, q, k, v, None, None, 9, 9, *rest[4:], **OPTIONS) == "theirs"


def test_within_a_call_of_ours_pytorchs_own_kernel_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(2, 4, 9, 16)
    dense = made(DENSE, lambda *args, **options: (q, "asked"))
    monkeypatch.setattr(torch_sdpa, "attend", lambda *args: dense(KEYS, q, k, v))
    assert dense(KEYS, q, k, v)[1] == "asked"
    assert not torch_sdpa._BUSY.now


@pytest.mark.skipif(on_cuda(DENSE), reason="this PyTorch has a kernel of its own")
def test_without_one_the_call_is_refused_in_words() -> None:
    with pytest.raises(NotImplementedError, match="'flashmoe' does not serve this call"):
        made(DENSE)(KEYS, *drawn(2, 4, 9, 16), 0.5)
