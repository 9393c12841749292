"""Decisions: measured, near, modelled, requested and required, on a fabricated table and kernels."""

from __future__ import annotations

import dataclasses
import json

import pytest

from flashmoe_science.dispatch.select import Decision, at_lengths, select
from flashmoe_science.dispatch.table import Table, committed_table, parse_table
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import CannotServe, Config, Device, Kernel
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionOutput
from flashmoe_science.problem import Problem


def make_kernel(name: str, only: str | None = None, absent: str | None = None) -> Kernel:
    """A kernel that serves the architecture ``only`` (or every GPU) and cannot be run."""

    def supports(problem: Problem, device: Device) -> str | None:
        if device is None:
            return "needs a GPU"
        return None if only in (None, device.arch) else f"needs {only}"

    def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
        raise AssertionError("a decision runs nothing")

    return Kernel(
        name=name,
        origin="ours",
        op="attention",
        about="",
        supports=supports,
        configs=lambda problem, device: tuple(Config(m=m) for m in (len(name), 1, 2, 7, 9, 16)),
        run=run,
        launches=lambda problem, config, gpu: (),
        absent=lambda: absent,
    )


HOPPER, PORTABLE = make_kernel("hopper", only="sm_90"), make_kernel("portable")
BOTH = (HOPPER, PORTABLE)
EMPTY = Table(())
OURS, KERNELS = operation("attention").ours(), operation("attention").kernels()


def table(*rows: tuple[str, str, str, str]) -> Table:
    entries = [
        {"gpu": gpu, "problem": problem, "kernel": kernel, "config": config, "run": f"run{i}", "time_ns": 1000 + i}
        for i, (gpu, problem, kernel, config) in enumerate(rows)
    ]
    return parse_table(json.dumps({"schema": 1, "entries": entries}), "fabricated")


def decide(problem: str, gpu: str, rows: Table = EMPTY, requested: Kernel | None = None, **unable: str) -> Decision:
    return select(parse_problem(problem), gpu_named(gpu), rows, BOTH, "sdpa", requested, unable)


def test_a_record_of_the_very_problem_decides() -> None:
    rows = table(("h200", "attn b1 h8 q128 d64", "portable", "m=16"), ("h200", "attn b1 h8 q256 d64", "hopper", "m=99"))
    decision = decide("attn b1 h8 q128 d64 bshd", "h200", rows)
    assert (decision.kernel, decision.config, decision.basis) == ("portable", Config(m=16), "measured")
    assert decision.record == "run0"
    assert dict(decision.others) == {"hopper": "portable is the fastest in record run0"}


ONE, TWO, LONG = "attn b1 h8 q128 d64", "attn b2 h8 q1024 d64", "attn b1 h8 q1024 d64"
NEAR = [("h200", LONG, "hopper", "m=1"), ("h200", TWO, "portable", "m=2"), ("h200", f"{TWO} causal", "hopper", "m=3")]
CARDS = [("h100", ONE, "hopper", "m=1"), ("h200", ONE, "portable", "m=2")]


