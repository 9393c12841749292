"""Uniform registers that some path reads unwritten are found in Hopper's machine code, and no others."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from uniform_registers import unwritten_in

BRANCH = [
    ".text.k:",
    "R2UR UR4, R8",
    "ULDC.64 UR6, c[0x0][0x210]",
    "@P1 BRA `(.L_x_1)",
    "UIADD3 UR14, UP0, UR4, 0x2, URZ",
    "UIADD3.X UR15, UR7, URZ, URZ, UP0, !UPT",
    "BRA `(.L_x_2)",
    ".L_x_1:",
    "UMOV UR9, UR20",
    ".L_x_2:",
    "HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR12], R24",
    "EXIT",
]


def found(lines: list[str]) -> list[str]:
    return unwritten_in("\n".join(line if line[0] == "." else f"  /*{n:04x}*/  {line} ;" for n, line in enumerate(lines)))


def changed(old: str, *new: str) -> list[str]:
    at = BRANCH.index(old)
    return found([*BRANCH[:at], *new, *BRANCH[at + 1 :]])


def test_a_descriptor_that_one_arm_of_a_branch_writes_is_found() -> None:
    assert found(BRANCH) == [f"000a: {BRANCH[10]}"]


def test_what_every_path_writes_is_not() -> None:
    both = "UIADD3.64 UR14, UR6, 0x2"
    assert changed("@P1 BRA `(.L_x_1)", both, "@P1 BRA `(.L_x_1)") == []
    assert changed("UMOV UR9, UR20", both) == []
    assert changed("UMOV UR9, UR20", "UMOV UR14, UR6", "UMOV UR15, UR7") == []


def test_a_copy_of_nothing_is_found_where_it_is_read() -> None:
    assert len(changed("UMOV UR9, UR20", "UMOV UR14, UR20", "UMOV UR15, UR7")) == 1


def test_a_left_operand_in_shared_memory_has_a_descriptor_too() -> None:
    written = ["UIADD3.64 UR14, UR6, 0x2", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], R24, gsb0"]
    assert changed("UMOV UR9, UR20", written[0], "BRA `(.L_x_2)") == []
    assert len(found(["ULDC.64 UR6, c[0x0][0x210]", *written, "EXIT"])) == 1
    assert found(["ULDC.64 UR6, c[0x0][0x210]", "ULDC.64 UR12, c[0x0][0x210]", *written, "EXIT"]) == []


def test_a_table_of_jumps_leads_to_its_targets() -> None:
    jump = 'BRX R4 -0x220 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)'
    lines = ["UMOV UR4, 0x1", jump, ".L_x_1:", "UMOV UR5, UR4", ".L_x_2:", "IADD3 R3, R3, UR5, RZ", "EXIT"]
    assert len(found(lines)) == 1
    assert found(["UMOV UR5, 0x1", *lines]) == []
