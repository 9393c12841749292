"""bwd_gluon_sm90: what it serves, its waves, random problems as its source computes them, and on a GPU as it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapreplace
from itertools import product
from random import Random

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from tests.unit import gluon_interpreter
from tests.unit.ops.attention.backward import traps
from tests.unit.ops.attention.backward.random_problems import LARGE, Most, RandomCase, drawn

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume
from flashmoe_science.measure.guards import allocations
from flashmoe_science.ops.attention.backward import copied
from flashmoe_science.ops.attention.backward.sizes import QUERIES, Sizes, sizes_of
from flashmoe_science.ops.attention.backward.split_sm90 import launch
from flashmoe_science.ops.attention.backward.split_sm90 import waves as waves_module
from flashmoe_science.ops.attention.backward.split_sm90.kernel import KERNEL
from flashmoe_science.ops.attention.backward.split_sm90.waves import (
    BUDGET,
    Waves,
    grids_of,
    space_of,
    waves_in_order,
    waves_of,
    waves_without_ds,
)
from flashmoe_science.ops.attention.call.backward import Wanted
from flashmoe_science.ops.attention.problem.backward import parse
from flashmoe_science.ops.attention.problem.features import PLAIN
from flashmoe_science.ops.attention.proof.backward.contract import CONTRACT
from flashmoe_science.ops.attention.proof.backward.suites import SUITES
from flashmoe_science.ops.launch import Part, collect_builds, workspace_bytes

H100 = gpu_named("h100")
BUDGETS = (2**30, 2**26, 2**23, 2**21)
SMALL, SMALL_BUDGETS = Most(4, 2, 4, 300, 400, (64, 128, 40, 96)), (2**30, 2**20, 2**18, 1)


def sizes(text: str) -> Sizes:
    problem = parse(f"attnbwd {text}")
    return sizes_of(problem, KERNEL.configs(problem, H100)[0])


def served(number: int, most: Most) -> RandomCase:
    """The random case of a number, with what the kernel serves."""
    case, chance = drawn(number, most), Random(number)
    fields = ("window_left", "window_right", "lengths", "sinks", "softcap")
    asked = {name: getattr(case.problem.features, name) for name in fields}
    features = {"features": replace(PLAIN, **asked), "dtype": chance.choice(("bf16", "fp16"))}
    dims = {name: 8 if getattr(case.problem, name) == 1 else getattr(case.problem, name) for name in ("head_dim", "head_dim_v")}
    return replace(case, problem=replace(case.problem, **features, **dims))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("b1 h2 q128 d64 fp32", "fp16 and bf16, not fp32"),
        ("b1 h2 q128 d60 bf16", "head_dim is 60"),
        ("b1 h2 q128 d64 bf16 sinks softcap3 alibi", "ALiBi"),
        ("b2 h2 q128 d64 bf16 causal packed prefix9", "a prefix"),
    ],
)
def test_what_it_does_not_serve_is_refused_in_words(text: str, reason: str) -> None:
    said = KERNEL.cannot(parse(f"attnbwd {text}"), H100)
    assert said is not None
    assert reason in said
    assert KERNEL.cannot(parse("attnbwd b1 h2 q128 d64 bf16"), gpu_named("a100")) is not None


def test_a_launcher_serves_other_lengths_and_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stored by the dtype, the head dimensions and the mask alone."""
    seen: list[Sizes] = []
    monkeypatch.setattr(launch, "waves_of", lambda sizes, *rest: seen.append(sizes) or waves_of(sizes, *rest))
    first = parse("attnbwd b2 h4 q256 d64 bf16 causal")
    with collect_builds(H100) as jobs:
        inputs = CONTRACT.for_kernel(first, CONTRACT.inputs(first, torch.device("meta"), torch.Generator()))
        launcher = KERNEL.plan(inputs, KERNEL.configs(first, H100)[0])  # type: ignore[misc]  # it has one
        for text in ("b2 h4 q256", "b3 h8 hk2 q300 k500", "b1 h6 hk6 q64 k32"):
            problem = parse(f"attnbwd {text} d64 bf16 causal")
            like = CONTRACT.for_kernel(problem, CONTRACT.inputs(problem, torch.device("meta"), torch.Generator()))
            launcher.bind(like.tensors, like.saved, like.options, like.wanted)
            assert seen[-1] == sizes(f"{text} d64 bf16 causal")
    assert len(jobs) == 3


