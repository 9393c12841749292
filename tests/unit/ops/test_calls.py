"""The caches of plans and calls, and the guard of the current device."""

from __future__ import annotations

import pytest
import torch

from flashmoe_science.ops.cache import Cache
from flashmoe_science.ops.calls import device_guard, is_plain


def test_a_full_cache_drops_its_oldest_entry() -> None:
    cache: Cache[int, str] = Cache(3)
    for key in range(7):
        cache[key] = str(key)
        assert len(cache) <= 3
        assert cache.get(key) == str(key)
    assert list(cache) == [4, 5, 6]


def test_nothing_is_guarded_on_the_cpu_or_a_lone_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> None:
        return None

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_guard(-1)(call) is call
    assert device_guard(0)(call) is call


def test_a_call_runs_on_its_own_device_where_another_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    class On:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *error: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", On)
    assert [device_guard(index)(lambda x: (x, current[0]))(7) for index in (0, 1)] == [(7, 0), (7, 1)]
    assert current == [0]


def test_a_call_is_plain_where_memory_is_all_there_is() -> None:
    x = torch.zeros(2)
    assert is_plain(x, torch.nn.Parameter(x), x)
    assert not is_plain(x, x.as_subclass(type("Tagged", (torch.Tensor,), {})), x)
    assert not is_plain(x, x, torch._neg_view(x))
    assert not torch.func.vmap(lambda one: torch.tensor(is_plain(one, one, one)))(x[None]).any()
