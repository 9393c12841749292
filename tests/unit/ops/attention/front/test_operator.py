"""The operator under PyTorch's own checks, torch.compile, fake tensors and autograd, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashmoe_science as fm

OPERATOR = torch.ops.flashmoe.attention_forward.default


def tensors(queries: int = 7, keys: int = 9, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    shapes = ((2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 24))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad) for shape in shapes]


@pytest.mark.parametrize(
    ("mask", "return_lse", "grad"),
    [
        ("full", False, False),
        ("full", True, True),
        pytest.param("causal", False, True, marks=[pytest.mark.slow, pytest.mark.redundant]),
        ("causal-topleft", True, False),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by opcheck of PyTorch 2.14
def test_opcheck(mask: str, return_lse: bool, grad: bool) -> None:
    torch.library.opcheck(OPERATOR, (*tensors(grad=grad), mask, 0.3, return_lse, None))


def test_opcheck_with_token_first_memory_and_more_queries_than_keys() -> None:
    q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors(9, 5))
    torch.library.opcheck(OPERATOR, (q, k, v, "causal", None, True, None))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return fm.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    result = fm.flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True, return_attn_probs=True)
    assert isinstance(result, tuple)
    return result


def filled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.full((q.shape[0] * q.shape[1] * q.shape[2],), float("nan"))
    return fm.flash_attention_forward(q, k, v, lse, True, 0.5), lse


@pytest.mark.parametrize("function", [attention, flash, filled, fm.flash_attention_science])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_keeps_one_graph_and_the_result(function: Callable[..., object], dynamic: bool) -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    for queries, keys in ((7, 9), (12, 30)):
        inputs = tensors(queries, keys)
        torch.testing.assert_close(compiled(*inputs), function(*inputs), rtol=0, atol=0)
    assert len(graphs) == (1 if dynamic else 2)
    assert all(any(node.target is OPERATOR for node in graph.graph.nodes) for graph in graphs)


def test_a_scale_that_changes_is_traced_once() -> None:
    torch._dynamo.reset()
    q, k, v = (one.repeat_interleave(4 // one.shape[1], 1) for one in tensors())
    mask = torch.rand(q.shape[2], k.shape[2]) > 0.3

    def attends(scale: float, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        masked = fm.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        return masked, fm.flash_attention_forward(q, k, v, lse, True, scale)

    compiled = torch.compile(attends, fullgraph=True, dynamic=True, backend="eager")
    for scale in (0.3, 0.5):
        torch.testing.assert_close(compiled(scale, q.new_empty(q.shape[:3])), attends(scale, q.new_empty(q.shape[:3])))


def test_compiled_gradients_are_those_of_eager() -> None:
    torch._dynamo.reset()
    eager, compiled = tensors(grad=True), tensors(grad=True)
    attention(*eager).square().sum().backward()
    torch.compile(attention, fullgraph=True, backend="aot_eager")(*compiled).square().sum().backward()
    for a, b in zip(eager, compiled, strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.slow
def test_compile_with_inductor() -> None:
    torch._dynamo.reset()
    inputs = tensors()
    torch.testing.assert_close(torch.compile(attention, fullgraph=True)(*inputs), attention(*inputs))


def test_compile_holds_the_rules_of_the_eager_call() -> None:
    torch._dynamo.reset()
    q, k, v = tensors()
    without_gqa = torch.compile(fm.scaled_dot_product_attention, backend="eager")
    # As PyTorch says it, whose function may broadcast; from 2.14 on in the words of the eager call.
    with pytest.raises(Exception, match=r"broadcast a dimension of length 2|key has 2 heads and query has 4"):
        without_gqa(q, k, v)
    with_flash = torch.compile(fm.flash_attention_science, backend="eager")
    with pytest.raises(Exception, match="k has 2 heads and q has 3; the first must divide the second"):
        with_flash(q[:, :3], k, v)


def test_fake_tensors_have_the_shapes_strides_and_dtypes_of_real_ones() -> None:
    for token_first in (False, True):
        real = tensors(dtype=torch.bfloat16)
        if token_first:
            real = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in real]
        out, lse = OPERATOR(*real, "causal", None, True, None)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(tensor) for tensor in real]
            fake_out = fm.flash_attention_science(*fakes, causal=True)
            fake_lse = OPERATOR(*fakes, "causal", None, True, None)[1]
        assert (fake_out.shape, fake_out.stride(), fake_out.dtype) == (out.shape, out.stride(), out.dtype)
        assert (fake_lse.shape, fake_lse.stride(), fake_lse.dtype) == (lse.shape, lse.stride(), lse.dtype)


def test_the_operator_refuses_a_kernel_where_gradients_are_needed_and_its_backward_cannot_serve() -> None:
    with pytest.raises(ValueError, match=r"'fwd_triton' is asked for by name and an input requires gradients: .*need a GPU"):
        OPERATOR(*tensors(grad=True), "full", None, False, "fwd_triton")


def test_no_log_sum_exp_is_an_empty_tensor() -> None:
    assert OPERATOR(*tensors(), "full", None, False, None)[1].shape == (0,)


class Layer(torch.nn.Module):
    """A module whose forward is one call."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v)


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_operator(strict: bool) -> None:
    inputs = tuple(tensors())
    program = torch.export.export(Layer(), inputs, strict=strict)
    assert [node.target for node in program.graph.nodes].count(OPERATOR) == 1
    torch.testing.assert_close(program.module()(*inputs), attention(*inputs), rtol=0, atol=0)


def test_function_transforms_see_through_the_call() -> None:
    q, k, v = tensors()
    grad = torch.func.grad(lambda x: attention(x, k, v).square().sum())(q)
    leaf = q.clone().requires_grad_()
    attention(leaf, k, v).square().sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(grad, leaf.grad)
