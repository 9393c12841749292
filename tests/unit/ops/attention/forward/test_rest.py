"""Rows of packed queries past the last sequence get zeros and log-sum-exps of -inf, from every kernel that serves such."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from tests.unit import gluon_interpreter
from tests.unit.interpreter import Interpreter
from tests.unit.ops.attention.forward import rest

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume, current_gpu
from flashmoe_science.operations import kernel_named
from flashmoe_science.ops.attention.call.kernel import AttentionOutput
from flashmoe_science.ops.attention.device import merge_gluon
from flashmoe_science.ops.attention.forward.chunked_sm90 import launch as chunked
from flashmoe_science.ops.attention.forward.prefill_sm90 import launch as prefill
from flashmoe_science.ops.attention.forward.prefill_sm90 import packed_schedule
from flashmoe_science.ops.attention.front import pytorch

H100 = gpu_named("h100")
NAMES = ("split_triton", "chunk_gluon_sm90", "fwd_gluon_sm90")


def wrong(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {case: reasons for case, reasons in found.items() if reasons}


def test_the_portable_kernel_writes_them(interpreted: Interpreter) -> None:
    found = interpreted("ops/attention/forward/rest.py")
    assert len(found) == (len(rest.RESTS) + 1) * len(rest.OF_SPLITS) + 2 * len(rest.RESTS)
    assert wrong(found) == {}


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_source_of_each_kernel_writes_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_argument(tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else gluon_interpreter.address_of(tensor)

    for module in (chunked, prefill, merge_gluon, packed_schedule):
        monkeypatch.setattr(module, "Build", gluon_interpreter.Build)
    for module in (chunked, prefill):
        monkeypatch.setattr(module, "argument", as_argument)
    texts = tuple(text for text in rest.TEXTS if name != "fwd_gluon_sm90" or "d40" not in text)  # whose product is assembly
    with assume(H100):
        found = dict(rest.cases(kernel_named(name), H100, torch.device("cpu"), texts))
    assert len(found) >= 5 * len(rest.RESTS)
    assert wrong(found) == {}


def test_pytorchs_operators_write_them() -> None:
    """Each sequence by itself, and all padded to one length; the gradient of the rest is 0."""
    for text, least in product(rest.TEXTS, (-1, 2**60)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pytorch, "_SCORES_OF_A_CALL", least)
            for count in rest.RESTS:
                inputs = rest.inputs_of(text, count, torch.device("cpu"))
                q = inputs.q.clone().requires_grad_()
                out, lse = pytorch.pytorch_attention(inputs.tensors._replace(q=q), inputs.options, inputs.softmax_scale)
                assert rest.complaints(inputs, AttentionOutput(out.detach(), lse if lse is None else lse.detach())) == []
                (gradient,) = torch.autograd.grad(out.float().sum(), q)
                assert not gradient[:, :, gradient.shape[2] - count :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_writes_them_on_a_gpu(name: str) -> None:
    gpu, kernel = current_gpu(), kernel_named(name)
    assert gpu is not None
    found = dict(rest.cases(kernel, gpu, torch.device("cuda")))
    if not found:
        pytest.skip(f"{gpu.product} has no {name}")
    assert wrong(found) == {}
