"""What holds for every test: one thread of torch's a process, and those that need a GPU are skipped, with that reason, where
there is none."""

from __future__ import annotations

import os

import pytest

# Pytest's workers share the cores among themselves; more threads of torch's, here or in a process that a test starts, fight
# for them. Set before torch is imported, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch  # not at the top: most selections have no GPU test and should start at once

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none here"))