@pytest.mark.parametrize("text", ["b40000 h4 q64 d64 bf16", "b3000 h32 q8 k200 d128 bf16 causal"])
def test_a_grid_has_less_than_two_to_the_sixteen_heads(text: str) -> None:
    one = sizes(text)
    for waves in (waves_of(one, 132), waves_without_ds(one)):
        every = waves_in_order(waves, one)
        assert sum(wave.heads for wave in every if wave.first_step == wave.first_tile == 0) == one.batch * one.heads_kv
        assert all(number < 2**16 for wave in every for grid in grids_of(wave, one) for number in grid[1:])


@pytest.mark.parametrize("text", SUITES["train"])
def test_a_workspace_has_at_most_a_gib(text: str) -> None:
    if KERNEL.cannot(parse(text), H100) is None:
        one = sizes(text.removeprefix("attnbwd "))
        assert 0 < space_of(waves_of(one, 132), one).bytes <= BUDGET


def simulated(waves: Waves, one: Sizes, sm_count: int = 132) -> float:
    """Steps until the last program of the first kernel ends, of all waves, where an SM takes the next program as one ends."""
    time = 0.0
    for wave in waves_in_order(waves, one):
        (together, tiles, sets), _ = grids_of(wave, one)
        ends = [0.0] * sm_count
        for tile, _ in product(list(range(tiles)) * sets, range(together)):
            heapreplace(ends, ends[0] + waves_module._steps_of(tile, wave, one) + waves_module._START)
        time += max(ends)
    return time


@pytest.mark.parametrize(
    "text",
    [
        "b1 h11 q13086 k23940 d192 dv128 bf16 causal",  # 282 programs a wave, nearly of one length, were 2.2 rounds of 132 SMs
        "b1 h44 hk11 q4042 k23049 d64 bf16 causal",
        "b4 h4 hk1 q22430 k25142 d128 bf16 causal",
        "b1 h16 q16384 d128 bf16 causal",
    ],
)
def test_waves_are_near_the_quickest_of_those_tried(text: str) -> None:
    one = sizes(text)
    tried = {waves: simulated(waves, one) for waves in waves_module._tried(one)}
    assert simulated(waves_of(one, 132), one) <= 1.05 * min(tried.values())


