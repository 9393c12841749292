"""The eager path: what is planned once, what is bound anew, what never reaches a kernel, and that nothing holds a tensor."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_science import explain, flash_attention_forward, flash_attn_func, scaled_dot_product_attention
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops import calls
from flashmoe_science.ops import choose as any_choice
from flashmoe_science.ops.attention.call.tensors import Options, Tensors, problem_of
from flashmoe_science.ops.attention.front import choose, kernels, operator
from flashmoe_science.ops.attention.problem import AttentionProblem

if TYPE_CHECKING:
    from tests.unit.ops.attention.conftest import FakeKernel


def tensors(
    batch: int = 2, heads: int = 4, queries: int = 8, keys: int = 8, width: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(batch, heads, queries, width),
        torch.randn(batch, heads, keys, width),
        torch.randn(batch, heads, keys, width),
    )


@pytest.fixture
def chosen(fake: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    """The kernel "fake" as what an automatic choice finds, on a GPU that nothing was measured on."""
    monkeypatch.setattr(kernels, "ours", lambda: (fake.kernel(),))
    monkeypatch.setattr(choose, "gpu_of", lambda q: gpu_named("l4"))
    return fake


def test_a_second_call_of_the_kind_neither_checks_nor_plans(fake: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    scaled_dot_product_attention(q, k, v, kernel="fake")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the second call must find itself bound")

    for name in ("check_call", "_new_plan"):
        monkeypatch.setattr(choose, name, fail)
    out = scaled_dot_product_attention(q, k + 1, v + 1, kernel="fake")
    assert (len(fake.planned), fake.launches) == (1, 2)
    assert torch.all(out == 16**-0.5)


def test_what_decides_a_launch_makes_a_new_plan(fake: FakeKernel) -> None:
    q, k, v = tensors()
    memory = torch.randn(2 * 4 * 8 * 16 + 1)
    wide, token_first = torch.randn(2, 4, 8, 20), torch.randn(2, 8, 4, 16).transpose(1, 2)
    scaled_dot_product_attention(q, k, v, enable_gqa=True, kernel="fake")  # which shares the plan of the first
    variants: list[Callable[[], object]] = [
        lambda: scaled_dot_product_attention(q, k, v, kernel="fake"),
        lambda: scaled_dot_product_attention(q, k, v, is_causal=True, kernel="fake"),
        lambda: scaled_dot_product_attention(q, k, v, scale=-1.0, kernel="fake"),
        lambda: scaled_dot_product_attention(wide[..., :16], k, v, kernel="fake"),  # strides of other alignment
        lambda: scaled_dot_product_attention(q, k[:1].expand(2, 4, 8, 16), v, kernel="fake"),  # a stride of 0
        lambda: scaled_dot_product_attention(token_first, k, v, kernel="fake"),
        lambda: scaled_dot_product_attention(memory[1:].view(2, 4, 8, 16), k, v, kernel="fake"),  # alignment of one
        lambda: scaled_dot_product_attention(q, memory[1:].view(2, 4, 8, 16), v, kernel="fake"),  # and of another
        lambda: scaled_dot_product_attention(q[:, :, :1], k, v, kernel="fake"),  # one query
        lambda: scaled_dot_product_attention(*tensors(keys=17), kernel="fake"),  # another class of lengths
        lambda: scaled_dot_product_attention(*tensors(heads=5), kernel="fake"),
        lambda: scaled_dot_product_attention(q.half(), k.half(), v.half(), kernel="fake"),
    ]
    for count, call in enumerate(variants, start=1):
        call()
        call()
        assert len(fake.planned) == count, count
        assert count < len(fake.bound) <= 2 * count + 1, count  # and stored


def test_lengths_of_a_class_share_a_plan_and_are_bound_each(fake: FakeKernel) -> None:
    for keys in range(97, 113):
        q, k, v = tensors(keys=keys)
        assert scaled_dot_product_attention(q, k, v, kernel="fake").shape == q.shape
    assert (len(fake.planned), len(fake.bound), fake.launches) == (1, 16, 16)


def test_grown_keys_are_bound_without_a_look_at_their_class(chosen: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    plan_call = choose.plan_call
    monkeypatch.setattr(operator, "plan_call", lambda given, *rest: looked.append(given.k.shape[2]) or plan_call(given, *rest))
    query, cache = torch.randn(1, 4, 1, 16), torch.randn(2, 1, 4, 128, 16)

    def call(*kv: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, *kv)

    def grown(keys: int, width: int = 16) -> list[torch.Tensor]:
        return [one[:, :, :keys, :width].clone() for one in cache]

    for keys in range(65, 81):  # one class
        assert torch.all(call(*grown(keys)) == 0.25)
    assert looked == [65, 66]
    assert (len(chosen.planned), chosen.launches) == (1, 16)
    bound = len(chosen.bound)
    for _ in range(2):
        call(*grown(70))
    assert len(chosen.bound) == bound + 1  # and stored
    for other in (grown(81), grown(70, 8), [torch.randn(4 * 71 * 16 + 1)[1:].view(1, 4, 71, 16) for _ in range(2)]):
        query = torch.randn(1, 4, 1, other[0].shape[3])
        call(*other)
    assert looked == [65, 66, 81, 70, 71]  # another class, another width, other alignments
    query = torch.randn(1, 4, 1, 16)
    with pytest.raises(ValueError, match="72"):
        call(grown(72)[0], grown(73)[1])


@pytest.mark.parametrize("is_causal", [False, True])
def test_prompts_of_new_lengths_are_bound_without_a_look_at_their_class(
    is_causal: bool, chosen: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[tuple[int, int]] = []
    plan_call = choose.plan_call

    def recording(given: Any, *rest: Any) -> Any:
        looked.append((given.q.shape[2], given.k.shape[2]))
        return plan_call(given, *rest)

    monkeypatch.setattr(operator, "plan_call", recording)

    def call(rows: int, keys: int, layout: str = "bhsd", width: int = 16, heads: int = 4) -> None:
        shapes = [(1, heads, rows, width), (1, heads, keys, width), (1, heads, keys, width)]
        tensors = [torch.randn(shape) for shape in shapes]
        if layout == "bshd":
            tensors = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in tensors]
        scaled_dot_product_attention(*tensors, is_causal=is_causal)

    for length in range(65, 81):  # one class
        call(length, length)
    assert looked == [(65, 65), (66, 66)]
    bound = len(chosen.bound)
    for _ in range(3):
        call(70, 70)
    assert len(chosen.bound) == bound + 1  # and stored
    looked.clear()
    call(81, 81)  # another class
    call(67, 71)  # not square
    call(68, 68, layout="bshd")
    call(68, 68, width=32)
    call(68, 68, heads=2)
    assert looked == [(81, 81), (67, 71), (68, 68), (68, 68), (68, 68)]


def test_measured_lengths_are_no_part_of_their_class(chosen: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_measured_sizes", lambda: frozenset({(1, 4, 4, 70, 70, 16, 16)}))
    for length in (69, 71, 72, 70, 70, 73):
        scaled_dot_product_attention(*(torch.randn(1, 4, length, 16) for _ in range(3)))
    assert len(chosen.planned) == 2


def test_grown_keys_whose_strides_a_kernel_refuses_are_served_by_another(chosen: FakeKernel) -> None:
    query, cache = torch.randn(1, 4, 1, 16), torch.randn(2, 1, 4, 128, 16)
    for keys in range(65, 72):
        chosen.refused_rows = 1 if keys == 70 else None
        k, v = (one[:, :, :keys].clone() for one in cache)
        expected = torch.nn.functional.scaled_dot_product_attention(query, k, v) if keys == 70 else torch.full_like(query, 0.25)
        torch.testing.assert_close(scaled_dot_product_attention(query, k, v), expected)


def test_the_top_left_mask_of_equal_lengths_is_a_kind_of_its_own(fake: FakeKernel) -> None:
    """Its problem is normalised to the bottom-right one, whose offset would be wrong for unequal lengths."""
    for keys in (100, 101, 102):
        q, k, v = tensors(queries=100, keys=keys)
        scaled_dot_product_attention(q, k, v, is_causal=True, kernel="fake")
    assert fake.planned == ["attn b2 h4 q100 d16 fp32 causal", "attn b2 h4 q100 k101 d16 fp32 causal-topleft"]


def test_the_choice_is_the_classs_and_not_of_the_length_that_came_first(
    monkeypatch: pytest.MonkeyPatch, chosen: FakeKernel
) -> None:
    seen: list[AttentionProblem] = []
    select = any_choice.select

    def spy(problem: AttentionProblem, *args: Any) -> Any:
        seen.append(problem.representative())
        return select(problem, *args)

    monkeypatch.setattr(any_choice, "select", spy)
    for lengths in ((97, 104, 112), (112, 104, 97)):
        for cache in (calls.LAUNCHES, choose.PLANS, choose.LAUNCHERS):
            cache.clear()
        for keys in lengths:
            scaled_dot_product_attention(*tensors(keys=keys))
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_a_measured_problem_is_a_class_of_its_own(chosen: FakeKernel) -> None:
    entry = next(entry.problem for entry in committed_table().entries if str(entry.problem) == "attn b1 h1 q65 d64 fp16")
    assert isinstance(entry, AttentionProblem)
    for length in (64, 65, 66, 80):
        q, k, v = (torch.randn(1, 1, length, 64, dtype=torch.float16) for _ in range(3))
        scaled_dot_product_attention(q, k, v)
    assert chosen.planned == [f"attn b1 h1 q{length} d64 fp16" for length in (64, 65, 66)]


def test_wrong_sizes_are_refused_though_their_class_has_a_plan(fake: FakeKernel) -> None:
    q, k, v = tensors(keys=100)
    scaled_dot_product_attention(q, k, v, kernel="fake")
    with pytest.raises(ValueError, match="value has sequence length 99 and key has 100"):
        scaled_dot_product_attention(q, k, v[:, :, :99], kernel="fake")
    with pytest.raises(ValueError, match="key has batch size 1 and query has 2"):
        scaled_dot_product_attention(q, k[:1], v[:1], kernel="fake")
    with pytest.raises(ValueError, match="value has batch size 1 and query has 2"):
        scaled_dot_product_attention(q, k, v[:1], kernel="fake")
    with pytest.raises(ValueError, match="value has 4 heads and key has 2; they must be equal"):
        scaled_dot_product_attention(q, k[:, :2], v, kernel="fake")
    with pytest.raises(ValueError, match="key has head_dim 8 and query has 16"):
        scaled_dot_product_attention(q, k[..., :8], v, kernel="fake")
    with pytest.raises(TypeError, match=r"key has dtype torch.float16 and query has torch.float32"):
        scaled_dot_product_attention(q, k.half(), v, kernel="fake")
    with pytest.raises(ValueError, match="value has stride 2 in its last dimension"):
        scaled_dot_product_attention(q, k, v.repeat(1, 1, 1, 2)[..., ::2], kernel="fake")
    assert fake.launches == 1


def test_strides_that_a_kernel_refuses_pass_it_over_for_that_call_alone(chosen: FakeKernel) -> None:
    chosen.refused_rows = 20
    for queries, kernel in ((19, "fake"), (20, "sdpa"), (18, "fake")):
        q, k, v = tensors(queries=queries, keys=9)
        expected = torch.full_like(q, 0.25) if kernel == "fake" else torch.nn.functional.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v), expected)
    with pytest.raises(CannotServe, match=r"kernel 'fake' cannot serve attn b2 h4 q20 k9 .*: these strides"):
        scaled_dot_product_attention(*tensors(queries=20, keys=9), kernel="fake")


def test_positive_scales_share_a_plan_and_each_reaches_the_kernel(fake: FakeKernel) -> None:
    q, k, v = tensors()
    for scale in (0.5, 2, None, 3.5):
        out = scaled_dot_product_attention(q, k, v, scale=scale, kernel="fake")
        assert torch.all(out == (16**-0.5 if scale is None else scale))
    assert len(fake.planned) == 1
    assert len(fake.bound) == 2  # and stored


def test_the_output_keeps_the_memory_order_of_the_queries(fake: FakeKernel) -> None:
    q, k, _ = tensors(queries=3)
    value = torch.randn(2, 4, 8, 5)
    out = scaled_dot_product_attention(q, k, value, kernel="fake")
    assert (out.shape, out.stride()) == ((2, 4, 3, 5), (60, 15, 5, 1))
    token_first = torch.randn(2, 3, 4, 16).transpose(1, 2)
    out = scaled_dot_product_attention(token_first, k, value, kernel="fake")
    assert (out.shape, out.stride()) == ((2, 4, 3, 5), (60, 5, 20, 1))
    assert fake.bound[-1] == ((2, 4, 3, 16), out.stride())
    assert "bshd" in fake.planned[-1]


def reachable(roots: list[object]) -> list[object]:
    """Everything that the roots hold, but for what every module, class and function holds anyway."""
    seen: dict[int, object] = {}
    todo = list(roots)
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | type(torch)):
            continue
        seen[id(one)] = one
        if callable(one) and hasattr(one, "__closure__"):
            todo += [cell.cell_contents for cell in one.__closure__ or ()] + list(one.__defaults__ or ())
        else:
            todo += gc.get_referents(one)
    return list(seen.values())


def test_neither_plans_nor_calls_hold_a_tensor(chosen: FakeKernel) -> None:
    """A plan that kept the tensors of its first call kept 513 MB alive."""
    alive = []
    for keys in (8, 9, 100, 300):
        for token_first in (False, True):
            q, k, v = tensors(keys=keys)
            if token_first:
                q = q.transpose(1, 2).contiguous().transpose(1, 2)
            out = scaled_dot_product_attention(q, k, v)
            lse = torch.zeros(2, 4, 8)
            flash_attention_forward(q, k, v, lse, True, 0.5)
            alive += [weakref.ref(one) for one in (q, k, v, out, lse)]
    del q, k, v, out, lse
    assert [ref() for ref in alive if ref() is not None] == []
    held = reachable([calls.LAUNCHES, choose.PLANS, choose.LAUNCHERS])
    assert len(held) > 100
    assert not [one for one in held if isinstance(one, torch.Tensor)]


def test_a_stored_launch_serves_what_is_like_it_and_nothing_else(chosen: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    expected = scaled_dot_product_attention(q, k, v)
    assert not calls.LAUNCHES  # no guards are made for a length that may never come again
    scaled_dot_product_attention(q, k, v)

    def new_call(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(operator, "_serve", new_call)
    assert scaled_dot_product_attention(q.clone(), k.clone(), v.clone()).shape == expected.shape
    for others in (tensors(keys=k.shape[2] + 1), (q, k.transpose(1, 2).contiguous().transpose(1, 2), v)):
        with pytest.raises(AssertionError):
            scaled_dot_product_attention(*others)
    with pytest.raises(AssertionError):  # gradients are another call's
        scaled_dot_product_attention(q, k, v.clone().requires_grad_())


def test_the_caches_are_bounded_in_number_and_so_in_bytes(chosen: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose.PLANS, "max_entries", 3)
    monkeypatch.setattr(calls.LAUNCHES, "max_entries", 5)
    for rows in range(1, 60):
        q, k, v = tensors(queries=rows)
        scaled_dot_product_attention(q, k, v)
        assert len(choose.PLANS) <= 3
        assert len(calls.LAUNCHES) <= 5
    assert len(chosen.bound) >= 59


def test_a_refused_plan_is_an_error_where_the_kernel_was_asked_for(fake: FakeKernel) -> None:
    fake.refusal = "k is not aligned to 16 bytes"
    q, k, v = tensors()
    with pytest.raises(CannotServe, match=r"kernel 'fake' cannot serve .*: k is not aligned to 16 bytes; sdpa can"):
        scaled_dot_product_attention(q, k, v, kernel="fake")
    assert not choose.PLANS
    assert not calls.LAUNCHES


def test_a_refused_plan_passes_the_kernel_over_where_the_choice_is_automatic(chosen: FakeKernel) -> None:
    chosen.refusal = "q is not aligned to 16 bytes"
    decision = explain(*tensors())
    assert (decision.kernel, decision.others) == ("sdpa", (("fake", "q is not aligned to 16 bytes"),))


def test_explain_says_where_triton_launches_by_its_slower_path(chosen: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("flashmoe_science.ops.launch", reason="Triton is not installed here")
    for wrapped in (set(), {"a kernel"}):
        choose.PLANS.clear()
        monkeypatch.setattr(launch, "_WRAPPED", wrapped)
        assert ("launched by the Python of Triton" in explain(*tensors()).reason) is bool(wrapped)


def test_a_peer_asked_for_by_name_is_held_to_what_it_supports_at_every_length() -> None:
    q, k, v = tensors(queries=17, keys=20)
    scaled_dot_product_attention(q, k, v, kernel="sdpa_math")
    with pytest.raises(CannotServe, match="kernel 'sdpa_flash' cannot serve attn b2 h4 q17 k20 d16 fp32 on the CPU"):
        scaled_dot_product_attention(q, k, v, kernel="sdpa_flash")


def test_gradients_are_an_error_for_a_kernel_asked_for_and_pytorch_otherwise(fake: FakeKernel) -> None:
    q, k, v = tensors()
    q.requires_grad_()
    with pytest.raises(CannotServe, match=r"'fake' is asked for by name and an input requires gradients"):
        scaled_dot_product_attention(q, k, v, kernel="fake")
    with torch.no_grad():
        scaled_dot_product_attention(q, k, v, kernel="fake")
    assert fake.launches == 1
    decision = explain(q, k, v)
    assert (decision.kernel, decision.basis) == ("sdpa", "required")
    assert "gradients" in decision.reason
    scaled_dot_product_attention(q, k, v).sum().backward()
    assert q.grad is not None


class CountingMode(TorchDispatchMode):
    """Counts the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operator(fake: FakeKernel) -> None:
    q, k, v = tensors()
    with CountingMode() as mode:
        out = scaled_dot_product_attention(q, k, v, kernel="fake")
    assert mode.seen == ["flashmoe.attention_forward.default"]
    assert torch.all(out == 0.25)


