"""The short path from Python to a launch: keep the compiled kernel and call its launcher directly.

Triton's JIT binds, specialises and looks up on every call; on an H200 host that is 15 us, its compiled kernel's launcher 5 us
(docs/notes/launch-cost.md). A planned launch skips the first part. It is safe because a plan is only ever used for tensors of
the shapes, strides and 16-byte alignment that it was specialised for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from triton import knobs

from flashmoe_science.kernels.kernel import AttentionInputs, AttentionOutput, Config, Kernel

INTERPRETING = knobs.runtime.interpret  # TRITON_INTERPRET=1, read by Triton itself when a kernel is decorated


def direct_launch(
    function: Any, grid: tuple[int, int, int], example_args: tuple[Any, ...], **options: Any
) -> Callable[..., None]:
    """Compile ``function`` for arguments like ``example_args`` and return ``launch(*args)``.

    ``args`` are all of the kernel's parameters, in order, constexprs included. Pointers may be given as addresses, which
    spares the driver a look-up for each. The launch goes to the current stream of the current device.
    """
    if INTERPRETING:
        return lambda *args: function[grid](*args, **options)
    compiled = function.warmup(*example_args, grid=grid, enable_fp_fusion=True, **options)  # 3.10 changes the default
    compiled._init_handles()  # loads the cubin now, not inside the first timed call
    run, handle, metadata = compiled.run, compiled.function, compiled.packed_metadata
    current_stream = torch._C._cuda_getCurrentRawStream
    device = torch.cuda.current_device()
    grid_x, grid_y, grid_z = grid
    runtime = knobs.runtime

    def launch(*args: Any) -> None:
        # The hooks are Triton's own profilers'; they are read at each launch because a profiler may start at any time.
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        stream = current_stream(device)
        lazy = compiled.launch_metadata(grid, stream, *args) if enter is not None else None
        run(grid_x, grid_y, grid_z, stream, handle, metadata, lazy, enter, leave, *args)

    return launch


def can_start_early(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it finishes (programmatic dependent launch, Hopper and newer).

    Such a kernel sets itself up early and waits (``gdc_wait``) before it touches memory, so that nothing can be seen of it but
    the microsecond that it saves. See docs/notes/launch-cost.md.
    """
    return torch.cuda.get_device_capability(device) >= (9, 0)


def allocate_output(inputs: AttentionInputs) -> AttentionOutput:
    """New tensors for the result, ``out`` in the memory order of ``q`` ([B, S, H, D] stays so).

    Returns:
        out [batch, heads, seqlen_q, head_dim_v] in the input dtype and, where asked for, lse [batch, heads, seqlen_q] fp32.
    """
    q, problem = inputs.q, inputs.problem
    out = inputs.out
    if out is None:
        shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v)
        if q.stride(1) < q.stride(2):
            batch, heads, rows, width = shape
            out = torch.empty((batch, rows, heads, width), dtype=q.dtype, device=q.device).transpose(1, 2)
        else:
            out = torch.empty(shape, dtype=q.dtype, device=q.device)
    lse = None
    if inputs.return_lse:
        lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
    return AttentionOutput(out, lse)


def run_planned(kernel: Kernel, inputs: AttentionInputs, config: Config) -> AttentionOutput:
    """Plan and launch once: what ``Kernel.run`` means for a kernel that has a plan."""
    assert kernel.plan is not None
    result = allocate_output(inputs)
    launcher = kernel.plan(replace(inputs, out=result.out), config)
    launcher(inputs.q, inputs.k, inputs.v, result.out, result.lse, inputs.softmax_scale)
    return result


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return int(triton.next_power_of_2(n))
