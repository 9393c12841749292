"""The tile scheduler of fwd_gluon_sm90: the tiles of queries of each program, and the tiles of keys that rows see; by the
kernel's own functions with numbers in place of tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import Gpu, gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.device.mask import MaskBounds
from flashmoe_science.ops.attention.forward.prefill_sm90 import config as host
from flashmoe_science.ops.attention.forward.prefill_sm90 import schedule as scheduler
from flashmoe_science.ops.attention.forward.prefill_sm90 import variant
from flashmoe_science.ops.attention.forward.prefill_sm90.arguments import Sizes
from flashmoe_science.ops.attention.problem import AttentionProblem, parse


@pytest.fixture
def problem(request: pytest.FixtureRequest) -> AttentionProblem:
    return parse(request.param)


def scheduled(
    program: int, programs: int, tiles_m: int, heads_all: int, pair_rounds: int, schedule: Any
) -> list[tuple[int, int]]:
    """(head, tile) of every step of a program that has work, in order."""
    sizes = Sizes(1, 1, 1, 1, 0, tiles_m, heads_all, pair_rounds)
    language = SimpleNamespace(
        num_programs=lambda axis: programs,
        program_id=lambda axis: program,
        where=lambda condition, yes, no: yes if condition else no,
        maximum=max,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "gl", language)
        for name in ("_tail", "_half_pair"):
            patch.setattr(scheduler, name, getattr(scheduler, name).fn)
        steps = scheduler.steps_of_program.fn(sizes, schedule)
        tiles: list[Any] = [scheduler.tile_at.fn(step, sizes, True, schedule) for step in range(steps)]
    return [(head, tile) for has_work, tile, head in tiles if has_work]


@settings(max_examples=300)
@given(
    programs=st.sampled_from([1, 7, 132, 264]),
    tiles_m=st.integers(1, 70),
    heads_all=st.integers(1, 60),
    share=st.floats(0, 1),
    schedule=st.sampled_from([variant.LINEAR, variant.PAIRED, variant.PAIRED_TAIL]),
)
def test_every_tile_is_scheduled_once(programs: int, tiles_m: int, heads_all: int, share: float, schedule: Any) -> None:
    whole_rounds = heads_all * ((tiles_m + 1) // 2) // programs
    sizes = (programs, tiles_m, heads_all, round(share * whole_rounds), schedule)
    tiles = [tile for program in range(programs) for tile in scheduled(program, *sizes)]
    assert sorted(tiles) == [(head, tile) for head in range(heads_all) for tile in range(tiles_m)]


@settings(max_examples=500)
@given(
    sizes=st.tuples(st.integers(1, 400), st.integers(1, 600)),
    right=st.one_of(st.none(), st.integers(0, 500)),
    prefix=st.one_of(st.none(), st.integers(0, 700)),
    left=st.one_of(st.none(), st.integers(0, 500)),
    consumers=st.sampled_from([1, 2, 3]),
    block_n=st.sampled_from([64, 128]),
)
def test_a_consumer_has_the_tiles_that_its_rows_see_and_skips_others(
    sizes: tuple[int, int], right: int | None, prefix: int | None, left: int | None, consumers: int, block_n: int
) -> None:
    """``right``: keys past a row's own place that it sees; a causal mask's are 0. The producer loads for all consumers."""
    rows, keys = sizes
    ends, offset = right is not None, keys - rows
    prefix = prefix if ends and left is None else None
    bounds = MaskBounds(rows, keys, offset + (right or 0), prefix, left)
    language = SimpleNamespace(maximum=max, minimum=min)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "gl", language)
        for top in range(0, rows, 64 * consumers):
            first, after = scheduler.key_tiles.fn(top, 64 * consumers, bounds, block_n, ends)
            for row in range(top, top + 64 * consumers, 64):
                low, high = scheduler.key_tiles.fn(row, 64, bounds, block_n, ends)
                assert first <= low < high <= after
                assert ends or high == after  # where no row's keys end, a consumer skips no tile before its own
                for one in range(row, min(row + 64, rows)):
                    begin = 0 if left is None else max(one + offset - left, 0)
                    end = min(keys, max(one + offset + right + 1, prefix or 0)) if right is not None else keys
                    assert begin >= end or (low * block_n <= begin and end <= high * block_n)


def configs(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """As they are launched."""
    return [host.fitted(problem, problem, config, gpu) for config in host.configs(problem, gpu)]


@pytest.mark.parametrize("problem", ["attn b1 h16 q16384 d128 bf16 causal", "attn b2 h32 q8192 d64 bf16 causal"], indirect=True)
def test_long_causal_work_is_more_even_than_in_pairs(problem: AttentionProblem) -> None:
    gpu = gpu_named("h200")
    for config in configs(problem, gpu):
        tiles_m, programs = variant.tiles_of_head(problem, config), variant.grid_of(problem, config, gpu)[0]
        assert variant.schedule_of(problem, config, gpu) is variant.PAIRED_TAIL

        def most(schedule: Any, rounds: int, tiles_m: int = tiles_m, programs: int = programs) -> int:
            sizes = (programs, tiles_m, problem.batch * problem.heads, rounds, schedule)
            return max(sum(1 + tile for _, tile in scheduled(program, *sizes)) for program in range(programs))

        assert most(variant.PAIRED_TAIL, variant.pair_rounds_of(problem, config, programs)) < 0.98 * most(variant.PAIRED, 0), (
            config
        )


@pytest.mark.parametrize("problem", ["attn b32 h16 q512 d128 bf16 causal"], indirect=True)
def test_short_heads_are_scheduled_in_pairs_alone(problem: AttentionProblem) -> None:
    gpu = gpu_named("h200")
    assert {variant.schedule_of(problem, config, gpu) for config in configs(problem, gpu)} == {variant.PAIRED}


@pytest.mark.parametrize(
    "problem", ["attn b80 h16 q300 d128 bf16 causal softcap9", "attn b80 h16 q620 d256 bf16 causal"], indirect=True
)
def test_the_middle_one_of_an_odd_number_of_tiles_comes_to_every_program(problem: AttentionProblem) -> None:
    gpu = gpu_named("h200")
    for config in configs(problem, gpu):
        tiles_m, programs = variant.tiles_of_head(problem, config), variant.grid_of(problem, config, gpu)[0]
        heads = problem.batch * problem.heads
        assert tiles_m % 2
        loads = [
            sum(1 + tile for _, tile in scheduled(one, programs, tiles_m, heads, 0, variant.PAIRED)) for one in range(programs)
        ]
        assert max(loads) < 1.1 * sum(loads) / programs, config


@pytest.mark.parametrize(
    ("problem", "schedule"),
    [
        ("attn b8 h8 q2048 d256 bf16 causal", variant.PAIRED),  # 3.9 rounds of pairs
        ("attn b10 h8 q1600 d256 bf16 causal", variant.PAIRED_TAIL),  # 4.2 rounds, and one tile of 13 stands alone
        ("attn b40 h8 q1100 d256 bf16 causal", variant.PAIRED),  # few tiles
        ("attn b8 h16 q1920 d128 bf16 causal", variant.PAIRED),  # 8 rounds, in which each program has a middle tile
        ("attn b4 h32 q4096 d64 bf16 causal", variant.PAIRED_TAIL),  # three consumers
        ("attn b8 h4 q1364 k9717 d64 bf16 causal", variant.PAIRED_TAIL),  # that cost about the same
        ("attn b8 h4 q1364 k2100 d64 bf16 causal", variant.PAIRED),
        ("attn b1 h48 q640 d192 bf16 causal", variant.PAIRED_TAIL),  # 144 pairs for 132 processors
        ("attn b1 h1 q1364 k9717 d64 bf16 causal", variant.LINEAR),  # one a program
    ],
    indirect=["problem"],
)
def test_single_tiles_fill_the_last_round_where_pairs_would_waste_much(problem: AttentionProblem, schedule: Any) -> None:
    gpu = gpu_named("h200")
    assert variant.schedule_of(problem, configs(problem, gpu)[0], gpu) is schedule
