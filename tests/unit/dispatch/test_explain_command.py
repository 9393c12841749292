"""``flashmoe explain`` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from flashmoe_science.cli import explain
from flashmoe_science.dispatch.table import committed_table, parse_table
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.operations import operation, parse_problem

Flashmoe = Callable[..., tuple[int, str, str]]
OURS = operation("attention").ours()
PROBLEM = "attn b1 h16 q4096 d128 bf16 causal"


@pytest.mark.parametrize("gpu", ["l4", "a100", "h200", "b200"])
def test_every_kernel_of_ours_is_chosen_or_said_why_not(gpu: str, flashmoe: Flashmoe) -> None:
    code, out, _ = flashmoe("explain", PROBLEM, "--gpu", gpu, "--json")
    assert code == 0
    answer = json.loads(out)
    assert set(answer) == {"problem", "gpu", "kernel", "config", "basis", "record", "reason", "others"}
    assert (answer["problem"], answer["gpu"]) == (PROBLEM, gpu)
    assert {answer["kernel"], *answer["others"]} == {kernel.name for kernel in OURS}
    assert (answer["basis"] == "measured") == (committed_table().exact(gpu, parse_problem(PROBLEM)) is not None)
    chosen = next(kernel for kernel in OURS if kernel.name == answer["kernel"])
    assert chosen.supports(parse_problem(PROBLEM), gpu_named(gpu)) is None


def test_the_plain_answer_says_the_same(flashmoe: Flashmoe) -> None:
    answer = json.loads(flashmoe("explain", PROBLEM, "--gpu", "l4", "--json")[1])
    out = flashmoe("explain", PROBLEM, "--gpu", "NVIDIA L4")[1]
    for word in (PROBLEM, "NVIDIA L4", answer["kernel"], answer["config"], answer["basis"], answer["reason"]):
        assert word in out
    for name, why in answer["others"].items():
        assert f"{name}: {why}" in out


def test_a_requested_kernel_is_explained_or_refused(flashmoe: Flashmoe) -> None:
    answer = json.loads(flashmoe("explain", PROBLEM, "--gpu", "l4", "--kernel", "fwd_triton", "--json")[1])
    assert (answer["kernel"], answer["basis"]) == ("fwd_triton", "requested")
    code, out, err = flashmoe("explain", PROBLEM, "--gpu", "l4", "--kernel", "fwd_gluon_sm90")
    assert (code, out) == (2, "")
    assert "fwd_gluon_sm90" in err
    assert "compute capability 9.0" in err


def test_a_peer_that_records_have_faster_is_named_with_its_backend_and_ratio(
    flashmoe: Flashmoe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As text, as JSON, and not where a kernel is asked for by name."""
    problem = "attn b4 h16 q4096 d128 fp32"
    entry = {"gpu": "h200", "problem": problem, "kernel": "fwd_triton", "run": "r1", "time_ns": 9,
             "config": str(OURS[-1].configs(parse_problem(problem), gpu_named("h200"))[0])}  # fmt: skip
    faster = {"config": "", "ratio": 2.083, "problem": problem}
    peers = [faster | {"kernel": "sdpa", "backend": "PyTorch's cuDNN backend"}, faster | {"kernel": "fa3"}]
    text = json.dumps({"schema": 1, "entries": [entry | {"peers": peers}]})
    monkeypatch.setattr(explain, "known_table", lambda: parse_table(text, "fabricated"))
    monkeypatch.delenv("FLASHMOE_PEERS", raising=False)
    answer = json.loads(flashmoe("explain", problem, "--gpu", "h200", "--json")[1])
    assert (answer["kernel"], answer["basis"], answer["record"]) == ("sdpa", "measured", "r1")
    assert answer["reason"] == "PyTorch's cuDNN backend, 2.08x ours (fwd_triton) on this problem on NVIDIA H200"
    assert answer["others"]["fwd_triton"] == "slower than sdpa in record r1"
    assert "FLASHMOE_PEERS=1" in answer["others"]["fa3"]
    assert f"reason   {answer['reason']}" in flashmoe("explain", problem, "--gpu", "h200")[1]
    answer = json.loads(flashmoe("explain", problem, "--gpu", "h200", "--kernel", "fwd_triton", "--json")[1])
    assert (answer["kernel"], answer["basis"]) == ("fwd_triton", "requested")


@pytest.mark.parametrize(
    ("lengths", "tiles"), [("b4 h16 q4096", "consumers=2 block_n=128"), ("b34 h24 q908", "consumers=3 block_n=64")]
)
def test_tiles_that_are_left_to_a_calls_lengths_are_those_of_the_problem(flashmoe: Flashmoe, lengths: str, tiles: str) -> None:
    assert f"config   {tiles} " in flashmoe("explain", f"attn {lengths} d128 bf16 bshd", "--gpu", "h200")[1]
