"""What a launch builds: the JIT is given no tensor, and one build serves the lengths that it should."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

POINTERS = ["q_base", "k_base", "v_base", "out_base", "lse_base"]


def test_kernels_build_from_stand_ins_of_tensors_once_a_variant(hold: Callable[..., None]) -> None:
    script = Path(__file__).with_name("jit_builds.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    builds = [json.loads(line) for line in done.stdout.splitlines()]
    assert [build["kernel"] for build in builds] == ["flashmoe_fwd_triton"] * 3 + ["flashmoe_fwd_gluon_sm90"] * 2
    assert all(build["alike"] for build in builds), "what a CompileJob describes is not what the JIT compiles"
    for build, launched in zip(builds, ("usual", "even", "odd", "usual", "even"), strict=True):
        function = build["kernel"]
        hold(build["ptx"], function.removeprefix("flashmoe_"), function, "h200", f"launched {launched}", "the last")
    usual, even, odd = (build["aligned"] for build in builds[:3])
    strides = [
        f"stride_{tensor}{dim}" for tensor, last in (("q", "m"), ("k", "n"), ("v", "n"), ("o", "m")) for dim in f"bh{last}"
    ]
    assert usual == even == POINTERS + strides
    assert odd == [name for name in usual if name not in ("stride_kn", "stride_vn")]
    for build in builds[3:]:
        assert build["aligned"] == ["lse_base"]
        assert all(kind.startswith("tensordesc<bf16[1, 1, ") for kind in build["descriptors"].values())
        assert list(build["descriptors"]) == ["q_desc", "k_desc", "v_desc", "o_desc"]
