"""The plugin that runs PyTorch's tests, on a file that stands in for one of theirs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.unit.tools.conftest import run_theirs

THEIRS = """
import unittest

import torch
from torch.nn.attention import current_flash_attention_impl

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.front.backward.choose import choose_backward

class TestTheirs(unittest.TestCase):
    def test_ours_is_active(self):
        self.assertEqual(current_flash_attention_impl(), "flashmoe")

    def test_a_backward_of_ours_is_asked_for(self):
        few = torch.empty(1, 2, 3, 64, dtype=torch.bfloat16, device="meta")
        with assume(gpu_named("h100")):
            chosen = choose_backward(Tensors(few, few, few), Options())
        self.assertEqual((chosen.kernel[:4], chosen.basis), ("bwd_", "requested"))

    def test_skipped(self):
        self.skipTest("wrong GPU")

def make(number):
    def test_many(self):
        self.assertLess(number, 100)
    return test_many

for number in range(100):
    setattr(TestTheirs, f"test_many_{number}", make(number))
"""


@pytest.mark.slow
@pytest.mark.redundant  # of a tool that is run by hand
def test_ours_is_active_in_a_sample_of_their_cases(tmp_path: Path) -> None:
    rows, done = run_theirs(tmp_path, THEIRS, "torch_tests", "--ours", "--cases", 7)
    assert Counter(one["kind"] for one in rows) == {"passed": 9, "skipped": 1}, done.stdout + done.stderr
