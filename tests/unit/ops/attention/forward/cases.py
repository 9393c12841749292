"""The cases that every attention kernel of ours is held to, and how one is put to a kernel.

Run as a script with TRITON_INTERPRET=1 it puts the small ones to the portable kernel in Triton's interpreter, which needs a
process of its own, and prints one JSON object: the reasons to refuse each case's result, by its name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from tests.unit.ops.attention.calls import call_of

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.measure.tolerance import check_output, expected
from flashmoe_science.operations import kernel_named
from flashmoe_science.ops.attention.call.kernel import AttentionKernel
from flashmoe_science.ops.attention.call.outputs import strides_like
from flashmoe_science.ops.attention.call.tensors import ALL_KEYS
from flashmoe_science.ops.attention.problem import AttentionProblem, parse
from flashmoe_science.ops.attention.proof.contract import AttentionContract

BAND = 4096  # elements of NaN before and after each tensor; a multiple of every alignment


@dataclass(frozen=True)
class Case:
    """A problem, and in what it is unusual: the softmax scale, how the values are drawn, how the tensors lie in memory."""

    problem: str
    scale: float | None = None
    values: str = "normal"  # one of AttentionContract.distributions
    memory: str = "dense"  # dense | packed (q, k, v of one tensor) | cache (rows of a longer one) | broadcast (batch stride 0)
    lse: bool = True

    def __str__(self) -> str:
        words = [self.problem, "" if self.scale is None else f"scale={self.scale}", self.values, self.memory]
        return " ".join(word for word in (*words, "" if self.lse else "no-lse") if word not in ("", "normal", "dense"))


SCALES = tuple(
    Case(f"attn b1 h2 q{queries} k{keys} d24 {dtype}{mask}", scale)
    for scale in (0.0, -0.7, 3.0, 1e-3)
    for queries, keys, dtype, mask in ((9, 70, "fp32", " causal"), (33, 20, "fp16", ""), (20, 33, "bf16", " causal-topleft"))
)
VALUES = tuple(
    Case(f"attn b1 h2 q20 k40 d32 {dtype}{mask}", values=values)
    for values in ("zeros", "constant", "large", "tiny", "opposed")
    for dtype, mask in (("fp16", " causal"), ("bf16", ""), ("fp32", " causal"))
)
MEMORY = (
    Case("attn b2 h3 q17 k17 d16 fp16 causal", memory="packed"),
    Case("attn b2 h2 q5 k37 d40 bf16 causal", memory="cache"),
    Case("attn b2 h4 hk2 q1 k65 d64 fp16", memory="cache"),
    Case("attn b3 h2 q18 k21 d8 fp32", memory="broadcast"),
    Case("attn b2 h2 q19 k23 d48 dv16 bf16 causal bshd"),
    Case("attn b2 h2 q19 k23 d48 fp16 bshd", memory="cache"),
)
SHAPES = (
    Case("attn b1 h1 q1 k1 d1 fp32"),
    Case("attn b3 h2 q1 k1 d8 fp16"),
    Case("attn b1 h2 q1 k129 d64 bf16"),
    Case("attn b1 h6 hk1 q7 k31 d16 fp16 causal"),
    Case("attn b1 h6 hk3 q31 k7 d20 fp32"),
    Case("attn b1 h2 q40 k9 d16 fp16 causal"),  # rows that see no key
    Case("attn b1 h2 q40 k9 d16 bf16 causal-topleft"),
    Case("attn b1 h1 q9 k40 d16 fp32 causal-topleft"),
    *(Case(f"attn b1 h1 q18 k35 d{d} {t} causal") for d, t in ((2, "fp16"), (7, "bf16"), (63, "fp32"), (100, "fp16"))),
    *(Case(f"attn b1 h1 q18 k35 d{d} {t}") for d, t in ((128, "bf16"), (160, "fp32"), (255, "fp16"), (256, "bf16"))),
    Case("attn b1 h1 q10 k20 d8 dv256 fp16"),
    Case("attn b1 h1 q10 k20 d256 dv3 bf16 causal"),
    Case("attn b1 h1 q64 k64 d64 fp16 causal"),
    Case("attn b1 h1 q64 k128 d32 bf16 causal"),
)
WITHOUT_LSE = (
    Case("attn b1 h2 q33 k70 d40 dv24 bf16 causal", lse=False),
    Case("attn b2 h2 q16 k16 d16 fp16", lse=False),
    Case("attn b1 h2 q20 k9 d16 fp32 causal", scale=-1.0, lse=False),
)
SMALL = (*SCALES, *VALUES, *MEMORY, *SHAPES, *WITHOUT_LSE)

# For a GPU: several tiles of every config, rounds of persistent programs, and the same oddities.
LARGE = tuple(
    Case(problem, scale, values, memory)
    for problem, scale, values, memory in (
        ("attn b2 h8 hk2 q799 k1023 d64 bf16 causal", None, "normal", "dense"),
        ("attn b2 h8 hk2 q799 k1023 d64 bf16 causal", 0.0, "normal", "dense"),
        ("attn b2 h8 q513 d64 fp16 causal", -0.5, "normal", "dense"),
        ("attn b2 h8 q513 d64 fp16 causal", 2.0, "large", "dense"),
        ("attn b1 h4 q700 k1100 d128 bf16", 1e-3, "normal", "dense"),
        ("attn b1 h4 q1024 d128 fp16 causal bshd", None, "large", "dense"),
        ("attn b1 h4 q1024 d128 bf16", None, "opposed", "dense"),
        ("attn b1 h4 q640 d64 fp16 causal", None, "constant", "packed"),
        ("attn b2 h4 hk2 q300 k777 d128 bf16 causal", None, "normal", "cache"),
        ("attn b2 h4 hk2 q300 k777 d128 bf16 causal bshd", None, "normal", "cache"),
        ("attn b3 h4 q400 k500 d64 fp16", None, "normal", "broadcast"),
        ("attn b4 h8 hk1 q1 k3001 d128 bf16", None, "normal", "cache"),
        ("attn b1 h4 q1023 k1024 d111 bf16", None, "normal", "dense"),
        ("attn b1 h2 q512 d256 bf16 causal", None, "normal", "dense"),
        ("attn b1 h2 q640 k128 d128 fp16 causal", None, "normal", "dense"),
        ("attn b1 h2 q500 d192 dv128 bf16 causal-topleft", None, "normal", "dense"),
        ("attn b1 h2 q500 k900 d72 dv40 fp16 causal-topleft", None, "normal", "packed"),
        ("attn b1 h4 q777 d64 fp32 causal", -2.0, "normal", "dense"),
        ("attn b2 h33 q2100 d64 fp16 causal", None, "normal", "dense"),  # a round in pairs, then tile by tile
        ("attn b1 h36 hk12 q4224 d128 bf16 causal bshd", None, "normal", "dense"),
        ("attn b1 h2 q128 k65536 d64 bf16", None, "normal", "dense"),  # an error of every step adds up over a thousand
    )
)


def problem_of(case: Case) -> AttentionProblem:
    return parse(case.problem)


def contract_of(case: Case, problem: AttentionProblem) -> AttentionContract:
    return AttentionContract(1.0 if case.scale is None else case.scale / problem.softmax_scale)


def tensors_of(case: Case, problem: AttentionProblem, device: torch.device) -> dict[str, torch.Tensor]:
    """Q, K and V of the case, all of their memory that is not theirs filled with NaN."""
    generator = torch.Generator(device).manual_seed(len(case.problem))
    contract = AttentionContract()
    drawn = contract.vary(case.values, contract.inputs(problem, device, generator))
    if case.memory == "broadcast":
        drawn = {name: tensor[:1].expand_as(tensor) for name, tensor in drawn.items()}
    return {name: _laid_out(tensor, case.memory, problem.layout) for name, tensor in drawn.items()}


def _laid_out(tensor: torch.Tensor, memory: str, layout: str) -> torch.Tensor:
    batch, heads, rows, width = tensor.shape
    batches = 1 if memory == "broadcast" else batch
    held_rows = rows + 24 if memory == "cache" else rows
    shape = (batches, held_rows, heads, width) if layout == "bshd" else (batches, heads, held_rows, width)
    if memory == "packed":  # [batch, rows, 3, heads, width], as one linear layer gives them
        shape = (batches, rows, 3, heads, -(-width // 8) * 8)
    view = guarded(shape, tensor)
    if memory == "packed":
        view = view[:, :, 1, :, :width].transpose(1, 2)
    elif layout == "bshd":
        view = view[:, :rows].transpose(1, 2)
    else:
        view = view[:, :, :rows]
    view = view.expand(batch, heads, rows, width)
    view[:batches].copy_(tensor[:batches])
    return view


def guarded(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """NaN of that shape, between bands of NaN."""
    size = 1
    for extent in shape:
        size *= extent
    return torch.full((size + 2 * BAND,), torch.nan, dtype=like.dtype, device=like.device)[BAND : BAND + size].view(shape)


def band_of(tensor: torch.Tensor) -> torch.Tensor:
    """What lies before and after a tensor that ``guarded`` made."""
    base = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return torch.cat([base[:BAND], base[-BAND:]])


def examine(kernel: AttentionKernel, config: Config, case: Case, device: torch.device) -> list[str]:
    """Why the kernel's result is refused; empty where it is right."""
    problem = problem_of(case)
    contract, tensors = contract_of(case, problem), tensors_of(case, problem, device)
    scale = problem.softmax_scale if case.scale is None else case.scale
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    shape = (*q.shape[:3], problem.head_dim_v)
    out = guarded(shape, q).as_strided(shape, strides_like(q.shape, q.stride(), problem.head_dim_v), BAND)
    lse = guarded(shape[:3], q.float()) if case.lse else None
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    assert kernel.plan is not None
    inputs = call_of(problem, q, k, v, scale, case.lse)
    launch = kernel.plan(inputs, config).bind(inputs.tensors, inputs.options, out)
    assert launch((q, k, v), scale, ALL_KEYS, out, lse) is not None

    references = contract.reference(problem, {name: tensor.double() for name, tensor in tensors.items()})
    reasons = []
    held = expected(references, contract.plain(problem, tensors), *contract.bounds(problem, tensors, references))
    for name, got, one in zip(("out", "lse"), (out, lse), held, strict=True):
        if got is not None:
            reasons += check_output(name, got, one)[1]
            reasons += [] if band_of(got).isnan().all() else [f"{name}: wrote before or after it"]
    reasons += [f"{name} was changed" for name, tensor in tensors.items() if not torch.equal(tensor, before[name])]
    return reasons


def main() -> None:
    torch.set_num_threads(1)
    kernel, gpu = kernel_named("fwd_triton"), gpu_named("h200")
    found = {}
    for index, case in enumerate(SMALL):
        configs = kernel.configs(problem_of(case), gpu)
        found[str(case)] = examine(kernel, configs[index % len(configs)], case, torch.device("cpu"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
