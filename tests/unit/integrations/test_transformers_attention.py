"""``attn_implementation="fms"`` of transformers' models against "eager": logits, greedy tokens, padding, caches, gradients."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    StaticCache,
    T5Config,
)

from flashmoe_science.integrations import transformers as ours
from flashmoe_science.integrations import transformers_attention as attention
from flashmoe_science.integrations.transformers_masks import StructuredMask
from flashmoe_science.ops.attention.call.tensors import Tensors

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "mistral": MistralConfig(**SIZES, sliding_window=8),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, sliding_window=8, query_pre_attn_scalar=24, attn_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=24
    ),
    "gpt-oss": GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
}
WINDOWED = {"mistral", "gemma2", "gemma3", "gpt-oss"}
TOKENS = torch.randint(2, 97, (2, 11), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(TOKENS)
PADDED[0, :4] = 0


@pytest.fixture(autouse=True, scope="module")
def registered_on_one_thread() -> Iterator[None]:
    """The models are so small that threads would wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    ours.register()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The attention mask of each call of ours."""
    seen: list[Any] = []

    def spy(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **rest: Any) -> Any:
        seen.append(attention_mask)
        return attention.attention_forward(module, query, key, value, attention_mask, **rest)

    monkeypatch.setitem(AttentionInterface._global_mapping, "fms", spy)
    return seen


def model_of(family: str, implementation: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A model whose attention matters: random weights and sinks, in which scores reach a cap and logits are near 1."""
    config = copy.deepcopy(CONFIGS[family])  # the model keeps it, and with it the name of the implementation
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    randomise(model)
    return model.to(device, dtype)


def randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        random = torch.randn(parameter.shape, generator=generator) / (parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 4)
        larger = 3.0 if "q_proj.weight" in name else 1.0
        parameter.data = larger * random + (1.0 if parameter.dim() == 1 and "bias" not in name else 0.0)


