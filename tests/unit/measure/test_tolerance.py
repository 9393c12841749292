"""The tolerance rule lets honest rounding pass and nothing else."""

from __future__ import annotations

import re
from dataclasses import astuple, replace
from weakref import ref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_science.measure import inputs as inputs_module
from flashmoe_science.measure.finding import classify_error, is_mistake
from flashmoe_science.measure.tolerance import Errors, Expected, by_chance, check_output, expected, general_cap
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionOutput
from flashmoe_science.ops.attention.proof.contract import CONTRACT
from flashmoe_science.ops.attention.proof.oracle import attention_plain
from flashmoe_science.records import ErrorStats

Held = tuple[Expected, Expected]
DTYPES = ("fp16", "bf16", "fp32")


def case(dtype: str, shape: str = "attn b1 h2 q96 k130 d64") -> tuple[AttentionInputs, Held]:
    problem = parse_problem(f"{shape} {dtype}")
    inputs = CONTRACT.for_kernel(problem, CONTRACT.inputs(problem, torch.device("cpu"), torch.Generator().manual_seed(3)))
    return inputs, held(inputs)


def held(inputs: AttentionInputs) -> Held:
    problem, tensors = inputs.problem, {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    references = CONTRACT.reference(problem, {name: tensor.double() for name, tensor in tensors.items()})
    out, lse = expected(references, CONTRACT.plain(problem, tensors), *CONTRACT.bounds(problem, tensors, references))
    return out, lse


def rounded(inputs: AttentionInputs, reference: Held) -> AttentionOutput:
    return AttentionOutput(reference[0].value.to(inputs.q.dtype), reference[1].value.float())


def check(output: AttentionOutput, reference: Held) -> tuple[ErrorStats, list[str]]:
    """Statistics of the output, and why it and the log-sum-exp are refused."""
    out, reasons = check_output("out", output.out, reference[0])
    if output.lse is not None:
        reasons = reasons + check_output("lse", output.lse, reference[1])[1]
    return out, reasons


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["attn b1 h2 q96 k130 d64", "attn b1 h1 q1 d1", "attn b1 h2 q70 k33 d32 causal"])
def test_plain_attention_and_the_rounded_oracle_pass(dtype: str, shape: str) -> None:
    inputs, reference = case(dtype, shape)
    for output in (AttentionOutput(*attention_plain(inputs)), rounded(inputs, reference)):
        out, reasons = check(output, reference)
        assert reasons == []
        assert out.max is not None
        assert out.max <= out.bound_max


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("forged", ["zeros", "mean of V", "another query's rows", "first value row"])
def test_a_forged_output_fails(dtype: str, forged: str) -> None:
    inputs, reference = case(dtype)
    good = rounded(inputs, reference)
    out = {
        "zeros": torch.zeros_like(good.out),
        "mean of V": inputs.v.float().mean(2, keepdim=True).expand_as(good.out).to(good.out.dtype),
        "another query's rows": good.out.roll(1, 2),
        "first value row": inputs.v[:, :, :1].expand_as(good.out),
    }[forged]
    assert check(replace(good, out=out), reference)[1]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_fails_and_has_no_statistics(poison: float) -> None:
    inputs, reference = case("bf16")
    output = rounded(inputs, reference)
    output.out[0, 0, 95, 63] = poison
    out, reasons = check(output, reference)
    assert reasons
    assert (out.nonfinite, out.max, out.worst) == (1, None, [0, 0, 95, 63])


