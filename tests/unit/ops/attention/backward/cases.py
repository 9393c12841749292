"""Problems put to a kernel of the backward and held to its contract: poisoned outputs, guarded inputs, equal bits.

Run as a script with TRITON_INTERPRET=1 it puts the contract's small problems, or those named, to the portable kernels that
serve them in Triton's interpreter and prints one JSON object: the complaints about each, by kernel and problem.
"""

from __future__ import annotations

import json
import sys

import torch

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.measure.guards import Guarded, allocations
from flashmoe_science.measure.inputs import same_bits
from flashmoe_science.measure.tolerance import check_output, expected
from flashmoe_science.ops.attention.backward.short_triton.kernel import KERNEL as SHORT
from flashmoe_science.ops.attention.backward.tiled_triton.kernel import KERNEL as TILED
from flashmoe_science.ops.attention.call.backward import BackwardKernel
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem, parse
from flashmoe_science.ops.attention.proof.backward.contract import AttentionBackwardContract
from flashmoe_science.ops.attention.proof.backward.suites import small

PORTABLE = (TILED, SHORT)


def examine(
    kernel: BackwardKernel,
    config: Config,
    problem: AttentionBackwardProblem,
    contract: AttentionBackwardContract,
    device: torch.device,
    seed: int = 5,
    distribution: str = "normal",
) -> list[str]:
    """Why the kernel's results are refused; empty where they are right."""
    generator = torch.Generator(device).manual_seed(seed)
    made = contract.vary(distribution, contract.inputs(problem, device, generator))
    references = contract.reference(problem, contract.widened(made))
    held = expected(references, contract.plain(problem, made), *contract.bounds(problem, made, references))
    around = {name: Guarded(one) for name, one in made.items()}
    given = contract.for_kernel(problem, {name: one.placed for name, one in around.items()})
    call = contract.planned(kernel, config, given)
    with allocations(True) as guards:
        outputs = contract.from_kernel(call(given))
    again = contract.from_kernel(call(given))
    reasons = [] if all(map(same_bits, outputs, again)) else ["its bits differ from call to call"]
    names = [name for name, wanted in zip(given.wanted._fields, given.wanted, strict=True) if wanted]
    for name, got, one in zip(names, outputs, held, strict=True):
        if got.dtype != one.dtype or got.shape != one.value.shape:
            reasons.append(f"{name} is {got.dtype} {tuple(got.shape)}; it must be {one.dtype} {tuple(one.value.shape)}")
        else:
            reasons += check_output(name, got, one)[1]
    reasons += [f"{name} was changed" for name, one in around.items() if not same_bits(one.placed, made[name])]
    reasons += [f"it wrote around {name}" for name, one in around.items() if one.overwritten()]
    return reasons + (["it wrote past what it allocated"] if guards is not None and guards.overrun() else [])


def main() -> None:
    torch.set_num_threads(1)
    gpu, cpu, found = gpu_named("h200"), torch.device("cpu"), {}
    for index, text in enumerate(sys.argv[1:] or small()):
        problem = parse(text)
        contract = AttentionBackwardContract(sliced=index % 3 == 1, of_lse=index % 2 == 0)
        for kernel in (one for one in PORTABLE if one.cannot(problem, gpu) is None):
            configs = kernel.configs(problem, gpu)
            config = configs[index % len(configs)]
            found[f"{kernel.name}: {text}"] = examine(kernel, config, problem, contract, cpu, index)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
