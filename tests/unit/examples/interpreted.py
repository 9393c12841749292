"""Run with TRITON_INTERPRET=1: the Triton examples, file:function, on small problems. Prints what is wrong, as JSON."""

from __future__ import annotations

import json
import sys

from tests.unit.examples.example_files import faults, load

PROBLEMS = (
    "attn b1 h2 q33 d32 fp16 causal",
    "attn b2 h4 hk2 q17 k40 d24 dv16 bf16 causal",
    "attn b1 h1 q40 k9 d16 fp32 causal",
    "attn b1 h2 q20 k70 d64 fp32 bshd",
)

if __name__ == "__main__":
    wrong = []
    for name in sys.argv[1:]:
        file, function = name.split(":")
        attention = getattr(load(file), function)
        wrong += [f"{name} on {text}: {reason}" for text in PROBLEMS for reason in faults(attention, text)]
    print(json.dumps(wrong))
