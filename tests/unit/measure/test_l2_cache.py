"""The L2's set-aside part is seen and let go of; where no driver can say, that is no fault."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flashmoe_science.measure import l2_cache


def test_where_no_driver_can_be_asked_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2_cache, "_driver", lambda: None)
    l2_cache.release()
    assert l2_cache.set_aside_bytes() is None


@pytest.mark.gpu
def test_the_drivers_own_limit() -> None:
    torch.ones(1, device="cuda")
    l2_cache.release()
    assert l2_cache.set_aside_bytes() in (0, None)
    driver = l2_cache._driver()
    assert driver is not None
    assert driver.cuCtxSetLimit(6, ctypes.c_size_t(1 << 20)) == 0
    assert l2_cache.set_aside_bytes()
    l2_cache.release()
    assert l2_cache.set_aside_bytes() == 0
