"""Checking a function on a sweep: what it finds, what it calls it, and what it leaves to a process that ended."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.listed_faults import PLANTED, SWEPT, SWEPT_ON_GPU, Fault

from flashmoe_science.contract import built_in, contract_of
from flashmoe_science.measure.bench import Bench, bench_here
from flashmoe_science.measure.channel import Died, Hung, InProcess, Unusable
from flashmoe_science.measure.check import CheckResult, Sweep, _representative, check_function
from flashmoe_science.measure.correctness import Exam
from flashmoe_science.measure.finding import Finding, contract_mismatch
from flashmoe_science.measure.inputs import Case, Memory, make
from flashmoe_science.measure.oracle import ContractOracle, Oracle
from flashmoe_science.measure.sandbox.settings import FilesWritten, RandomStates
from flashmoe_science.measure.worker.loading import load
from flashmoe_science.measure.worker.worker import Opened, Worker
from flashmoe_science.operations import OPERATIONS, parse_problem
from flashmoe_science.ops.attention.call.kernel import AttentionInputs
from flashmoe_science.ops.attention.proof.contract import FAR
from flashmoe_science.ops.attention.proof.oracle import attention_oracle, attention_plain
from flashmoe_science.problem import Problem

ROOT = Path(__file__).parents[3]
_OF_NO_PROBLEM = """
import torch
from flashmoe_science.contract import Contract, contract

class Double(Contract):
    name = "double"
    def inputs(self, problem, device, generator):
        return {"x": torch.randn(problem["rows"], device=device, generator=generator)}
    def reference(self, problem, inputs):
        return inputs["x"] * 2
    def flops(self, problem):
        return problem["rows"]
    def min_bytes(self, problem):
        return 8 * problem["rows"]

@contract(Double())
def double(x):
    return x * 2