def test_a_row_that_sees_no_key_must_be_zero_and_its_lse_minus_infinity() -> None:
    inputs, reference = case("fp16", "attn b1 h2 q70 k33 d32 causal")
    good = rounded(inputs, reference)
    assert check(good, reference)[1] == []
    wrong = good.lse.clone()
    wrong[0, 0, 0] = -1e30
    assert check(replace(good, lse=wrong), reference)[1]
    wrong = good.out.clone()
    wrong[0, 0, 0] = inputs.v[0, 0, 0]
    assert check(replace(good, out=wrong), reference)[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lie", ["base 2", "not scaled", "off by 1e-3"])
def test_a_wrong_log_sum_exp_fails(dtype: str, lie: str) -> None:
    inputs, reference = case(dtype)
    good = rounded(inputs, reference)
    lse = {"base 2": good.lse * 1.442695, "not scaled": good.lse / inputs.softmax_scale, "off by 1e-3": good.lse + 1e-3}[lie]
    _, reasons = check(replace(good, lse=lse), reference)
    assert any(reason.startswith("lse") for reason in reasons)


def test_a_small_bias_everywhere_fails_by_its_mean() -> None:
    """A bias under the maximum's bound: only the mean and the RMS can see it."""
    _, reference = case("bf16")
    out = (reference[0].value + 0.9 * reference[0].bound.max).bfloat16()
    _, reasons = check(AttentionOutput(out), reference)
    assert any("mean" in reason for reason in reasons)


def test_the_cap_holds_when_the_plain_result_is_poor() -> None:
    """Scores of hundreds ruin the plain version in fp16; what it ruins must not become allowed."""
    inputs, _ = case("fp16", "attn b1 h1 q64 d64")
    hot = replace(inputs, tensors=inputs.tensors._replace(q=inputs.q * 30, k=inputs.k * 3))
    reference = held(hot)
    plain_error = (attention_plain(hot)[0].double() - reference[0].value).abs().max().item()
    assert reference[0].bound.max < 2 * plain_error


# Chance -------------------------------------------------------------------------------------------------------------------


def test_what_chance_makes_of_a_maximum_is_what_one_in_ten_million_exceeds() -> None:
    shares = (np.arange(10_000) + 0.5) / 10_000
    draws = 5.0 - 0.5 * np.log(-np.log(shares))  # Gumbel's law around 5, of scale 0.5
    allowed = by_chance([Errors(each, each, each) for each in draws])
    assert allowed.max == pytest.approx(5.0 - 0.5 * np.log(-np.log1p(-1e-7)), rel=1e-3)


def test_chance_makes_nothing_of_an_error_that_does_not_vary() -> None:
    """As the RMS of many errors: twice the plain error is more, and decides as before."""
    _, (one, _) = case("fp32")
    drawn = by_chance([one.plain, one.plain])
    assert drawn == one.plain
    assert replace(one, chance=drawn).bound == one.bound


def test_chance_never_allows_more_than_the_cap() -> None:
    _, (one, _) = case("bf16")
    assert replace(one, chance=Errors(9.0, 9.0, 9.0)).bound == one.cap


def test_draws_that_are_not_finite_allow_nothing() -> None:
    _, (one, _) = case("fp16")
    assert replace(one, chance=by_chance([one.plain, Errors(np.inf, np.nan, 1.0)])).bound.max == one.bound.max


def test_a_plain_result_beyond_the_cap_is_named() -> None:
    alike = [Errors(each, each, each) for each in (0.5, 0.01, 0.3)]
    _, reasons = check_output("out", torch.tensor([0.0, 0.1, 0.9]), Expected(torch.zeros(3), torch.float16, *alike))
    assert "the absolute cap, which the same maths done plainly in float16 exceeds too (0.5)" in reasons[0]


@pytest.mark.parametrize(
    ("chance", "words"),
    [
        (None, r"above 0\.41 \(at \[2\]\): twice the plain maths' 0\.2, and 0\.01 for rounding"),
        (0.5, r"above 0\.51 \(at \[2\]\): 0\.5 that chance makes of the plain maths' 0\.2, and 0\.01 for rounding"),
        (2.0, r"above 0\.8 \(at \[2\]\): the absolute cap"),
    ],
)
def test_a_reason_says_what_its_bound_is_made_of(chance: float | None, words: str) -> None:
    alike = [Errors(each, each, each) for each in (0.2, 0.01, 0.8)]
    one = Expected(torch.zeros(3), torch.float32, *alike, chance=None if chance is None else Errors(chance, 9.0, 9.0))
    _, reasons = check_output("out", torch.tensor([0.0, 0.1, 0.9]), one)
    assert re.fullmatch(f"out: maximum error 0\\.9 is {words}", reasons[0])


# Of an operation of a user's own ------------------------------------------------------------------------------------------


def test_a_poor_plain_result_loosens_nothing_beyond_the_cap() -> None:
    value = torch.ones(64, dtype=torch.float64)
    poor = torch.full((64,), 1.5, dtype=torch.float16)
    (one,) = expected((value,), (poor,), None)
    assert one.bound == general_cap(value, torch.float16)


def test_where_the_plain_result_is_not_finite_the_cap_alone_decides() -> None:
    value = torch.ones(4, dtype=torch.float64)
    cap = Errors(0.1, 0.1, 0.1)
    (one,) = expected((value,), (torch.full((4,), torch.inf, dtype=torch.float16),), (cap,))
    assert one.bound == cap
    _, reasons = check_output("out", torch.full((4,), 1.2), one)
    assert reasons[0].startswith("out: maximum error 0.2 is above 0.1")


def test_integers_are_right_or_wrong() -> None:
    (one,) = expected((torch.tensor([3.0, 4.0]),), (torch.tensor([3, 4]),), None)
    assert check_output("ids", torch.tensor([3, 4]), one)[1] == []
    assert check_output("ids", torch.tensor([3, 5]), one)[1]


def test_what_a_gpu_flushes_to_zero_is_no_error() -> None:
    """dsinks of a backward were 5e-39 where an exponential below 1.2e-38 is 0 on every GPU."""
    exact = torch.tensor([5.3e-39, 0.0], dtype=torch.float64)
    (right,) = expected([exact], [exact.float()], None)
    _, wrong = check_output("dsinks", torch.zeros(2), right)
    assert not wrong


# Of large results ---------------------------------------------------------------------------------------------------------

LARGE = (3, 100, 70)


def large(distribution: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A reference, whose rows and columns are exchanged in memory, and a result that is a little or a lot off."""
    chance = torch.Generator().manual_seed(7)
    reference = torch.randn(LARGE, dtype=torch.float64, generator=chance).mT.contiguous().mT
    got = reference.float() + 1e-6 * torch.randn(LARGE, generator=chance)
    if distribution == "one place":
        got[2, :, 5] += 1.0
    elif distribution == "no keys":
        reference[1, 9], got[1, 9] = -torch.inf, -torch.inf
    elif distribution == "not finite":
        got[1, 80, 3], got[2, 1, 1] = torch.nan, torch.inf
    elif distribution == "constant":
        got = torch.full(LARGE, 0.25)
    return reference, got


@pytest.mark.parametrize("distribution", ["normal", "one place", "no keys", "not finite", "constant"])
def test_what_is_compared_in_parts_has_the_errors_of_the_whole(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, got = large(distribution)

    def compared(part: int) -> tuple[Expected, ErrorStats, list[object]]:
        monkeypatch.setattr(inputs_module, "PART", part)
        (right,) = expected([reference], [reference.float()], None)
        stats, reasons = check_output("out", got, right)
        return right, stats, [classify_error(got, right, stats), is_mistake(got, right, got.double()), len(reasons)]

    def numbers(stats: ErrorStats) -> dict[str, float]:
        return stats.model_dump(exclude={"worst"}, exclude_none=True)

    whole, stats, named = compared(2**24)
    for part in (140, 1000, 70 * 99):
        in_parts, in_parts_stats, in_parts_named = compared(part)
        for one, other in ((in_parts.floor, whole.floor), (in_parts.plain, whole.plain), (in_parts.cap, whole.cap)):
            assert astuple(one) == pytest.approx(astuple(other), rel=1e-14)
        assert in_parts_stats.worst == stats.worst
        assert numbers(in_parts_stats) == pytest.approx(numbers(stats), rel=1e-14)
        assert [one for one, _ in in_parts_named[0]] == [one for one, _ in named[0]]
        assert in_parts_named[1:] == named[1:]
    error = (got.double() - reference).abs()[reference.isfinite()]
    if distribution != "not finite":
        rms = (error.square().sum() / got.numel()).sqrt()
        assert (stats.max, stats.rms) == (pytest.approx(error.max().item()), pytest.approx(rms.item()))


@pytest.mark.parametrize("what", ["right", "wrong", "mistake"])
def test_a_comparison_takes_little_memory_beside_its_references(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gibibyte and a fifth of the references: of Mixtral's weights' gradients whole temporaries took more than 80 GB."""
    part = 2**12  # elements, of which a gibibyte is 8 in fp64, as it is of the harness's own
    monkeypatch.setattr(inputs_module, "PART", part)
    reference = torch.randn(8, 128, 512, dtype=torch.float64)
    plain = reference.float()
    got = plain * (1.0 if what == "right" else 1.01)
    with LiveBytes() as live:
        (right,) = expected([reference], [plain], None)
        if what == "mistake":
            is_mistake(got, right, reference)
        else:
            stats, reasons = check_output("out", got, right)
            assert bool(reasons) == (what == "wrong")
            classify_error(got, right, stats)
    assert live.peak <= 0.2 * reference.nbytes + 8 * 8 * part


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made in its scope had at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: list[ref[torch.Tensor]] = []
        self._given: set[int] = set()

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        for one in args:
            if isinstance(one, torch.Tensor) and all(made() is not one for made in self._made):
                self._given.add(one.untyped_storage().data_ptr())
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._made.append(ref(result))
        self._made = [one for one in self._made if one() is not None]
        storages = {one.data_ptr(): one.nbytes() for made in self._made if (one := made().untyped_storage())}
        self.peak = max(self.peak, sum(size for at, size in storages.items() if at not in self._given))
        return result