@pytest.mark.parametrize(
    ("problem", "gpu", "rows", "kernel", "config", "record", "reason"),
    [
        ("attn b2 h8 q1100 d60 bf16", "h200", NEAR, "portable", Config(m=2), "run1", TWO),
        # Other tiles lend the kernel but not the config.
        ("attn b1 h8 q1024 d128", "h200", [("h200", LONG, "portable", "m=1")], "portable", Config(m=8), "run0", LONG),
        # A GPU of the same architecture is a model; the GPU itself goes before it; another architecture says nothing.
        (ONE, "h100", [("h200", ONE, "portable", "m=1")], "portable", Config(m=1), "run0", "on h200"),
        ("attn b1 h8 q129 d64", "h200", CARDS, "portable", Config(m=2), "run1", ONE),
        ("attn b1 h8 q129 d64", "h100", CARDS, "hopper", Config(m=1), "run0", ONE),
        # A config that the kernel does not offer any more.
        (ONE, "h200", [("h200", ONE, "portable", "m=3")], "portable", Config(m=8), "run0", "not offered any more"),
        ("attn b2 h8 q130 d64", "h200", [("h200", ONE, "portable", "m=3")], "portable", Config(m=8), "run0", "not offered"),
        (ONE, "l4", [("h200", ONE, "portable", "m=1")], "portable", Config(m=8), None, "no record"),
        *(
            (f"attn h8 d64 {words}", "h200", [("h200", LONG, "portable", "m=1")], "hopper", Config(m=6), None, "no record")
            for words in ("b1 q8192", "b1 q1024 k1", "b16 q1024", "b1 q1024 causal", "b1 q1024 fp32")
        ),
    ],
)
def test_the_nearest_record_decides_where_it_is_near(
    problem: str, gpu: str, rows: list[tuple[str, str, str, str]], kernel: str, config: Config, record: str | None, reason: str
) -> None:
    decision = decide(problem, gpu, table(*rows))
    assert (decision.kernel, decision.config, decision.basis, decision.record) == (kernel, config, "modelled", record)
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("row", "kernel", "record"),
    [
        ("attn b1 h8 q1024 d64", "hopper", None),  # other tiles: the record's kernel is not lent where it does not suit
        ("attn b1 h8 q1000 d128", "portable", "run0"),  # the same tiles: it was measured so
    ],
)
def test_with_other_tiles_a_kernel_is_lent_only_where_it_suits(row: str, kernel: str, record: str | None) -> None:
    narrow = dataclasses.replace(PORTABLE, suits=lambda problem, gpu: problem.head_dim <= 64)
    rows = table(("h200", row, "portable", "m=1"))
    decision = select(parse_problem("attn b1 h8 q1024 d128"), gpu_named("h200"), rows, (narrow, HOPPER), "sdpa")
    assert (decision.kernel, decision.record) == (kernel, record)


@pytest.mark.parametrize(("measured", "config"), [("m=2", Config(m=1)), ("m=7", Config(m=7))])
def test_a_record_that_confirms_a_kernels_rule_leaves_near_problems_to_it(measured: str, config: Config) -> None:
    """The kernel's own guess is m=2 for many queries and m=1 for few. A record of another config goes before the rule."""

    def configs(problem: Problem, device: Device) -> tuple[Config, ...]:
        return Config(m=2 if problem.seqlen_q >= 1000 else 1), Config(m=7)

    ruled = dataclasses.replace(PORTABLE, configs=configs)
    rows = table(("h200", "attn b1 h8 q1024 d64", "portable", measured))
    decision = select(parse_problem("attn b1 h8 q600 d64"), gpu_named("h200"), rows, (ruled,), "sdpa")
    assert (decision.config, decision.record) == (config, "run0")


