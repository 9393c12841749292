"""How tiles of queries are dealt out among programs, by the kernel's own functions with numbers in place of tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention import fwd_gluon_sm90 as kernel
from flashmoe_science.ops.attention.problem import AttentionProblem


@pytest.fixture
def problem(request: pytest.FixtureRequest) -> AttentionProblem:
    found = parse_problem(request.param)
    assert isinstance(found, AttentionProblem)
    return found


def dealt(program: int, programs: int, tiles_m: int, heads_all: int, pair_rounds: int, deal: Any) -> list[tuple[int, int]]:
    """(head, tile) of every step of a program that has work, in order."""
    sizes = (tiles_m, heads_all, pair_rounds)
    language = SimpleNamespace(
        num_programs=lambda axis: programs,
        program_id=lambda axis: program,
        where=lambda condition, yes, no: yes if condition else no,
        maximum=max,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "gl", language)
        for name in ("_left_over", "_half_pair"):
            patch.setattr(kernel, name, getattr(kernel, name).fn)
        steps = kernel._steps_of_program.fn(*sizes, deal)
        pieces: list[Any] = [kernel._piece.fn(step, *sizes, True, deal) for step in range(steps)]
    return [(head, tile) for has_work, tile, head in pieces if has_work]


@settings(deadline=None, max_examples=300)
@given(
    programs=st.sampled_from([1, 7, 132, 264]),
    tiles_m=st.integers(1, 70),
    heads_all=st.integers(1, 60),
    share=st.floats(0, 1),
    deal=st.sampled_from([kernel.TILES, kernel.PAIRS, kernel.PAIRS_THEN_TILES]),
)
def test_every_tile_is_dealt_once(programs: int, tiles_m: int, heads_all: int, share: float, deal: Any) -> None:
    whole_rounds = heads_all * ((tiles_m + 1) // 2) // programs
    sizes = (programs, tiles_m, heads_all, round(share * whole_rounds), deal)
    pieces = [piece for program in range(programs) for piece in dealt(program, *sizes)]
    assert sorted(pieces) == [(head, tile) for head in range(heads_all) for tile in range(tiles_m)]


@pytest.mark.parametrize("problem", ["attn b1 h16 q16384 d128 bf16 causal", "attn b2 h32 q8192 d64 bf16 causal"], indirect=True)
def test_long_causal_work_is_more_even_than_in_pairs(problem: AttentionProblem) -> None:
    gpu = gpu_named("h200")
    for config in kernel.configs(problem, gpu):
        tiles_m, programs = kernel._tiles_m(problem, config), kernel._grid(problem, config, gpu)[0]
        assert kernel._deal(problem, config, gpu) is kernel.PAIRS_THEN_TILES

        def most(deal: Any, rounds: int, tiles_m: int = tiles_m, programs: int = programs) -> int:
            sizes = (programs, tiles_m, problem.batch * problem.heads, rounds, deal)
            return max(sum(1 + tile for _, tile in dealt(program, *sizes)) for program in range(programs))

        assert most(kernel.PAIRS_THEN_TILES, kernel._pair_rounds(problem, config, programs)) < 0.98 * most(kernel.PAIRS, 0), (
            config
        )


@pytest.mark.parametrize("problem", ["attn b32 h16 q512 d128 bf16 causal"], indirect=True)
def test_short_heads_are_dealt_in_pairs_alone(problem: AttentionProblem) -> None:
    gpu = gpu_named("h200")
    assert {kernel._deal(problem, config, gpu) for config in kernel.configs(problem, gpu)} == {kernel.PAIRS}


@pytest.mark.parametrize("problem", ["attn b80 h16 q300 d128 bf16 causal", "attn b80 h16 q620 d256 bf16 causal"], indirect=True)
def test_the_middle_one_of_an_odd_number_of_tiles_comes_to_every_program(problem: AttentionProblem) -> None:
    gpu = gpu_named("h200")
    for config in kernel.configs(problem, gpu):
        tiles_m, programs = kernel._tiles_m(problem, config), kernel._grid(problem, config, gpu)[0]
        heads = problem.batch * problem.heads
        assert tiles_m % 2
        loads = [sum(1 + tile for _, tile in dealt(one, programs, tiles_m, heads, 0, kernel.PAIRS)) for one in range(programs)]
        assert max(loads) < 1.1 * sum(loads) / programs, config


@pytest.mark.parametrize(
    ("problem", "deal"),
    [
        ("attn b8 h8 q2048 d256 bf16 causal", kernel.PAIRS),  # 3.9 rounds of pairs
        ("attn b10 h8 q1600 d256 bf16 causal", kernel.PAIRS_THEN_TILES),  # 4.2 rounds, and one tile of 13 stands alone
        ("attn b10 h8 q1100 d256 bf16 causal", kernel.PAIRS),  # few tiles
    ],
    indirect=["problem"],
)
def test_single_tiles_fill_the_last_round_where_pairs_would_waste_much(problem: AttentionProblem, deal: Any) -> None:
    gpu = gpu_named("h200")
    assert kernel._deal(problem, kernel.configs(problem, gpu)[0], gpu) is deal