def logits(model: Any, padding: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        mask = None if padding is None else padding.to(model.device)
        return model(TOKENS.to(model.device), attention_mask=mask, **more).logits.double().cpu()


def root_mean_square(tensor: torch.Tensor) -> float:
    return tensor.square().mean().sqrt().item()


# Models ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """However few queries are served as packed sequences where there is padding; what they were, a call each."""
    calls: list[Any] = []

    serve = attention.attend

    def attend(tensors: Any, *args: Any) -> Any:
        calls.extend([tensors] if isinstance(tensors, Tensors) and tensors.cu_seqlens_q is not None else [])
        return serve(tensors, *args)

    monkeypatch.setattr(attention, "_SPLIT_QUERIES", 0)
    monkeypatch.setattr(attention, "attend", attend)
    return calls


@pytest.mark.parametrize("family", CONFIGS)
def test_padding_as_packed_sequences_gives_the_logits_of_eager(family: str, packed: list[Any]) -> None:
    got = logits(model_of(family, "fms"), PADDED)
    assert got.isfinite().all()
    torch.testing.assert_close(
        got[PADDED.bool()], logits(model_of(family, "eager"), PADDED)[PADDED.bool()], rtol=1e-4, atol=2e-5
    )
    assert len(packed) == 2  # layers
    assert packed[0].cu_seqlens_q.tolist() == [0, 4, 11, 11, 22]
    assert packed[0].cache_seqlens.tolist() == [0, 7, 0, 11]


@pytest.mark.parametrize("padding", [None, PADDED, PADDED.flip(1)], ids=["whole", "left-padded", "right-padded"])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_eager_in_fp32(family: str, padding: torch.Tensor | None, masks: list[Any]) -> None:
    got = logits(model_of(family, "fms"), padding)
    assert got.isfinite().all()
    valid = slice(None) if padding is None else padding.bool()
    torch.testing.assert_close(got[valid], logits(model_of(family, "eager"), padding)[valid], rtol=1e-4, atol=2e-5)
    assert len(masks) == 2
    assert all(mask is None or isinstance(mask, StructuredMask) for mask in masks)
    assert any(mask is not None for mask in masks) == (padding is not None or family in WINDOWED)
    assert all(mask._matrix is None for mask in masks if mask is not None)  # no matrix was made


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_tokens_are_those_of_eager(family: str, cache: str, masks: list[Any]) -> None:
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": PADDED, "cache_implementation": cache}
    expected, got = (model_of(family, one).generate(TOKENS, **options) for one in ("eager", "fms"))
    assert torch.equal(got, expected)
    assert len(masks) == 2 * 8


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_by_chunks_with_a_cache_are_those_of_eager_without(family: str, kind: type) -> None:
    model = model_of(family, "fms")
    places = (PADDED.cumsum(1) - 1).clamp(min=0)
    expected = logits(model_of(family, "eager"), PADDED, position_ids=places)
    sizes = {"max_cache_len": 16} if kind is StaticCache else {}
    cache, pieces, first = kind(config=model.config, **sizes), [], 0
    with torch.no_grad():
        for length in (6, 3, 1, 1):  # a first pass, several tokens after some, single tokens
            last = first + length
            more = {"attention_mask": PADDED[:, :last], "past_key_values": cache, "position_ids": places[:, first:last]}
            pieces.append(model(TOKENS[:, first:last], **more).logits.double())
            first = last
    torch.testing.assert_close(torch.cat(pieces, 1)[PADDED.bool()], expected[PADDED.bool()], rtol=1e-4, atol=2e-5)


def test_an_encoder_padded_to_the_right(masks: list[Any]) -> None:
    encoder_padded_to_the_right(masks)


def test_an_encoder_padded_to_the_right_as_packed_sequences(masks: list[Any], packed: list[Any]) -> None:
    encoder_padded_to_the_right(masks)
    assert [one.cache_seqlens.tolist() for one in packed] == 2 * [[0, 7, 0, 11]]


def encoder_padded_to_the_right(masks: list[Any]) -> None:
    config = BertConfig(**{**SIZES, "num_key_value_heads": None})
    models = [AutoModel.from_config(copy.deepcopy(config), attn_implementation=one).eval() for one in ("eager", "fms")]
    padding = PADDED.flip(1)
    for model in models:
        randomise(model)
    with torch.no_grad():
        expected, got = (model(TOKENS, attention_mask=padding).last_hidden_state for model in models)
    torch.testing.assert_close(got[padding.bool()], expected[padding.bool()], rtol=1e-4, atol=1e-5)
    assert all(isinstance(mask, StructuredMask) and mask._matrix is None for mask in masks)
    assert len(masks) == 2


def test_a_position_bias_beside_padding(masks: list[Any]) -> None:
    config = T5Config(vocab_size=97, d_model=64, d_kv=16, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    models = [AutoModel.from_config(copy.deepcopy(config), attn_implementation=one).eval() for one in ("eager", "fms")]
    padding = PADDED.flip(1)
    for model in models:
        randomise(model)
    with torch.no_grad():
        expected, got = (
            model(TOKENS, attention_mask=padding, decoder_input_ids=TOKENS[:, :5]).last_hidden_state for model in models
        )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert len(masks) == 6  # two layers of the encoder, and two kinds of attention in each of the decoder


@pytest.mark.parametrize("family", ["gpt-oss", *(pytest.param(one, marks=pytest.mark.slow) for one in ("llama", "gemma2"))])
def test_a_step_of_decoding_compiles_into_one_graph(family: str) -> None:
    model = model_of(family, "fms")
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(TOKENS, past_key_values=cache)
        same = copy.deepcopy(cache)
        expected = model(TOKENS[:, :1], past_key_values=same).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(TOKENS[:, :1], past_key_values=cache).logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("few", [0, 16])
@pytest.mark.parametrize("family", CONFIGS)
def test_on_a_gpu_logits_in_bf16_are_as_near_to_fp32_as_those_of_eager(
    family: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_SPLIT_QUERIES", few)  # 0: padding as packed sequences
    valid = PADDED.bool()
    exact = logits(model_of(family, "eager"), PADDED)[valid]
    eager, fms = (model_of(family, one, torch.bfloat16, "cuda") for one in ("eager", "fms"))
    errors = [root_mean_square(logits(model, PADDED)[valid] - exact) for model in (fms, eager)]
    assert errors[0] <= 2 * errors[1]
    for cache in ("dynamic", "static"):
        tokens = fms.generate(
            TOKENS.cuda(), attention_mask=PADDED.cuda(), max_new_tokens=12, do_sample=False, cache_implementation=cache
        )
        assert tokens.shape == (2, TOKENS.shape[1] + 12)


# Calls -----------------------------------------------------------------------------------------------------------------------

HEADS, HEADS_KV, DIM = 4, 2, 16


def drawn(queries: int = 5, keys: int = 5, dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, queries, HEADS, dim, generator=generator).transpose(1, 2)
    k, v = (torch.randn(2, HEADS_KV, keys, dim, generator=generator) for _ in range(2))
    return q, k, v


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None = None,
    scale: float = DIM**-0.5,
    bias: Any = 0.0,
) -> torch.Tensor:
    k, v = (one.repeat_interleave(HEADS // HEADS_KV, 1) for one in (k, v))
    scores = q @ k.mT * scale + bias
    weights = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    return (weights.softmax(-1).nan_to_num() @ v).transpose(1, 2)


def call(q: Any, k: Any, v: Any, mask: Any = None, module: Any = None, **rest: Any) -> torch.Tensor:
    out, weights = attention.attention_forward(module or SimpleNamespace(is_causal=True), q, k, v, mask, **rest)
    assert weights is None
    assert out.is_contiguous()
    return out


def lower(queries: int, keys: int, past: int = 0) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(past)


@pytest.mark.parametrize(
    ("queries", "keys", "flags", "seen"),
    [
        (5, 5, {}, lower(5, 5)),
        (5, 5, {"is_causal": False}, None),
        (5, 5, {"module": SimpleNamespace(is_causal=False)}, None),
        (5, 5, {"module": SimpleNamespace(is_causal=False), "is_causal": True}, lower(5, 5)),
        (1, 7, {}, None),  # a step of decoding
        (5, 9, {}, lower(5, 9)),  # a static cache's first pass
        (5, 5, {"sliding_window": 2}, lower(5, 5) & ~lower(5, 5, -2)),
        (5, 5, {"sliding_window": 2, "is_causal": False}, lower(5, 5, 1) & ~lower(5, 5, -2)),
        (1, 7, {"sliding_window": 3}, torch.arange(7) >= 4),
        (5, 5, {"sliding_window": 5}, lower(5, 5)),
    ],
)
def test_flags_say_what_is_seen_where_there_is_no_mask(queries: int, keys: int, flags: dict[str, Any], seen: Any) -> None:
    q, k, v = drawn(queries, keys)
    torch.testing.assert_close(call(q, k, v, scaling=0.3, **flags), plain(q, k, v, seen, 0.3))


def test_a_models_own_mask_says_all() -> None:
    q, k, v = drawn()
    seen = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(3)) > 0.5
    seen[0, 0, 1] = False
    torch.testing.assert_close(call(q, k, v, seen), plain(q, k, v, seen))
    assert (call(q, k, v, seen)[0, 1] == 0).all()
    added = torch.where(seen, 0.5, -torch.inf)
    torch.testing.assert_close(call(q, k, v, added), plain(q, k, v, seen))
    lowest = torch.where(lower(5, 5), 0.0, torch.finfo(torch.float32).min)
    torch.testing.assert_close(call(q, k, v, lowest[None, None]), plain(q, k, v, lower(5, 5)))


@pytest.mark.parametrize("dropout", [0.0, 1e-30], ids=["ours", "by-pytorch"])
def test_a_position_bias_is_added(dropout: float) -> None:
    q, k, v = drawn(keys=7)
    bias = torch.randn(1, HEADS, 5, 7, generator=torch.Generator().manual_seed(4))
    expected = plain(q, k, v, lower(5, 7), bias=bias)
    torch.testing.assert_close(call(q, k, v, position_bias=bias, dropout=dropout), expected)
    torch.testing.assert_close(call(q, k, v, lower(5, 7)[None, None], position_bias=bias, dropout=dropout), expected)


def test_sinks_and_a_soft_cap() -> None:
    q, k, v = drawn()
    sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(5))
    got = call(q, k, v, lower(5, 5)[None, None], softcap=1.5, s_aux=sinks)
    scores = 1.5 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * DIM**-0.5 / 1.5)
    scores = scores.masked_fill(~lower(5, 5), -torch.inf)
    weights = torch.cat([scores, sinks[:, None, None].expand(2, -1, 5, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(got, (weights @ v.repeat_interleave(2, 1)).transpose(1, 2))


def test_dropout_is_pytorchs() -> None:
    q, k, v = drawn()
    for mask in (None, lower(5, 5)[None, None]):
        torch.testing.assert_close(call(q, k, v, mask, dropout=1e-30), plain(q, k, v, lower(5, 5)))
        torch.manual_seed(0)
        assert (call(q, k, v, mask, dropout=0.9) == 0).any()


def test_a_wide_head_is_pytorchs() -> None:
    q, k, v = drawn(dim=260)
    torch.testing.assert_close(call(q, k, v), plain(q, k, v, lower(5, 5), 260**-0.5))
    torch.testing.assert_close(call(q, k, v, lower(5, 5)[None, None]), plain(q, k, v, lower(5, 5), 260**-0.5))


def test_autocast_gives_its_dtype() -> None:
    q, k, v = drawn()
    with torch.autocast("cpu", torch.bfloat16):
        got = call(q, k.bfloat16(), v)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), plain(q, k, v, lower(5, 5)), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sinks": torch.ones(4)}, "does not serve sinks, which SimpleNamespace passes"),
        ({"cache": object()}, "does not serve cache"),
        (
            {"module": SimpleNamespace(_modules={"compressor": object()})},
            "does not serve the compressed keys of SimpleNamespace",
        ),
        ({"dropout": 0.5, "softcap": 50.0}, "does not serve softcap with dropout 0.5; 'eager' may"),
        (
            {"dropout": 0.5, "s_aux": torch.ones(4), "sliding_window": 2},
            "does not serve sinks and sliding_window with dropout 0.5",
        ),
    ],
)
def test_what_is_not_served_is_refused_in_words(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        call(*drawn(), **arguments)


def test_a_second_registration_changes_nothing() -> None:
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    ours.register()
    assert (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)) == before
    assert before[0]["fms"] is attention.attention_forward
