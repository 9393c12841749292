"""Training steps of transformers' models by our kernels (a script for Triton's interpreter): how far each is from "eager"."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from tests.unit.integrations.test_transformers_attention import model_of
from tests.unit.integrations.test_transformers_training import INPUTS, expected, losses, step

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume
from flashmoe_science.integrations import transformers as ours
from flashmoe_science.integrations import transformers_attention as attention
from flashmoe_science.ops.attention.front.backward import autograd, operator


def main() -> None:
    torch.set_num_threads(1)
    ours.register()
    attention._SPLIT_QUERIES = 0  # the rows are short, and are served as packed sequences all the same
    called: list[str] = []

    def spied(module: Any, name: str) -> None:
        function = getattr(module, name)

        def spy(*arguments: Any) -> Any:
            called.append(name)
            return function(*arguments)

        setattr(module, name, spy)

    spied(autograd, "_gradients")
    spied(operator, "_by_pytorch")
    found = {}
    for case in sys.argv[1:]:
        family, name = case.split(" ", 1)
        right = expected(family, name)
        called.clear()
        torch.use_deterministic_algorithms(True)
        with assume(gpu_named("a100")):
            model = model_of(family, "fms").train()
            got = step(model, losses(model, INPUTS[name]))
        torch.use_deterministic_algorithms(False)
        errors = [(one - right.gradients[key]).abs().max().item() for key, one in got.gradients.items()]
        found[case] = {"called": called[:], "error": max(errors), "loss": (got.loss - right.loss).abs().item()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
