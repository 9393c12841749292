"""chunk_gluon_sm90: what it decides on the host and, on a Hopper GPU, its results where keys are split and merged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.unit.ops.attention.calls import call_of

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from tests.unit.ops.attention.forward.cases import Case, examine, problem_of
from tests.unit.ops.attention.forward.features_cases import Changed
from tests.unit.ops.attention.forward.features_cases import examine as examine_modes

import flashmoe_science as fm
from flashmoe_science.hardware.gpus import GPUS, gpu_named
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.call.kernel import Launcher
from flashmoe_science.ops.attention.device import merge_gluon as chunk_merge
from flashmoe_science.ops.attention.device.sm90 import ROWS, window_of
from flashmoe_science.ops.attention.device.splits import partial_bytes
from flashmoe_science.ops.attention.device.tma import rows_of_copy
from flashmoe_science.ops.attention.forward.chunked_sm90 import config as chunk_configs
from flashmoe_science.ops.attention.forward.chunked_sm90.kernel import KERNEL
from flashmoe_science.ops.attention.forward.chunked_sm90.launch import ChunkLauncher
from flashmoe_science.ops.attention.problem import AttentionProblem, parse
from flashmoe_science.ops.attention.proof.contract import CONTRACT

SIZES = (
    "attn b1 h32 hk8 q16 k8192 d128 bf16 causal",
    "attn b1 h32 hk8 q64 k32768 d128 bf16",
    "attn b2 h7 hk1 q33 k777 d96 fp16 causal",
    "attn b1 h128 hk1 q9 k1500 d128 bf16 causal",
    "attn b8 h32 hk8 q64 k16384 d128 bf16 causal bshd ragged",
    "attn b4 h8 hk2 q128 k2048 d256 fp16 causal bshd packed",
    "attn b1 h32 hk8 q16 k32768 d128 bf16 causal left4095",
    "attn b1 h16 hk8 q64 k8192 d256 bf16 softcap50 sinks",
    "attn b16 h32 hk8 q512 k16384 d128 bf16 causal bshd packed page16",
)
NAMES = ("consumers", "block_n", "stages_k", "stages_v", "occupancy", "num_splits")
LONE = (1, 64, 3, 3, 2)  # one consumer


def test_its_launcher_has_what_public_calls_ask_of_one() -> None:
    """On a machine without a GPU no plan is made, and mypy does not see through Gluon."""
    assert issubclass(ChunkLauncher, Launcher)
    assert not ChunkLauncher.__abstractmethods__


@pytest.mark.parametrize("text", SIZES)
def test_the_workspace_holds_the_partials_on_every_gpu(text: str) -> None:
    one = parse(text)
    rows = one.batch * one.heads * one.seqlen_q
    for gpu in GPUS.values():
        if KERNEL.supports(one, gpu) is None:
            for config in KERNEL.configs(one, gpu):
                splits = max([launch.grid[1] for launch in KERNEL.launches(one, config, gpu)])
                assert KERNEL.workspace(one, config) >= partial_bytes(rows, splits, one.head_dim_v), config


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 20, 64, 128])
def test_a_consumers_rows_are_all_heads_of_its_queries(group: int) -> None:
    heads = chunk_configs.heads_of(group)
    assert heads * chunk_configs.queries_of(group) == ROWS
    assert heads >= group or heads == ROWS


@pytest.mark.parametrize("width", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 1000, 8192])
def test_the_merge_has_a_program_for_every_row_and_no_more(width: int, rows: int) -> None:
    held = chunk_merge.rows_at_once(width)
    assert 0 <= chunk_merge.programs(rows, width) * held - rows < held


@pytest.mark.parametrize(
    ("text", "suits"),
    [
        ("attn b1 h32 hk8 q64 k32768 d128 bf16 causal", True),
        ("attn b1 h32 hk8 q256 k32768 d128 bf16 causal", True),
        ("attn b16 h32 hk8 q512 k16384 d128 bf16 causal bshd packed", False),  # the plain kernel is faster
        ("attn b8 h32 hk8 q64 k16384 d128 bf16 causal bshd ragged", True),
        ("attn b16 h32 hk8 q512 k16384 d128 bf16 causal bshd packed page16", False),
        ("attn b8 h32 hk8 q64 k16384 d128 bf16 causal", True),  # no split, but few queries of each head
        ("attn b1 h32 hk8 q1 k32768 d128 bf16", False),  # decoding
        ("attn b1 h32 hk8 q8 k8192 d128 bf16 causal", True),  # half of a consumer's rows, and long keys
        ("attn b1 h32 hk8 q8 k2048 d128 bf16 causal", True),
        ("attn b1 h32 hk8 q8 k1024 d128 bf16 causal", False),
        ("attn b1 h32 hk8 q8 k32768 d128 bf16 causal", False),  # the memory's speed decides
        ("attn b8 h32 hk8 q8 k8192 d128 bf16 causal", False),
        ("attn b8 h32 hk8 q8 k8192 d128 bf16 causal bshd ragged", True),
        ("attn b1 h32 hk8 q8 k32768 d128 bf16 causal bshd ragged", False),
        ("attn b64 h32 hk8 q8 k8192 d128 bf16 causal", False),  # the same without splits
        ("attn b16 h64 hk8 q4 k8192 d128 bf16 causal bshd ragged", False),
        ("attn b1 h32 hk8 q4 k32768 d128 bf16", False),  # rows that fill a quarter of a consumer
        ("attn b1 h32 hk8 q512 k8192 d128 bf16 causal", False),  # no split: the plain kernel is faster
        ("attn b2 h16 q4096 d128 bf16 causal", False),
        ("attn b1 h2 q4096 d128 bf16 causal", True),  # fewer tiles than processors
        ("attn b1 h8 q1024 d128 bf16", False),  # the same, but too few keys to split
        ("attn b1 h4 q512 d256 bf16", True),  # where no other kernel is quick
        ("attn b1 h32 hk8 q8192 d128 bf16 causal bshd left4095", False),
        ("attn b1 h16 hk8 q4096 d256 bf16 causal bshd softcap50", False),  # no split: the plain kernel is faster
        ("attn b1 h8 hk4 q512 d256 bf16 causal bshd softcap50", True),  # which this would not fill
        ("attn b4 h32 hk8 q64 k32768 d128 bf16 causal bshd softcap50", True),
        ("attn b1 h16 hk8 q4096 d256 bf16 causal bshd softcap50 sinks", False),
        ("attn b1 h64 hk8 q4096 d64 bf16 causal bshd sinks", False),
        ("attn b1 h64 hk8 q4096 d64 bf16 causal bshd left127 sinks", False),
        ("attn b32 h12 q2048 d64 bf16 bshd left64 right64 packed", False),  # half of the scores would be masked
        ("attn b32 h12 q2048 d64 bf16 bshd left128 right128 packed", False),
        ("attn b8 h16 hk8 q1 k8192 d256 bf16 bshd softcap50 ragged", False),
    ],
)
def test_it_is_chosen_where_splits_or_modes_ask_for_it(text: str, suits: bool) -> None:
    assert KERNEL.suits(parse(text), gpu_named("h200")) is suits


@pytest.mark.parametrize(("page", "served"), [(8, True), (64, True), (256, True), (384, True), (4, False), (48, False)])
def test_it_serves_pages_that_tiles_are_made_of(page: int, served: bool) -> None:
    one = parse(f"attn b4 h8 hk2 q64 k2048 d128 bf16 causal ragged page{page}")
    assert (KERNEL.supports(one, gpu_named("h200")) is None) is served
    for config in KERNEL.configs(one, gpu_named("h200")) if served else ():
        rows = rows_of_copy(one, config)
        assert rows == min(page, config["block_n"])
        assert page % rows == config["block_n"] % rows == 0


def test_it_serves_no_pages_that_are_padded_on_the_left_or_e4m3() -> None:
    for words in ("leftpad", "fp8kv"):
        one = parse(f"attn b4 h8 hk2 q64 k2048 d128 bf16 causal ragged page16 {words}")
        assert KERNEL.supports(one, gpu_named("h200")) is not None


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("attn b1 h32 hk8 q8192 d128 bf16 causal left4095", 4095 + 32),
        ("attn b1 h32 hk8 q8192 d128 bf16 left64 right32", 64 + 32 + 32),
        ("attn b1 h32 hk8 q8192 k9000 d128 bf16 left64", None),
        ("attn b1 h32 hk8 q8192 d128 bf16 causal", None),
    ],
)
def test_a_window_limits_the_keys_of_a_program(text: str, keys: int | None) -> None:
    """Two consumers with 16 queries of four heads each."""
    one = parse(text)
    config = KERNEL.configs(one, gpu_named("h200"))[0]
    assert chunk_configs.span_of(one, 4, one.seqlen_q, config) == keys
    seen = chunk_configs.work_of(8, 4, one.seqlen_q, one.seqlen_k, config, keys).tiles_n
    assert seen == -(-(keys or one.seqlen_k) // 128) + (keys is not None)


def test_a_window_that_hides_nothing_takes_no_more_than_32_bits() -> None:
    left, right = window_of(parse(f"attn b1 h4 q64 d64 bf16 left{2**31 - 1} right{2**31 - 1}"))
    assert left is not None
    assert right is not None
    assert left + right + 2**30 < 2**31
    assert window_of(parse("attn b1 h4 q64 d64 bf16 causal left9 right4")) == (9, None)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("attn b1 h64 hk8 q4096 d64 bf16 causal", (2, 128)),
        ("attn b1 h64 hk8 q4096 d64 bf16 causal sinks", (1, 128)),
        ("attn b1 h64 hk8 q4096 d64 bf16 causal left1023", (1, 128)),
        ("attn b1 h64 hk8 q4096 d64 bf16 causal left127 sinks", (1, 64)),
        ("attn b1 h32 hk8 q4096 d128 bf16 causal left127 sinks", (2, 128)),
        ("attn b1 h16 hk8 q4096 d256 bf16 causal softcap50", (2, 64)),
    ],
)
def test_narrow_heads_with_modes_have_one_consumer(text: str, first: tuple[int, int]) -> None:
    config = KERNEL.configs(parse(text), gpu_named("h200"))[0]
    assert (config["consumers"], config["block_n"]) == first


def test_a_cap_of_which_scores_would_be_too_rough_is_refused() -> None:
    h200 = gpu_named("h200")
    assert KERNEL.supports(parse("attn b1 h4 q64 d64 bf16 softcap1000"), h200) is None
    assert "1001" in str(KERNEL.supports(parse("attn b1 h4 q64 d64 bf16 softcap1001"), h200))


@pytest.mark.parametrize("text", ["attn b1 h4 q64 d64 bf16 alibi", "attn b1 h4 q64 d64 bf16 boolmask sinks"])
def test_other_modes_are_refused_in_words(text: str) -> None:
    assert "does not serve" in str(KERNEL.supports(parse(text), gpu_named("h200")))


# On a GPU -------------------------------------------------------------------------------------------------------------------


def asked(one: AttentionProblem, place: int, splits: int) -> Config:
    """A config that the kernel offers, with so many splits."""
    configs = KERNEL.configs(one, current_gpu())
    return Config(**{**configs[place % len(configs)], "num_splits": splits})


def skip_elsewhere(one: AttentionProblem) -> None:
    if reason := KERNEL.supports(one, current_gpu()):
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 7, 16, 33, 40])
@pytest.mark.parametrize("values", ["normal", "opposed"])
@pytest.mark.parametrize("memory", ["dense", "cache"])
def test_any_number_of_splits_gives_the_result(splits: int, values: str, memory: str) -> None:
    """More programs than the GPU holds at once among them, and weights of splits that are zero in fp32."""
    case = Case("attn b1 h8 hk2 q128 k16384 d128 fp16 causal", None, values, memory)
    skip_elsewhere(problem_of(case))
    config = Config(**dict(zip(NAMES, (*LONE, splits), strict=True)))
    assert examine(KERNEL, config, case, torch.device("cuda")) == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("text", "splits"),
    [
        ("attn b1 h8 hk2 q64 k3000 d128 bf16", 5),
        ("attn b2 h6 hk2 q50 k3000 d64 fp16", 3),
        ("attn b1 h7 hk1 q33 k777 d128 bf16 causal", 2),
        ("attn b2 h4 hk2 q200 k64 d64 bf16 causal", 4),  # rows and whole tiles that see no key
        ("attn b1 h4 q300 k2000 d128 bf16 causal-topleft", 7),  # pieces without keys
        ("attn b1 h8 hk2 q100 k3000 d80 dv96 bf16", 3),
        ("attn b1 h4 hk2 q100 k3000 d256 fp16 causal", 4),
        ("attn b1 h80 hk1 q20 k2000 d64 bf16 causal", 3),
        ("attn b1 h128 hk1 q9 k1500 d128 bf16 causal", 6),
    ],
)
def test_partials_merge_to_the_result(text: str, splits: int) -> None:
    one = parse(text)
    skip_elsewhere(one)
    for place, values in enumerate(("normal", "opposed")):
        assert examine(KERNEL, asked(one, place, splits), Case(text, None, values), torch.device("cuda")) == []


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("splits", [0, 1, 3, 16])
@pytest.mark.parametrize(
    "text",
    [
        "attn b3 h8 hk2 q64 k3000 d128 bf16 causal bshd ragged",
        "attn b4 h8 hk2 q40 k2000 d64 fp16 ragged",
        "attn b4 h8 hk2 q128 k2048 d128 bf16 causal bshd packed",
        "attn b3 h8 hk1 q50 k1000 d96 fp16 causal bshd packed",
    ],
)
def test_sequences_of_any_length_are_right(text: str, splits: int, seed: int) -> None:
    one = parse(text)
    skip_elsewhere(one)
    changed = Changed(seed, other_lengths=seed % 2 == 0)
    assert examine_modes(KERNEL, asked(one, seed, splits), one, CONTRACT, torch.device("cuda"), changed) == []


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [0, 1, 3, 16])
@pytest.mark.parametrize(
    "text",
    [
        "attn b1 h8 hk2 q1500 d128 bf16 causal bshd left700",
        "attn b1 h4 hk2 q900 d256 fp16 causal bshd left300 softcap50",
        "attn b1 h16 hk2 q900 d64 bf16 causal bshd left127 sinks",
        "attn b1 h4 q300 k64 d64 fp16 left9 right4",  # rows and programs that see no key
        "attn b2 h4 hk2 q200 k700 d128 bf16 right30",
        "attn b2 h4 hk2 q200 k700 d128 fp16 left30 sinks",
        "attn b2 h4 hk2 q300 k100 d64 bf16 causal sinks",  # rows that see the sink alone
        "attn b1 h4 q300 k200 d128 bf16 causal-topleft softcap5 sinks",
        "attn b2 h80 hk1 q20 k900 d64 bf16 causal left300 sinks",
        "attn b3 h8 hk2 q20 k3000 d128 bf16 causal bshd left1000 sinks ragged",
        "attn b5 h12 hk4 q400 d128 bf16 causal bshd left100 softcap30 sinks packed",
        "attn b3 h8 hk2 q64 k3000 d128 bf16 causal bshd left500 softcap30 sinks ragged page16",
    ],
)
def test_windows_caps_and_sinks_are_right(text: str, splits: int) -> None:
    one = parse(text)
    skip_elsewhere(one)
    for place, distribution in enumerate(("normal", "opposed", "large")):  # scores far below the sinks among them
        changed = Changed(splits, distribution, other_lengths=place == 1)
        assert examine_modes(KERNEL, asked(one, place, splits), one, CONTRACT, torch.device("cuda"), changed) == []


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [0, 1, 7])
@pytest.mark.parametrize(
    "text",
    [
        *(f"attn b3 h8 hk2 q64 k3000 d128 bf16 causal bshd ragged page{page}" for page in (8, 16, 32, 64, 128, 256, 384)),
        "attn b4 h8 hk2 q128 k2048 d128 bf16 causal bshd packed page16",
        "attn b5 h7 hk1 q33 k1500 d64 fp16 causal packed page8",
        "attn b3 h8 hk1 q50 k1000 d96 fp16 bshd packed page64",
        "attn b4 h4 hk2 q40 k900 d80 dv160 bf16 causal ragged page32",
        "attn b3 h8 hk2 q300 k300 d256 bf16 causal bshd packed page256",
    ],
)
def test_pages_are_right(text: str, splits: int) -> None:
    """Entries of the table past a length are of no page, and the rows there, and pages of no sequence, are NaN."""
    one = parse(text)
    skip_elsewhere(one)
    for seed in (splits, splits + 1):
        changed = Changed(seed, other_lengths=seed % 2 == 0)
        assert examine_modes(KERNEL, asked(one, seed, splits), one, CONTRACT, torch.device("cuda"), changed) == []


@pytest.mark.gpu
@pytest.mark.parametrize("page", [8, 64, 256])
def test_pages_give_the_bits_of_a_contiguous_cache(page: int) -> None:
    """Sequences share their first pages; one has no key, one has one."""
    lengths, capacity = (2000, 0, 1, 2048, 1537), 2048
    paged = parse(f"attn b5 h8 hk2 q70 k{capacity} d128 bf16 causal ragged page{page}")
    skip_elsewhere(paged)
    generator = torch.Generator("cuda").manual_seed(page)
    q, k, v = (
        torch.randn(shape, device="cuda", generator=generator).bfloat16()
        for shape in ((5, 8, 70, 128), (5 * capacity // page, 2, page, 128), (5 * capacity // page, 2, page, 128))
    )
    table = torch.randperm(k.shape[0], device="cuda", generator=generator).to(torch.int32).view(5, -1)
    table[:, : 512 // page] = table[0, : 512 // page]
    cache = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device="cuda"), "max_seqlen_k": capacity}
    inputs = call_of(paged, q, k, v, 0.1, True, page_table=table, **cache)
    dense = [one[table.long()].transpose(1, 2).flatten(2, 3).contiguous() for one in (k, v)]
    contiguous = call_of(replace(paged, features=replace(paged.features, page=0)), q, *dense, 0.1, True, **cache)
    for place, splits in ((0, 0), (0, 3), (1, 1)):
        config = asked(paged, place, splits)
        mine, right = KERNEL.run(inputs, config), KERNEL.run(contiguous, config)
        assert torch.equal(mine.out, right.out)
        assert mine.lse is not None
        assert torch.equal(mine.lse, right.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("grown", [0, 1, 64])
def test_public_functions_are_served_by_it(grown: int) -> None:
    """One call after another, with more keys each time."""
    skip_elsewhere(parse("attn b1 h8 hk2 q64 k4096 d128 bf16 causal"))
    q, k, v = (torch.randn(1, heads, rows, 128, device="cuda").bfloat16() for rows, heads in ((64, 8), (4200, 2), (4200, 2)))
    for keys in (4096, 4096 + grown):
        parts = q, k[:, :, :keys], v[:, :, :keys]
        out = fm.scaled_dot_product_attention(*parts, enable_gqa=True, kernel=KERNEL.name)
        right = fm.scaled_dot_product_attention(*parts, enable_gqa=True, kernel="split_triton")
        assert (out - right).abs().max() < 2.0**-7
