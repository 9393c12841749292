"""tools/mbarriers.py on PTX as Triton writes it."""

from __future__ import annotations

import pytest
from mbarriers import reused

BARRIER = """
    mov.b32 	%r9, global_smem;
    add.s32 	%r2, %r9, 215040;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 2;
"""


@pytest.mark.parametrize(
    "access",
    [
        "@%p1 st.shared.b32 [ %r2 + 0 ], %r3;",
        "ld.shared.b32 	%r4, [global_smem+215044];",
        "st.shared.v4.b32 [global_smem+215028], %r3;",
    ],
)
def test_plain_memory_that_was_an_mbarrier_is_found(access: str) -> None:
    assert reused(BARRIER + access) == {215040}


@pytest.mark.parametrize(
    "other",
    [
        "ld.shared.b32 	%r4, [global_smem+215048];",
        "st.shared.v4.b32 [global_smem+215024], %r3;",
        "@%p1 mbarrier.inval.shared::cta.b64 [%r2];\n@%p1 st.shared.b32 [ %r2 + 0 ], %r3;",
        "mbarrier.try_wait.parity.shared.b64 complete, [%r2], %r3;",
    ],
)
def test_memory_beside_it_and_a_barrier_that_is_ended_are_not(other: str) -> None:
    assert reused(BARRIER + other) == set()
