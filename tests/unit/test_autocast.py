"""Under torch.autocast every function casts as PyTorch's own do; without it tensors of several dtypes are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unit.tensors import i32

import flashmoe_science as fm
from flashmoe_science.ops.calls import guards_of

Made = dict[str, torch.Tensor]
Call = Callable[..., Any]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


def with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return fm.flash_attention_forward(q, k, v, torch.empty(2, 4, 6), True, None)


HEADS_FIRST = {"q": randn(2, 4, 6, 16), "k": randn(2, 2, 9, 16), "v": randn(2, 2, 9, 16)}
TOKENS_FIRST = {"q": randn(2, 6, 4, 16), "k": randn(2, 9, 2, 16), "v": randn(2, 9, 2, 16)}
PACKED = {"q": randn(12, 4, 16), "k": randn(18, 2, 16), "v": randn(18, 2, 16)}
CACHE = {"q": randn(2, 3, 4, 16), "k_cache": randn(2, 9, 2, 16), "v_cache": randn(2, 9, 2, 16)}
NEW = {"k": randn(2, 3, 2, 16), "v": randn(2, 3, 2, 16)}
EXPERTS = {"hidden_states": randn(5, 16), "gate_up_proj": randn(4, 48, 16), "down_proj": randn(4, 16, 24)}
STARTS = {"cu_seqlens_q": i32(0, 7, 12), "cu_seqlens_k": i32(0, 10, 18), "max_seqlen_q": 7, "max_seqlen_k": 10}
ROUTING = {"top_k_weights": torch.rand(5, 2), "top_k_ids": torch.randint(4, (5, 2))}
# By name: the function, the tensors that are cast, other arguments.
CALLS: dict[str, tuple[Call, Made, dict[str, Any]]] = {
    "flash_attn_func": (fm.flash_attn_func, TOKENS_FIRST, {"causal": True}),
    "flash_attn_func, window": (fm.flash_attn_func, TOKENS_FIRST, {"window_size": (2, 1)}),
    "flash_attention_science": (fm.flash_attention_science, HEADS_FIRST, {}),
    "flash_attention_forward": (with_lse, HEADS_FIRST, {}),
    "flash_attn_varlen_func": (fm.flash_attn_varlen_func, PACKED, STARTS),
    "flash_attn_varlen_func, qv": (fm.flash_attn_varlen_func, PACKED | {"qv": randn(12, 4, 16)}, STARTS),
    "flash_attn_with_kvcache": (fm.flash_attn_with_kvcache, CACHE, {"cache_seqlens": i32(5, 2)}),
    "flash_attn_with_kvcache, one length": (fm.flash_attn_with_kvcache, CACHE, {"cache_seqlens": 5}),
    "fused_moe": (fm.fused_moe, EXPERTS, ROUTING),
    "fused_moe, biases": (fm.fused_moe, EXPERTS, ROUTING | {"gate_up_bias": randn(4, 48), "down_bias": randn(4, 16)}),
}


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def on(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Autocast on the CPU to each dtype."""
    with torch.autocast("cpu", request.param):
        yield request.param


def others(function: Call, made: Made) -> list[Made]:
    """The tensors in fp32, in each dtype that may be there, and of several."""
    names = list(made)
    bf16 = {name: one.bfloat16() for name, one in made.items()}
    mixed = [made | {name: bf16[name]} for name in names]
    return [made, bf16, {name: one.half() for name, one in made.items()}, *mixed]


@pytest.mark.parametrize("case", CALLS)
def test_under_autocast_all_is_cast(on: torch.dtype, case: str) -> None:
    function, made, options = CALLS[case]
    for given in others(function, made):
        cast = {name: one.to(on) for name, one in given.items()}
        with torch.autocast("cpu", enabled=False):
            right = function(**cast, **options)
        for _ in range(3):  # the last finds the launch
            out = function(**given, **options)
            assert out.dtype == on
            assert torch.equal(out, right)


