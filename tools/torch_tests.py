"""A plugin for pytest that runs PyTorch's own tests of attention on this package's kernels, and counts what comes of them.

    PYTHONPATH=tools pytest -p torch_tests -c /dev/null -n 8 --counts FILE CLONE/test/test_varlen_attention.py

CLONE is one of PyTorch's repository, of the release that is installed. The other file is test/test_transformers.py, with
-k "SDPA or AttnBias". On a GPU; without one PyTorch's own operators serve, as they do in all tests of the CPU.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from flashmoe_science.integrations import torch_sdpa

pytest_plugins = ["upstream_tests"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Serve PyTorch's attention by ours while a test runs."""
    with torch_sdpa.activated():
        return (yield)
