"""The correctness stage: outputs into poisoned memory, held to the tolerance rule, bitwise repeats, peak memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flashmoe_science.measure.bench import Bench, Candidate
from flashmoe_science.measure.inputs import TORCH_DTYPE
from flashmoe_science.measure.tolerance import Check, Reference, check_attention
from flashmoe_science.ops.attention.inputs import AttentionInputs, AttentionOutput
from flashmoe_science.records import CorrectnessRow

_REPEATS = 2  # further runs that must give the same bits


@dataclass(frozen=True, slots=True)
class Finding:
    """A row for the record, and why it is not a pass (empty where it is)."""

    row: CorrectnessRow
    reasons: tuple[str, ...]


def examine(run: str, bench: Bench, candidate: Candidate, inputs: AttentionInputs, reference: Reference) -> Finding:
    """Run a candidate as a caller would and judge what it wrote. Raises whatever the kernel raises.

    Ours must also repeat to the bit, answer anew when the same memory holds other values, and use no device memory beyond its
    output and log-sum-exp.
    """
    inputs = replace(inputs, return_lse=True)
    before = _fingerprint(inputs)
    poisoned = _poison(inputs)
    result = candidate.run(replace(inputs, out=poisoned))
    bench.synchronize()
    check = check_attention(result, reference)
    reasons = [*check.reasons, *_wrong_output(result, poisoned)]
    if _fingerprint(inputs) != before:
        reasons.append("it changed its inputs")
    if candidate.kernel.origin == "ours" and not _repeats(bench, candidate, inputs, result):
        reasons.append("its result differs from run to run")
    if candidate.kernel.origin == "ours" and not _answers_anew(bench, candidate, inputs, reference):
        reasons.append("it does not answer anew when the same memory holds other values")
    peak, needed = _peak_extra_bytes(bench, candidate, inputs), _output_bytes(result)
    if candidate.kernel.origin == "ours" and peak is not None and peak > needed:
        reasons.append(f"one call takes {peak} bytes of device memory; its output and log-sum-exp are {needed}")
    return Finding(_row(run, candidate, inputs, check, tuple(reasons), peak, needed), tuple(reasons))


def _row(
    run: str,
    candidate: Candidate,
    inputs: AttentionInputs,
    check: Check,
    reasons: tuple[str, ...],
    peak: int | None,
    needed: int,
) -> CorrectnessRow:
    return CorrectnessRow(
        run=run,
        problem=str(inputs.problem),
        kernel=candidate.name,
        origin=candidate.kernel.origin,
        config=str(candidate.config),
        passed=not reasons,
        out=check.out,
        lse=check.lse,
        peak_extra_bytes=peak,
        output_bytes=needed,
    )


def _poison(inputs: AttentionInputs) -> torch.Tensor:
    """An output full of NaN in the memory order of Q; a kernel that leaves an element unwritten leaves a NaN.

    Blocks of the output's and the log-sum-exp's sizes are also filled with NaN and freed, for the allocator to hand to a
    kernel that allocates its own.
    """
    problem, device, dtype = inputs.problem, inputs.q.device, TORCH_DTYPE[inputs.problem.dtype]
    batch, heads, rows, width = problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v
    freed = [
        torch.full((batch, heads, rows, width), torch.nan, dtype=dtype, device=device),
        torch.full((batch, heads, rows), torch.nan, dtype=torch.float32, device=device),
    ]
    if problem.layout == "bshd":
        out = torch.full((batch, rows, heads, width), torch.nan, dtype=dtype, device=device).transpose(1, 2)
    else:
        out = torch.full((batch, heads, rows, width), torch.nan, dtype=dtype, device=device)
    del freed
    return out


def _wrong_output(result: AttentionOutput, given: torch.Tensor) -> list[str]:
    wrong = []
    if type(result.out) is not torch.Tensor:
        wrong.append(f"it returned a {type(result.out).__name__}, not a plain tensor")
    if result.out.data_ptr() != given.data_ptr():
        wrong.append("it returned another tensor than the one it was given to write")
    if result.out.dtype != given.dtype:
        wrong.append(f"it returned {result.out.dtype}; the inputs are {given.dtype}")
    return wrong


def _fingerprint(inputs: AttentionInputs) -> tuple[float, ...]:
    return tuple(tensor.double().sum().item() for tensor in (inputs.q, inputs.k, inputs.v))


def _repeats(bench: Bench, candidate: Candidate, inputs: AttentionInputs, first: AttentionOutput) -> bool:
    for _ in range(_REPEATS):
        again = candidate.run(inputs)
        bench.synchronize()
        if not _same_bits(again.out, first.out):
            return False
        if again.lse is not None and first.lse is not None and not _same_bits(again.lse, first.lse):
            return False
    return True


def _answers_anew(bench: Bench, candidate: Candidate, inputs: AttentionInputs, reference: Reference) -> bool:
    """Whether -V in V's own memory gives -O: an answer kept by address, or by size, does not."""
    inputs.v.neg_()
    try:
        again = candidate.run(inputs)
        bench.synchronize()
    finally:
        inputs.v.neg_()
    return check_attention(AttentionOutput(-again.out, again.lse), reference).passed


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _peak_extra_bytes(bench: Bench, candidate: Candidate, inputs: AttentionInputs) -> int | None:
    """Device memory of one planned call beyond its inputs, as requested of PyTorch's allocator. None on a CPU."""
    if bench.gpu is None:
        return None
    call = candidate.planned(inputs)
    call(inputs)  # once before, so that no one-time workspace is counted as a call's
    bench.synchronize()
    torch.cuda.reset_peak_memory_stats(bench.device)
    before = _requested(bench, "current")
    kept = call(inputs)
    bench.synchronize()
    peak = _requested(bench, "peak") - before
    del kept
    return peak


def _requested(bench: Bench, which: str) -> int:
    return int(torch.cuda.memory_stats(bench.device)[f"requested_bytes.all.{which}"])


def _output_bytes(result: AttentionOutput) -> int:
    return sum(t.numel() * t.element_size() for t in (result.out, result.lse) if t is not None)
