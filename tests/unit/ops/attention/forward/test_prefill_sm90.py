"""fwd_gluon_sm90: what it serves, its tiles and its builds; on a Hopper GPU its results with a soft cap and with heads of no
power of two."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Any

import pytest
import torch
from tests.unit.ops.attention.calls import call_of

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from tests.unit.ops.attention.forward.features_cases import Changed
from tests.unit.ops.attention.forward.features_cases import examine as examine_modes
from tests.unit.ops.attention.forward.lowest_bias import PROBLEM, error

from flashmoe_science.dispatch.select import select
from flashmoe_science.dispatch.table import Table, committed_table
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, Launcher
from flashmoe_science.ops.attention.call.tensors import ALL_KEYS, Options, Tensors
from flashmoe_science.ops.attention.device import softcap
from flashmoe_science.ops.attention.forward.prefill_sm90 import config as host
from flashmoe_science.ops.attention.forward.prefill_sm90 import kernel, variant
from flashmoe_science.ops.attention.forward.prefill_sm90 import launch as fwd_launcher
from flashmoe_science.ops.attention.front.kernels import ours
from flashmoe_science.ops.attention.problem import parse
from flashmoe_science.ops.attention.proof.contract import CONTRACT


@pytest.mark.parametrize(
    ("sizes", "consumers", "block_n"),
    [
        ("b4 h16 q4000 k4050", 2, 128),
        ("b4 h16 q4096 k8192", 2, 128),  # others of its class have a diagonal that crosses two tiles
        ("b16 h16 q300 k777", 1, 64),
        ("b8 h16 q4096 packed", 2, 128),
        ("b32 h16 q512 packed", 1, 64),
        ("b8 h16 q4096 packed left500", 2, 64),  # beside 128 keys its second loop spills
    ],
)
@pytest.mark.parametrize("width", ["d160", "d192 dv128"])
def test_wide_heads_have_128_keys_a_tile_from_a_thousand_on(sizes: str, consumers: int, block_n: int, width: str) -> None:
    words = sizes.split()
    text = " ".join(["attn", *words[:2], *(word for word in words[2:] if word[0] in "qk"), width, "bf16 causal"])
    one, h200 = parse_problem(" ".join([text, *(word for word in words[2:] if word[0] in "lp")])), gpu_named("h200")
    config = select(one, h200, committed_table(), [kernel.KERNEL], None).config
    assert (config["consumers"], config["block_n"]) == (consumers, block_n)


@pytest.mark.parametrize(
    ("text", "consumers"),
    [
        ("attn b2 h32 q8192 d64 bf16 causal", 3),
        ("attn b4 h1 q5120 d64 bf16 causal", 1),  # fewer tiles of three than processors
        ("attn b1 h32 q9590 k12618 d64 bf16", 3),
        ("attn b28 h32 q577 d64 bf16", 2),  # tiles of three would have a quarter of their rows empty
        ("attn b10 h32 q1500 d64 bf16", 3),
        ("attn b32 h8 q256 d64 bf16", 1),  # short
        ("attn b4 h4 q2048 d64 bf16", 1),  # 176 tiles of three: two rounds, the second for a third of the processors
        ("attn b1 h16 q20536 d128 bf16", 3),
        ("attn b34 h24 q908 d128 bf16", 3),  # 31 rounds of tiles of 192 rows, 50 of 128
        ("attn b1 h6 q12730 d128 bf16", 2),  # 4 rounds, 5
        ("attn b4 h16 q4097 d128 bf16 causal", 3),
        ("attn b68 h24 q1220 d128 bf16 causal", 2),
        ("attn b4 h16 q4097 d128 bf16 causal softcap50", 2),
        ("attn b1 h16 q16384 d128 bf16 causal", 2),  # which 128 divides
        ("attn b8 h8 q701 d80 bf16 causal", 2),  # too few for pairs of tiles
        ("attn b55 h16 q577 d96 bf16 causal", 1),
        ("attn b142 h32 q326 d96 bf16 causal", 3),
        ("attn b257 h28 q326 d112 bf16 causal bshd", 3),  # rows of 224 bytes: one consumer takes 1.75 times as long
        ("attn b1600 h8 q94 k260 d128 bf16 causal", 2),
        ("attn b1 h2 q1272 k2098 d128 bf16", 1),
        ("attn b1 h48 hk6 q22832 d40 bf16 causal", 3),
        ("attn b8 h16 q1886 k13432 d64 bf16 causal", 3),
        ("attn b4 h32 q6000 d64 bf16 causal packed", 3),
        ("attn b4 h32 q6000 d64 bf16 causal left1023 packed", 1),
        ("attn b1 h4 q6000 d64 bf16 causal packed", 1),
    ],
)
def test_tiles_are_as_small_as_it_takes_to_use_all_processors(text: str, consumers: int) -> None:
    one, h200 = parse(text), gpu_named("h200")
    assert host.fitted(one, one, host.configs(one, h200)[0], h200)["consumers"] == consumers


@pytest.mark.parametrize("mask", ["", " causal"])
def test_the_work_of_tiles_is_counted_as_they_are(mask: str) -> None:
    chance, gpu = Random(3), gpu_named("h200")
    for _ in range(60):
        queries, heads = chance.randrange(1, 3000), chance.randrange(1, 600)
        keys = queries + (chance.randrange(3000) if chance.random() < 0.5 else 0)
        one = parse(f"attn b1 h{heads} q{queries} k{keys} d128 bf16{mask}")
        for shape in (host.shape_of(1, 64, 2, 2), host.shape_of(2, 128, 2, 2), host.shape_of(3, 64, 2, 3)):
            rows, block = 64 * shape["consumers"], shape["block_n"]
            ends = [min(keys, first + rows + keys - queries) if mask else keys for first in range(0, queries, rows)]
            diagonal = host.DIAGONAL_KEYS if mask else 0
            of_head = [rows * (block * math.ceil(end / block) + diagonal) for end in ends]
            counted = host._pairs_of_busiest(one, gpu, shape)
            busiest = math.ceil(heads * len(ends) / gpu.sm_count) * of_head[0]
            assert counted == pytest.approx(sum(of_head) * heads / gpu.sm_count if mask else busiest)


def launched(monkeypatch: pytest.MonkeyPatch, constant: str) -> list[int]:
    """The value of a constant of the kernel in each launch from now on; nothing is launched."""
    found: list[int] = []

    class Recorded:
        def __init__(self, function: Any, arguments: Any, **options: Any) -> None:
            self.value = arguments[function.arg_names.index(constant)]

        def encoder(self, *args: Any) -> Any:
            return lambda tensor: ()

        def launch(self, grid: Any, *args: Any) -> None:
            found.append(self.value)

    monkeypatch.setattr(fwd_launcher, "Build", Recorded)
    return found


def test_each_length_is_bound_to_the_tiles_that_fit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launched(monkeypatch, "CONSUMERS")
    monkeypatch.setattr(kernel, "current_gpu", lambda device: gpu_named("h200"))
    monkeypatch.setattr(kernel, "can_start_early", lambda device: False)
    one = parse("attn b1 h64 q4096 d128 bf16 causal")

    def inputs(length: int) -> AttentionInputs:
        q = torch.empty(1, 64, length, 128, dtype=torch.bfloat16)
        return call_of(one, q, q, q, 0.1)

    launcher = kernel.plan(inputs(4096), host.configs(one, gpu_named("h200"))[0])
    for length in (4096, 4097, 1220, 4097):
        call = inputs(length)
        launcher.bind(call.tensors, call.options)(call.tensors, None, ALL_KEYS, None, None)
    assert found == [2, 3, 2, 3]


def test_a_growing_cache_gets_the_schedule_of_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launched(monkeypatch, "SCHEDULE")
    one, h200 = parse("attn b8 h4 q1364 k2100 d64 bf16 causal"), gpu_named("h200")
    config = host.configs(one, h200)[0]
    launcher = fwd_launcher.FwdLauncher(kernel.flashmoe_fwd_gluon_sm90, one, config, h200, False, False)
    q = torch.zeros(8, 4, 1364, 64, dtype=torch.bfloat16)
    for keys in (2100, 9744, 2100):
        k = torch.zeros(8, 4, keys, 64, dtype=torch.bfloat16)
        launcher.bind(Tensors(q, k, k), Options())((q, k, k), None, ALL_KEYS, None, None)
    assert found == [variant.PAIRED.value, variant.PAIRED_TAIL.value, variant.PAIRED.value]


def test_a_build_reads_a_bias_as_its_own_strides_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever those of the call were that the launcher was planned for."""
    built: list[tuple[int, bool]] = []

    class Recorded:
        def __init__(self, function: Any, arguments: Any, **options: Any) -> None:
            unit, bias = (arguments[function.arg_names.index(name)] for name in ("UNIT", "bias"))
            built.append((unit, bias.data_ptr() % 16 == 0))

        def encoder(self, *args: Any) -> Any:
            return lambda tensor: ()

        launch = None

    monkeypatch.setattr(fwd_launcher, "Build", Recorded)
    monkeypatch.setattr(kernel, "current_gpu", lambda device: gpu_named("h200"))
    monkeypatch.setattr(kernel, "can_start_early", lambda device: False)
    one = parse("attn b1 h2 q64 k256 d64 bf16 bias")
    q, k = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16)
    memory = torch.zeros(2 * 64 * 264, dtype=torch.bfloat16)

    def call(row: int) -> AttentionInputs:
        bias = memory.as_strided((1, 2, 64, 256), (2 * 64 * row, 64 * row, row, 1))
        return call_of(one, q, k, k, 0.125, bias=bias)

    launcher = kernel.plan(call(257), host.configs(one, gpu_named("h200"))[0])
    for row in (257, 264, 258, 0):
        inputs = call(row)
        launcher.bind(inputs.tensors, inputs.options)
    assert built == [(1, False), (8, True), (2, True)]


