"""Times under ceilings: what each would take alone, which binds, and whether it was measured."""

from __future__ import annotations

import pytest
from tests.unit.fabricated import Fabricate, verdicts
from tests.unit.judge.diagnose.planted import Plant

from flashmoe_science.judge.diagnose.roofline import ceilings, place, rooflines

LONG = "attn b4 h16 q4096 d128 bf16"


def test_each_level_has_its_least_time_and_the_longest_binds() -> None:
    above = ceilings([], "h200", "bf16")
    point = place(LONG, "k", "", 1_000_000.0, above)
    flops = 4 * 4 * 16 * 4096**2 * 128
    assert point.achieved == pytest.approx(flops / 1e-3)
    tensor, special, dram = (point.need(level) for level in ("tensor", "special", "dram"))
    assert tensor.least_ns == pytest.approx(flops / 989e12 * 1e9)
    assert special.amount == 4 * 16 * 4096**2
    assert special.least_ns == pytest.approx(special.amount / (16 * 132 * 1.98e9) * 1e9)
    assert dram.amount == 4 * 4 * 16 * 4096 * 128 * 2
    assert point.binding is tensor
    assert tensor.share == pytest.approx(tensor.least_ns / 1e6)
    assert point.intensity("dram") == pytest.approx(flops / dram.amount)
    assert point.intensity("shared") is None


def test_a_measurement_takes_the_specifications_place_and_says_so() -> None:
    run = Plant().ceiling("dram read", 4.0e12, "B/s").ceiling("dram copy", 4.3e12, "B/s").ceiling("tensor bf16", 7e14, "FLOP/s")
    above = ceilings([run.done()], "h200", "bf16")
    assert (above["dram"].value, above["dram"].measured) == (4.3e12, True)
    assert (above["tensor"].value, above["tensor"].measured) == (7e14, True)
    assert not above["special"].measured
    # fp16 was not measured, and an L4's ceilings are not an H200's.
    assert not ceilings([run.done()], "h200", "fp16")["tensor"].measured
    assert not ceilings([run.done()], "l4", "bf16")["dram"].measured


def test_a_roofline_holds_every_standing_time() -> None:
    problem = "attn b2 h8 q512 d64 fp16"
    run = Fabricate().control().timed("fwd_triton", 20_000, "fa3", 24_000, problem=problem).done()
    (drawn,) = rooflines([run], verdicts([run]))
    assert (drawn.machine, drawn.dtype) == ("h200", "fp16")
    assert {point.kernel: point.need("dram").amount for point in drawn.points} == dict.fromkeys(
        ("fwd_triton", "fa3"), 4 * 16 * 512 * 64 * 2
    )
