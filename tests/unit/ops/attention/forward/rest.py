"""Packed queries in a buffer that is longer than their sequences: NaN in the rows past the last one, and in the outputs.

Run as a script with TRITON_INTERPRET=1 (which needs a process of its own) it prints as one JSON object what is wrong with each
case by split_triton. Other kernels, and a GPU, are given the same cases by test_rest.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product

import torch

from flashmoe_science.hardware.gpus import Gpu, gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionKernel, AttentionOutput, Launcher
from flashmoe_science.ops.attention.call.tensors import ALL_KEYS
from flashmoe_science.ops.attention.problem import parse
from flashmoe_science.ops.attention.proof.contract import CONTRACT
from flashmoe_science.ops.attention.proof.oracle import attention_oracle

TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.float16: (4e-3, 2e-5), torch.bfloat16: (3e-2, 2e-5)}  # of O and its log-sum-exp
RESTS = (0, 3, 300)  # none, a few, more than two tiles and more than the longest sequence has
TEXTS = (
    "b3 h4 hk2 q40 k90 d64 bf16 causal bshd packed",
    "b2 h4 hk1 q70 k150 d64 fp16 packed",
    "b3 h2 hk1 q30 k200 d128 bf16 causal left50 sinks bshd packed",
    "b3 h4 hk2 q20 k300 d64 bf16 causal softcap9 sinks bshd packed page16",
    "b2 h6 hk2 q33 k100 d64 dv128 bf16 bshd packed page64",
    "b2 h2 q40 k90 d64 bf16 causal prefix30 bshd packed",
    "b2 h2 q40 k90 d64 bf16 causal alibi bshd packed",
    "b9 h4 hk2 q7 k400 d40 bf16 causal bshd packed page16",
)
OF_SPLITS = TEXTS[:4]  # to split_triton other features make no difference
FEW = "b9 h4 hk2 q3 k400 d40 bf16 causal bshd packed page16"  # queries, so that programs may take ranges of all keys


def inputs_of(text: str, rest: int, device: torch.device) -> AttentionInputs:
    """A call whose buffer of queries is ``rest`` rows longer than its sequences, and which is given an output full of NaN."""
    problem = parse(f"attn {text}")
    made = CONTRACT.poisoned(problem, CONTRACT.inputs(problem, device, torch.Generator(device).manual_seed(1)))
    inputs = CONTRACT.for_kernel(problem, made)
    rows = inputs.q.transpose(1, 2)
    q = torch.cat((rows, rows.new_full((1, rest, *rows.shape[2:]), math.nan)), 1).transpose(1, 2)
    out = torch.full_like(q[..., :1], math.nan).repeat_interleave(problem.head_dim_v, 3)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return replace(inputs, tensors=inputs.tensors._replace(q=q if problem.layout == "bshd" else q.contiguous()), out=out)


def run(launcher: Launcher, inputs: AttentionInputs, num_splits: int = 0) -> AttentionOutput:
    lse = torch.full(inputs.q.shape[:3], math.nan, device=inputs.q.device)
    launch = launcher.bind(inputs.tensors, inputs.options._replace(num_splits=num_splits), inputs.out)
    result = launch(inputs.tensors, inputs.softmax_scale, ALL_KEYS, inputs.out, lse)
    assert result is not None
    return AttentionOutput(*result)


def complaints(inputs: AttentionInputs, got: AttentionOutput) -> list[str]:
    """How the outputs differ from the oracle's, whose rows past the last sequence are zeros and -inf."""
    assert inputs.tensors.cu_seqlens_q is not None
    assert got.lse is not None
    end, found = int(inputs.tensors.cu_seqlens_q[-1]), []
    exact, tolerance = attention_oracle(inputs), TOLERANCE[inputs.q.dtype]
    for name, one, right, close in zip(("out", "lse"), (got.out, got.lse), exact, tolerance, strict=True):
        if not torch.allclose(one[:, :, :end].double(), right[:, :, :end], rtol=close, atol=close):
            found.append(f"{name} is wrong in a sequence")
        if not torch.equal(one[:, :, end:].double(), right[:, :, end:]):
            found.append(f"{name} past the last sequence is not {right[:, :, end:].unique().tolist()}")
    return found


def cases(
    kernel: AttentionKernel, gpu: Gpu, device: torch.device, texts: tuple[str, ...] = TEXTS
) -> Iterator[tuple[str, list[str]]]:
    """What is wrong with each case that a kernel serves: in its first config, and of the longest rest with splits."""
    for text in texts:
        for rest in RESTS:
            inputs = inputs_of(text, rest, device)
            if kernel.cannot(inputs.problem, gpu) is not None:
                continue
            config = kernel.configs(inputs.problem, gpu)[0]
            for splits in (1, 3) if "num_splits" in config and rest == RESTS[-1] else (1,):
                yield f"{text} and {rest} rows, {splits} splits", tried(kernel, config, inputs, splits)


def tried(kernel: AttentionKernel, config: Config, inputs: AttentionInputs, splits: int) -> list[str]:
    assert kernel.plan is not None
    return complaints(inputs, run(kernel.plan(inputs, config), inputs, splits))


def ranges(device: torch.device) -> Iterator[tuple[str, list[str]]]:
    """The same where programs of split_triton take ranges of all sequences' keys, or decide not to."""
    from flashmoe_science.ops.attention.forward.splitkv import config, kernel, launch

    with ExitStack() as after:
        for module, name in ((config, "STREAM_K_KEYS"), (config, "STREAM_K_WHOLE"), (launch, "splits_for")):
            after.callback(setattr, module, name, getattr(module, name))
        config.STREAM_K_KEYS = config.STREAM_K_WHOLE = 0
        chosen = launch.splits_for
        for rest, least in product(RESTS, (-1.0, 2.0**30)):
            launch.splits_for = lambda *a, least=least: chosen(*a)._replace(even_slope=0.0, even_least=least)
            inputs = inputs_of(FEW, rest, device)
            plan = kernel.plan(inputs, kernel.configs(inputs.problem, None)[0])
            plan._sm_count = 8
            wrong = complaints(inputs, run(plan, inputs))
            if not all(variant.stream_k for variant in plan._builds):
                wrong.append("this build has no stream-K")
            yield f"{FEW} and {rest} rows, {'ranges' if least < 0 else 'splits'}", wrong


def main() -> None:
    from flashmoe_science.ops.attention.forward.splitkv.kernel import KERNEL

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    print(json.dumps(dict([*cases(KERNEL, gpu_named("h200"), cpu, OF_SPLITS), *ranges(cpu)])))


if __name__ == "__main__":
    main()