WIDE = ("d40", "d72", "d80", "d96", "d136", "d160", "d192", "d64 dv96", "d192 dv160", "d80 dv192")


@pytest.mark.parametrize("width", [*WIDE, "d64", "d128", "d256", "d192 dv128"])
@pytest.mark.parametrize("sizes", ["b4 h16 q4096", "b64 h16 q200", "b4 h16 q1000 k3001"])
@pytest.mark.parametrize("mask", ["", " causal"])
def test_tiles_fit_as_many_programs_as_a_processor_should_hold(width: str, sizes: str, mask: str) -> None:
    one = parse(f"attn {sizes} {width} bf16{mask}")
    for config in host.configs(one, gpu_named("h200")):
        assert config["occupancy"] * (host.tile_bytes(one, dict(config)) + 2048) <= 228 << 10, config


@pytest.mark.parametrize("width", WIDE)
def test_v_comes_in_chunks_of_64_columns_where_it_is_no_power_of_two(width: str) -> None:
    one = parse(f"attn b4 h16 q4096 {width} bf16")
    config = host.configs(one, gpu_named("h200"))[0]
    _, _, of_v, of_out, _, _, rest_of_v, rest_of_out = variant.tile_shapes(one, config)
    assert of_v == (1, 1, config["block_n"], 64)
    assert rest_of_v is None
    assert of_out is not None
    assert rest_of_out is not None
    assert one.head_dim_v <= of_out[3] + rest_of_out[3] < one.head_dim_v + 16


