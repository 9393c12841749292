"""A private name of PyTorch that is gone costs time and one warning, and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._subclasses.fake_tensor as fake_tensor
from tests.unit.ops.private_names import SOURCE

import flashmoe_science as fms
from flashmoe_science.ops import private

# Looked up where they are used, as they are: by a peer, by the harness where a call left a mode on, and names of operators.
ELSEWHERE = {
    "ops/attention/peers/sdpa_backward.py": {"_fused_sdp_choice"},
    "measure/sandbox/settings.py": {"_C._pop_torch_function_stack"},
    "measure/worker/clocks.py": {"_foreach_copy_", "_foreach_mul_"},
    "integrations/transformers_masks.py": {"_C.DisableTorchFunctionSubclass"},  # in PyTorch's pages on subclasses
}
IN_A_FUNCTION = {"ops/private.py": {"_subclasses.fake_tensor"}}
ON_A_GPU = {"torch._C._cuda_getCurrentRawStream", "torch._C._dynamo.guards._empty_strided_cuda"}


def test_each_name_that_is_gone_gives_the_same_results_after_one_warning() -> None:
    script = Path(__file__).with_name("private_names.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 17
    assert {name: one["wrong"] for name, one in found.items() if one["wrong"]} == {}
    for name, one in found.items():
        warned = [line.partition(" of PyTorch")[0] for line in one["warned"]]
        here = set() if torch.version.cuda else ON_A_GPU & {*warned}
        assert sorted(warned) == sorted({f"torch.{name}"} | here), name


def test_no_other_private_name_of_pytorch_is_read() -> None:
    found = {}
    for path in SOURCE.rglob("*.py"):
        names = {*re.findall(r"\btorch\.(_[a-zA-Z][\w.]+)", re.sub(r'"[^"]*"', "", path.read_text()))}
        if names:
            found[str(path.relative_to(SOURCE))] = names
    assert found == ELSEWHERE | IN_A_FUNCTION


def test_a_call_is_explained_without_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [torch.ones(2, 3, 4)] * 3
    fms.explain(*given)  # PyTorch imports what it needs
    monkeypatch.delattr(fake_tensor, "FakeTensorMode")
    monkeypatch.setattr(private, "_WARNED", set())
    with pytest.warns(RuntimeWarning, match="torch._subclasses.fake_tensor is gone") as warned:
        decisions = [fms.explain(*given) for _ in range(2)]
    assert [one.kernel for one in decisions] == ["sdpa", "sdpa"]
    assert len(warned) == 1
