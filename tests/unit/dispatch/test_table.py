"""dispatch/table.json: what is read, and what is refused."""

from __future__ import annotations

import json

import pytest

from flashmoe_science.dispatch.table import TableError, committed_table, parse_table
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.operations import OPERATIONS, parse_problem

ENTRY = {
    "gpu": "h200",
    "problem": "attn b1 h8 q128 d64 fp16 bshd",
    "kernel": "a",
    "config": "block_m=64",
    "run": "r1",
    "time_ns": 9,
}
PEER = {"kernel": "fa3", "config": "num_splits=1", "ratio": 1.25, "problem": "attn b1 h8 q128 d64 fp16 bshd"}


def table_text(*entries: dict[str, object], schema: int = 1) -> str:
    return json.dumps({"schema": schema, "entries": list(entries)})


def test_an_entry_is_found_by_gpu_and_problem_in_any_layout() -> None:
    table = parse_table(table_text(ENTRY), "t")
    for layout in ("", " bshd"):
        entry = table.exact("h200", parse_problem("attn b1 h8 q128 d64 fp16" + layout))
        assert entry is not None
        assert dict(entry.config) == {"block_m": 64}
        assert (entry.kernel, entry.run, entry.time_ns) == ("a", "r1", 9)
    assert table.exact("l4", parse_problem("attn b1 h8 q128 d64 fp16")) is None
    assert table.exact("h200", parse_problem("attn b1 h8 q128 d64 bf16")) is None


def test_peers_that_were_faster_keep_the_memory_order_that_was_measured() -> None:
    by = {"kernel": "sdpa", "config": "", "backend": "PyTorch's cuDNN backend"}
    (entry,) = parse_table(table_text(ENTRY | {"peers": [PEER, PEER | by]}), "t").entries
    assert [(one.kernel, str(one.config), one.ratio, one.backend) for one in entry.peers] == [
        ("fa3", "num_splits=1", 1.25, None),
        ("sdpa", "", 1.25, "PyTorch's cuDNN backend"),
    ]
    assert {str(one.problem) for one in entry.peers} == {PEER["problem"]}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "Expecting property name"),
        (table_text(ENTRY, schema=2), "schema is 2; this version reads schema 1"),
        ('{"schema": 1}', "lacks 'entries'"),
        (table_text({k: v for k, v in ENTRY.items() if k != "kernel"}), "lacks 'kernel'"),
        (table_text(ENTRY | {"gpu": "h9000"}), "gpu is 'h9000'"),
        (table_text(ENTRY | {"problem": "attn b1"}), "problem 'attn b1' lacks"),
        (table_text(ENTRY | {"config": "block_m"}), "config word 'block_m'"),
        (table_text(ENTRY, ENTRY | {"kernel": "b"}), "attn b1 h8 q128 d64 fp16 on h200 is given twice"),
        (table_text(ENTRY | {"peers": [{"kernel": "fa3"}]}), "lacks 'config'"),
    ],
)
def test_a_malformed_table_is_refused_in_one_line(text: str, what: str) -> None:
    with pytest.raises(TableError) as refusal:
        parse_table(text, "t")
    assert what in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_every_committed_entry_can_be_served() -> None:
    kernels = {kernel.name: kernel for one in OPERATIONS for kernel in one.kernels()}
    for entry in committed_table().entries:
        gpu = gpu_named(entry.gpu)
        assert kernels[entry.kernel].supports(entry.problem, gpu) is None, entry
        first = kernels[entry.kernel].configs(entry.problem, gpu)[0]
        assert set(entry.config) == set(first), f"{entry}: the kernel's configs have other names"
        for peer in entry.peers:
            assert kernels[peer.kernel].replaces_ours != "never", entry
            assert kernels[peer.kernel].supports(peer.problem, gpu) is None, entry
            assert set(peer.config) == set(kernels[peer.kernel].configs(peer.problem, gpu)[0]), entry