"""
CPU = Bench(torch.device("cpu"), None)
HERE = bench_here()
ATTENTION = built_in("attention")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with CPU.single_threaded():
        yield


class Here(InProcess):
    """A function in this process, asked as a child is."""

    def drain(self) -> tuple[list[str], list[str]]:
        return [], []

    def close(self) -> None: ...


class Until(Sweep):
    """A sweep that is over where a wrong answer is said in one of these words."""

    words: tuple[str, ...] = ()

    def _add(self, problem: Problem, inputs: str, examine: Callable[[Exam], Finding]) -> None:
        super()._add(problem, inputs, examine)
        last = self.checked[-1]
        if last.answer == "wrong" and any(re.search(one, last.words) for one in self.words):
            self.stopped = "found"


def swept(
    spec: str,
    *problems: str,
    child: Callable[[Any], Any] = lambda home: home,
    bench: Bench = CPU,
    until: tuple[str, ...] = (),
) -> Sweep:
    """A sweep of these problems in this process; ``child`` may put another in the place of the worker."""
    handover = Memory()
    worker, oracle = Worker(bench, handover, trusted=False), Oracle(handover, bench.device)
    opened = Opened.model_validate(worker.open(spec, ""))
    oracle.open(opened.contract if opened.built_in else spec)
    home = Here(worker.command)
    sweep = Until(bench, lambda: child(home), ContractOracle(InProcess(oracle.command)), opened, 7, lambda text: None)
    sweep.words = until
    sweep.go(parse_problem(text) for text in problems)
    return sweep


def result_of(sweep: Sweep) -> CheckResult:
    return CheckResult("spec", "attention", tuple(sweep.checked), 0.0, sweep.stopped)


# The sweep's problems -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [one.name for one in OPERATIONS])
def test_a_sweep_is_of_tiny_problems_none_twice(name: str) -> None:
    contract = built_in(name)
    problems = [parse_problem(str(text)) for text in contract.sweep()]
    assert len(set(problems)) == len(problems) >= 30
    assert all(contract.cannot(one) is None for one in problems)
    assert max(one.flops() for one in problems) < 2e7


def test_each_two_kinds_are_asked_together() -> None:
    """A kernel has a build, a tile or a branch for each of them: faults/two_together.py. Also where values are as wide as
    keys."""

    def kinds(one: Any) -> list[tuple[str, object]]:
        group, width = one.heads // one.heads_kv, one.head_dim
        even_group = group & (group - 1) == 0
        found = {
            "dtype": one.dtype,
            "width": width if width in (64, 128, 192, 256) else "odd" if width % 2 else width <= 32,
            "values": (one.head_dim_v > width) - (one.head_dim_v < width),
            "query heads a key head": group if group == 1 else (group > 8, even_group),
            "queries": 1 if one.seqlen_q == 1 else 64 if one.seqlen_q <= 64 else 65,
            "keys": (one.seqlen_k > one.seqlen_q) - (one.seqlen_k < one.seqlen_q) + (one.seqlen_k > max(one.seqlen_q, 255)),
            "mask": one.mask,
            "layout": one.layout,
            "batches": one.batch > 1,
        }
        return list(found.items())

    asked = [kinds(parse_problem(str(text))) for text in ATTENTION.sweep()]
    for some in asked, [each for each in asked if ("values", 0) in each]:
        together = {two for each in some for two in combinations(each, 2)}
        columns = [set(column) for column in zip(*some, strict=True)]
        every = {two for column, other in combinations(columns, 2) for two in product(column, other)}
        assert every - together <= {(("width", 256), ("values", 1)), (("queries", 1), ("keys", -1))}


# What it finds --------------------------------------------------------------------------------------------------------------


def test_a_right_function_is_right_on_everything_that_it_is_asked() -> None:
    sweep = swept(f"{ROOT / 'examples' / 'cpu_attention.py'}:attention", *map(str, ATTENTION.sweep()))
    assert {one.answer for one in sweep.checked} == {"right"}
    asked = {one.inputs for one in sweep.checked}
    assert {"a softmax scale of 0", "a negative softmax scale", "slices of larger tensors", "all zero"} <= asked
    assert result_of(sweep).exit_code == 0
    matrix = result_of(sweep).matrix()
    assert matrix["keys"].keys() == {"as queries", "more", "fewer"}
    assert matrix["query heads a key head"].keys() >= {"1", "2", "8 (all)"}
    assert result_of(sweep).not_covered() == ("mask causal-topleft",)


def test_a_contract_without_problems_is_asked_for_the_one_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_OF_NO_PROBLEM)
    spec = f"{tmp_path}/mine.py:double"
    with pytest.raises(Unusable, match="its contract's sweep names no problem; name one"):
        check_function(spec)
    assert check_function(spec, [parse_problem("op double rows8 fp32 flops8 bytes64")]).passed


def test_a_wrong_answer_is_wrong_and_one_that_raises_is_not_served() -> None:
    square, longer, shared = "attn b1 h2 q9 d8 fp32 causal", "attn b1 h2 q5 k9 d8 fp32 causal", "attn b1 h4 hk2 q9 d8 fp32"
    result = result_of(swept(PLANTED["another_mask"], square, longer, shared))
    answers = {str(one.problem): one.answer for one in result.checked if not one.inputs}
    assert answers == {square: "right", longer: "wrong", shared: "not served"}
    assert result.exit_code == 1
    assert "mask-top-left" in result.codes
    assert result.matrix()["keys"]["more"] == {"right": 0, "wrong": 1, "not served": 0, "not asked": 0}
    assert result.matrix()["query heads a key head"]["2"]["not served"] == 1
    assert "mask causal-topleft" in result.not_covered()


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("ignores_the_scale", "scale-default", "it is right for the default softmax scale"),
        ("requires_grad", "requires-grad", "requires gradients"),
        ("sums_its_input", "earlier-output", "one element of an input changed"),
        ("drifts", "drift", "error grows from call to call"),
        ("changes_its_input", "changes-input", "changed its inputs"),
        ("constant_output", "constant", "its output is constant"),
        ("returns_its_input", "shares-input", "memory of an input"),
    ],
)
def test_a_fault_has_words_and_a_code(name: str, code: str, words: str) -> None:
    found = [one for one in swept(PLANTED[name], "attn b1 h2 q16 d16 fp32").checked if code in one.codes]
    assert found
    assert words in "; ".join(found[0].reasons)


@pytest.mark.parametrize(
    "one", [*SWEPT, *(pytest.param(one, marks=pytest.mark.gpu) for one in SWEPT_ON_GPU)], ids=lambda one: one.name
)
def test_a_fault_of_real_use_is_named(one: Fault) -> None:
    """On the problem of the contract's sweep that meets it."""
    contract, fn = contract_of(load(one.spec)), load(one.spec)
    sweep = [str(text) for text in contract.sweep_of(fn)]
    problem = sweep[0] if one.problem is None else next(text for text in sweep if text.startswith(one.problem))
    sweep = swept(one.spec, problem, bench=HERE if one in SWEPT_ON_GPU else CPU, until=one.words)
    assert sweep.stopped == "found", ([found.words for found in sweep.checked if found.answer == "wrong"], sweep.checked)


