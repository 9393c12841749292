"""The cases that every mixture-of-experts kernel of ours must pass, and how a kernel is tested with one.

Run as a script with TRITON_INTERPRET=1 it puts them to the kernels in Triton's interpreter, which needs a process of its own,
and prints one JSON object: by case and kernel what is wrong with the result.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import torch

from flashmoe_science.formats import FORMATS
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.moe import dequantize_experts, quantize_experts
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.launch import INTERPRETING
from flashmoe_science.ops.moe.call import Activation, MoEInputs, MoEKernel, Tensors, activation_of
from flashmoe_science.ops.moe.call.formats import OF_FORMAT, OF_WEIGHTS
from flashmoe_science.ops.moe.front.kernels import ours
from flashmoe_science.ops.moe.problem import parse
from flashmoe_science.ops.moe.products.gemv import NAME as GEMV
from flashmoe_science.ops.moe.products.gemv_gluon.launch import NAME as GEMV_IN_FORMAT
from flashmoe_science.ops.moe.products.weights_sm90.config import NAME as MXFP4
from flashmoe_science.ops.moe.products.weights_sm90.config import NAME_OF_OTHERS

# Ids that are no expert's here: those of other ranks, extremes, and of 64 bits whose lower half is an expert's.
FOREIGN = {
    "foreign": lambda e: torch.tensor([-1, e, e + 5, -(2**31), 2**31 - 1], dtype=torch.int32),
    "foreign64": lambda e: torch.tensor([-1, e, 2**32 + 1, -(2**63), 2**63 - 1]),
}
UNIT = {"fp32": 2.0**-22, "bf16": 2.0**-8, "fp16": 2.0**-11}  # fp32: products of six bf16 products each
ROUNDINGS = 4


@dataclass(frozen=True)
class Case:
    """A problem, and in what it is unusual: the routing, the numbers of its activation."""

    problem: str
    routing: str = "random"  # random | crowded (few experts have all) | foreign (ids of no expert here) | foreign64 | twice
    alpha: float = 1.702
    limit: float = 7.0

    def __str__(self) -> str:
        numbers = "" if self.limit == 7.0 else f"limit {self.limit}"
        return " ".join(word for word in (self.problem, self.routing, numbers) if word not in ("", "random"))


FUNCTIONS = ("gelu", "gelu_tanh", "relu", "relu2", "clamped")
CASES = (
    Case("moe t1 e1 k1 d8 f8 fp32"),
    Case("moe t1 e8 k2 d24 f40 bf16"),
    Case("moe t9 e6 k3 d40 f72 fp16"),
    Case("moe t3 e5 k5 d17 f9 bf16"),
    Case("moe t5 e20 k4 d24 f16 fp32"),
    *(Case(f"moe t2 e3 k1 d8 f8 fp32 {function}") for function in FUNCTIONS),
    *(Case(f"moe t2 e3 k1 d8 f8 fp32 {function} ungated") for function in ("silu", *FUNCTIONS)),
    Case("moe t9 e4 k2 d16 f8 bf16 bias clamped interleaved transposed"),
    Case("moe t9 e4 k2 d16 f8 fp16 bias"),
    Case("moe t3 e4 k2 d16 f8 fp32 bias interleaved"),
    Case("moe t3 e4 k2 d16 f8 fp32 bias ungated"),
    Case("moe t3 e4 k2 d16 f8 fp32 bias ungated transposed"),
    Case("moe t9 e6 k3 d16 f8 bf16", routing="foreign"),
    Case("moe t4 e6 k3 d16 f8 fp32", routing="foreign"),
    Case("moe t4 e6 k3 d16 f8 bf16", routing="foreign64"),
    Case("moe t9 e6 k3 d16 f8 fp16", routing="foreign64"),
    Case("moe t3 e4 k2 d16 f8 fp32 clamped", alpha=1.25, limit=1.5),
    Case("moe t9 e6 k3 d16 f8 fp16", routing="crowded"),
    Case("moe t3 e6 k3 d16 f8 fp32", routing="twice"),
)
# Of weights in a format.
FORMAT_CASES = (
    Case("moe t1 e8 k2 d64 f96 bf16 w:mxfp4"),
    Case("moe t9 e4 k2 d96 f64 bf16 w:mxfp4 bias clamped interleaved"),
    Case("moe t9 e6 k3 d320 f160 bf16 w:mxfp4 gelu", routing="foreign"),
    Case("moe t40 e3 k1 d160 f288 bf16 w:mxfp4 ungated", routing="crowded"),
    Case("moe t1 e8 k2 d64 f96 bf16 w:fp8_block"),
    Case("moe t9 e4 k2 d200 f180 bf16 w:fp8_block bias clamped interleaved"),
    Case("moe t9 e4 k2 d200 f180 bf16 w:fp8_block"),
    Case("moe t9 e4 k2 d130 f150 bf16 w:fp8_block", routing="foreign"),
    Case("moe t40 e3 k1 d264 f256 bf16 w:fp8_block ungated", routing="crowded"),
    Case("moe t1 e8 k2 d64 f96 fp16 w:fp8_channel"),
    Case("moe t9 e4 k2 d200 f180 bf16 w:fp8_channel bias clamped interleaved"),
    Case("moe t9 e4 k2 d130 f150 fp16 w:fp8_channel gelu", routing="foreign"),
    Case("moe t40 e3 k1 d264 f256 bf16 w:fp8_channel ungated", routing="crowded"),
    # None of them is for Hopper's kernels, which round no rows to the dtype before they quantise them.
    Case("moe t1 e8 k2 d72 f100 bf16 w:fp8_channel_static"),
    Case("moe t9 e4 k2 d200 f180 fp16 w:fp8_channel_static bias clamped interleaved"),
    Case("moe t9 e4 k2 d130 f150 bf16 w:fp8_channel_static gelu", routing="foreign"),
    Case("moe t40 e3 k1 d264 f256 bf16 w:fp8_channel_static ungated", routing="crowded"),
    Case("moe t1 e8 k2 d64 f96 bf16 w:int4_g32"),
    Case("moe t9 e4 k2 d96 f64 fp16 w:int4_g32 bias clamped interleaved"),
    Case("moe t9 e6 k3 d384 f128 bf16 w:int4_g128 gelu", routing="foreign"),
    Case("moe t40 e3 k1 d256 f384 fp16 w:int4_g128 ungated", routing="crowded"),
    Case("moe t1 e8 k2 d64 f96 bf16 w:int4_g32_zero"),
    Case("moe t9 e4 k2 d96 f64 fp16 w:int4_g32_zero bias clamped interleaved"),
    Case("moe t9 e6 k3 d384 f128 bf16 w:int4_g128_zero gelu", routing="foreign"),
    Case("moe t40 e3 k1 d256 f384 fp16 w:int4_g128_zero ungated", routing="crowded"),
)


def inputs_of(case: Case, device: str) -> MoEInputs:
    problem = parse(case.problem)
    torch.manual_seed(0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[problem.dtype]
    e, h, i = problem.experts, problem.dim, problem.hidden
    rows = 2 * i if problem.gated else i

    def weights(inner: int, outer: int) -> torch.Tensor:
        shape = (e, inner, outer) if problem.transposed else (e, outer, inner)
        made = (torch.randn(shape) * inner**-0.5).to(device, dtype)
        return made.transpose(1, 2) if problem.transposed else made

    ids = torch.stack([torch.randperm(e)[: problem.top_k] for _ in range(problem.tokens)]).int()
    if case.routing == "crowded":
        ids = torch.arange(problem.top_k, dtype=torch.int32).expand_as(ids).contiguous()
    elif case.routing in FOREIGN:
        foreign = FOREIGN[case.routing](e)
        ids = torch.where(torch.rand(ids.shape) < 0.5, foreign[torch.randint(5, ids.shape)], ids)
    elif case.routing == "twice":
        ids[:, 1] = ids[:, 0]
    biases = (torch.randn(e, rows).to(device, dtype), torch.randn(e, h).to(device, dtype)) if problem.bias else (None, None)
    x = (3 * torch.randn(problem.tokens, h)).to(device, dtype)
    routing = torch.rand(ids.shape).to(device), ids.to(device)
    activation = replace(activation_of(problem), alpha=case.alpha, limit=case.limit)
    w1, w2, of_weights = weights(h, rows), weights(i, h), [None] * len(OF_FORMAT)
    if problem.weight_format is not None:
        made = quantize_experts(w1, w2, problem.weight_format.replace("static", "w8a8"), interleaved=problem.interleaved)
        if FORMATS[problem.weight_format].static:  # some numbers that they are for are greater than 448 times them
            scales = torch.rand(2, e).neg().exp2().to(device) / 56
            made |= dict(zip(OF_FORMAT[4:], scales, strict=True))
        w1, w2, of_weights = made["gate_up_proj"], made["down_proj"], [made.get(name) for name in OF_FORMAT]
    return MoEInputs(problem, Tensors(x, w1, w2, *routing, *biases, *of_weights), activation)


def dense(inputs: MoEInputs) -> MoEInputs:
    """The inputs with weights of fp64, if they are in a format. A GPU rounds those of int4 to the dtype; the interpreter does
    not."""
    form, (_, w1, w2, *_), of_weights = inputs.problem.weight_format, inputs.tensors, inputs.tensors[7:11]
    if form is None:
        return inputs
    dtype = inputs.tensors.x.dtype if "int4" in form and not INTERPRETING else torch.float64
    given = dict(zip(OF_WEIGHTS, of_weights, strict=True))
    made = dequantize_experts(w1, w2, weight_format=form, interleaved=inputs.activation.interleaved, dtype=dtype, **given)
    return changed(inputs, w1=made[0].double(), w2=made[1].double())


def changed(inputs: MoEInputs, **tensors: torch.Tensor) -> MoEInputs:
    """The inputs with other tensors, by their names in Tensors."""
    return replace(inputs, tensors=inputs.tensors._replace(**tensors))


def reference(inputs: MoEInputs) -> torch.Tensor:
    """The experts in fp64, pair by pair."""
    *tensors, gate_up_bias, down_bias = dense(inputs).tensors[:7]
    of_x, of_active = inputs.tensors[11:]
    x, w1, w2, topk_weights = (one.double() for one in tensors[:4])
    out = torch.zeros_like(x)
    for token, (weights, ids) in enumerate(zip(topk_weights, inputs.tensors.topk_ids.tolist(), strict=True)):
        for weight, expert in zip(weights, ids, strict=True):
            if not 0 <= expert < inputs.problem.experts:
                continue
            both = w1[expert] @ as_e4m3(x[token], of_x, expert)
            if gate_up_bias is not None:
                both = both + gate_up_bias[expert].double()
            active = activated(both, inputs.activation)
            if of_active is not None:
                active = as_e4m3(active.to(inputs.tensors.x.dtype).double(), of_active, expert)
            row = w2[expert] @ active
            if down_bias is not None:
                row = row + down_bias[expert].double()
            out[token] += weight * row
    return out


def as_e4m3(rows: torch.Tensor, scales: torch.Tensor | None, expert: int) -> torch.Tensor:
    """The fp64 rows of an expert as e4m3 by its static scale, if it has one."""
    if scales is None:
        return rows
    return (rows / scales[expert]).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scales[expert]


def activated(both: torch.Tensor, a: Activation) -> torch.Tensor:
    """The activation by its formula, independent of the one by PyTorch's operators."""
    half = both.shape[0] // 2
    gate, up = (both, None) if not a.gated else (both[::2], both[1::2]) if a.interleaved else (both[:half], both[half:])
    if a.function == "clamped_silu":
        # Of torch.clamp the gradient at the limit depends on the version.
        gate = torch.where(gate > a.limit, a.limit, gate)
        up = None if up is None else torch.where(up > a.limit, a.limit, torch.where(up < -a.limit, -a.limit, up)) + 1
    active = {
        "silu": lambda g: g / (1 + (-g).exp()),
        "gelu": lambda g: g / 2 * (1 + torch.erf(g / 2**0.5)),
        "gelu_tanh": lambda g: g / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))),
        "relu": lambda g: g * (g > 0),
        "relu2": lambda g: (g * (g > 0)) ** 2,
        "clamped_silu": lambda g: g / (1 + (-a.alpha * g).exp()),
    }[a.function](gate)
    return active if up is None else active * up


