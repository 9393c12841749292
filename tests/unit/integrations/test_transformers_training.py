"""A training step of transformers' models by ``attn_implementation="fms"`` against "eager": the loss and every gradient."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from tests.unit.integrations.test_transformers_attention import (
    DIM,
    HEADS,
    TOKENS,
    call,
    drawn,
    lower,
    model_of,
    root_mean_square,
)
from tests.unit.interpreter import Interpreter
from transformers import PreTrainedModel

from flashmoe_science.integrations import transformers as ours

FAMILIES = ("llama", "qwen3", "gemma2", "gpt-oss")


@pytest.fixture(autouse=True, scope="module")
def registered_on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    ours.register()
    yield
    torch.set_num_threads(before)


def padded(*rows: tuple[int, int]) -> dict[str, Any]:
    """Tokens of which each row's from the first to the last are valid."""
    mask = torch.zeros_like(TOKENS)
    for row, (first, last) in enumerate(rows):
        mask[row, first:last] = 1
    labels = TOKENS.masked_fill(mask == 0, -100)
    labels[:, 1:][mask[:, :-1] == 0] = -100  # they would be predicted from padding
    return {"input_ids": TOKENS, "attention_mask": mask, "labels": labels}


PLACES = torch.cat([torch.arange(length) for length in (5, 1, 9, 7)])[None]
STARTS = torch.tensor([0, 5, 6, 15, 22], dtype=torch.int32)
LABELS = TOKENS.reshape(1, -1).masked_fill(PLACES == 0, -100)  # as transformers' collators label what begins a sequence
PACKED = {"input_ids": TOKENS.reshape(1, -1), "labels": LABELS}
LENGTHS = {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_q": 9, "max_length_k": 9}
INPUTS: dict[str, dict[str, Any]] = {
    "whole": {"input_ids": TOKENS, "labels": TOKENS},
    "padded to the left": padded((4, 11), (0, 11)),
    "padded to the right": padded((0, 7), (0, 11)),
    "packed by positions": {**PACKED, "position_ids": PLACES},
    "packed by lengths": {**PACKED, **LENGTHS},
    "packed by both": {**PACKED, **LENGTHS, "position_ids": PLACES},
    "packed by lengths on the device": {
        **PACKED, **LENGTHS, "max_length_q": STARTS.diff().max(), "max_length_k": STARTS.diff().max()
    },
}  # fmt: skip


CASES = [(family, name) for family in FAMILIES for name in INPUTS]
CASES.remove(("gpt-oss", "packed by positions"))  # transformers does not tell this model's masks of positions


class Step(NamedTuple):
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def losses(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    inputs = {name: one.to(model.device) if isinstance(one, torch.Tensor) else one for name, one in inputs.items()}
    loss: torch.Tensor = model(**inputs, use_cache=False).loss
    return loss


def one_by_one(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    """The loss of packed sequences, of which each is a batch of its own."""
    total, count = torch.zeros((), device=model.device), 0
    for first, last in zip(STARTS[:-1].tolist(), STARTS[1:].tolist(), strict=True):
        if last - first > 1:  # one token predicts none
            own = {name: inputs[name][:, first:last] for name in ("input_ids", "labels")}
            total, count = total + losses(model, own) * (last - first - 1), count + last - first - 1
    return total / count


def step(model: PreTrainedModel, loss: torch.Tensor) -> Step:
    loss.backward()
    found = {name: one.grad.double().cpu() for name, one in model.named_parameters() if one.grad is not None}
    return Step(loss.detach().double().cpu(), found)


@cache
def eager(family: str, name: str) -> Step:
    model = model_of(family, "eager").train()
    return step(model, (one_by_one if name == "packed" else losses)(model, PACKED if name == "packed" else INPUTS[name]))


def expected(family: str, name: str) -> Step:
    return eager(family, "packed" if name.startswith("packed") else name)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_step_is_that_of_eager(family: str, name: str, checkpointed: bool) -> None:
    model = model_of(family, "fms").train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    right, got = expected(family, name), step(model, losses(model, INPUTS[name]))
    torch.testing.assert_close(got.loss, right.loss, rtol=1e-5, atol=1e-5)
    assert got.gradients.keys() == right.gradients.keys()
    assert family != "gpt-oss" or "model.layers.0.self_attn.sinks" in got.gradients
    for one, gradient in got.gradients.items():
        torch.testing.assert_close(gradient, right.gradients[one], rtol=1e-3, atol=2e-5, msg=f"{one} differs")


@pytest.mark.parametrize(
    "cases",
    [
        ("llama padded to the left", "gemma2 packed by positions"),
        pytest.param([f"{family} {name}" for family, name in CASES], marks=[pytest.mark.slow, pytest.mark.redundant]),
    ],
    ids=["few", "all"],
)
def test_a_step_by_our_kernels_is_that_of_eager(cases: list[str], interpreted: Interpreter) -> None:
    for case, found in interpreted("integrations/trained_models.py", *cases).items():
        assert found["called"] == ["_gradients", "_gradients"], case  # a layer each
        assert found["loss"] < 1e-5, case
        assert found["error"] < 2e-5, case


def test_few_packed_tokens_do_not_see_each_other() -> None:
    """Fewer than those up to which padded rows are served by lengths."""
    q, k, v = drawn()
    starts = torch.tensor([0, 2, 5, 5, 10])  # of both rows together
    more = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    pieces = [
        call(*(one.transpose(1, 2).reshape(1, 10, -1, DIM)[:, first:last].transpose(1, 2) for one in (q, k, v)))[0]
        for first, last in ((0, 2), (2, 5), (5, 10))
    ]
    expected = torch.cat(pieces).view(2, 5, HEADS, DIM)
    for mask in (None, lower(5, 5)[None, None], torch.where(lower(5, 5), 0.0, -torch.inf)[None, None]):
        torch.testing.assert_close(call(q, k, v, mask, **more), expected)
        torch.testing.assert_close(call(q, k, v, mask, dropout=1e-30, **more), expected)
    bias = torch.zeros(1, HEADS, 5, 5)
    torch.testing.assert_close(call(q, k, v, lower(5, 5)[None, None], position_bias=bias, **more), expected)
    with pytest.raises(ValueError, match="does not serve position_bias with cu_seq_lens_q and no mask"):
        call(q, k, v, position_bias=bias, **more)


@pytest.fixture
def by_our_kernels() -> Iterator[None]:
    """PyTorch's switch for deterministic algorithms, with which a backward of ours serves."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("by_our_kernels")
@pytest.mark.parametrize(("family", "name"), CASES)
def test_on_a_gpu_a_step_is_as_near_to_fp32_as_that_of_eager(family: str, name: str) -> None:
    dtype = torch.float32 if family == "gpt-oss" else torch.bfloat16  # of two experts that are as good, rounding would choose
    steps = []
    for implementation in ("fms", "eager"):
        model = model_of(family, implementation, dtype, "cuda").train()
        each = implementation == "eager" and name.startswith("packed")
        steps.append(step(model, one_by_one(model, PACKED) if each else losses(model, INPUTS[name])))
    for one, exact in expected(family, name).gradients.items():
        got, eager = (root_mean_square(each.gradients[one] - exact) for each in steps)
        assert got <= 2 * eager + 2**-8 * root_mean_square(exact), one


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
@torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
def test_a_step_compiles_once_for_packed_lengths_on_the_device(family: str) -> None:
    """The longest length is a tensor of no dimension: neither read nor a part of what is compiled."""
    torch._dynamo.reset()
    model = model_of(family, "fms").train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for lengths in ((5, 1, 9, 7), (11, 2, 3, 6)):
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        longest = starts.diff().max()
        places = torch.cat([torch.arange(one) for one in lengths])[None]
        inputs = {
            **PACKED, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest,
            "labels": PACKED["input_ids"].masked_fill(places == 0, -100),
        }  # fmt: skip
        found = []
        for one in (compiled, model):
            model.zero_grad()
            found.append(step(model, losses(one, inputs)))
        for name, gradient in found[1].gradients.items():
            torch.testing.assert_close(found[0].gradients[name], gradient, rtol=1e-3, atol=2e-5)