def test_a_window_that_is_kept_from_the_first_call_is_named() -> None:
    """Problems of the same sizes, without a window, with one, with another."""
    sweep = ATTENTION.sweep_of(load(PLANTED["window_of_the_first_call"]))
    same = [str(text) for text in sweep if str(text).startswith("attn b2 h8 hk2 q40 k200 d64")]
    assert len(same) == 4
    for first in same[:2]:
        result = result_of(swept(PLANTED["window_of_the_first_call"], first, same[2]))
        assert [str(one.problem) for one in result.of("wrong")][:1] == [str(parse_problem(same[2]))]


def test_where_memory_for_distant_keys_is_missing_they_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's allocator raises a RuntimeError, which would be the function's."""

    def no_memory(*shape: Any, **how: Any) -> torch.Tensor:
        if isinstance(shape[0], int) and shape[0] >= 2**31:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(*shape, **how)

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", no_memory)
    sweep = swept(f"{ROOT / 'examples' / 'cpu_attention.py'}:attention", "attn b1 h2 q9 d16 fp16")
    (far,) = (one for one in sweep.checked if one.inputs == FAR)
    assert far.answer == "not asked"


def test_a_scale_below_zero_is_asked_of_one_query_too() -> None:
    sweep = swept(PLANTED["negative_scale_of_one_query"], "attn b1 h2 q9 d16 fp32", "attn b1 h2 q1 k9 d16 fp32")
    (wrong,) = result_of(sweep).of("wrong")
    assert (wrong.problem.queries(), wrong.inputs) == (1, "a negative softmax scale")


@pytest.mark.parametrize(
    ("name", "form", "met", "how"),
    [
        ("scale_of_wide_heads", "attn b1 h2 q9 d{} fp16", ("16", "160", "24"), "with another softmax scale"),
        ("rows_of_fp32_without_gaps", "attn b1 h2 q9 {}", ("d8 fp16", "d8 fp32", "d16 fp16"), "with slices of larger tensors"),
        ("bf16_in_fp16", "attn b1 h2 q9 {}", ("d8 fp16", "d8 bf16", "d16 fp16"), "on inputs that are tiny"),
        ("moe_minus_one_is_the_last_in_prefill", "moe t{} e4 k2 d8 f8 bf16", ("9", "70", "8"), "with ids of -1"),
    ],
)
def test_what_one_of_many_problems_meets_is_asked_there(name: str, form: str, met: tuple[str, ...], how: str) -> None:
    """Another scale and ids of no expert on every problem; other ways of calling, and other values, in every dtype."""
    wrong = result_of(swept(PLANTED[name], *map(form.format, met))).of("wrong")
    assert {str(one.problem) for one in wrong} == {form.format(met[1])}
    assert f"wrong {how}" in wrong[0].words


@pytest.mark.parametrize(
    ("name", "plainest", "most"),
    [
        ("sums_in_bf16", "attn b2 h2 q65 d64 bf16", "attn b1 h2 q1 k8300 d64 bf16"),
        ("moe_sums_in_16_bits", "moe t40 e8 k2 d64 f48 bf16", "moe t9 e64 k64 d32 f24 bf16"),
    ],
)
def test_sums_that_stop_growing_are_met_on_the_most(name: str, plainest: str, most: str) -> None:
    """A sum kept in 16 bits is within the tolerance on every problem's chance inputs, and on few that are all the same."""
    fn = load(PLANTED[name])
    assert {plainest, most} <= {str(parse_problem(str(text))) for text in contract_of(fn).sweep_of(fn)}
    (wrong,) = result_of(swept(PLANTED[name], plainest, most)).of("wrong")
    assert (str(wrong.problem), wrong.inputs) == (most, "all the same")