def saved_z(inputs: MoEInputs) -> torch.Tensor:
    """The first product with its bias in fp64, rows sorted by expert; rows of no pair are not numbers."""
    x, w1, _, _, ids, bias, *_ = dense(inputs).tensors
    z, row = torch.full((ids.numel(), w1.shape[1]), torch.nan, dtype=torch.float64, device=x.device), 0
    for expert, weights in enumerate(w1):
        tokens = torch.nonzero(ids.flatten() == expert).flatten() // ids.shape[1]
        rows = as_e4m3(x[tokens].double(), inputs.tensors.gate_up_input_scale, expert) @ weights.double().T
        z[row : row + len(tokens)] = rows if bias is None else rows + bias[expert].double()
        row += len(tokens)
    return z


def z_off(z: torch.Tensor, inputs: MoEInputs) -> str | None:
    """What is wrong with the z that a forward saved, if anything is."""
    right = saved_z(inputs)
    used = int((~right[:, 0].isnan()).sum())
    if not used:
        return None
    error = ((z[:used].double() - right[:used]).abs().max() / right[:used].abs().max().clamp(min=1e-3)).item()
    allowed = ROUNDINGS * UNIT[inputs.problem.dtype]
    return None if error <= allowed else f"z is off by {error:.2e} of the largest, where {allowed:.2e} is allowed"


