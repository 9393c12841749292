"""What backwards of others got wrong, put to each kernel of ours on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.attention.backward import traps

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.ops.attention.front.backward.kernels import ours


@pytest.mark.gpu
@pytest.mark.parametrize("trap", traps.TRAPS, ids=traps.NAMES)
def test_what_others_got_wrong_is_right(trap: traps.Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = current_gpu()
    assert gpu is not None
    monkeypatch.setattr(traps, "GPU", gpu)
    monkeypatch.setattr(traps, "DEVICE", torch.device("cuda"))
    found, served = {}, set()
    for case, inputs in trap():
        for kernel in ours():
            if kernel.cannot(inputs.problem, gpu) is None:
                served.add(kernel.name)
                found[f"{kernel.name}: {case}"] = traps.complaints(inputs, traps.run(inputs, kernel))
    assert "bwd_triton" in served
    assert {case: reasons for case, reasons in found.items() if reasons} == {}