@pytest.mark.parametrize("of_two", [0, 1])
def test_what_is_wrong_in_every_second_call_is_not_called_reading_outside(
    tmp_path: Path, of_two: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls with NaN around the inputs are the wrong ones by chance: in the sweep, and in the exam."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # to which the file's folder is added
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch.nn.functional import scaled_dot_product_attention\n"
        "calls = [0]\n"
        "def fn(q, k, v, causal=False, softmax_scale=None):\n"
        "    calls[0] += 1\n"
        "    out = scaled_dot_product_attention(q, k, v, scale=softmax_scale)\n"
        f"    return out + 1.0 if calls[0] % 2 == {of_two} else out\n"
    )
    found = result_of(swept(f"{file}:fn", "attn b1 h2 q16 d16 fp32"))
    assert "wrong-at-times" in found.codes
    assert "reads-outside" not in found.codes


def test_a_problem_of_features_sits_the_exam_too() -> None:
    """A fault that other values alone meet, in a problem that is not the plainest."""
    plain, sinks = "attn b1 h2 q16 d16 fp32", "attn b1 h2 q60 k40 d128 fp32 causal sinks"
    result = result_of(swept(PLANTED["sinks_of_the_first_call"], plain, sinks))
    assert {str(one.problem) for one in result.of("wrong") if one.inputs == "the whole exam"} == {sinks}
    assert "wrong-for-a-seed" in result.codes


def test_no_query_loses_its_last_key_to_a_mask_of_the_first() -> None:
    """A bias of -inf everywhere makes NaN of honest autograd, and of PyTorch's own attention."""
    contract = ATTENTION.variant("a mask that hides the first keys")
    for sizes, mask in product(("q40 k50", "q9 k9", "q3 k16", "q16 k16"), ("bias", "boolmask")):
        problem = parse_problem(f"attn b2 h2 {sizes} d8 fp32 causal {mask}")
        bias = contract.inputs(problem, CPU.device, torch.Generator().manual_seed(1))["bias"]
        visible = bias.isfinite() if mask == "bias" else bias
        diagonal = problem.seqlen_k - problem.seqlen_q
        assert (visible & torch.ones(bias.shape[2:], dtype=torch.bool).tril(diagonal)).any(-1).all()
        hidden = problem.seqlen_k * 3 // 4
        assert not visible[..., -1, :hidden].any(), "the last query sees one of the first keys"


@pytest.mark.parametrize("problem", ["attnbwd b2 h4 hk2 q9 k70 d16 fp32 bias", "attnbwd b2 h4 hk2 q9 k70 d16 bf16 boolmask"])
def test_a_right_backward_with_a_mask_is_right_however_the_mask_is_given(problem: str, tmp_path: Path) -> None:
    lines = (
        "from torch.nn.functional import scaled_dot_product_attention as sdpa",
        "from flashmoe_science.contract import contract",
        "@contract('attention_backward')",
        "def attention(q, k, v, causal=False, softmax_scale=None, attn_mask=None):",
        "    return sdpa(q, k, v, attn_mask=attn_mask, scale=softmax_scale, enable_gqa=True)",
    )
    (tmp_path / "masked.py").write_text("\n".join(lines))
    checked = swept(f"{tmp_path / 'masked.py'}:attention", problem).checked
    asked = {one.inputs: one.answer for one in checked}
    assert asked.pop("a gradient into the log-sum-exp too") == "not served"
    assert {"slices of larger tensors", "a mask that hides the first keys"} <= asked.keys()
    assert set(asked.values()) == {"right"}, [one.words for one in checked if one.answer != "right"]


def test_a_backward_that_computes_large_scores_anew_is_right(tmp_path: Path) -> None:
    """Its P is exp(s - lse), of a log-sum-exp that was rounded: PyTorch's, on a CPU."""
    lines = (
        "from torch.nn.functional import scaled_dot_product_attention as sdpa",
        "from flashmoe_science.contract import contract",
        "@contract('attention_backward')",
        "def attention(q, k, v, causal=False, softmax_scale=None):",
        "    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)",
    )
    (tmp_path / "anew.py").write_text("\n".join(lines))
    checked = swept(f"{tmp_path / 'anew.py'}:attention", "attnbwd b1 h2 q70 d128 fp32").checked
    assert {one.answer for one in checked} == {"right", "not served"}, [one.words for one in checked]