def test_a_record_of_the_tiles_that_a_call_would_choose_confirms_a_rule_that_leaves_them_to_its_lengths() -> None:
    """Measured with m=4, which the rule, m=0, comes to at those lengths."""
    loose = dataclasses.replace(
        PORTABLE,
        configs=lambda problem, device: (Config(m=0), Config(m=7)),
        exact=lambda problem, config, gpu: config if config["m"] else Config(m=problem.seqlen_q // 32),
    )
    rows, h200 = table(("h200", ONE, "portable", "m=4"), ("h200", LONG, "portable", "m=9")), gpu_named("h200")
    same, other = (select(parse_problem(text), h200, rows, (loose,), "sdpa") for text in (ONE, LONG))
    assert (same.config, same.basis) == (Config(m=0), "measured")
    assert (other.config, other.basis) == (Config(m=0), "modelled")
    assert "not offered any more" in other.reason
    assert at_lengths(same, parse_problem(ONE), h200, (HOPPER, loose)).config == Config(m=4)
    assert at_lengths(same, parse_problem(LONG), h200, (HOPPER, loose)).config == Config(m=32)


def test_under_a_causal_mask_unequal_lengths_lend_no_config_to_equal_ones_nor_take_theirs() -> None:
    """A tile of queries meets the diagonal at one place where the lengths are equal, and anywhere else where they are not."""
    rows = table(("h200", "attn b4 h32 q4096 d64 causal", "portable", "m=7"))
    configs = {text: decide(f"attn b4 h32 {text} d64 causal", "h200", rows).config for text in ("q4000", "q4000 k4050")}
    assert configs == {"q4000": Config(m=7), "q4000 k4050": Config(m=8)}


def test_queries_that_share_a_key_head_in_taller_tiles_are_no_near_problem_of_lower_ones() -> None:
    """In tiles of 16 rows, which 8 query heads of a key head have, the keys of 64 would be read four times."""
    few, many = (f"attn b1 h64 hk{heads_kv} q1 k16384 d128 bf16" for heads_kv in (8, 1))
    rows = table(("h200", few, "portable", "m=1"))
    assert decide(few.replace("16384", "16000"), "h200", rows).config == Config(m=1)
    found = decide(many, "h200", rows)
    assert (found.kernel, found.config, found.record) == ("hopper", Config(m=len("hopper")), None)


@pytest.mark.parametrize(("kernel", "config", "record"), [(PORTABLE, Config(m=1), "run0"), (HOPPER, Config(m=6), None)])
def test_a_request_by_name_takes_its_own_best_record(kernel: Kernel, config: Config, record: str | None) -> None:
    decision = decide(ONE, "h200", table(("h200", ONE, "portable", "m=1")), kernel)
    assert (decision.kernel, decision.config, decision.basis, decision.record) == (kernel.name, config, "requested", record)


def test_problems_of_a_class_of_lengths_share_a_choice_and_a_measured_one_keeps_its_own() -> None:
    rows = table(("h200", "attn b1 h8 q100 d64", "portable", "m=16"), ("h200", "attn b1 h8 q112 d64", "hopper", "m=9"))
    chosen = {length: decide(f"attn b1 h8 q{length} d64", "h200", rows) for length in (97, 100, 104, 112)}
    assert {chosen[length].config for length in (97, 104, 112)} == {Config(m=9)}
    assert chosen[100].config == Config(m=16)
    assert [chosen[length].basis for length in chosen] == ["modelled", "measured", "modelled", "measured"]


def test_a_kernel_sees_the_problem_itself_where_it_says_what_it_supports() -> None:
    even = dataclasses.replace(PORTABLE, supports=lambda problem, device: "odd" if problem.seqlen_q % 2 else None)
    problem = parse_problem("attn b1 h8 q99 d64")
    assert select(problem, gpu_named("l4"), EMPTY, (even,), "sdpa").kernel == "sdpa"


def test_a_record_of_a_kernel_that_cannot_serve_is_passed_over_with_the_reason() -> None:
    rows = table(("h200", "attn b1 h8 q128 d64", "hopper", "m=1"))
    decision = decide("attn b1 h8 q128 d64", "h200", rows, hopper="k is not aligned to 16 bytes")
    assert (decision.kernel, decision.basis) == ("portable", "modelled")
    assert ("hopper", "k is not aligned to 16 bytes") in decision.others
    assert "not hopper: k is not aligned" in str(decision)


def test_the_cpu_and_a_gpu_that_nothing_supports_get_pytorch() -> None:
    problem = parse_problem("attn b1 h8 q128 d64")
    on_cpu = select(problem, None, EMPTY, BOTH, "sdpa")
    assert (on_cpu.kernel, on_cpu.basis) == ("sdpa", "required")
    nowhere = select(problem, gpu_named("l4"), EMPTY, (HOPPER,), "sdpa")
    assert (nowhere.kernel, nowhere.basis) == ("sdpa", "required")
    assert nowhere.others == (("hopper", "needs sm_90"),)


@pytest.mark.parametrize(
    ("gpu", "requested", "unable", "what"),
    [
        (
            "l4",
            HOPPER,
            {},
            "kernel 'hopper' cannot serve attn b1 h8 q128 d64 bf16 on NVIDIA L4: needs sm_90; portable, sdpa can",
        ),
        ("h200", HOPPER, {"hopper": "q is not aligned"}, "q is not aligned; portable, sdpa can"),
        ("h200", make_kernel("peer", absent="peer is not installed"), {}, "peer is not installed; hopper, portable, sdpa can"),
    ],
)
def test_a_request_that_cannot_be_served_is_an_error_and_never_a_fallback(
    gpu: str, requested: Kernel, unable: dict[str, str], what: str
) -> None:
    with pytest.raises(CannotServe) as refusal:
        decide("attn b1 h8 q128 d64", gpu, EMPTY, requested, **unable)
    assert what in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("problem", "gpu", "kernel"),
    [
        ("attn b4 h16 q4096 d128 bf16 causal", "h200", "fwd_gluon_sm90"),
        ("attn b1 h2 q4096 d128 bf16 causal", "h200", "chunk_gluon_sm90"),  # fewer tiles than processors: keys are split
        ("attn b1 h8 q1024 d128 bf16", "h200", "fwd_gluon_sm90"),  # but not so few
        ("attn b1 h1 q100 d64 bf16", "h200", "short_gluon"),
        ("attn b1 h1 q100 d64 bf16", "a100", "short_gluon"),
        ("attn b1 h1 q100 d60 bf16", "h200", "fwd_triton"),  # no rows of 16 bytes to copy
        ("attn b1 h4 q512 d256 bf16", "h200", "chunk_gluon_sm90"),  # where the portable kernel spills
        ("attn b1 h4 q512 d256 fp32", "h200", "fp32_gluon_sm90"),
        ("attn b1 h4 q512 d256 fp32", "a100", "fwd_triton"),
        ("attn b1 h4 q512 d256 bf16", "a100", "fwd_triton"),
        ("attn b1 h32 hk8 q1 k8192 d128 bf16", "h200", "decode_gluon"),
        ("attn b1 h32 hk8 q1 k8192 d256 bf16", "h200", "split_triton"),
    ],
)
def test_where_nothing_was_measured_the_kernels_own_rules_choose(problem: str, gpu: str, kernel: str) -> None:
    assert select(parse_problem(problem), gpu_named(gpu), EMPTY, OURS, "sdpa").kernel == kernel


