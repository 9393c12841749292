"""The structure that ``make_mask`` finds, against the matrix that transformers makes of the same description."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BigBirdPegasusConfig,
    BloomConfig,
    CodeGenConfig,
    MptConfig,
    TrOCRConfig,
    XGLMConfig,
)
from transformers import masking_utils as hf

from flashmoe_science.integrations import transformers
from flashmoe_science.integrations.transformers_masks import Packed, StructuredMask, Visible, make_mask

FUNCTIONS = {
    "causal": lambda window: hf.causal_mask_function,
    "full": lambda window: hf.bidirectional_mask_function,
    "window": hf.sliding_window_causal_mask_function,
    "two-sided": hf.sliding_window_bidirectional_mask_function,
}


def described(
    kind: str, queries: int, keys: int, past: int = 0, skipped: int = 0, window: int = 3, **more: Any
) -> dict[str, Any]:
    return {
        "batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": past, "kv_offset": skipped,
        "mask_function": FUNCTIONS[kind](window), "attention_mask": None, "allow_is_causal_skip": kind in ("causal", "window"),
        "allow_is_bidirectional_skip": kind in ("full", "two-sided"), "dtype": torch.float32, "config": None, "use_vmap": False,
        "device": "cpu", **({"local_size": window} if kind in ("window", "two-sided") else {}), **more,
    }  # fmt: skip


def matrix_of(visible: Visible, queries: int, keys: int) -> torch.Tensor:
    """[2, 1, queries, keys], as ``visible`` is defined."""
    column, place = torch.arange(keys), torch.arange(queries)[:, None] + visible.length - queries
    seen = (column < visible.length).expand(2, 1, queries, keys)
    right = 0 if visible.causal else visible.right
    if right is not None:
        seen = seen & (column <= place + right)
    if visible.left is not None:
        seen = seen & (column >= place - visible.left)
    for bound, inside in ((visible.first, torch.ge), (visible.end, torch.lt)):
        if bound is not None:
            assert bound.dtype == torch.int32
            seen = seen & inside(column, bound[:, None, None, None])
    return seen


@st.composite
def descriptions(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(FUNCTIONS)))
    queries, past = draw(st.integers(1, 6)), draw(st.integers(0, 6))
    skipped = draw(st.integers(0, past))
    keys = past - skipped + queries + draw(st.integers(0, 3))  # a static cache has room left
    if kind == "full":
        past, skipped = 0, 0
    bits = st.lists(st.booleans(), min_size=skipped + keys, max_size=skipped + keys)
    sorted_rows = draw(st.booleans())
    rows = [draw(bits) for _ in range(2)]
    padding = draw(st.sampled_from([None, [sorted(row) for row in rows] if sorted_rows else rows]))
    mask = None if padding is None else torch.tensor(padding)
    if mask is not None and draw(st.booleans()):
        mask = mask[:, : max(1, past + queries)]
    return described(kind, queries, keys, past, skipped, window=draw(st.integers(1, 8)), attention_mask=mask)


@st.composite
def packed_descriptions(draw: st.DrawFn) -> dict[str, Any]:
    kind, tokens = draw(st.sampled_from(sorted(FUNCTIONS))), draw(st.integers(2, 9))
    begins = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    rows = []
    for _ in range(2):
        place, places = -1, []
        for begin in draw(begins):
            place = 0 if begin else place + 1
            places.append(place)
        rows.append([*places[:-1], 0])
    positions = torch.tensor(rows)
    arguments = described(kind, tokens, tokens, window=draw(st.integers(1, 8)))
    sequences = hf.find_packed_sequence_indices(positions)
    assert sequences is not None
    function = hf.packed_sequence_compatibility_function(arguments["mask_function"], positions, sequences)
    return arguments | {"mask_function": function, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


@given(packed_descriptions())
def test_sequences_that_are_packed_by_their_positions(arguments: dict[str, Any]) -> None:
    mask, expected = make_mask(**arguments), hf.sdpa_mask(**arguments)
    assert isinstance(mask, StructuredMask)
    assert torch.equal(mask & True, expected)
    packed, tokens = mask.packed(), mask.shape[2]
    assert packed is not None
    assert packed.max_seqlen_q == packed.max_seqlen_k == packed.cu_seqlens_q.diff().max()
    assert packed.cu_seqlens_q.dtype == torch.int32
    seen = torch.zeros(2 * tokens, 2 * tokens, dtype=torch.bool)
    for first, last in zip(packed.cu_seqlens_q[:-1].tolist(), packed.cu_seqlens_k[1:].tolist(), strict=True):
        visible = Visible(last - first, mask.visible.causal, mask.visible.left, mask.visible.right)
        seen[first:last, first:last] = matrix_of(visible, last - first, last - first)[0, 0]
    by_rows = seen.view(2, tokens, 2, tokens)
    assert torch.equal(torch.stack([by_rows[row, :, row] for row in range(2)])[:, None], expected)
    assert seen.sum() == expected.sum()


@given(descriptions())
@settings(max_examples=400)
def test_the_structure_is_that_of_the_matrix_that_transformers_makes(arguments: dict[str, Any]) -> None:
    no_skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    expected = hf.sdpa_mask(**{**arguments, **no_skip})
    mask = make_mask(**arguments)
    if mask is None:  # is_causal says all
        assert hf.sdpa_mask(**arguments) is None or torch.equal(expected, matrix_by_flag(arguments))
    elif isinstance(mask, StructuredMask):
        valid = valid_queries(arguments, mask.visible)
        assert torch.equal(matrix_of(mask.visible, *mask.shape[2:])[valid], expected[valid])
        assert torch.equal(mask & True, expected)
        packed = mask.packed()
        assert (packed is None) == (mask.visible.end is None)
        assert packed is None or torch.equal(matrix_of_packed(packed, mask)[valid], expected[valid])
        assert mask.shape == expected.shape
    else:
        assert torch.equal(mask, expected)


def valid_queries(arguments: dict[str, Any], visible: Visible) -> torch.Tensor:
    """bool [2, 1, queries]: all but the queries of padding that ends a causal mask, which may see what they will."""
    queries, padding = arguments["q_length"], arguments["attention_mask"]
    if padding is None or not visible.causal:
        return torch.ones(2, 1, queries, dtype=torch.bool)
    padding = F.pad(padding[:, arguments["kv_offset"] :], (0, visible.length))[:, : visible.length]
    behind = padding.flip(1).cummax(1).values.flip(1)  # a valid key is there or behind
    return behind[:, None, -queries:]


def matrix_of_packed(packed: Packed, mask: StructuredMask) -> torch.Tensor:
    """What each query sees, by FlashAttention's rules for packed sequences: in each, the last query is at the last key."""
    batch, _, queries, _ = mask.shape
    visible = mask.visible
    seen = torch.zeros(mask.shape, dtype=torch.bool)
    for n, used in enumerate(packed.seqused_k.tolist()):
        (begin_q, end_q), begin_k = packed.cu_seqlens_q[n : n + 2].tolist(), int(packed.cu_seqlens_k[n])
        for query in range(begin_q, end_q):
            place = used - (end_q - query)
            last = min(used, place + 1 + (visible.right or 0)) if visible.causal or visible.right is not None else used
            for key in range(0 if visible.left is None else max(0, place - visible.left), last):
                sequence, own = divmod(begin_k + key, visible.length)
                assert sequence == query // queries
                seen[sequence, 0, query % queries, own] = True
    assert packed.cu_seqlens_q[-1] == batch * queries
    return seen