def test_other_bits_at_every_call_that_are_all_right_are_a_note(tmp_path: Path) -> None:
    lines = (
        "from torch.nn.functional import scaled_dot_product_attention as sdpa",
        "calls = [0]",
        "def attention(q, k, v, causal=False, softmax_scale=None):",
        "    calls[0] += 1",
        "    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale) * (1 + calls[0] % 2 * 2**-23)",
    )
    (tmp_path / "rounds.py").write_text("\n".join(lines))
    checked = swept(f"{tmp_path / 'rounds.py'}:attention", "attn b1 h2 q16 d16 fp32").checked
    assert {one.answer for one in checked} == {"right"}
    assert any("differs from call to call in some bits" in note for one in checked for note in one.notes)


@pytest.mark.parametrize(
    ("returned", "answer"), [("out, lse", "right"), ("out", "not served"), ("out, lse.detach()", "not served")]
)
def test_a_log_sum_exp_is_differentiated_where_one_is_returned(returned: str, answer: str, tmp_path: Path) -> None:
    lines = (
        "from flashmoe_science import flash_attn_func",
        "from flashmoe_science.contract import contract",
        "@contract('attention_backward')",
        "def attention(q, k, v, causal=False, softmax_scale=None):",
        "    rows = [one.transpose(1, 2) for one in (q, k, v)]",
        "    out, lse, _ = flash_attn_func(*rows, causal=causal, softmax_scale=softmax_scale, return_attn_probs=True)",
        "    out = out.transpose(1, 2)",
        f"    return {returned}",
    )
    (tmp_path / "trains.py").write_text("\n".join(lines))
    checked = swept(f"{tmp_path / 'trains.py'}:attention", "attnbwd b1 h4 hk2 q12 d16 fp32 causal").checked
    answers = {one.inputs: one.answer for one in checked}
    assert answers.pop("a gradient into the log-sum-exp too") == answer
    assert set(answers.values()) == {"right"}


class _Ends:
    """A child whose call raises."""

    folder = Path("nowhere")
    closed = 0

    def __init__(self, error: Exception) -> None:
        self.error = error

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        raise self.error

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(("error", "asked", "code"), [(Died("it crashed"), 3, "crashes"), (Hung("it hung"), 1, "hangs")])
def test_who_crashes_or_hangs_is_wrong_and_asked_no_further(error: Exception, asked: int, code: str) -> None:
    child = _Ends(error)
    problems = [f"attn b1 h2 q{length} d8 fp32" for length in range(2, 8)]
    result = result_of(swept(PLANTED["another_mask"], *problems, child=lambda home: child))
    assert [one.answer for one in result.checked] == ["wrong"] * asked + ["not asked"] * (6 - asked)
    assert result.codes == (code,)
    assert child.closed == asked


# What a wrong answer is called ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "required", "words"),
    [
        (["dict"], 2, "it returned a dict; it must return 2 results"),
        (["Tensor", "Tensor", "NoneType"], 1, "it returned 3 results; it must return 1 result"),
    ],
)
def test_results_of_another_number_are_called_what_they_are(returned: list[str], required: int, words: str) -> None:
    wanted = [{"optional": False}] * required
    assert contract_mismatch([{"type": one} for one in returned], wanted, "cpu") == [words]


def named(
    problem: str,
    mistaken: Callable[[AttentionInputs], AttentionInputs] = lambda inputs: inputs,
    compute: Callable[[AttentionInputs], torch.Tensor] = lambda inputs: attention_plain(inputs)[0],
) -> list[str]:
    """The codes of what is computed, by default with the plain maths, on other inputs than were given."""
    parsed, handover, case = parse_problem(problem), Memory(), Case(5)
    oracle = Oracle(handover, CPU.device)
    oracle.open("attention")
    oracle.problem(problem)
    inputs = ATTENTION.for_kernel(parsed, make(ATTENTION, parsed, CPU.device, case))
    handover.put("out", [compute(mistaken(inputs))])
    return [code for code, _ in oracle.check(case, "out", count=1, naming=True)["named"]]


def with_problem(**changes: Any) -> Callable[[AttentionInputs], AttentionInputs]:
    return lambda inputs: replace(inputs, problem=replace(inputs.problem, **changes))


