"""What backwards of others got wrong (a script for Triton's interpreter): prints what is wrong with each case of one trap.

A GPU is given the same cases by test_traps_on_gpu.py.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from tests.unit.ops.attention.backward.cases import PORTABLE

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.measure.guards import allocations
from flashmoe_science.measure.inputs import same_bits
from flashmoe_science.ops.attention.backward.tiled_triton.kernel import KERNEL
from flashmoe_science.ops.attention.call.backward import BackwardInputs, BackwardKernel, Gradients, Wanted
from flashmoe_science.ops.attention.problem.backward import parse
from flashmoe_science.ops.attention.proof.backward.contract import CONTRACT
from flashmoe_science.ops.attention.proof.backward.oracle import backward_oracle

GPU, DEVICE = gpu_named("h200"), torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
Case = tuple[str, BackwardInputs]
Trap = Callable[[], Iterator[Case]]


def made(text: str, seed: int = 1, **changed: Any) -> dict[str, torch.Tensor]:
    problem = parse(text)
    return CONTRACT.inputs(problem, DEVICE, torch.Generator(DEVICE).manual_seed(seed)) | changed


def call(text: str, inputs: dict[str, torch.Tensor] | None = None) -> BackwardInputs:
    return CONTRACT.for_kernel(parse(text), made(text) if inputs is None else inputs)


def run(inputs: BackwardInputs, kernel: BackwardKernel = KERNEL) -> Gradients:
    launch = CONTRACT.planned(kernel, kernel.configs(inputs.problem, GPU)[0], inputs)
    with allocations(True):  # memory full of NaN
        return launch(inputs)


def complaints(inputs: BackwardInputs, got: Gradients) -> list[str]:
    """How the gradients differ from the oracle's."""
    found, names = [], [name for name, wanted in zip(Wanted._fields, inputs.wanted, strict=True) if wanted]
    for name, right in zip(names, backward_oracle(inputs), strict=True):
        one = getattr(got, name)
        lse = inputs.saved.lse  # in fp32 a large one is off by so much more, and probabilities by that of themselves
        size = max(1.0, lse[torch.isfinite(lse)].abs().max().item() / 16) if torch.isfinite(lse).any() else 1.0
        close = TOLERANCE[inputs.tensors.q.dtype] * max(1.0, right.abs().max().item()) * size
        if not bool(torch.isfinite(one).all()):
            found.append(f"{name} is not finite")
        elif (one.double() - right).abs().max() > close:
            found.append(f"{name} is off by {(one.double() - right).abs().max():.3g}")
    return found


def lowest() -> Iterator[Case]:
    """Keys that end 64 past a tile, with a mask too, and scores so low that exp(-lse) overflows (PyTorch #196678;
    cudnn-frontend #1072)."""
    for words in ("q64 k192 d32 fp32", "q64 k192 d32 bf16 boolmask", "q1 k64 d32 fp32 causal", "q40 k70 d16 bf16"):
        text = f"attnbwd b1 h2 {words}"
        inputs = CONTRACT.vary("opposed", made(text))
        yield text, call(text, inputs)


def unseen() -> Iterator[Case]:
    """Rows that see no key, and keys that no row sees (FA #443, #2421); a boolean mask that hides all of a row (#178251)."""
    for text in ("attnbwd b1 h2 q70 k20 d16 fp32 causal", "attnbwd b1 h2 q5 k70 d16 fp32 causal left3"):
        yield text, call(text)
    text = "attnbwd b2 h2 q33 k40 d16 fp32 boolmask"
    inputs = made(text)
    inputs["bias"][:, :, ::3] = False
    inputs["bias"][..., 7] = False
    yield text, call(text, inputs)
    text = "attnbwd b1 h2 q20 k24 d16 bf16 bias"
    inputs = made(text)
    inputs["bias"][:, :, ::2] = -torch.inf
    yield f"{text} of -inf", call(text, inputs)