class Tagged(torch.Tensor):
    """A subclass whose functions return it."""


def test_a_subclass_goes_through_the_operator_and_comes_back(fake: FakeKernel) -> None:
    q, k, v = (tensor.as_subclass(Tagged) for tensor in tensors())
    assert isinstance(scaled_dot_product_attention(q, k, v, kernel="fake"), Tagged)


def test_a_lazily_negated_view_is_refused_by_a_kernel_also_where_its_kind_was_served(fake: FakeKernel) -> None:
    q, k, v = tensors()
    scaled_dot_product_attention(q, k, v, kernel="fake")
    with pytest.raises(ValueError, match=r"query is a lazily negated view"):
        scaled_dot_product_attention(torch._neg_view(q), k, v, kernel="fake")


def test_the_log_sum_exp_goes_straight_into_the_users_tensor(chosen: FakeKernel) -> None:
    q, k, v = tensors()
    for memory in (torch.zeros(65)[:64], torch.zeros(65)[1:], torch.zeros(2, 4, 8)):
        flash_attention_forward(q, k, v, memory, False, 0.5)
        assert torch.all(memory == float(chosen.launches))
    token_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    result = flash_attn_func(*token_first, return_attn_probs=True)
    assert isinstance(result, tuple)
    out, lse, nothing = result
    assert (out.shape, lse.shape, nothing) == ((2, 8, 4, 16), (2, 4, 8), None)


def test_a_problem_is_what_its_tensors_say() -> None:
    q, k, v = tensors(heads=4, queries=3)
    assert (
        str(problem_of(Tensors(q, k[:, :2], v[:, :2, :, :5]), Options("causal"))) == "attn b2 h4 hk2 q3 k8 d16 dv5 fp32 causal"
    )
