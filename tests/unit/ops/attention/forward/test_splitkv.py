"""The serving kernel in Triton's interpreter: features drawn at random against plain fp64, and what its host part decides."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from tests.unit.interpreter import Interpreter
from tests.unit.ops.attention.forward.features_reference import TINY, Draw

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.device import merge_triton, splits
from flashmoe_science.ops.attention.device.softcap_triton import tanh
from flashmoe_science.ops.attention.forward.splitkv import config as split_configs
from flashmoe_science.ops.attention.problem import AttentionProblem, parse
from flashmoe_science.ops.attention.problem.features import Features
from flashmoe_science.ops.attention.proof.suites_serving import small

SCRIPT = "ops/attention/forward/features_reference.py"
H200 = gpu_named("h200")


def wrong(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {call: complaints for call, complaints in found.items() if complaints}


ONLY: tuple[dict[str, object], ...] = (
    {},
    {"lengths": "ragged", "page": 16, "leftpad": True},
    {"lengths": "ragged", "page": 64, "fp8_cache": True, "dtype": "bf16"},
    {"lengths": "packed", "contiguous": False, "page": 0, "bias": "alibi"},
    {"lengths": "equal", "mask": "causal", "window_left": 5, "sinks": True, "prefix": 9},
    {"bias": "boolean", "softcap": 2, "lengths": "ragged"},
)


@pytest.mark.parametrize("only", ONLY, ids=lambda only: " ".join(f"{name}={value}" for name, value in only.items()) or "any")
def test_calls_are_right(only: dict[str, object], interpreted: Interpreter) -> None:
    found = interpreted(SCRIPT, "1000", "2", json.dumps(only))
    assert len(found) == 2
    assert wrong(found) == {}


def test_the_order_of_sequences_changes_no_bit(interpreted: Interpreter) -> None:
    found = interpreted(SCRIPT, "unequal")
    assert wrong(found) == {}
    for ending in ("1 splits, LPT order", "3 splits, LPT order"):
        assert any(call.endswith(ending) for call in found)


def test_ranges_of_all_keys_are_right(interpreted: Interpreter) -> None:
    found = interpreted(SCRIPT, "ranges")
    assert wrong(found) == {}
    assert len(found) >= 16


def test_columns_of_a_row_are_merged_apart(interpreted: Interpreter) -> None:
    assert wrong(interpreted(SCRIPT, "columns")) == {}


@pytest.mark.slow
@pytest.mark.redundant  # test_serving_on_gpu.py holds it too
def test_a_cache_that_grows_by_a_token_shares_its_calls(interpreted: Interpreter) -> None:
    found = interpreted(SCRIPT, "grown")
    assert len(found) == 161
    assert wrong(found) == {}


def test_all_modes_are_drawn() -> None:
    import torch

    drawn = [Draw(seed, torch.device("cpu"), TINY).call().inputs for seed in range(300)]
    for name in Features.__slots__:
        assert len({getattr(one.problem.features, name) for one in drawn}) > 1, name
    assert {one.problem.dtype for one in drawn} == {"fp16", "bf16", "fp32"}
    assert {one.problem.mask for one in drawn} == {"full", "causal", "causal-topleft"}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "count"), [("0", "30"), pytest.param("30", "270", marks=pytest.mark.redundant)])
def test_more_calls_are_right(first: str, count: str, interpreted: Interpreter) -> None:
    assert wrong(interpreted(SCRIPT, first, count)) == {}


def problem(text: str, **features: object) -> AttentionProblem:
    parsed = parse(text)
    return replace(parsed, features=Features(**features))  # type: ignore[arg-type]


def test_an_fp8_cache_is_refused_where_the_gpu_cannot_convert_it() -> None:
    cached = problem("attn b1 h1 q1 k64 d64 fp16", fp8_cache=True)
    assert "8.9" in (split_configs.supports(cached, gpu_named("a100")) or "")
    assert split_configs.supports(cached, H200) is None


def test_tiles_follow_how_full_the_gpu_is() -> None:
    assert [split_configs.grid_kind(programs, keys, 132) for programs, keys in ((128, 8192), (8, 1024), (8, 8192))] == [
        "full",
        "short",
        "few",
    ]


CONFIG = Config(block_m=16, block_n=64, num_warps=4, num_stages=3, num_splits=0)


def test_keys_are_split_where_programs_are_few_and_not_where_the_gpu_is_full() -> None:
    few = split_configs.work_of(8, 4, 8192, CONFIG, None)
    full = split_configs.work_of(1024, 4, 8192, CONFIG, None)
    assert splits.num_splits(few, 1, 0, 132, 2) >= 16
    assert splits.num_splits(full, 1, 0, 132, 2) == 1
    assert splits.num_splits(few, 1, 1, 132, 2) == 1
    assert splits.num_splits(few, 1, 5, 132, 2) == 5
    assert splits.num_splits(split_configs.work_of(8, 4, 64, CONFIG, None), 1, 7, 132, 2) == 1


def splits_in(text: str, **features: object) -> split_configs.Splits:
    one = problem(text, lengths="ragged", **features)
    return split_configs.splits_in(one, split_configs.configs(one, H200)[0], 132)[1]


@pytest.mark.parametrize(
    ("text", "page", "num_splits", "lpt_order", "ranges"),
    [
        ("attn b32 h32 hk8 q1 k8192 d128 bf16 bshd", 0, 1, True, 16),  # two waves: an order is enough where lengths are alike
        ("attn b33 h32 hk8 q1 k8192 d128 bf16 bshd", 0, 1, True, 16),
        ("attn b8 h32 hk8 q1 k32768 d128 bf16 bshd", 0, 4, True, 16),  # one wave of two splits each: two waves of four
        ("attn b64 h16 hk1 q1 k8192 d128 bf16 bshd", 0, 2, False, 128),  # splits that are short already; 128 ranges of 132
        ("attn b16 h32 hk8 q1 k8192 d128 bf16 bshd", 0, 2, True, 16),
        ("attn b16 h64 hk8 q4 k8192 d128 bf16 bshd causal", 0, 2, True, 16),
        ("attn b8 h32 hk8 q1 k4096 d128 bf16 bshd", 0, 2, False, 16),
        ("attn b200 h32 hk8 q1 k8192 d128 bf16 bshd", 0, 1, False, 16),  # too many to compare
        ("attn b128 h32 hk8 q1 k2048 d128 bf16 bshd", 0, 1, False, 0),  # whole and short: reading lengths would be dearer
        ("attn b32 h32 hk8 q1 k1024 d128 bf16 bshd", 0, 1, True, 0),  # few keys: a merge would be dearer
        ("attn b8 h32 hk8 q1 k1024 d128 bf16 bshd", 0, 2, False, 0),
        ("attn b2 h140 q1 k8192 d128 bf16 bshd", 0, 2, True, 0),  # one range for each key head would not fill the GPU
        ("attn b1 h32 hk8 q1 k4096 d128 bf16 bshd", 0, 16, False, 0),  # one sequence
        ("attn b32 h32 hk8 q1 k8192 d128 bf16 bshd", 16, 3, True, 49),  # three programs on an SM: two waves, all but full
        ("attn b32 h32 hk8 q1 k8192 d128 bf16 bshd", 64, 2, True, 32),  # two programs on an SM
        ("attn b64 h32 hk8 q1 k8192 d128 bf16 bshd", 64, 1, True, 32),
        ("attn b8 h32 hk8 q1 k32768 d128 bf16 bshd", 16, 12, True, 48),
        ("attn b64 h16 hk1 q1 k8192 d128 bf16 bshd", 64, 2, False, 128),  # one fills it: short splits gain nothing
        ("attn b16 h32 hk8 q1 k1024 d128 bf16 bshd", 64, 1, False, 0),
    ],
)
def test_unequal_sequences_take_turns_longest_first_or_share_their_keys(
    text: str, page: int, num_splits: int, lpt_order: bool, ranges: int
) -> None:
    chosen = splits_in(text, page=page)
    assert (chosen.splits, chosen.lpt_order, chosen.ranges) == (num_splits, lpt_order, ranges)


def test_an_order_and_ranges_need_lengths_that_differ_and_one_tile_of_rows() -> None:
    assert splits_in("attn b32 h32 hk8 q1 k8192 d128 bf16 bshd causal", window_left=4095) == split_configs.Splits(1)
    many_rows = splits.Work(256, 2, 64)
    one_tile = many_rows._replace(tiles_m=1)
    assert split_configs.splits_for(many_rows, 128, 1, 0, 132, 1, 32) == split_configs.Splits(1)
    assert split_configs.splits_for(one_tile, 128, 1, 0, 132, 1, 32).ranges == 16
    assert split_configs.splits_for(one_tile, 128, 1, 1, 132, 1, 32) == split_configs.Splits(1, 32, True)  # asked: in order


@pytest.mark.parametrize(
    ("batch", "keys", "lengths", "ranges"),
    [
        (32, 8192, [8192] * 32, False),
        (32, 8192, [8192, 64] * 16, False),
        (32, 8192, [8192] + [110] * 31, True),
        (32, 8192, [8192 // (1 + i) for i in range(32)], True),
        (32, 8192, [512] * 31 + [1024], False),  # short ones are not worth a merge
        (8, 32768, [32768] * 8, False),
        (8, 32768, [32768 // (1 + i) for i in range(8)], True),
        (4, 16384, [16384, 10000, 8000, 6000], True),
    ],
)
def test_ranges_are_taken_where_one_sequence_is_much_longer(batch: int, keys: int, lengths: list[int], ranges: bool) -> None:
    chosen = splits_in(f"attn b{batch} h32 hk8 q1 k{keys} d128 bf16 bshd")
    tiles = [-(-length // 128) for length in lengths]
    assert (max(tiles) > chosen.even_least + chosen.even_slope * sum(tiles)) == ranges


def test_splits_that_are_asked_for_stay_as_many() -> None:
    work = splits.Work(64, 1, 256)
    assert [split_configs.splits_for(work, 128, 1, asked, 132, 1, 8).splits for asked in (0, 1, 2, 5)] == [4, 1, 2, 5]


def test_a_row_that_has_an_sm_to_itself_is_merged_in_columns() -> None:
    assert merge_triton.merge_grid(32, 128, merge_triton.merge_warps(32, 132)) == (32, 4, 1)
    assert merge_triton.merge_grid(32, 24, merge_triton.merge_warps(32, 132)) == (32, 1, 1)
    assert merge_triton.merge_grid(512, 128, merge_triton.merge_warps(512, 132)) == (512, 1, 1)


def test_a_window_bounds_the_splits() -> None:
    windowed = problem("attn b1 h8 q1 k100000 d64 fp16 causal", window_left=127)
    span = split_configs.span_of(windowed, 1, CONFIG)
    assert split_configs.work_of(8, 1, 100000, CONFIG, span).tiles_n <= 4


def test_the_workspace_holds_the_partials() -> None:
    decode = problem("attn b1 h32 hk8 q1 k8192 d128 bf16")
    assert split_configs.workspace(decode, CONFIG) >= 4 * 32 * 16 * 130
    assert split_configs.workspace(problem("attn b128 h32 hk8 q1 k8192 d128 bf16"), CONFIG) == 0


@triton.jit
def store_tanh(x, out, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(out + at, tanh(tl.load(x + at)))


def main() -> None:
    """Prints the largest errors of the kernel's tanh, of 1 and of itself, by fp64's."""
    x = torch.cat((torch.linspace(-30, 30, 2**15), torch.linspace(-1, 1, 2**15)))
    out = torch.empty_like(x)
    store_tanh[(1,)](x, out, 2**16)
    right = x.double().tanh()
    error = (out.double() - right).abs()
    near = (x.abs() < 0.6) & (x != 0)
    print(json.dumps({"of_1": error.max().item(), "of_itself": (error[near] / right[near].abs()).max().item()}))


def test_a_cap_is_as_exact_as_fp32_scores_need(interpreted: Interpreter) -> None:
    found = interpreted(__file__)
    assert found["of_1"] < 2e-7
    assert found["of_itself"] < 1e-7


def test_every_problem_with_modes_is_right(interpreted: Interpreter) -> None:
    found = interpreted("ops/attention/forward/features_cases.py")
    assert {problem: reasons for problem, reasons in found.items() if reasons} == {}
    assert found.keys() == set(small())


def test_a_row_whose_every_bias_is_the_lowest_number_is_the_mean_of_its_values(interpreted: Interpreter) -> None:
    """The lowest of bf16, times log2(e), is beyond fp32."""
    lowest, hidden = interpreted("ops/attention/forward/lowest_bias.py")
    assert lowest < 0.01
    assert hidden == 0.0


if __name__ == "__main__":
    main()
