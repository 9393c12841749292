"""Matrix products as plain maths has them, for what the error of a kernel is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_tf32() -> Iterator[None]:
    """Products in fp32 are in fp32, whatever the caller has set."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def plain_product(dtype: torch.dtype, device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The product that the plain maths in ``dtype`` takes. In fp32 on a CPU it adds one product after another, as a loop does:
    the library there adds up lanes apart, and errs by a half to a quarter of it."""
    return _in_order if dtype == torch.float32 and device.type == "cpu" else torch.matmul


def _in_order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of [..., m, n] and [..., n, p]."""
    made, b = a[..., :0] @ b[..., :0, :], b.contiguous()  # of the transposed, rows are read with strides: 8 times as long
    for n in range(a.shape[-1]):
        made.addcmul_(a[..., n : n + 1], b[..., n : n + 1, :])
    return made
