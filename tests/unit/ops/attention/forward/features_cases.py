"""Small problems of every mode put to split_triton as the exam does: NaN around the inputs and in all that no call may use.

Run as a script with TRITON_INTERPRET=1 (which needs a process of its own) it prints one JSON object: the reasons to refuse each
problem's result, by its text.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import torch

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.measure.guards import Guarded, allocations
from flashmoe_science.measure.inputs import same_bits
from flashmoe_science.measure.tolerance import check_output, expected
from flashmoe_science.operations import kernel_named
from flashmoe_science.ops.attention.call.kernel import AttentionKernel
from flashmoe_science.ops.attention.problem import AttentionProblem, parse
from flashmoe_science.ops.attention.proof.contract import CONTRACT, AttentionContract
from flashmoe_science.ops.attention.proof.inputs import GARBAGE, fill_unused
from flashmoe_science.ops.attention.proof.suites_serving import small

SLICED = "slices of larger tensors"


@dataclass(frozen=True)
class Changed:
    """How the inputs of a call are made. With ``other_lengths`` sequences have any lengths up to those of the pattern, none
    among them, and some rows of a boolean mask hide every key."""

    seed: int = 5
    distribution: str = "normal"
    other_lengths: bool = False


def inputs_of(
    contract: AttentionContract, problem: AttentionProblem, device: torch.device, changed: Changed
) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(changed.seed)
    made = contract.vary(changed.distribution, contract.inputs(problem, device, generator))
    if not changed.other_lengths:
        return made
    if "cache_seqlens" in made:
        lengths = made["cache_seqlens"]
        less = torch.rand(lengths.shape, generator=generator, device=device) * 1.2 - 0.1
        lengths.copy_((lengths * less.clamp(0, 1)).to(torch.int32))
        if "leftpad" in made:
            made["leftpad"].clamp_(max=lengths)
        fill_unused(made, GARBAGE)
    elif "cu_seqlens_q" in made:  # the same lengths in another order, those of the keys in one of their own
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            lengths = made[name].diff()
            order = torch.randperm(len(lengths), generator=generator, device=device)
            made[name][1:] = lengths[order].cumsum(0)
    if problem.features.bias == "boolean":
        made["bias"][..., ::3, :] = False
    return made


def examine(
    kernel: AttentionKernel,
    config: Config,
    problem: AttentionProblem,
    contract: AttentionContract,
    device: torch.device,
    changed: Changed = Changed(),
) -> list[str]:
    """Why the kernel's results are refused; empty where they are right."""
    made = inputs_of(contract, problem, device, changed)
    wide = {name: one.double() if one.is_floating_point() else one for name, one in made.items()}
    references = contract.reference(problem, wide)
    held = expected(references, contract.plain(problem, made), *contract.bounds(problem, made, references))

    poisoned = contract.poisoned(problem, made)
    around = {name: Guarded(one) for name, one in poisoned.items()}
    given = contract.for_kernel(problem, {name: one.placed for name, one in around.items()})
    call = contract.planned(kernel, config, given)
    with allocations(True) as guards:
        outputs = contract.from_kernel(call(given))
    again = outputs if device.type == "cpu" else contract.from_kernel(call(given))  # the interpreter has one order of its sums
    reasons = [] if all(map(same_bits, outputs, again)) else ["its bits differ from call to call"]
    for name, got, one in zip(("out", "lse"), outputs, held, strict=True):
        if got.dtype != one.dtype:
            reasons.append(f"{name} is {got.dtype}; it must be {one.dtype}")
        elif got.shape != one.value.shape:
            reasons.append(f"{name} has shape {tuple(got.shape)}; it must be {tuple(one.value.shape)}")
        else:
            reasons += check_output(name, got, one)[1]
    reasons += [f"{name} was changed" for name, one in around.items() if not same_bits(one.placed, poisoned[name])]
    reasons += [f"it wrote around {name}" for name, one in around.items() if one.overwritten()]
    return reasons + (["it wrote past what it allocated"] if guards is not None and guards.overrun() else [])


def main() -> None:
    torch.set_num_threads(1)
    kernel, gpu, cpu = kernel_named("split_triton"), gpu_named("h200"), torch.device("cpu")
    found = {}
    for index, text in enumerate(sys.argv[1:] or small()):
        problem = parse(text)
        contract = CONTRACT.variant(SLICED) if index % 3 == 1 else CONTRACT
        configs = kernel.configs(problem, gpu)
        changed = Changed(index, other_lengths=index % 3 == 2)
        found[text] = examine(kernel, configs[index % len(configs)], problem, contract, cpu, changed)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
