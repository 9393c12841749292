"""An eager call that was seen before takes no more Python frames than it did: each is time that a user waits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

Counted = dict[str, tuple[list[str], int]]

# By call: what it launches, and the frames that CPython 3.11 makes. A later one makes none of a comprehension.
MOST: Counted = {
    "scaled_dot_product_attention": (["flashmoe_fwd_gluon_sm90"], 10),
    "scaled_dot_product_attention, boolean mask": (["flashmoe_fwd_gluon_sm90"], 18),
    "scaled_dot_product_attention, bias": (["flashmoe_fwd_gluon_sm90"], 18),
    "flash_attn_func": (["flashmoe_fwd_gluon_sm90"], 11),
    "flash_attn_func, window": (["flashmoe_fwd_gluon_sm90"], 44),
    "flash_attn_varlen_func": (["flashmoe_packed_tiles_triton", "flashmoe_fwd_gluon_sm90"], 26),
    "flash_attn_with_kvcache": (["flashmoe_decode_gluon", "flashmoe_merge_triton"], 16),
    "flash_attn_with_kvcache, append": (["flashmoe_split_triton", "flashmoe_merge_triton"], 16),
    "fused_moe, a token": (["flashmoe_moe_gemv_up", "flashmoe_moe_gemv_down"], 14),
    "fused_moe, a token, int4": (["flashmoe_moe_gemv_up_gluon", "flashmoe_moe_gemv_down_gluon"], 14),
    "fused_moe": (
        ["flashmoe_moe_rows", "flashmoe_moe_up_gluon_sm90", "flashmoe_moe_down_gluon_sm90", "flashmoe_moe_combine"],
        22,
    ),
}


def test_calls_seen_before_take_no_more_frames() -> None:
    script = Path(__file__).with_name("eager_frames.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: Counted = json.loads(done.stdout)
    assert {call: launched for call, (launched, _) in found.items()} == {call: launched for call, (launched, _) in MOST.items()}
    assert {call: count for call, (_, count) in found.items() if count > MOST[call][1]} == {}