def unused() -> Iterator[Case]:
    """Rows past the last sequence, and keys that a sequence does not use: NaN there, zeros in the gradients."""
    text = "attnbwd b3 h2 hk1 q20 k30 d16 bf16 causal bshd packed"
    inputs = call(text)
    x, saved = inputs.tensors, inputs.saved

    def longer(one: torch.Tensor, value: float = math.nan) -> torch.Tensor:
        return torch.cat((one, one.new_full((*one.shape[:2], 5, *one.shape[3:]), value)), 2)

    tensors = x._replace(q=longer(x.q), k=longer(x.k), v=longer(x.v))
    kept = saved._replace(out=longer(saved.out), dout=longer(saved.dout), lse=longer(saved.lse))
    yield text, replace(inputs, tensors=tensors, saved=kept)
    assert x.cu_seqlens_k is not None
    used = (x.cu_seqlens_k.diff() // 2).to(torch.int32)
    cut = x._replace(cache_seqlens=used)
    yield f"{text} of which half is used", replace(inputs, tensors=cut, saved=results(replace(inputs, tensors=cut)))


def results(inputs: BackwardInputs) -> Any:
    """The Saved of changed tensors."""
    from flashmoe_science.ops.attention.call.kernel import AttentionInputs
    from flashmoe_science.ops.attention.proof.oracle import attention_oracle

    out, lse = attention_oracle(AttentionInputs(inputs.problem, inputs.tensors, inputs.options, inputs.softmax_scale))
    return inputs.saved._replace(out=out.to(inputs.saved.out.dtype), lse=lse.float())


def expanded() -> Iterator[Case]:
    """A gradient with strides of 0, as of a sum (FA #2611)."""
    text = "attnbwd b2 h4 hk2 q33 k40 d16 fp32 causal"
    inputs = call(text)
    for name, dout in (
        ("rows", inputs.saved.dout[:, :1, :1].expand_as(inputs.saved.dout)),
        ("batches", inputs.saved.dout[:1].expand_as(inputs.saved.dout)),
    ):
        yield f"{text} {name}", replace(inputs, saved=inputs.saved._replace(dout=dout))


def empty() -> Iterator[Case]:
    """Packed sequences without queries, without keys, and without either (FA #1254, #2568)."""
    text = "attnbwd b4 h2 q24 k24 d16 fp32 bshd packed sinks"
    inputs = call(text)
    total_q, total_k = inputs.tensors.q.shape[2], inputs.tensors.k.shape[2]
    for name, of_q, of_k in (
        ("no queries", (0, 10, 10, total_q, total_q), (0, 9, 20, 30, total_k)),
        ("no keys", (0, 10, 20, 30, total_q), (0, 9, 9, 30, 30)),
        ("neither", (0, 0, 0, 20, total_q), (0, 0, 12, 30, total_k)),
    ):
        yield f"{text} {name}", packed(inputs, of_q, of_k)


def packed(inputs: BackwardInputs, of_q: tuple[int, ...], of_k: tuple[int, ...]) -> BackwardInputs:
    """The inputs as sequences that begin there."""
    x, int32 = inputs.tensors, {"dtype": torch.int32, "device": DEVICE}
    tensors = x._replace(cu_seqlens_q=torch.tensor(of_q, **int32), cu_seqlens_k=torch.tensor(of_k, **int32))
    options = inputs.options._replace(max_seqlen_q=x.q.shape[2], max_seqlen_k=x.k.shape[2])
    changed = replace(inputs, tensors=tensors, options=options)
    return replace(changed, saved=results(changed))


def tiles() -> Iterator[Case]:
    """Packed sequences that end at tiles of 64 and 128, one before and one after (FA's VARLEN_PREPROCESS_TILE_BUG)."""
    for kind, of_q in (
        ("h2 hk1 q450 d16 fp32 causal bshd", (0, 63, 127, 192, 320, 449, 450)),
        ("h1 q450 d64 bf16 bshd", (0, 128, 129, 256, 383, 450)),
    ):
        text = f"attnbwd b{len(of_q) - 1} {kind} packed"
        yield text, packed(replace(call(f"attnbwd b1 {kind}"), problem=parse(text)), of_q, of_q)


def far() -> Iterator[Case]:
    """Batches and rows that lie more than 2^31 elements apart (FA #1311)."""
    text = "attnbwd b2 h2 hk1 q40 k33 d16 bf16 causal"
    inputs = call(text)
    for dim, step in ((0, 2**31 + 16), (2, 2**26)):
        for name in ("q", "k", "v", "out", "dout"):
            part = inputs.tensors if name in inputs.tensors._fields else inputs.saved
            given = getattr(part, name)
            strides = [*given.contiguous().stride()]
            strides[dim] = step
            count = 1 + sum((size - 1) * stride for size, stride in zip(given.shape, strides, strict=True))
            apart = given.new_empty(count).as_strided(given.shape, strides).copy_(given)
            field = "tensors" if part is inputs.tensors else "saved"
            yield f"{text} {name} by {step}", replace(inputs, **{field: part._replace(**{name: apart})})


def lengths() -> Iterator[Case]:
    """The bottom-right mask where queries are more, and fewer, than keys (ffpa-attn #300); GQA and another value width."""
    for sizes in ("q24 k40", "q40 k24", "q1 k40", "q129 k64"):
        text = f"attnbwd b2 h6 hk2 {sizes} d24 dv40 fp32 causal"
        yield text, call(text)


def broadcast() -> Iterator[Case]:
    """Biases that are expanded: their gradients are summed over what they are expanded by (xFormers #783)."""
    text = "attnbwd b2 h4 hk2 q40 k37 d16 fp32 causal bias"
    inputs = call(text)
    bias = torch.randn(2, 4, 40, 37, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    for some in ((1, 1, 40, 37), (2, 1, 40, 37), (2, 4, 1, 37), (2, 4, 40, 1), (1, 4, 1, 37), (1, 1, 1, 1)):
        part = bias[tuple(slice(0, size) for size in some)].expand(2, 4, 40, 37)
        changed = replace(inputs, tensors=inputs.tensors._replace(bias=part))
        yield f"{text} {some}", replace(changed, saved=results(changed))


def overflow() -> Iterator[Case]:
    """Large scores in 16 bits (FA's bwd_overflow)."""
    for text in ("attnbwd b1 h2 q40 k50 d64 fp16 causal", "attnbwd b1 h2 q40 k50 d64 bf16"):
        inputs = made(text)
        inputs["q"].mul_(5.0), inputs["k"].mul_(3.0)
        yield text, call(text, inputs)


def negative() -> Iterator[Case]:
    """A scale below zero, and one of zero."""
    text = "attnbwd b1 h2 q40 k50 d16 fp32 causal softcap3"
    inputs = call(text)
    for scale in (-0.5, 0.0):
        changed = replace(inputs, softmax_scale=scale)
        yield f"{text} {scale}", replace(changed, saved=results(changed))


def asked() -> dict[str, list[str]]:
    """Gradients one by one: only what is asked for is computed, and with the bits that it has among all."""
    found = {}
    for kernel, text in (
        (KERNEL, "attnbwd b1 h2 q20 k24 d16 bf16 sinks bias"),
        (KERNEL, "attnbwd b2 h2 q20 d16 fp32 causal packed sinks"),
        (PORTABLE[1], "attnbwd b2 h4 hk2 q70 k90 d16 bf16 causal"),
    ):
        inputs = call(text)
        every = run(inputs, kernel)
        for place, name in enumerate(Wanted._fields):
            if inputs.wanted[place]:
                one = run(replace(inputs, wanted=Wanted(*(index == place for index in range(5)))), kernel)
                wrong = [
                    f"{other} was computed" for other in Wanted._fields if other != name and getattr(one, other) is not None
                ]
                same = same_bits(getattr(one, name), getattr(every, name))
                found[f"{text}: {name}"] = wrong + ([] if same else ["its bits differ alone"])
    return found


OF_Q, OF_K = (0, 60, 60, 200, 330, 400), (0, 0, 130, 130, 300, 500)  # without queries, without keys; both end before the rows


def odd_lengths(words: str, seqused: bool, device: torch.device) -> BackwardInputs:
    """Packed sequences of which some are empty, with NaN where no sequence uses a row."""
    text = f"attnbwd b5 h4 hk2 q200 k300 d64 bf16 bshd packed {words}"
    one, room = parse(text), parse("attnbwd b1 h4 hk2 q450 k520 d64 bf16 bshd")
    made = CONTRACT.inputs(room, device, torch.Generator(device).manual_seed(3))
    of_q, of_k = (torch.tensor(each, dtype=torch.int32, device=device) for each in (OF_Q, OF_K))
    made |= {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k}
    made["q"][:, :, 400:] = made["dout"][:, :, 400:] = math.nan
    unused = [*range(500, 520)]
    if seqused:
        made["cache_seqlens"] = torch.tensor((0, 100, 0, 1, 30), dtype=torch.int32, device=device)
        unused += [*range(100, 130), *range(131, 300), *range(330, 500)]
    made["k"][:, :, unused] = made["v"][:, :, unused] = math.nan
    return CONTRACT.for_kernel(one, made)


ODD = [("", False), ("causal", True), ("left40 right20", True), ("causal left70", False)]  # words and seqused of odd_lengths

TRAPS: tuple[Trap, ...] = (lowest, unseen, unused, expanded, empty, tiles, far, lengths, broadcast, overflow, negative)
NAMES = [trap.__name__ for trap in TRAPS]


def main() -> None:
    torch.set_num_threads(1)
    name = sys.argv[1]
    if name == "asked":
        print(json.dumps(asked()))
        return
    found = {}
    for case, inputs in TRAPS[NAMES.index(name)]():
        for kernel in (one for one in PORTABLE if one.cannot(inputs.problem, GPU) is None):
            found[f"{kernel.name}: {case}"] = complaints(inputs, run(inputs, kernel))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
