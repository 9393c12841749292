"""The plugin that runs PyTorch's tests, on a file that stands in for one of theirs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.unit.tools.conftest import run_theirs

THEIRS = """
import unittest
from torch.nn.attention import current_flash_attention_impl

class TestTheirs(unittest.TestCase):
    def test_ours_is_active(self):
        self.assertEqual(current_flash_attention_impl(), "flashmoe")

    def test_skipped(self):
        self.skipTest("wrong GPU")

def make(number):
    def test_many(self):
        self.assertLess(number, 100)
    return test_many

for number in range(100):
    setattr(TestTheirs, f"test_many_{number}", make(number))
"""


def test_ours_is_active_in_a_sample_of_their_cases(tmp_path: Path) -> None:
    rows, done = run_theirs(tmp_path, THEIRS, "torch_tests", "--cases", 7)
    assert Counter(one["kind"] for one in rows) == {"passed": 8, "skipped": 1}, done.stdout + done.stderr