def with_heads(index: list[int]) -> Callable[[AttentionInputs], AttentionInputs]:
    def change(inputs: AttentionInputs) -> AttentionInputs:
        shared = replace(inputs.problem, heads_kv=inputs.problem.heads)
        return replace(inputs, problem=shared, tensors=inputs.tensors._replace(k=inputs.k[:, index], v=inputs.v[:, index]))

    return change


@pytest.mark.parametrize(
    ("problem", "mistaken", "code"),
    [
        ("attn b1 h2 q9 k20 d16 {} causal", with_problem(mask="causal-topleft"), "mask-top-left"),
        ("attn b1 h2 q9 k20 d16 {} causal", with_problem(mask="full"), "mask-missing"),
        ("attn b1 h2 q20 d16 {}", with_problem(mask="causal"), "mask-not-asked"),
        ("attn b1 h4 hk2 q20 d16 {}", with_heads([0, 1, 0, 1]), "heads-interleaved"),
        ("attn b1 h4 hk2 q20 d16 {}", with_heads([0, 0, 0, 0]), "heads-first"),
        ("attn b1 h4 hk2 q20 d16 {}", with_heads([0, 1, 1, 1]), "heads-clamped"),
        ("attn b1 h2 q20 d16 {}", lambda inputs: replace(inputs, softmax_scale=1.0), "scale-missing"),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_wrong_answer_is_named_by_what_it_matches(
    problem: str, mistaken: Callable[[AttentionInputs], AttentionInputs], code: str, dtype: str
) -> None:
    assert named(problem.format(dtype), mistaken) == [code]


def test_queries_that_see_no_key_are_named() -> None:
    def no_numbers(inputs: AttentionInputs) -> torch.Tensor:
        out, lse = attention_oracle(inputs)
        return torch.where((lse == -torch.inf)[..., None], torch.nan, out).float()

    assert named("attn b1 h2 q20 k9 d16 fp32 causal", compute=no_numbers) == ["empty-rows"]


def test_noise_is_no_mistake_and_a_right_answer_has_no_name() -> None:
    def noisy(inputs: AttentionInputs) -> AttentionInputs:
        noise = 0.3 * torch.randn(inputs.v.shape, generator=torch.Generator().manual_seed(1))
        return replace(inputs, tensors=inputs.tensors._replace(v=inputs.v + noise))

    assert named("attn b1 h4 hk2 q20 d16 fp32", noisy) == []
    assert named("attn b1 h4 hk2 q20 k30 d16 fp32 causal") == []


# What a call leaves behind --------------------------------------------------------------------------------------------------


def test_a_random_state_that_moves_is_told_by_name_once() -> None:
    states = RandomStates()
    assert states.moved() == []
    torch.rand(1)
    assert states.moved() == ["it moves the random state of torch"]
    random.random()
    np.random.rand()
    assert states.moved() == ["it moves the random state of random", "it moves the random state of numpy"]
    assert states.moved() == []


def test_files_opened_for_writing_are_named_but_for_caches_and_temporary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, cache = tmp_path / "temporary", tmp_path / "cache"
    elsewhere.mkdir()
    cache.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    files = FilesWritten()
    (elsewhere / "one").write_text("")
    (cache / "two").write_text("")
    (tmp_path / "mine").write_text("")
    (tmp_path / "mine").read_text()
    assert files.written() == [f"it opens a file for writing: {tmp_path / 'mine'}"]
    for index in range(9):
        (tmp_path / f"more{index}").write_text("")
    assert len(files.written()) == 2
    assert files.written() == []


@pytest.mark.gpu
def test_a_check_on_a_gpu_takes_seconds() -> None:
    result = check_function(f"{ROOT / 'examples' / 'cpu_attention.py'}:attention")
    assert result.passed, result.as_dict()
    assert result.seconds < 15


def test_a_causal_window_is_asked_in_other_ways() -> None:
    """The last problem with a window, of a function that has no other argument, is one whose mask the window can give."""

    def fn(q: Any, k: Any, v: Any, causal: bool = False, softmax_scale: Any = None, window_size: Any = None) -> None: ...

    asked = _representative([parse_problem(str(text)) for text in ATTENTION.sweep_of(fn)])
    assert any(one.causal and one.features.window and one.seqlen_q > 1 for one in asked)  # type: ignore[attr-defined]
