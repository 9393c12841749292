"""The backend "FMS" of vLLM against attention done plainly, on modules that stand in for vLLM 0.33's.

vLLM is not installed for the tests. The stand-ins have what our classes take from vLLM's: names, signatures, the attributes
that ``TritonAttentionImpl`` sets, the layout of its cache and the fields of its metadata. They cannot show that vLLM runs.
"""

from __future__ import annotations

import enum
import importlib
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_science.integrations import vllm as ours

BACKEND = "flashmoe_science.integrations.vllm_backend"
HEADS, HEADS_KV, DIM, ROWS = 4, 2, 16, 16


class Names(enum.Enum):
    """vLLM's enumeration of backends, which ``register_backend`` adds a new name to."""

    TRITON_ATTN = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"


class TritonAttentionImpl:
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None = None, attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None, sinks: torch.Tensor | None = None, use_alibi_sqrt: bool = False,
        chunk_lookback: int = -1,
    ) -> None:  # fmt: skip
        self.head_size, self.scale = head_size, scale
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.logits_soft_cap = logits_soft_cap or 0
        self.sinks, self.use_alibi_sqrt, self.chunk_lookback = sinks, use_alibi_sqrt, chunk_lookback


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """vLLM's modules; what was registered."""
    registered: list[tuple[str, str]] = []
    members = SimpleNamespace(__members__=dict(Names.__members__))

    def register_backend(name: str, path: str) -> None:
        assert name not in members.__members__  # vLLM raises
        members.__members__[name] = path
        registered.append((name, path))

    contents: dict[str, dict[str, Any]] = {
        "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": members, "register_backend": register_backend},
        "vllm.v1.attention.backend": {
            "AttentionCGSupport": enum.Enum("AttentionCGSupport", ["ALWAYS", "NEVER"]),
            "AttentionType": SimpleNamespace(DECODER="decoder", ENCODER="encoder"),
        },
        "vllm.v1.attention.backends.triton_attn": {
            "TritonAttentionImpl": TritonAttentionImpl,
            **{name: type(name, (), {}) for name in ("TritonAttentionBackend", "TritonAttentionMetadata")},
            "TritonAttentionMetadataBuilder": type("TritonAttentionMetadataBuilder", (), {}),
        },
    }
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", *contents):
        module = ModuleType(name)
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    yield registered
    sys.modules.pop(BACKEND, None)


@pytest.fixture
def backend() -> Any:
    return importlib.import_module(BACKEND)


def made(backend: Any, **options: Any) -> Any:
    arguments = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", **options}
    return backend.FMSBackend.get_impl_cls()(HEADS, DIM, 0.3, HEADS_KV, **arguments)


LENGTHS, QUERIES = (21, 5, 33), (3, 5, 1)  # some after a prefix, a first pass, a step of decoding
TABLE = torch.tensor([[4, 1, 99], [0, 99, 99], [5, 2, 3]], dtype=torch.int32)  # 99 lies past a length


