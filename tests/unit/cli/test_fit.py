"""``flashmoe fit``: what it prints of a planned block and of a kernel, its exit codes, and one line for a wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from flashmoe_science.hardware import target
from flashmoe_science.hardware.gpus import GPUS

Flashmoe = Callable[..., tuple[int, str, str]]


def test_a_tile_above_48_kb_fits_an_l4_by_opt_in(flashmoe: Flashmoe) -> None:
    """56.75 KB: more than the 48 KB that a block gets without asking."""
    code, out, _ = flashmoe("fit", "--gpu", "l4", "--block", "56.75,256,64")
    assert code == 0
    said = " ".join(out.split())
    assert "NVIDIA L4 (sm_89, 58 SMs); a block's shared memory: 48 KB static, 99 KB by opt-in" in said
    assert "56.75 KB, opt-in 1 8 of 48" in said
    assert "fits; 56.75 KB: above the 48 KB that a block gets without asking, within the 99 KB it may ask for" in said
    assert "limited by shared memory (57.75 KB with the 1 KB reserved, of 100 KB)" in said


def test_json_of_a_planned_block(flashmoe: Flashmoe) -> None:
    code, out, err = flashmoe("fit", "--all", "--block", "120,384,168", "--json")
    rows = {row["gpu"]: row for row in json.loads(out)}
    assert (code, err) == (1, "")
    assert list(rows) == list(GPUS)
    assert {name for name, row in rows.items() if row["fits"]} == {"a100", "h100", "h200", "b200"}
    assert rows["h200"]["blocks_per_sm"] == 1
    assert rows["h200"]["limited_by"] == ["registers", "shared memory"]
    assert (rows["l4"]["shared_limit_static"], rows["l4"]["shared_limit_opt_in"]) == (49152, 101376)


def test_a_table_names_gpu_config_and_limit(flashmoe: Flashmoe, monkeypatch: pytest.MonkeyPatch) -> None:
    """One build stands for all of them, without the pool of processes, which tests/compile holds."""
    monkeypatch.setattr(target, "compile_many", lambda jobs, on_done: [target.compile_for(*jobs[0])] * len(jobs))
    code, out, _ = flashmoe("fit", "--gpu", "l4", "--problem", "attn b1 h8 q512 d64 fp16")
    assert code == 0
    assert "NVIDIA L4 (sm_89, 58 SMs); a block's shared memory: 48 KB static, 99 KB by opt-in" in out
    assert "block_m=" in out
    assert "kernel 'fwd_gluon_sm90' cannot serve attn b1 h8 q512 d64 fp16: needs compute capability 9.0" in " ".join(
        out.split()
    )
    rows = json.loads(flashmoe("fit", "fwd_triton", "--gpu", "l4", "--problem", "attn b1 h8 q512 d64 fp16", "--json")[1])
    assert all((row["kernel"], row["fits"], row["gpu"]) == ("fwd_triton", True, "l4") for row in rows)
    assert rows[0]["waves"] == pytest.approx(rows[0]["grid_blocks"] / (58 * rows[0]["blocks_per_sm"]))


def test_interpreting_is_one_line(flashmoe: Flashmoe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, _, err = flashmoe("fit", "fwd_triton", "--gpu", "l4")
    assert code == 2
    assert "compiling is not possible with TRITON_INTERPRET=1; unset it" in err
