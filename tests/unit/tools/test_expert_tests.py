"""The plugin that runs others' tests of experts, on a file that stands in for Liger's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.unit.tools.conftest import run_theirs

THEIRS = """
import torch
from liger_kernel.ops import LigerFusedMoEFunction
from liger_kernel.ops.fused_moe import compute_routing_metadata

def call(rows=3):
    ids, weights = torch.tensor([[0, 1]] * 3), torch.tensor([[0.25, 0.5]] * 3)
    return LigerFusedMoEFunction.apply(torch.ones(rows, 4), torch.ones(2, 6, 4), torch.ones(2, 4, 3), ids, weights)

def test_right():
    torch.testing.assert_close(call(), torch.full((3, 4), 0.75 * 3 * torch.nn.functional.silu(torch.tensor(4.0)) * 4))

def test_refused():
    call(rows=2)

def test_private():
    compute_routing_metadata(torch.zeros(1, 1), 1)

def test_wrong():
    assert 0, "wrong"
"""


@pytest.mark.slow
@pytest.mark.redundant  # of a tool that is run by hand
def test_our_experts_are_under_ligers_name(tmp_path: Path) -> None:
    for name in ("__init__", "ops/__init__", "ops/fused_moe", "transformers/__init__", "transformers/swiglu"):
        path = tmp_path / "liger_kernel" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("def compute_routing_metadata(): ...\n" if name.endswith("moe") else "")
    rows, done = run_theirs(tmp_path, THEIRS, "expert_tests", "--of", "liger")
    found = Counter(one["kind"] for one in rows)
    assert found == {"passed": 1, "not served": 2, "failed": 1}, done.stdout + done.stderr
    assert [one["line"] for one in rows if one["kind"] == "failed"] == ["AssertionError: wrong"]


SONIC = """
import torch
from sonicmoe import MoE, count_cumsum
from sonicmoe.functional import moe_TC_softmax_topk_layer

def test_right():
    x, router = torch.randn(5, 8), torch.randn(4, 8)
    up, down, b1, b2 = torch.randn(4, 6, 8), torch.randn(4, 8, 3), torch.randn(4, 6), torch.randn(4, 8)
    rest = up.permute(1, 2, 0), b1, down.permute(1, 2, 0), b2, 2, None, "swiglu", False
    y, logits, counts = moe_TC_softmax_topk_layer(x, router, *rest)
    chosen, ids = (x @ router.T).topk(2)
    expected = torch.zeros(5, 8)
    for n in range(5):
        for weight, e in zip(chosen[n].softmax(0), ids[n]):
            z = x[n] @ up[e].T + b1[e]
            expected[n] += weight * (torch.nn.functional.silu(z[::2]) * z[1::2] @ down[e].T + b2[e])
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(logits, x @ router.T)
    assert torch.equal(counts, count_cumsum(ids.flatten(), 4, do_cumsum=True)[0])
"""


def test_our_experts_are_under_sonicmoes_name(tmp_path: Path) -> None:
    (tmp_path / "sonicmoe").mkdir()
    (tmp_path / "sonicmoe" / "__init__.py").write_text("from .count_cumsum import count_cumsum\nfrom .moe import MoE\n")
    (tmp_path / "sonicmoe" / "moe.py").write_text("MoE = None\n")
    (tmp_path / "sonicmoe" / "functional.py").write_text("import quack\n")
    rows, done = run_theirs(tmp_path, SONIC, "expert_tests", "--of", "sonicmoe")
    assert [one["kind"] for one in rows] == ["passed"], done.stdout + done.stderr