@pytest.mark.parametrize("case", CALLS)
def test_without_autocast_several_dtypes_are_refused(case: str) -> None:
    function, made, options = CALLS[case]
    function(**made, **options)
    with torch.autocast("cpu", torch.bfloat16):
        function(**made, **options)
    for given in others(function, made)[3:]:
        with pytest.raises(TypeError, match=r"dtype|must be as q"):
            function(**given, **options)


@pytest.mark.parametrize("case", CALLS)
def test_gradients_have_the_dtype_of_what_was_given(on: torch.dtype, case: str) -> None:
    function, made, options = CALLS[case]
    leaves = {name: one.clone().requires_grad_() for name, one in made.items()}
    function(**leaves, **options).float().square().mean().backward()
    for leaf in leaves.values():
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        assert leaf.grad.isfinite().all()


def test_scaled_dot_product_attention_and_its_masks_are_pytorchs(on: torch.dtype) -> None:
    q, k, v = HEADS_FIRST["q"], *(HEADS_FIRST[name].repeat_interleave(2, 1) for name in "kv")
    for mask in (None, torch.rand(6, 9) > 0.3, randn(6, 9), randn(6, 9).to(on)):
        for given in ((q, k, v), (q, k.to(on), v), (q.half(), k, v.bfloat16())):
            right = F.scaled_dot_product_attention(*given, mask)
            for _ in range(2):
                out = fm.scaled_dot_product_attention(*given, mask)
                assert out.dtype == right.dtype == on
                assert torch.equal(out, right)
            assert fm.explain(*given, mask).kernel == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_grows_in_its_own_dtype(on: torch.dtype, dtype: torch.dtype) -> None:
    caches = {name: one.to(dtype) for name, one in CACHE.items() if name != "q"}
    mine, right = ({name: one.clone() for name, one in caches.items()} for _ in range(2))
    out = fm.flash_attn_with_kvcache(CACHE["q"], **mine, **NEW, cache_seqlens=i32(5, 2))
    with torch.autocast("cpu", enabled=False):
        for name in "kv":
            for row, first in enumerate((5, 2)):
                right[f"{name}_cache"][row, first : first + 3] = NEW[name][row].to(dtype)
        cast = {name: one.to(on) for name, one in right.items()}
        expected = fm.flash_attn_with_kvcache(CACHE["q"].to(on), **cast, cache_seqlens=i32(8, 5))
    assert all(torch.equal(mine[name], right[name]) for name in mine)
    assert torch.equal(out, expected)


def test_a_layer_after_a_linear(on: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 16)
    layer = fm.FlashMoELayer(16, 24, 4, 2, shared_intermediate_size=8)
    out = layer(linear(randn(5, 16)))
    assert out.dtype == on
    out.float().square().sum().backward()
    assert all(one.grad is not None and one.grad.dtype == torch.float32 for one in layer.parameters())
    assert layer.router_logits(linear(randn(5, 16))).dtype == torch.float32  # chosen in fp32, as without autocast


def test_the_autocast_dtype_is_a_part_of_a_launch() -> None:
    x = TOKENS_FIRST["q"].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        matches = guards_of([x])
        assert matches(x)
        with torch.autocast("cpu", torch.float16):
            assert not matches(x)
    assert not matches(x)


def test_fp64_and_e4m3_are_not_cast(on: torch.dtype) -> None:
    q, k, v = (one.double() for one in HEADS_FIRST.values())
    assert fm.scaled_dot_product_attention(q, k, v, enable_gqa=True).dtype == torch.float64
    k, v = (CACHE[f"{name}_cache"].to(torch.float8_e4m3fn) for name in "kv")
    out = fm.flash_attn_with_kvcache(CACHE["q"], k, v, cache_seqlens=5)
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(out, fm.flash_attn_with_kvcache(CACHE["q"].to(on), k, v, cache_seqlens=5))


@pytest.mark.parametrize("case", ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "fused_moe"])
def test_torch_compile_casts_too(case: str) -> None:
    function, made, options = CALLS[case]
    compiled = torch.compile(lambda given: function(**given, **options), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(made), function(**made, **options))