def test_each_kernel_has_configs_wherever_it_claims_to_run() -> None:
    for kernel in OURS:
        for gpu in map(gpu_named, ("l4", "a100", "h200", "b200")):
            for text in ("attn b1 h1 q1 d1 fp16", "attn b2 h4 hk2 q129 k65 d80 dv256 bf16 causal", "attn b1 h1 q64 d64 fp32"):
                problem = parse_problem(text)
                if kernel.supports(problem, gpu) is None:
                    assert kernel.configs(problem, gpu), (kernel.name, gpu.name, text)


def test_a_table_older_than_its_kernel_is_not_followed() -> None:
    """Failure planted: a stale dispatch table, whose config the kernel no longer has."""
    rows = table(("h200", "attn b1 h8 q128 d64", "portable", "gone=16"))
    exact, near = decide("attn b1 h8 q128 d64", "h200", rows), decide("attn b1 h8 q129 d64", "h200", rows)
    assert {exact.config, near.config} == {Config(m=6)}
    assert exact.basis == near.basis == "modelled"
    assert "no record" in exact.reason


@pytest.mark.parametrize("text", ["moe t64 e8 k2 d64 f128", "op row_sum rows8 fp16 flops8 bytes16"])
@pytest.mark.parametrize("gpu", [None, "h200"])
def test_pytorchs_attention_is_not_said_to_serve_what_is_no_attention(text: str, gpu: str | None) -> None:
    with pytest.raises(CannotServe, match="no kernel here serves"):
        select(parse_problem(text), gpu and gpu_named(gpu), EMPTY, (), None)


@pytest.mark.parametrize(
    ("layer", "one", "two"),
    [
        ("e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved", "moe_gemv_gluon", "moe_mxfp4_gluon_sm90"),
        ("e128 k8 d2048 f768 bf16 w:fp8_block", "moe_gemv_gluon", "moe_gemv_gluon"),
        ("e128 k8 d2048 f768 bf16 w:fp8_block_w8a8", "moe_gemv_gluon", "moe_gemv_gluon"),
    ],
)
def test_two_tokens_of_weights_in_a_format_do_not_take_the_config_of_one(layer: str, one: str, two: str) -> None:
    """Kernels of a few tokens have configs of one; and serve no more tokens than they suit, whatever the record of one says."""
    op, gpu = operation("moe"), gpu_named("h200")
    alone, both = (
        select(parse_problem(f"moe t{tokens} {layer}"), gpu, committed_table(), op.ours(), op.fallback()) for tokens in (1, 2)
    )
    assert (alone.kernel, alone.basis, both.kernel) == (one, "measured", two)
    chosen = next(kernel for kernel in op.ours() if kernel.name == two)
    assert both.config == chosen.configs(parse_problem(f"moe t2 {layer}"), gpu)[0]


@pytest.mark.parametrize("form", ["mxfp4", "fp8_block", "fp8_block_w8a8", "int4_g128"])
def test_a_decision_by_a_record_names_the_peer_and_the_ratio(form: str) -> None:
    op, entries = operation("moe"), [one for one in committed_table().entries if f"w:{form}" in str(one.problem).split()]
    assert entries
    for one in entries:
        found = select(one.problem, gpu_named(one.gpu), committed_table(), op.ours(), op.fallback())
        assert one.rival in {peer.name for peer in op.peers()}
        assert f"{one.ratio:.2f}x the speed of {one.rival}" in found.reason
