"""The L2's set-aside part is seen and let go of; where no driver can say, that is no fault."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flashmoe_science.measure import l2_cache


class Driver:
    """A CUDA driver that keeps a limit, as far as it can be asked for one."""

    def __init__(self, held: int, known: bool = True, settable: bool = True) -> None:
        self.held, self.known, self.settable, self.reset = held, known, settable, 0

    def cuCtxGetLimit(self, where: object, limit: int) -> int:
        assert limit == 6
        if not self.known:
            return 215  # CUDA_ERROR_UNSUPPORTED_LIMIT
        where._obj.value = self.held
        return 0

    def cuCtxSetLimit(self, limit: int, value: ctypes.c_size_t) -> int:
        if self.settable:
            self.held = value.value
        return 0

    def cuCtxResetPersistingL2Cache(self) -> int:
        self.reset += 1
        return 0


def use(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    monkeypatch.setattr(l2_cache, "_driver", lambda: driver)


def test_what_is_set_aside_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(30 << 20)
    use(monkeypatch, driver)
    assert l2_cache.set_aside_bytes() == 30 << 20
    l2_cache.release()
    assert l2_cache.set_aside_bytes() == 0
    assert (driver.held, driver.reset) == (0, 1)


@pytest.mark.parametrize("driver", [None, Driver(0, known=False)])
def test_where_nobody_can_be_asked_nothing_is_known(driver: Driver | None, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, driver)
    assert l2_cache.set_aside_bytes() is None
    l2_cache.release()
    assert l2_cache.set_aside_bytes() is None


@pytest.mark.gpu
def test_the_drivers_own_limit() -> None:
    torch.ones(1, device="cuda")
    l2_cache.release()
    assert l2_cache.set_aside_bytes() in (0, None)
    driver = l2_cache._driver()
    assert driver is not None
    assert driver.cuCtxSetLimit(6, 1 << 20) == 0
    assert l2_cache.set_aside_bytes()
    l2_cache.release()
    assert l2_cache.set_aside_bytes() == 0