def batch() -> tuple[torch.Tensor, torch.Tensor, SimpleNamespace]:
    """Queries, a cache of pages, and the metadata."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(QUERIES)
    query = torch.randn(tokens + 2, HEADS, DIM, generator=generator)  # two of padding
    cache = torch.randn(6, HEADS_KV, ROWS, 2 * DIM, generator=generator)
    starts = torch.tensor([0, *QUERIES]).cumsum(0).int()
    about = SimpleNamespace(
        num_actual_tokens=tokens, max_query_len=max(QUERIES), max_seq_len=max(LENGTHS), query_start_loc=starts, causal=True,
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32), block_table=TABLE, mm_prefix_range=None, rswa_prefix_lens=None,
    )  # fmt: skip
    return query, cache, about


def expected(query: torch.Tensor, cache: torch.Tensor, window: int | None, cap: float, sinks: Any, slopes: Any) -> torch.Tensor:
    pieces, first = [], 0
    for row, (length, queries) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        pages = TABLE[row, : -(-length // ROWS)].long()
        both = cache[pages].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(HEADS // HEADS_KV, 0)
        k, v = both.split(DIM, -1)
        scores = query[first : first + queries].transpose(0, 1) @ k.mT * 0.3
        scores = cap * torch.tanh(scores / cap) if cap else scores
        back = torch.arange(length - queries, length)[:, None] - torch.arange(length)
        if slopes is not None:
            scores = scores - torch.tensor(slopes)[:, None, None] * back.abs()
        seen = (back >= 0) if window is None else (back >= 0) & (back < window)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, queries, 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        pieces.append((weights @ v).transpose(0, 1))
        first += queries
    return torch.cat(pieces)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"sliding_window": 4}, {"logits_soft_cap": 1.5}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"alibi_slopes": [0.1, 0.2, 0.3, 0.4]}, {"sliding_window": 4, "logits_soft_cap": 2.0, "sinks": torch.ones(4)},
    ],
)  # fmt: skip
def test_a_layer_attends_to_the_pages_of_each_sequence(options: dict[str, Any], backend: Any) -> None:
    query, cache, about = batch()
    output = torch.full_like(query, 7.0)
    returned = made(backend, **options).forward(None, query, query, query, cache, about, output)
    assert returned is output
    wanted = expected(
        query, cache, options.get("sliding_window"), options.get("logits_soft_cap", 0.0), options.get("sinks"),
        options.get("alibi_slopes"),
    )  # fmt: skip
    torch.testing.assert_close(output[: sum(QUERIES)], wanted)
    assert (output[sum(QUERIES) :] == 7.0).all()


def test_the_output_is_zeros_where_vllm_measures_memory(backend: Any) -> None:
    query, cache, _ = batch()
    assert (made(backend).forward(None, query, query, query, cache, None, torch.ones_like(query)) == 0).all()


@pytest.mark.parametrize("change", [{"causal": False}, {"mm_prefix_range": {}}, {"rswa_prefix_lens": torch.ones(3)}])
def test_a_batch_that_is_not_served_is_refused(change: dict[str, Any], backend: Any) -> None:
    query, cache, about = batch()
    vars(about).update(change)
    with pytest.raises(NotImplementedError, match="serves causal attention without prefixes"):
        made(backend).forward(None, query, query, query, cache, about, query)


@pytest.mark.parametrize("options", [{"chunk_lookback": 1}, {"use_alibi_sqrt": True}])
def test_a_layer_that_is_not_served_is_refused(options: dict[str, Any], backend: Any) -> None:
    with pytest.raises(NotImplementedError, match="serves neither chunk_lookback nor use_alibi_sqrt"):
        made(backend, **options)


def test_what_vllm_asks_of_a_backend(backend: Any) -> None:
    asked = backend.FMSBackend
    assert asked.get_name() == "FMS"
    assert asked.supports_head_size(256)
    assert not asked.supports_head_size(512)
    assert asked.supports_attn_type("decoder")
    assert not asked.supports_attn_type("encoder")
    assert "fp8" not in asked.supported_kv_cache_dtypes
    refused = ("non_causal", "mm_prefix", "rswa", "alibi_sqrt", "batch_invariance")
    assert not any(getattr(asked, f"supports_{name}")() for name in refused)
    assert asked.get_builder_cls()._cudagraph_support.name == "NEVER"


def test_a_second_registration_changes_nothing(vllm: list[tuple[str, str]]) -> None:
    ours.register()
    ours.register()
    assert vllm == [("FMS", f"{BACKEND}.FMSBackend")]
    assert BACKEND not in sys.modules


def test_the_registered_path_and_the_entry_point_lead_to_ours(vllm: list[tuple[str, str]], backend: Any) -> None:
    ours.register()
    module, _, name = vllm[0][1].rpartition(".")
    assert getattr(sys.modules[module], name) is backend.FMSBackend
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    value = project["entry-points"]["vllm.general_plugins"]["flashmoe"]
    assert metadata.EntryPoint("flashmoe", value, "vllm.general_plugins").load() is ours.register


def test_another_vllm_is_warned_of_and_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    with pytest.warns(UserWarning, match=r"needs another vLLM \(0.33 was read\): "):  # an error would end vLLM's process
        ours.register()
