"""What may come back from a kernel in place of a plain tensor."""

from __future__ import annotations

import pytest
import torch
from flashmoe_science.measure.trial.cases import kind_of


def freed() -> torch.Tensor:
    made = torch.ones(8)
    made.untyped_storage().resize_(0)
    return made


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (torch.ones(2, 3), "Tensor"),
        (torch.ones(2, 3).t()[1:], "Tensor"),
        (torch.ones(1).expand(5), "Tensor"),
        (torch.empty(0, 3), "Tensor"),
        (None, "NoneType"),
        (torch.nn.Parameter(torch.ones(2)), "Parameter"),
        (torch.ones(2, 3).to_sparse(), "tensor of layout sparse_coo"),
        (torch.ones(2, 3).to_mkldnn(), "tensor of layout _mkldnn"),
        (torch.ones(2, device="meta"), "tensor without memory (on the device meta)"),
        (torch._neg_view(torch.ones(2)), "tensor that is negated or conjugated only when it is read"),
        (torch.ones(2, dtype=torch.complex64).conj(), "tensor that is negated or conjugated only when it is read"),
        (freed(), "tensor whose memory was freed"),
    ],
)
def test_what_is_no_plain_tensor_is_told_by_its_kind(made: object, kind: str) -> None:
    assert kind_of(made) == kind