@pytest.mark.parametrize("number", range(40))
def test_every_score_that_is_seen_is_in_one_wave(number: int) -> None:
    """And a program's sums are taken up in order: keys ascend for each query, queries for each key."""
    chance = Random(number)
    heads_kv, seqlen_q, seqlen_k = chance.randint(1, 3), chance.randint(1, 1500), chance.randint(1, 1500)
    mask = chance.choice(("", " causal", " causal-topleft"))
    dim = chance.choice((64, 128, 256))
    one = sizes(f"b2 h{heads_kv * 3} hk{heads_kv} q{seqlen_q} k{seqlen_k} d{dim} bf16{mask}")
    unit = QUERIES // one.block_m
    waves = Waves(chance.randint(1, 6), unit * chance.randint(1, one.steps // unit), chance.randint(1, one.tiles))
    found: Counter[tuple[int, int, int]] = Counter()
    written: Counter[tuple[int, int]] = Counter()
    for wave in waves_in_order(waves, one):
        (together, tiles, sets), (_, products, _) = grids_of(wave, one)
        assert together * sets == wave.heads <= waves.heads
        assert products * unit == wave.steps <= waves.steps
        ends = wave.first_step + wave.steps == one.steps
        for head in range(wave.first_head, wave.first_head + wave.heads):
            for tile in range(wave.first_tile, wave.first_tile + tiles):
                written[head, tile] += ends
                for step in range(wave.first_step, wave.first_step + wave.steps):
                    assert all((head, tile, later) not in found for later in (step, step + 1))
                    found[head, tile, step] += 1
    of_head = one.padded // one.block_m
    for head in range(one.batch * one.heads_kv):
        for tile in range(one.tiles):
            assert written[head, tile] == 1
            for step in range(one.steps):
                last = min((step % of_head + 1) * one.block_m, one.seqlen_q) - 1
                sees = last >= step % of_head * one.block_m and last + one.offset >= tile * one.block_n
                assert found[head, tile, step] == 1 or not sees


@pytest.mark.parametrize(
    "text", ["b1 h8 hk2 q640 d128 bf16 causal", "b2 h3 q300 k1000 d256 bf16 causal", "b1 h2 q512 d64 bf16"]
)
def test_the_share_of_scores_that_are_seen_is_counted(text: str) -> None:
    one = sizes(text)
    unit, of_head = QUERIES // one.block_m, one.padded // one.block_m
    for wave in waves_in_order(Waves(1, 3 * unit, 2), one):
        keys, first_key = max(wave.seen, 1) * one.block_n, wave.first_tile * one.block_n
        rows = [
            step % of_head * one.block_m + row
            for step in range(wave.first_step, wave.first_step + wave.steps)
            for row in range(one.block_m)
        ]
        seen = sum(min(max(row + 1 + one.offset - first_key, 0), keys) for row in rows)
        assert waves_module._share(wave, one) == pytest.approx(seen / (len(rows) * keys), abs=0.01)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run on the CPU, by Python."""
    monkeypatch.setattr(copied, "Build", gluon_interpreter.Build)
    with assume(H100):
        yield


@pytest.mark.parametrize("budget", SMALL_BUDGETS[::3])
@pytest.mark.parametrize(
    "text",
    [
        "b2 h2 hk1 q300 k200 d64 bf16 causal",
        "b1 h2 hk1 q400 k401 d64 bf16 causal left70",
        "b2 h2 q200 k500 d128 fp16 left70 right60",
        "b2 h1 q300 k130 d256 bf16 left90 sinks",
        "b3 h2 hk1 q400 d64 bf16 causal bshd sinks packed",
        "b3 h2 q300 k400 d40 dv128 fp16 left50 right100 packed",
        "b1 h2 q200 d64 fp16 causal softcap3",
        "b1 h2 hk1 q200 k300 d96 bf16 causal",
        "b1 h2 q200 k130 d80 dv96 fp16",
        "b2 h1 q200 d72 bf16 causal left70 packed",
        "b1 h1 q200 k130 d80 dv72 bf16 causal softcap3",
        "b1 h2 hk1 q200 k300 d192 dv128 bf16 causal",
        "b1 h2 q150 k200 d160 fp16 causal left90",
        "b1 h1 q200 k130 d192 bf16 causal",
        "b1 h1 q150 d136 dv64 bf16",
    ],
)
def test_the_source_is_right(text: str, budget: int, uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.ops.attention.backward.cases import examine

    monkeypatch.setattr(waves_module, "BUDGET", budget)
    problem = parse(f"attnbwd {text}")
    assert examine(KERNEL, KERNEL.configs(problem, H100)[0], problem, CONTRACT, torch.device("cpu")) == []


def check_some_wanted(text: str, device: torch.device) -> None:
    """Whatever is asked for has the bits that it has beside all others."""
    problem = parse(f"attnbwd {text}")
    every = CONTRACT.for_kernel(problem, CONTRACT.inputs(problem, device, torch.Generator(device).manual_seed(1)))
    config = KERNEL.configs(problem, H100)[0]
    whole = CONTRACT.planned(KERNEL, config, every)(every)
    for dq, dk, dv in product((True, False), repeat=3):
        some = replace(every, wanted=every.wanted._replace(dq=dq, dk=dk, dv=dv))
        with allocations(True) as guards:  # memory full of NaN
            found = CONTRACT.planned(KERNEL, config, some)(some)
        assert guards is None or not guards.overrun()
        for wanted, one, other in zip(some.wanted, found, whole, strict=True):
            assert (one is not None) == (wanted and other is not None)
            assert one is None or torch.equal(one, other)


PARTLY = (
    "b2 h2 hk1 q300 k200 d64 bf16 causal",
    "b2 h1 q300 k130 d256 bf16 left90 sinks",
    "b3 h2 hk1 q400 d128 bf16 causal bshd sinks packed",
    "b1 h1 q200 k130 d80 dv72 bf16 causal softcap3",
    "b1 h2 hk1 q200 k300 d192 dv128 bf16 causal",
)


@pytest.mark.parametrize("budget", SMALL_BUDGETS[::3])
@pytest.mark.parametrize("text", PARTLY)
def test_what_is_not_wanted_changes_no_bit(text: str, budget: int, uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waves_module, "BUDGET", budget)
    monkeypatch.setattr(waves_module, "MOST_HEADS", 1 if budget == 1 else waves_module.MOST_HEADS)
    check_some_wanted(text, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("text", PARTLY)
def test_what_is_not_wanted_changes_no_bit_on_a_gpu(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for budget in SMALL_BUDGETS[::3]:
        monkeypatch.setattr(waves_module, "BUDGET", budget)
        check_some_wanted(text, torch.device("cuda"))


def test_without_dq_there_is_no_workspace_and_one_launch_over_keys(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16384 queries dS has more than one wave; of sinks alone there is neither kernel."""
    problem, launched, parts = parse("attnbwd b1 h4 q16384 d128 bf16 sinks"), Counter[str](), []
    monkeypatch.setattr(gluon_interpreter.Build, "bound", lambda build, *rest: launched.update([build._function.__name__]))
    monkeypatch.setattr(launch, "workspace_allocator", lambda on_gpu, every: parts.append(every[3][0]))
    inputs = CONTRACT.for_kernel(problem, CONTRACT.inputs(problem, torch.device("meta"), torch.Generator()))
    launcher = KERNEL.plan(inputs, KERNEL.configs(problem, H100)[0])  # type: ignore[misc]  # it has one
    one = sizes_of(problem, KERNEL.configs(problem, H100)[0])
    waves = len(waves_in_order(waves_of(one, 132), one))
    assert waves > 1
    for dq, dk, dv in product((True, False), repeat=3):
        launched.clear()
        launcher.bind(inputs.tensors, inputs.saved, inputs.options, Wanted(dq, dk, dv, True))
        assert launched["flashmoe_bwd_dkdv_gluon_sm90"] == (waves if dq else dk or dv)
        assert launched["flashmoe_bwd_dq_gluon_sm90"] == (waves if dq else 0)
        assert launched["flashmoe_bwd_dsinks_triton"] == 1
        assert (parts[-1] > 0) == dq


@pytest.mark.slow
@pytest.mark.redundant
@pytest.mark.parametrize("number", range(60))
def test_the_source_is_right_for_random_problems(number: int, uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.ops.attention.backward.cases import examine

    case = served(number, SMALL)
    monkeypatch.setattr(waves_module, "BUDGET", SMALL_BUDGETS[number % len(SMALL_BUDGETS)])
    config, device = KERNEL.configs(case.problem, H100)[0], torch.device("cpu")
    assert examine(KERNEL, config, case.problem, case.contract, device, case.seed, case.distribution) == []


def check_odd_lengths(words: str, seqused: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = traps.odd_lengths(words, seqused, device)
    for budget in SMALL_BUDGETS:
        monkeypatch.setattr(waves_module, "BUDGET", budget)
        call = CONTRACT.planned(KERNEL, KERNEL.configs(inputs.problem, H100)[0], inputs)
        with allocations(True):  # memory full of NaN
            found = call(inputs)
        assert traps.complaints(inputs, found) == []


@pytest.mark.slow  # its source is run by Python: no PyTorch or Triton changes it
@pytest.mark.parametrize(("words", "seqused"), traps.ODD)
def test_the_source_is_right_where_sequences_are_empty(
    words: str, seqused: bool, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_odd_lengths(words, seqused, torch.device("cpu"), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize(("words", "seqused"), traps.ODD)
def test_sequences_may_be_empty_on_a_gpu(words: str, seqused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check_odd_lengths(words, seqused, torch.device("cuda"), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(8))
def test_random_problems_are_right_on_a_gpu(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.ops.attention.backward.cases import examine

    from flashmoe_science.hardware.probe import current_gpu

    gpu, found, device = current_gpu(), {}, torch.device("cuda")
    assert gpu is not None
    for number in range(part, 240, 8):
        case = served(number, LARGE)
        if KERNEL.cannot(case.problem, gpu) is None:
            monkeypatch.setattr(waves_module, "BUDGET", BUDGETS[number // 8 % len(BUDGETS)])
            config = KERNEL.configs(case.problem, gpu)[0]
            reasons = examine(KERNEL, config, case.problem, case.contract, device, case.seed, case.distribution)
            found[f"{number}: {case.problem} {case.distribution}"] = reasons
    assert {case: reasons for case, reasons in found.items() if reasons} == {}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "text",
    [
        "b1 h8 hk2 q1000 d128 bf16 causal",
        "b1 h4 q700 k900 d256 fp16",
        "b2 h6 hk2 q600 k500 d64 bf16 causal",
        "b2 h6 hk2 q900 k800 d64 bf16 causal left200",
        "b1 h8 hk2 q1000 d96 bf16 causal",
        "b1 h4 q700 k900 d192 dv128 bf16 causal",
        "b1 h4 q700 k900 d160 fp16",
        "b2 h4 q600 d192 bf16 causal",
        "b6 h8 hk2 q900 d128 bf16 causal packed",
        "b4 h4 hk2 q500 k700 d256 fp16 left90 right150 packed",
    ],
)
def test_bits_are_equal_whatever_the_workspace_holds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, device = parse(f"attnbwd {text}"), torch.device("cuda")
    inputs = CONTRACT.for_kernel(problem, CONTRACT.inputs(problem, device, torch.Generator(device).manual_seed(1)))
    first = None
    for number in range(40):
        monkeypatch.setattr(waves_module, "BUDGET", BUDGETS[number % len(BUDGETS)])
        found = CONTRACT.from_kernel(CONTRACT.planned(KERNEL, KERNEL.configs(problem, H100)[0], inputs)(inputs))
        first = first or found
        assert all(map(torch.equal, first, found))


@pytest.mark.parametrize("number", range(60))
def test_a_call_takes_no_more_than_the_promised_workspace(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, taken = served(number, LARGE).problem, list[Sequence[Part]]()
    if number == 0:  # the numbers of rows, of their partials and of dS end within 256 bytes
        problem = parse("attnbwd b3 h8 q4921 d128 bf16 causal bshd left1560")
    config = KERNEL.configs(problem, H100)[0]
    monkeypatch.setattr(launch, "workspace_allocator", lambda on_gpu, parts: taken.append(parts))
    inputs = CONTRACT.for_kernel(problem, CONTRACT.inputs(problem, torch.device("meta"), torch.Generator()))
    with collect_builds(H100):
        KERNEL.plan(inputs, config).bind(inputs.tensors, inputs.saved, inputs.options, inputs.wanted)  # type: ignore[misc]
    assert workspace_bytes(taken[0]) <= KERNEL.workspace(problem, config)


@pytest.mark.gpu
def test_tensors_that_copies_do_not_take_are_copied() -> None:
    """An expanded gradient (FA #2611), keys expanded over their heads, queries that start at an odd address."""
    problem, device = parse("attnbwd b2 h4 q130 d64 bf16 causal"), torch.device("cuda")
    made = CONTRACT.inputs(problem, device, torch.Generator(device).manual_seed(2))
    odd = torch.empty(made["q"].numel() + 1, dtype=torch.bfloat16, device=device)[1:].view(made["q"].shape).copy_(made["q"])
    changed = {"q": odd, "dout": made["dout"][:1, :, :1].expand_as(made["dout"]), "k": made["k"][:, :1].expand_as(made["k"])}
    found = []
    for given in ({**made, **changed}, {**made, **{name: one.contiguous().clone() for name, one in changed.items()}}):
        inputs = CONTRACT.for_kernel(problem, given)
        found.append(CONTRACT.from_kernel(CONTRACT.planned(KERNEL, KERNEL.configs(problem, H100)[0], inputs)(inputs)))
    assert all(map(torch.equal, *found))
