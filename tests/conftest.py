"""What holds for every test: one thread of torch's a process, a limit of time, the longest tests first, no garbage is looked
for in what is imported, and those that need a GPU are skipped, with that reason, where there is none."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# A first import, or another process on the machine, is no fault of an example.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
# Pytest's workers share the cores among themselves; more threads of torch's, here or in a process that a test starts, fight
# for them. Inductor compiles here too, not in processes of its own, each of which imports torch. Set before torch is imported,
# which reads them once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

LIMIT_S = 600

gc.disable()  # until all is collected: PyTorch's and 200 other modules' imports leave none


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay
    gc.enable()


@pytest.fixture
def short_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function is checked on every eighth problem of its sweep, where a test asks what follows from the answers."""
    from flashmoe_science.measure import check, function_run

    problems_of = check.problems_of
    for module in (check, function_run):
        monkeypatch.setattr(module, "problems_of", lambda texts, what: problems_of(texts, what)[::8])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that hangs fails, and the others go on."""

    def too_long(*_: object) -> None:
        raise TimeoutError(f"{item.nodeid} did not end within {LIMIT_S} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ("harness" not in item.path.parts, item.get_closest_marker("slow") is None))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch  # not at the top: most selections have no GPU test and should start at once

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none here"))