def test_it_serves_what_changes_scores_and_windows() -> None:
    h200 = gpu_named("h200")
    served_words = (("softcap50", True), ("softcap1001", False), ("softcap50 sinks bias", True), ("boolmask", True))
    packed_words = (
        ("packed softcap50 sinks", True),
        ("packed alibi", True),
        ("packed page16 sinks", True),
        ("packed page12", False),
        ("ragged page16", False),
        ("packed prefix9", True),
    )
    for words, served in (
        *served_words,
        *packed_words,
        ("alibi sinks", True),
        ("prefix9", True),
        ("left100", True),
        ("left100 prefix9", False),
        ("left100 packed sinks", True),
        ("ragged", False),
    ):
        one = parse_problem(f"attn b4 h16 q4096 d128 bf16 causal {words}")
        assert (kernel.KERNEL.cannot(one, h200) is None) is served, words


@pytest.mark.parametrize(("words", "heads"), [("h32 hk8", 4), ("h12 hk2", 2), ("h64 hk1", 8), ("h5", 1), ("h32 hk8 alibi", 1)])
def test_packed_queries_of_a_group_share_a_tile(words: str, heads: int) -> None:
    one = parse(f"attn b4 {words} q512 d128 bf16 causal packed")
    for config in host.configs(one, gpu_named("h200")):
        of_q, of_k, *_ = variant.tile_shapes(one, config)
        assert of_q == (1, 1, heads, 64 // heads, 128)
        assert of_k == (1, 1, 1, config["block_n"], 128)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("attn b2 h32 hk16 q4096 d128 bf16 causal bshd softcap50", "fwd_gluon_sm90"),
        ("attn b2 h32 hk16 q4096 d128 bf16 causal bshd softcap50 sinks", "fwd_gluon_sm90"),
        ("attn b8 h12 q512 d64 bf16 bias", "fwd_gluon_sm90"),
        ("attn b8 h12 q1 k4096 d64 bf16 boolmask", "split_triton"),
        ("attn b1 h8 q256 d128 bf16 causal bshd softcap50", "chunk_gluon_sm90"),  # which it would not fill
        ("attn b4 h32 hk8 q64 k32768 d128 bf16 causal softcap50", "chunk_gluon_sm90"),  # keys are split
        ("attn b1 h8 q1 k4096 d128 bf16 softcap50", "split_triton"),
        ("attn b16 h32 hk8 q4096 d128 bf16 causal bshd packed", "fwd_gluon_sm90"),
        ("attn b64 h32 hk8 q256 d128 bf16 causal bshd softcap30 packed", "fwd_gluon_sm90"),
        ("attn b16 h32 hk8 q2048 d128 bf16 causal bshd left255 packed", "fwd_gluon_sm90"),
        ("attn b1 h64 hk8 q4096 d64 bf16 causal bshd left127 sinks", "fwd_gluon_sm90"),
        ("attn b2 h16 q2048 d128 bf16 left100 right100", "fwd_gluon_sm90"),
        ("attn b1 h8 q256 d128 bf16 causal left100", "chunk_gluon_sm90"),  # which it would not fill
        ("attn b8 h32 hk8 q512 k4096 d128 bf16 causal bshd left255 ragged", "chunk_gluon_sm90"),
        ("attn b16 h32 hk8 q1 k4096 d128 bf16 causal bshd packed", "split_triton"),
        ("attn b16 h32 hk8 q512 k8192 d128 bf16 causal bshd packed page16", "fwd_gluon_sm90"),
        ("attn b4 h8 hk1 q1024 d256 bf16 causal bshd prefix256", "fwd_gluon_sm90"),
    ],
)
def test_it_is_chosen_for_prompts_that_fill_its_tiles(text: str, first: str) -> None:
    one, h200 = parse(text), gpu_named("h200")
    assert select(one, h200, Table(()), ours(), None).kernel == first
    assert select(one, h200, committed_table(), ours(), None).kernel == first


