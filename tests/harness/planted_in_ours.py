"""Faults of the corpus as kernels of origin "ours", examined and timed in process as the package's own are.

A program, because faults change settings and leave threads, which must not stay in the process of the tests:
``planted_in_ours.py NAME...`` prints, by fault, its refusals as [stage, reason] and the rows against a rival that stand.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tests.harness.listed_faults import TIMED, WRONG, Fault
from tests.harness.planted_kernels import kernel
from tests.harness.rows import Rows

from flashmoe_science.kernel import Config
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.channel import InProcess
from flashmoe_science.measure.inputs import Memory
from flashmoe_science.measure.kernels_run import ProblemRun
from flashmoe_science.measure.on_problem import OnProblem
from flashmoe_science.measure.oracle import Oracle
from flashmoe_science.measure.request import Request, of_kernel
from flashmoe_science.measure.session import Session
from flashmoe_science.measure.worker.loading import load
from flashmoe_science.measure.worker.worker import Worker
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.ops.attention.call.backward import BackwardInputs, Gradients
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionOutput
from flashmoe_science.ops.attention.front import kernels as attention_kernels
from flashmoe_science.ops.attention.front.backward import kernels as backward_kernels
from flashmoe_science.ops.attention.front.merge import kernels as merge_kernels
from flashmoe_science.ops.moe.call import MoEInputs
from flashmoe_science.ops.moe.call.backward import BackwardInputs as MoEBackwardInputs
from flashmoe_science.ops.moe.call.backward import Gradients as ExpertGradients
from flashmoe_science.ops.moe.call.formats import OF_FORMAT
from flashmoe_science.ops.moe.front import kernels as moe_kernels
from flashmoe_science.ops.moe.front.backward import kernels as expert_backward_kernels
from flashmoe_science.records import RefusalRow, TimingRow

BENCH = Bench(torch.device("cpu"), None)
MODULES = {
    "attention": attention_kernels,
    "attention_backward": backward_kernels,
    "attention_merge": merge_kernels,
    "moe": moe_kernels,
    "moe_backward": expert_backward_kernels,
}


def attention(fn: Callable[..., Any]) -> Callable[[AttentionInputs, Config], AttentionOutput]:
    """The function's own tensor, whatever it is: a copy would hide some faults."""
    return lambda inputs, config: AttentionOutput(
        fn(inputs.q, inputs.k, inputs.v, causal=inputs.problem.causal, softmax_scale=inputs.softmax_scale), None
    )


def gradients(fn: Callable[..., Any]) -> Callable[[BackwardInputs, Config], Gradients]:
    def run(inputs: BackwardInputs, config: Config) -> Gradients:
        leaves = [one.detach().requires_grad_() for one in inputs.tensors[:3]]
        with torch.enable_grad():
            out = fn(*leaves, causal=inputs.problem.causal, softmax_scale=inputs.softmax_scale)
        return Gradients(*torch.autograd.grad(out, leaves, inputs.saved.dout), None, None)

    return run


def experts(fn: Callable[..., Any]) -> Callable[[MoEInputs, Config], Any]:
    def run(inputs: MoEInputs, config: Config) -> Any:
        form, t = inputs.problem.weight_format, inputs.tensors
        of_weights = {name: getattr(t, name) for name in OF_FORMAT if getattr(t, name) is not None}
        named = of_weights | {"weight_format": form} if form else {}
        return fn(*t[:5], **named)

    return run


def expert_gradients(fn: Callable[..., Any]) -> Callable[[MoEBackwardInputs, Config], ExpertGradients]:
    def run(inputs: MoEBackwardInputs, config: Config) -> ExpertGradients:
        of_call = inputs.tensors.of_call()
        leaves = [one.detach().requires_grad_() for one in of_call[:4]]
        with torch.enable_grad():
            out = fn(*leaves, of_call.topk_ids)
        into = inputs.tensors.dout
        made = torch.autograd.grad(out, leaves, into, allow_unused=True, materialize_grads=True)
        return ExpertGradients(*made, None, None)

    return run


RUNS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "attention_backward": gradients,
    "attention_merge": lambda fn: lambda inputs, config: fn(*inputs),
    "moe": experts,
    "moe_backward": expert_gradients,
}


def run(one: Fault) -> dict[str, Any]:
    assert one.problem is not None
    problem, rows, handover = parse_problem(one.problem), Rows(), Memory()
    worker = InProcess(Worker(BENCH, handover, trusted=True).command)
    oracle = InProcess(Oracle(handover, BENCH.device).command)
    worker.ask("open", spec=None, contract=problem.op)
    oracle.ask("open", contract=problem.op)
    session = Session(BENCH, rows, Request(quick=True), lambda *step: None)
    on = OnProblem.begin(session, problem, worker, oracle, {})
    fn = load(one.spec)
    planted = kernel(op=problem.op, run=RUNS[problem.op](fn))
    MODULES[problem.op].ours = lambda: (planted,)
    rivals = [of_kernel(peer) for peer in operation(problem.op).peers() if peer.name == on.framework]
    ProblemRun(on).go([of_kernel(planted)], rivals)
    voided = any(row.voids for row in rows.of(RefusalRow) if row.kernel == "planted")
    return {"refusals": rows.refusals(), "numbers": 0 if voided else len(rows.of(TimingRow))}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    faults = {one.name: one for one in (*WRONG, *TIMED)}
    print(json.dumps({name: run(faults[name]) for name in sys.argv[1:]}))
