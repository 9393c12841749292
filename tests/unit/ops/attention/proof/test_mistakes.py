"""Common mistakes in attention's features: each gives another result, which is then named."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.attention.held import CPU

from flashmoe_science.measure.inputs import Case, Memory, make, varied
from flashmoe_science.measure.oracle import Oracle
from flashmoe_science.ops.attention.problem import parse
from flashmoe_science.ops.attention.proof.contract import CONTRACT

SLICED = "slices of larger tensors"
CODES = {
    "attn b2 h4 hk2 q6 k20 d16 fp16 left4 right2": {
        "mask-top-left", "window-left-more", "window-left-fewer", "window-right-more", "window-right-fewer", "window-missing",
    },
    "attn b2 h2 q6 k20 d16 fp16 causal softcap2 sinks": {
        "mask-top-left", "mask-missing", "softcap-missing", "softcap-after-mask", "sinks-missing", "sinks-twice",
    },
    "attn b1 h4 q6 k9 d16 fp16 alibi": {"mask-top-left", "bias-missing", "alibi-sign"},
    "attn b1 h4 q6 k9 d16 fp16 boolmask": {"bias-missing", "mask-inverted"},
    "attn b1 h4 q16 d16 fp16 causal prefix6 bias": {"mask-missing", "prefix-missing", "bias-missing"},
    "attn b4 h4 hk2 q2 k40 d16 fp16 causal ragged leftpad": {
        "mask-missing", "last-key-missing", "leftpad-missing", "cache-rows",
    },
    "attn b4 h8 hk2 q2 k40 d16 fp16 ragged page8 fp8kv": {
        "last-key-missing", "pages-in-order", "key-scale-missing", "value-scale-missing", "heads-interleaved", "heads-first",
    },
    "attn b4 h2 q9 k30 d16 fp16 causal packed": {"mask-missing", "mask-top-left", "scale-missing"},
}  # fmt: skip


@pytest.mark.parametrize("text", CODES)
def test_a_result_that_makes_a_mistake_is_named_by_it(text: str) -> None:
    """A made result of each mistake, handed over as a kernel's, is refused and called by its code."""
    problem = parse(text)
    case = Case(3, variant=SLICED)
    contract = varied(CONTRACT, case)
    made = make(contract, problem, CPU, case)
    wide = {name: one.double() if one.is_floating_point() else one for name, one in made.items()}
    handover = Memory()
    oracle = Oracle(handover, CPU)
    oracle.open("attention")
    oracle.problem(text, by_function=False)
    met = {}
    for mistake in contract.mistakes(problem, wide):
        out, lse = mistake.outputs
        handover.put("x", [out.to(torch.float16), lse.float()])
        told = oracle.check(case, "x", 2, naming=True)
        assert told["reasons"], mistake.words
        met[mistake.code] = [code for code, _ in told["named"]]
    assert CODES[text] <= set(met)
    for code in CODES[text]:
        assert code in met[code], (code, met[code])
