"""Public calls that are differentiated by our kernels (a script for Triton's interpreter): what came of one case, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import flashmoe_science as fm
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume
from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops import launch

DEVICE = torch.device("cpu")


def leaves() -> list[torch.Tensor]:
    generator, shapes = torch.Generator().manual_seed(1), ((2, 20, 4, 16), (2, 33, 2, 16), (2, 33, 2, 24))
    return [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]


def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, deterministic: bool = True, **more: Any) -> torch.Tensor:
    out, lse, _ = fm.flash_attn_func(q, k, v, causal=True, deterministic=deterministic, return_attn_probs=True, **more)
    return out.square().sum() + lse.sin().sum()


def gradients(function: Any, *more: Any) -> list[torch.Tensor]:
    inputs = leaves()
    return list(torch.autograd.grad(function(*inputs, *more), inputs))


def errors(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[float]:
    return [(a - b).abs().max().item() for a, b in zip(one, other, strict=True)]


def eager() -> dict[str, Any]:
    ours = gradients(loss)
    node = fm.scaled_dot_product_attention(*(one.transpose(1, 2) for one in leaves()), enable_gqa=True, kernel="bwd_triton")
    bits = all(map(torch.equal, ours, gradients(loss)))
    return {"errors": errors(ours, gradients(loss, False)), "bits": bits, "node": type(node.grad_fn).__name__}


def compiled() -> dict[str, Any]:
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    function = torch.compile(loss, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    return {"errors": errors(gradients(function), gradients(loss, False)), "graphs": "\n".join(graphs)}


def dynamic() -> dict[str, Any]:
    """One compilation for all lengths."""
    torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = 1, True
    function = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    found = []
    for queries, keys in ((20, 33), (7, 9)):
        generator, shapes = torch.Generator().manual_seed(3), ((3, queries, 4, 16), (3, keys, 2, 16), (3, keys, 2, 24))
        inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        found += errors(*(list(torch.autograd.grad(each(*inputs), inputs)) for each in (function, loss)))
    return {"errors": found}


def transformed() -> dict[str, Any]:
    """The gradients of each sample, where equal bits are asked of PyTorch, and of the call."""
    alone = [one.unsqueeze(1) for one in leaves()]
    torch.use_deterministic_algorithms(True)
    of_each = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), (0, 0, 0, None))
    ours = [one.squeeze(1) for one in of_each(*(one.detach() for one in alone), False)]
    torch.use_deterministic_algorithms(False)
    try:
        of_each(*(one.detach() for one in alone), True)
        refusal = ""
    except CannotServe as error:
        refusal = str(error)
    return {"errors": errors(ours, gradients(loss)), "refusal": refusal}


def autocast() -> dict[str, Any]:
    def cast(*inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(*inputs, kernel="fwd_triton")  # in 16 bits one that is not interpreted would be chosen

    ours = gradients(cast)
    return {"errors": errors(ours, gradients(loss)), "dtypes": [str(one.dtype) for one in ours]}


def again() -> dict[str, Any]:
    """Calls alike but for one thing, one after the other: the second's gradients are not by the first's launch (FA #2402,
    #2298, #2686)."""
    q, k, v = leaves()
    v = v[..., :16].detach().requires_grad_()
    dense = torch.randn(q.shape, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    apart = dense.new_empty(dense.numel() + 1)[1:].view(dense.shape).copy_(dense)
    wide = dense.new_empty(*dense.shape[:3], 32)[..., :16].copy_(dense)
    plain = {"causal": True, "softcap": 2.5}
    found = {}
    for name, changed, dout in (
        ("first", {}, dense),
        ("a cap with the same ceiling", {"softcap": 3.0}, dense),
        ("a scale", {"softmax_scale": 0.5}, dense),
        ("a window", {"window_size": (9, -1)}, dense),
        ("another mask", {"causal": False}, dense),
        ("an address that is no multiple of 16", {}, apart),
        ("other strides", {}, wide),
        ("expanded", {}, dense[:1, :1].expand_as(dense)),
        ("the first again", {}, dense),
    ):
        both = []
        for deterministic in (True, False):
            out = fm.flash_attn_func(q, k, v, **{**plain, **changed}, deterministic=deterministic)
            assert isinstance(out, torch.Tensor)
            both.append(list(torch.autograd.grad(out, (q, k, v), dout)))
        found[name] = max(errors(*both))
    return {"errors": found}


def around() -> dict[str, Any]:
    """A call like one before chooses nothing anew and goes around PyTorch's dispatcher, forward and backward, until PyTorch is
    set to deterministic algorithms."""
    from flashmoe_science.ops.attention.front.backward import autograd

    before = [gradients(loss) for _ in range(2)][1]
    found: dict[str, Any] = {"again": False}

    def refused(*given: Any) -> Any:
        raise AssertionError("a new choice, or the arguments of an operator")

    autograd.choose_backward = autograd.of_features = refused
    found["bits"] = all(map(torch.equal, gradients(loss), before))
    torch.use_deterministic_algorithms(True)
    try:
        gradients(loss)
    except AssertionError:
        found["again"] = True
    return found


def operator() -> dict[str, Any]:
    """Packed sequences by the operator itself, as by the function (FA-3's own dropped their lengths)."""
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((25, 4, 16), (37, 2, 16), (37, 2, 16))]
    cu_q, cu_k = torch.tensor([0, 10, 10, 25], dtype=torch.int32), torch.tensor([0, 12, 20, 37], dtype=torch.int32)
    of_function = fm.flash_attn_varlen_func(*inputs, cu_q, cu_k, 15, 17, causal=True, deterministic=True)
    assert isinstance(of_function, torch.Tensor)
    rows = [one.transpose(0, 1).unsqueeze(0) for one in inputs]
    sizes = {"max_seqlen_q": 15, "max_seqlen_k": 17, "deterministic": True}
    out, _ = torch.ops.flashmoe.attention_forward(*rows, "causal", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **sizes)
    dout = torch.randn(25, 4, 16, generator=generator)
    both = torch.autograd.grad(of_function, inputs, dout), torch.autograd.grad(out[0].transpose(0, 1), inputs, dout)
    return {"bits": all(map(torch.equal, *both))}


def lengths() -> dict[str, Any]:
    """How many kernels each step compiles whose packed lengths are others, the longest a tensor (FA #2507)."""
    compiled = [0]
    build = launch.Build.__init__

    def counted(self: Any, *args: Any, **options: Any) -> None:
        compiled[0] += 1
        build(self, *args, **options)

    launch.Build.__init__ = counted  # type: ignore[method-assign]
    generator, found = torch.Generator().manual_seed(6), []
    for each in ((10, 0, 15), (3, 30, 8), (21, 1, 25), (40, 60, 17)):
        compiled[0], total = 0, sum(each)
        shapes = ((total, 4, 16), (total, 2, 16), (total, 2, 16))
        inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        starts = torch.tensor([0, *each]).cumsum(0).int()
        longest = starts.diff().max()
        out = fm.flash_attn_varlen_func(*inputs, starts, starts, longest, longest, causal=True, deterministic=True)
        assert isinstance(out, torch.Tensor)
        torch.autograd.grad(out.sum(), inputs)
        found.append(compiled[0])
    return {"compiled": found}


def checkpointed() -> dict[str, Any]:
    return {"bits": all(map(torch.equal, gradients(loss), gradients(lambda *x: checkpoint(loss, *x, use_reentrant=False))))}


def features() -> dict[str, Any]:
    """Packed, windowed and capped, with sinks; half of the keys used."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, sinks = (
        torch.randn(shape, generator=generator).requires_grad_() for shape in ((25, 4, 16), (37, 2, 16), (37, 2, 16), (4,))
    )
    cu_q, cu_k = torch.tensor([0, 10, 10, 24], dtype=torch.int32), torch.tensor([0, 12, 20, 36], dtype=torch.int32)
    used_q, used_k = torch.tensor([7, 0, 14], dtype=torch.int32), torch.tensor([12, 3, 9], dtype=torch.int32)
    found = []
    for deterministic in (True, False):
        out, lse = fm.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 14, 16, used_q, used_k, causal=True, window_size=(5, -1), softcap=3.0, s_aux=sinks,
            deterministic=deterministic, return_attn_probs=True,
        )  # fmt: skip
        finite = torch.where(torch.isfinite(lse), lse, 0.0)
        found.append(list(torch.autograd.grad(out.square().sum() + finite.cos().sum(), (q, k, v, sinks))))
    return {"errors": errors(*found)}


def launches() -> dict[str, Any]:
    """How many kernels a call without gradients launches, before a call with them and after."""
    counted = [0]
    bound = launch.Build.__init__

    def counting(self: Any, *args: Any, **options: Any) -> None:
        bound(self, *args, **options)
        start = self.bound

        def counted_bound(*given: Any) -> Any:
            begin = start(*given)

            def run(*more: Any) -> None:
                counted[0] += 1
                begin(*more)

            return run

        self.bound = counted_bound

    launch.Build.__init__ = counting  # type: ignore[method-assign]
    inputs, found = leaves(), []
    for _ in range(2):
        counted[0] = 0
        with torch.no_grad():
            loss(*inputs)
        found.append(counted[0])
        gradients(loss)
    return {"without": found[0], "none": found[1]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with assume(gpu_named("a100")):
        print(json.dumps(globals()[sys.argv[1]]()))