def matrix_by_flag(arguments: dict[str, Any]) -> torch.Tensor:
    queries, keys = arguments["q_length"], arguments["kv_length"]
    causal = arguments["allow_is_causal_skip"] and queries > 1
    return torch.ones(2, 1, queries, keys, dtype=torch.bool).tril() if causal else torch.ones(2, 1, queries, keys).bool()


LEFT = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (described("causal", 5, 5), None),
        (described("causal", 1, 5, past=4), None),
        (described("full", 5, 5), None),
        (described("window", 5, 5, window=8), None),
        (described("window", 5, 5), Visible(5, True, left=2)),
        (described("two-sided", 5, 5), Visible(5, False, left=3, right=3)),
        (described("causal", 2, 5, past=3), Visible(5, True)),  # more than one token after some
        (described("causal", 5, 9), Visible(5, True)),  # a static cache's first pass
        (described("window", 1, 3, past=9, skipped=7), None),  # all that a full sliding cache holds
        (described("causal", 5, 5, attention_mask=LEFT.flip(1)), Visible(5, True, padded=True)),
    ],
)  # fmt: skip
def test_what_is_found(arguments: dict[str, Any], found: Visible | None) -> None:
    mask = make_mask(**arguments)
    assert mask is found if found is None else isinstance(mask, StructuredMask) and mask.visible == found


def test_padding_to_the_left_is_two_numbers_a_sequence() -> None:
    mask = make_mask(**described("window", 5, 5, attention_mask=LEFT))
    assert isinstance(mask, StructuredMask)
    assert mask.visible.first is not None
    assert mask.visible.end is not None
    assert (mask.visible.first.tolist(), mask.visible.end.tolist()) == ([2, 0], [5, 5])


