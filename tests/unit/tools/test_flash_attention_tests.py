"""The plugin that runs FlashAttention's tests, on a file that stands in for theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.unit.tools.conftest import TOOLS, run_theirs

THEIRS = """
import pytest, torch, time
from flash_attn import flash_attn_func
from flash_attn.bert_padding import unpad_input
from flash_attn.flash_attn_interface import USE_TRITON_ROCM
from flash_attn_interface import flash_attn_with_kvcache

@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q, k", [(n, n + 1) for n in range(1, 1001)])
def test_many(q, k, causal):
    rows, keys = torch.zeros(1, q, 2, 8), torch.zeros(1, k, 2, 8)
    assert flash_attn_func(rows, keys, keys, 0.0, None, causal).shape == rows.shape

@pytest.mark.parametrize("heads", [2, 3])
def test_refused(heads):
    flash_attn_func(torch.zeros(1, 3, 5, 8), *[torch.zeros(1, 3, heads, 8)] * 2)

def test_private():
    from flash_attn.flash_attn_interface import flash_attn_gpu

def test_gradients():
    from flash_attn.cute.interface import _flash_attn_fwd, _flash_attn_bwd
    from flash_attn_interface import _flash_attn_backward
    q, k, v, g = torch.randn(4, 1, 3, 2, 8).unbind()
    out, lse, *_ = _flash_attn_fwd(q, k, v, causal=True, return_lse=True)
    dq = torch.empty_like(q)
    made = _flash_attn_bwd(q, k, v, out, g, lse, causal=True, dq=dq)
    assert made[0] is dq
    others = _flash_attn_backward(g, q, k, v, out, lse, *[None] * 9, 8 ** -0.5, True, window_size=(-1, -1))
    assert all(torch.equal(one, other) for one, other in zip(made, others))
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    packed = [one[0] for one in (g, q, k, v, out)]
    parts = _flash_attn_backward(*packed, lse[0], starts, starts, None, None, 2, 2, *[None] * 3, None, True)
    torch.testing.assert_close(parts[0][0], torch.zeros(2, 8))  # the only key of its sequence
    assert parts[0][2].abs().max() > 0
    with pytest.raises(TypeError):
        _flash_attn_fwd(q, k, v, score_mod=print)

def test_refused_private():
    from flash_attn.cute.interface import _flash_attn_bwd_sparse_mla
    _flash_attn_bwd_sparse_mla()

def test_slow():
    time.sleep(30)

def test_wrong():
    assert 0, "wrong"
"""


@pytest.mark.slow
@pytest.mark.redundant  # of a tool that is run by hand
def test_a_sample_is_run_and_its_results_are_counted(tmp_path: Path) -> None:
    rows, done = run_theirs(
        tmp_path, THEIRS, "flash_attention_tests", "--flash-attention", tmp_path, "--cases", 30, "--limit", 4
    )
    kinds = Counter(one["kind"] for one in rows)
    assert kinds == {"passed": 31, "not served": 4, "out of time": 1, "failed": 1}, done.stdout + done.stderr
    reasons = Counter(one["line"] for one in rows if one["kind"] == "not served")
    assert sorted(reasons.values()) == [1, 1, 2]
    assert any("k has N heads and q has N" in one for one in reasons), reasons
    lines = sorted(one["line"] for one in rows if one["kind"] in ("failed", "out of time"))
    assert lines == ["AssertionError: wrong", "TimeoutError: 4 seconds have passed"]
    assert all(one["served by"] == ["sdpa"] for one in rows if "test_many" in one["test"] or "test_gradients" in one["test"])


def test_counts_are_printed_of_a_run_that_was_cut_off(tmp_path: Path) -> None:
    rows = [
        {"test": "a.py::one", "kind": "passed", "line": "", "served by": ["bwd_triton"], "s": 1.0},
        {"test": "a.py::two", "kind": "not served", "line": "TypeError: N", "served by": [], "s": 1.0},
    ]
    (tmp_path / "theirs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    command = [sys.executable, str(TOOLS / "upstream_tests.py"), str(tmp_path / "theirs.jsonl")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "| theirs | 1 | 0 | 1 | 0 | 0 | 0 | 0 | 1 |" in printed
    assert "not served 1: TypeError: N" in printed