def repeated(kernel: MoEKernel, inputs: MoEInputs, config: Config) -> torch.Tensor:
    """The result of a call, whose bits 20 more have."""
    out = kernel.run(inputs, config)
    again = (kernel.run(inputs, config) for _ in range(20))
    assert all(torch.equal(one.nan_to_num(), out.nan_to_num()) for one in again), config
    return out


def off(got: torch.Tensor, inputs: MoEInputs) -> str | None:
    """What is wrong with a result, if anything is."""
    right = reference(inputs)
    error = ((got.double() - right).abs().max() / right.abs().max().clamp(min=1e-3)).item()
    allowed = ROUNDINGS * UNIT[inputs.problem.dtype]
    return None if error <= allowed else f"off by {error:.2e} of the largest result, where {allowed:.2e} is allowed"


def put(case: Case, kernel: MoEKernel, config: Config, device: str) -> list[str]:
    """What is wrong with a kernel's results on a case: one, one whose foreign tokens are not numbers, and one of which a token
    is none."""
    inputs = inputs_of(case, device)
    try:
        got = kernel.run(inputs, config)
    except CannotServe:  # memory that the copy engine does not take
        return []
    found = [off(got, inputs)]
    if kernel.name not in (GEMV, GEMV_IN_FORMAT, MXFP4, NAME_OF_OTHERS):
        saved, z = kernel.run(replace(inputs, saves_z=True), config)  # type: ignore[misc]  # of inputs that save z
        found += [None if torch.equal(saved, got) else "to save z changes the result", z_off(z, inputs)]
    if device != "cpu" and not torch.equal(got, kernel.run(inputs, config)):  # the interpreter has one order of its sums
        found.append("two results of one call differ")
    x, ids = inputs.tensors.x, inputs.tensors.topk_ids
    lost = ~((ids >= 0) & (ids < inputs.problem.experts)).any(1)
    if lost.any():
        again = kernel.run(changed(inputs, x=torch.where(lost[:, None], torch.nan, x)), config)
        if not torch.equal(again, got):
            found.append("tokens without an expert here have a part in the result")
    elif inputs.problem.tokens > 1 and case.routing != "random":
        one_lost = x.clone()
        one_lost[1] = torch.nan
        again = kernel.run(changed(inputs, x=one_lost), config)
        if not again[1].isnan().all() or not torch.equal(again[0], got[0]) or not torch.equal(again[2:], got[2:]):
            found.append("a token that is no number is not one alone")
    return [one for one in found if one]


def main() -> None:
    gpu = gpu_named("h200")  # whose configs are interpreted; the tensors are on the CPU
    found = {}
    for case in (*CASES, *FORMAT_CASES):
        problem = parse_problem(case.problem)
        for kernel in ours():
            if kernel.interpretable and kernel.cannot(problem, gpu) is None:
                config = kernel.configs(problem, gpu)[-1]  # of the fewest programs
                found[f"{case}: {kernel.name}"] = put(case, kernel, config, "cpu")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
