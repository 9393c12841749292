"""A digest of machine code changes with what is computed, not with where it is written; and a build without one is refused."""

from __future__ import annotations

import importlib
from pathlib import Path

import machine_code
import pytest
import torch

from flashmoe_science.hardware.compiler import run_compiler
from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.kernel import CompileJob
from flashmoe_science.ops.launch import Pointer

IMPORTS = "import triton\nimport triton.language as tl\n"
HELPER = "@triton.jit\ndef {name}(a, b):\n    return a {sign} b\n"
KERNEL = """
@triton.jit
def adds(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for step in range(4):
        tl.store(out + at, {name}(tl.load(x + at), step))
"""


def digest_of(module: str) -> str:
    job = CompileJob(importlib.import_module(module).adds, (Pointer(torch.int32), Pointer(torch.int32), 256), {})
    return machine_code.digest(run_compiler(job, GPUS["h200"]).asm["ptx"])


def test_a_helper_may_move_and_be_renamed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    sources = {
        "pinned_one_file": IMPORTS + HELPER.format(name="plus", sign="+") + KERNEL.format(name="plus"),
        "pinned_helper": IMPORTS + "# Some\n# lines.\n" + HELPER.format(name="added", sign="+"),
        "pinned_two_files": "from pinned_helper import added\n" + IMPORTS + KERNEL.format(name="added"),
        "pinned_other": IMPORTS + HELPER.format(name="plus", sign="-") + KERNEL.format(name="plus"),
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    assert digest_of("pinned_one_file") == digest_of("pinned_two_files") != digest_of("pinned_other")


def test_only_what_a_debugger_reads_is_left_out() -> None:
    bare = ".visible .entry k(\n)\n{\n\tadd.s32 %r1, %r2, 1;\n$L__BB0_1:\n\tbra $L__BB0_1;\n}\n"
    full = bare.replace("\tadd", "$L__func_begin0:\n\t.loc\t1 2 3 // a.py:2:3\n$L__tmp0:\n\tadd")
    full = full.replace(";\n}", "; // loop\n$L__tmp1:\n}")
    full += '\t.file\t1 "/a/b.py"\n\t.section\t.debug_info\n\t{\n.b8 1 // DW\n\t}\n\t.section\t.debug_macinfo\t{\t}\n'
    assert machine_code.digest(full) == machine_code.digest(bare)
    where = ".global .align 1 .b8 assertFile_0[2] = {97};\n\tst.param.b32 \t[param2], 39;\n"
    assert machine_code.digest(where + bare) == machine_code.digest(bare)
    assert machine_code.digest(where.replace("File", "Message") + bare) != machine_code.digest(bare)
    assert machine_code.digest(bare.replace("%r2", "%r3")) != machine_code.digest(bare)
    assert machine_code.digest(bare.replace("$L__BB0_1:\n", "")) != machine_code.digest(bare)


def test_another_digest_and_none_are_refused_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_code, "FOLDER", tmp_path)
    one, other, third = (machine_code.Name("k", "flashmoe_k", "h200", "attn b1 d64", f"warps={count}") for count in (4, 8, 16))
    machine_code.write({one: "aa", other: "bb"}, whole=False)
    machine_code.hold(one, "aa")
    with pytest.raises(machine_code.Changed, match=r"k / .* / attn b1 d64 / warps=4.* was aa and is cc.*make digests"):
        machine_code.hold(one, "cc")
    with pytest.raises(machine_code.Changed, match=r"no digest is committed for it.*make digests ARGS=--write-digests"):
        machine_code.hold(third, "cc")


def test_the_others_stay_unless_the_whole_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_code, "FOLDER", tmp_path)
    one, other = (machine_code.Name("k", "flashmoe_k", "h200", "attn b1 d64", f"warps={count}") for count in (4, 8))
    machine_code.write({one: "aa"}, whole=False)
    machine_code.write({other: "bb"}, whole=False)
    assert machine_code.read() == {one: "aa", other: "bb"}
    machine_code.write({other: "cc"}, whole=True)
    assert machine_code.read() == {other: "cc"}