def test_padding_to_the_right_of_an_encoder_is_its_lengths() -> None:
    mask = make_mask(**described("full", 5, 5, attention_mask=LEFT.flip(1)))
    assert isinstance(mask, StructuredMask)
    assert mask.visible.first is None
    assert mask.visible.end is not None
    assert mask.visible.end.tolist() == [3, 5]


@pytest.mark.parametrize(
    "arguments",
    [
        described("two-sided", 5, 5, window=2, attention_mask=LEFT.flip(1)),  # the window of the last query begins at its place
        described("causal", 5, 5, attention_mask=torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()),
        {
            **described("causal", 5, 5),
            "mask_function": hf.chunked_causal_mask_function(2, torch.zeros(2).long()),
            "local_size": 2,
        },
        {**described("causal", 5, 5), "mask_function": lambda b, h, q, k: k < q, "allow_is_causal_skip": False},
        {**described("window", 5, 5), "use_vmap": True},
    ],
)
def test_another_mask_is_transformers_own(arguments: dict[str, Any]) -> None:
    mask = make_mask(**arguments)
    assert type(mask) is torch.Tensor
    assert torch.equal(mask, hf.sdpa_mask(**arguments))


def test_a_model_may_do_with_it_what_it_does_with_a_matrix() -> None:
    arguments = described("window", 5, 5, attention_mask=LEFT)
    mask, expected = make_mask(**arguments), hf.sdpa_mask(**arguments)
    assert isinstance(mask, StructuredMask)
    assert mask.contiguous() is mask
    assert "length=5" in repr(mask)
    for operation in (
        lambda one: one[:, :, 1:, :3],
        lambda one: ~one,
        lambda one: torch.where(one, 0.0, -1.0),
        lambda one: one.repeat(1, 2, 1, 1),
        lambda one: torch.cat([one, one]),
        lambda one: one.to(torch.int64).sum(),
    ):
        result = operation(mask)
        assert type(result) is torch.Tensor
        assert torch.equal(result, operation(expected))


def test_a_model_that_adds_its_mask_to_scores_is_refused() -> None:
    mask = make_mask(**described("full", 5, 5, attention_mask=LEFT))
    assert isinstance(mask, StructuredMask)
    with pytest.raises(ValueError, match="makes boolean masks: use 'eager'"):
        torch.zeros(2, 4, 5, 5) + mask
    with pytest.raises(ValueError, match="makes boolean masks: use 'eager'"):
        torch.zeros(2, 4, 5, 5).add_(mask)


# Models that do not say what they see ----------------------------------------------------------------------------------------

OWN = {"bloom": BloomConfig(), "codegen": CodeGenConfig(), "mpt": MptConfig(), "trocr": TrOCRConfig(), "xglm": XGLMConfig()}


@pytest.mark.parametrize("padding", [None, LEFT])
@pytest.mark.parametrize("family", OWN)
def test_a_causal_model_that_attends_by_code_of_its_own_is_refused(family: str, padding: torch.Tensor | None) -> None:
    """It would take None for no mask at all, and see the tokens that it is to predict."""
    AutoModelForCausalLM._model_mapping[type(OWN[family])]  # imports the model
    words = "attends by code of its own, which attn_implementation='fms' does not reach: use 'eager'"
    with pytest.raises(ValueError, match=words):
        make_mask(**described("causal", 5, 5, attention_mask=padding, config=OWN[family]))
    assert make_mask(**described("full", 5, 5, config=OWN[family])) is None  # an encoder sees all in any case


@pytest.mark.parametrize("backend", [None, "eager"])
def test_such_a_model_is_refused_as_a_whole(backend: str | None) -> None:
    transformers.register()
    config = XGLMConfig(vocab_size=97, d_model=32, ffn_dim=16, num_layers=1, attention_heads=2, max_position_embeddings=16)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="fms")
    call = model if backend is None else torch.compile(model, backend=backend)
    with torch.no_grad(), pytest.raises(ValueError, match="XGLM attends by code of its own"):
        call(torch.ones(1, 5, dtype=torch.long), use_cache=False)


def test_a_model_whose_layers_do_not_say_that_they_are_causal() -> None:
    transformers.register()
    sizes = {
        f"{part}_{what}": 16 if what == "ffn_dim" else 1 for part in ("encoder", "decoder") for what in ("layers", "ffn_dim")
    }
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BigBirdPegasusConfig(vocab_size=97, d_model=32, max_position_embeddings=64, **sizes, **heads)
    found = []
    for implementation in ("eager", "fms"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
        for one in model.parameters():
            one.data = torch.randn_like(one) / 4
        found.append(model(torch.arange(5, 14)[None], use_cache=False).logits)
    torch.testing.assert_close(*found)