def test_its_launcher_has_what_calls_with_modes_ask_of_one() -> None:
    assert issubclass(fwd_launcher.FwdLauncher, Launcher)
    assert not fwd_launcher.FwdLauncher.__abstractmethods__


def test_it_refuses_to_split_keys() -> None:
    assert not fwd_launcher.FwdLauncher.splits_keys


@pytest.mark.gpu
@pytest.mark.parametrize(
    "text",
    [
        "attn b1 h4 hk2 q900 d256 fp16 causal bshd softcap50",
        "attn b1 h4 hk2 q600 d128 fp16 causal softcap15",
        "attn b2 h4 q300 k200 d96 bf16 causal softcap5",
        "attn b2 h6 hk2 q500 k1001 d192 bf16 bshd softcap30",
        "attn b2 h4 q300 k200 d64 bf16 causal-topleft softcap5",
        "attn b1 h4 hk2 q1000 d128 bf16 causal bshd softcap50",  # caps that a polynomial may stand in for
        "attn b2 h4 q500 k900 d64 fp16 softcap30",
        "attn b1 h6 hk2 q1500 d96 fp16 causal bshd left700 softcap40",
        "attn b2 h8 hk2 q300 d64 bf16 causal sinks",
        "attn b1 h6 hk2 q500 k700 d192 dv128 fp16 bshd softcap20 sinks",
        "attn b2 h4 q320 k640 d64 bf16 bias",
        "attn b2 h4 hk2 q320 k640 d64 bf16 causal bshd alibi",
        "attn b2 h4 hk2 q301 k203 d128 fp16 alibi",
        "attn b2 h4 hk2 q333 k777 d64 fp16 bshd bias",
        "attn b2 h4 hk1 q300 k500 d128 bf16 boolmask",
        "attn b1 h3 q200 k300 d80 fp16 causal bias",
        "attn b2 h4 q130 k129 d256 bf16 sinks boolmask",
        "attn b1 h4 q260 k250 d128 bf16 causal-topleft softcap9 sinks bias",
        "attn b5 h8 hk2 q700 d128 bf16 causal bshd packed",
        "attn b6 h4 q300 d64 fp16 bshd packed",
        "attn b4 h8 hk1 q500 k900 d128 bf16 causal bshd packed",  # a diagonal at any place
        "attn b3 h12 hk4 q200 k100 d64 bf16 causal bshd sinks packed",  # rows that see no key
        "attn b4 h6 hk2 q300 k200 d256 fp16 causal packed",
        "attn b3 h4 hk2 q400 k1500 d192 dv128 bf16 causal bshd packed",
        "attn b4 h8 hk2 q300 d128 bf16 causal bshd softcap30 sinks packed",
        "attn b9 h5 q150 d128 bf16 causal bshd alibi packed",
        *(f"attn b4 h6 hk2 q300 k400 {width} bf16 causal bshd packed" for width in WIDE),
        "attn b2 h4 hk1 q300 d256 bf16 causal bshd prefix100",
        "attn b3 h4 hk2 q260 k500 d128 fp16 causal prefix333 softcap20",
        "attn b2 h4 q200 k100 d64 bf16 causal prefix150 sinks",  # rows that would see no key see the prefix
        "attn b4 h8 hk2 q300 d128 bf16 causal bshd prefix64 packed",
        "attn b3 h6 q400 k300 d64 fp16 causal bshd prefix129 packed",
        "attn b2 h4 q300 d96 bf16 causal prefix40 bias",
        "attn b1 h8 hk2 q1500 d128 bf16 causal bshd left700",
        "attn b1 h4 hk2 q900 d256 fp16 causal bshd left300 softcap50",
        "attn b1 h16 hk2 q900 d64 bf16 causal bshd left127 sinks",
        "attn b1 h4 q300 k64 d64 fp16 left9 right4",  # rows and programs that see no key
        "attn b2 h4 hk2 q200 k700 d128 bf16 right30",
        "attn b2 h4 hk2 q200 k700 d128 fp16 left30 sinks",
        "attn b2 h4 q300 k700 d96 bf16 bshd left100 right50",
        "attn b2 h4 hk2 q333 k500 d192 bf16 causal left64",
        "attn b3 h4 q256 d128 bf16 causal left0",
        "attn b2 h4 q300 d64 bf16 causal left99 alibi",
        "attn b2 h4 q300 k411 d128 fp16 left40 right9 bias",
        "attn b5 h12 hk4 q400 d128 bf16 causal bshd left100 softcap30 sinks packed",
        "attn b4 h6 hk2 q300 k700 d64 fp16 bshd left80 right20 packed",
        "attn b4 h6 hk2 q300 k200 d256 bf16 bshd right20 packed",
        "attn b4 h8 hk2 q300 k900 d128 bf16 causal bshd packed page16",
        "attn b5 h6 hk2 q200 k700 d64 fp16 causal bshd left100 sinks packed page64",
        "attn b3 h4 hk2 q300 k800 d192 dv128 bf16 causal bshd packed page256",
        "attn b3 h8 hk1 q150 k600 d256 bf16 bshd packed page128",
        "attn b4 h5 q100 k300 d96 fp16 causal bshd softcap30 packed page8",
        "attn b2 h6 hk2 q200 k500 d192 bf16 bshd left90 right20 packed page32",
        *(f"attn b2 h6 hk2 q500 k777 {width} fp16 causal bshd" for width in (*WIDE, "d192 dv128")),
        "attn b8 h32 q577 d64 bf16 bshd",
        "attn b8 h32 q1500 d64 bf16",
        *(f"attn b2 h4 q512 {width} bf16 causal" for width in WIDE),
    ],
)
@pytest.mark.parametrize("distribution", ["normal", "opposed", "large"])
def test_its_results_on_a_gpu(text: str, distribution: str) -> None:
    one, gpu = parse(text), current_gpu()
    if gpu is None or kernel.KERNEL.cannot(one, gpu) is not None:
        pytest.skip("needs a Hopper GPU")
    changed = Changed(distribution=distribution, other_lengths=one.features.lengths == "packed" and distribution == "opposed")
    for config in host.configs(one, gpu):
        assert examine_modes(kernel.KERNEL, config, one, CONTRACT, torch.device("cuda"), changed) == []


