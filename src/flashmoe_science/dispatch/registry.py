"""Every kernel there is, in one explicit tuple: ours, the preferred first, then the peers."""

from __future__ import annotations

import importlib.util

from flashmoe_science.kernels.kernel import Kernel
from flashmoe_science.kernels.peers import PEERS

TRITON_MISSING = None if importlib.util.find_spec("triton") else "Triton is not installed (it exists for Linux)"


def _ours() -> tuple[Kernel, ...]:
    if TRITON_MISSING:
        return ()  # the package still works, on PyTorch's own attention, and its decisions say why
    from flashmoe_science.kernels.attention import fwd_gluon_sm90, fwd_triton

    return (fwd_gluon_sm90.KERNEL, fwd_triton.KERNEL)


OURS: tuple[Kernel, ...] = _ours()
KERNELS: tuple[Kernel, ...] = (*OURS, *PEERS)


def kernel_named(name: str) -> Kernel:
    """The kernel of that name.

    Raises:
        TypeError: not a string.
        ValueError: there is none; the message lists the names.
    """
    if not isinstance(name, str):
        raise TypeError(f"kernel is {name!r}; it must be a string or None")
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    hint = f" ({TRITON_MISSING})" if TRITON_MISSING else ""
    raise ValueError(f"kernel is {name!r}; it must be one of {', '.join(kernel.name for kernel in KERNELS)}{hint}")