@pytest.mark.parametrize(("reach", "powers"), softcap._HALF_TANH, ids=str)
def test_what_stands_in_for_tanh_is_as_near_as_a_capped_score_must_be(reach: float, powers: tuple[float, ...]) -> None:
    y = torch.linspace(-40, 40, 2**20, dtype=torch.float64)
    found = y * sum(one * y ** (2 * n) for n, one in enumerate(powers))
    assert torch.all(found.diff() > 0)  # so that scores far below the largest stay below
    error = 2 * (found - (y / 2).tanh() / 2).abs()
    assert error[y.abs() < reach].max() < 2**-21
    below = y < -reach
    for cap in (softcap.MIN_CAP.value, 50.0, 1000.0):
        largest = math.tanh(-reach / 4)
        made, right = (torch.exp(cap * (one[below] - largest)) for one in (2 * found, (y / 2).tanh()))
        assert (made - right).abs().max() < 2**-20


@pytest.mark.gpu
@pytest.mark.parametrize("page", [8, 64, 256])
@pytest.mark.parametrize("rows_first", [True, False])
def test_pages_give_the_bits_of_packed_keys(page: int, rows_first: bool) -> None:
    """Whatever their order in memory, with NaN where nobody has keys and nonsense in the table past a sequence's."""
    gpu = current_gpu()
    if gpu is None or gpu.arch != "sm_90":
        pytest.skip("needs a Hopper GPU")
    lengths_q, lengths_k, most = (300, 1, 0, 70, 128), (511, 64, 9, 70, 1000), 1024
    cu_q, cu_k = (torch.tensor([0, *accumulate(one)], dtype=torch.int32, device="cuda") for one in (lengths_q, lengths_k))
    q = torch.randn(sum(lengths_q), 8, 128, device="cuda").bfloat16()
    k, v = (torch.randn(sum(lengths_k), 2, 128, device="cuda").bfloat16() for _ in range(2))
    each = most // page
    table = torch.randperm(5 * each, device="cuda").view(5, each).int()
    shape = (5 * each, page, 2, 128) if rows_first else (5 * each, 2, page, 128)
    caches = [torch.full(shape, torch.nan, device="cuda").bfloat16() for _ in range(2)]
    caches = caches if rows_first else [one.transpose(1, 2) for one in caches]
    for one, new in zip(caches, (k, v), strict=True):
        for n, (end, length) in enumerate(zip(accumulate(lengths_k), lengths_k, strict=True)):
            at = torch.arange(length, device="cuda")
            one[table[n, at // page].long(), at % page] = new[end - length : end]
    used = torch.tensor(lengths_k, dtype=torch.int32, device="cuda")
    table = torch.where(torch.arange(each, device="cuda") * page < used[:, None], table, 2**30)
    views = [one.unsqueeze(0).transpose(1, 2) for one in (q, k, v)]
    for words in ("causal", "left50 right20"):
        paged = parse(f"attn b5 h8 hk2 q300 k{most} d128 bf16 {words} packed page{page}")
        packed = replace(paged, features=replace(paged.features, page=0))
        config = host.configs(packed, gpu)[0]
        both = {"cu_seqlens_q": cu_q, "max_seqlen_q": 300, "max_seqlen_k": most}
        of_keys, of_pages = both | {"cu_seqlens_k": cu_k}, both | {"cache_seqlens": used, "page_table": table}
        in_pages = [one.transpose(1, 2) for one in caches]
        found, right = (
            kernel.KERNEL.run(call_of(one, views[0], *keys, 0.1, True, **lengths), config)
            for one, keys, lengths in ((paged, in_pages, of_pages), (packed, views[1:], of_keys))
        )
        assert torch.equal(found.out, right.out)
        assert found.lse is not None
        assert torch.equal(found.lse, right.lse)


@pytest.mark.gpu
def test_a_row_whose_every_bias_is_the_lowest_number_is_the_mean_of_its_values() -> None:
    one, gpu = parse(PROBLEM), current_gpu()
    if gpu is None or kernel.KERNEL.cannot(one, gpu) is not None:
        pytest.skip("needs a Hopper GPU")
    for config in host.configs(one, gpu):
        lowest, hidden = error(kernel.KERNEL, config, torch.device("cuda"))
        assert lowest < 0.01
        assert hidden == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize(("lead", "apart"), [(0, 1001), (1, 1024), (2, 1024), (0, 0)])
def test_biases_whose_rows_begin_anywhere(lead: int, apart: int) -> None:
    """At odd elements, at pairs that are no multiple of 16 bytes, and one row for all queries."""
    one, gpu = parse("attn b2 h3 q190 k777 d64 bf16 bias"), current_gpu()
    if gpu is None or kernel.KERNEL.cannot(one, gpu) is not None:
        pytest.skip("needs a Hopper GPU")
    rows = torch.randn(lead + 3 * 190 * max(apart, 777), device="cuda").bfloat16()
    bias = rows.as_strided((2, 3, 190, 777), (0, 190 * apart, apart, 1), lead)
    q, k, v = (torch.randn(2, 3, length, 64, device="cuda").bfloat16() for length in (190, 777, 777))
    inputs = call_of(one, q, k, v, 0.125, bias=bias)
    wide = torch.softmax(q.double() @ k.double().mT * 0.125 + bias.double(), -1) @ v.double()
    for config in host.configs(one, gpu):
        torch.testing.assert_close(kernel.KERNEL.run(inputs, config).out.double(), wide, atol=0.01, rtol=0.01)
