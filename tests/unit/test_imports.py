"""What importing costs and brings, one import after the other in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import flashmoe_science

PROGRAM = """
import json, sys, time
for code in json.loads(sys.argv[1]):
    before, start = set(sys.modules), time.process_time()
    exec(code)
    print(json.dumps([time.process_time() - start, sorted(set(sys.modules) - before)]))
"""
PROOF = ("flashmoe_science.measure", "flashmoe_science.judge", "scipy", "jinja2", "pydantic", "typer")
UNTOUCHED = """
assert not torch.cuda.is_initialized()
from torch.nn import attention
assert attention.current_flash_attention_impl() is None
assert "flashmoe" not in attention.list_flash_attention_impls()
"""


def brought(*steps: str) -> list[tuple[float, list[str]]]:
    """The seconds that each step took and the modules that it brought."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(steps)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_the_judges_half_runs_where_torch_is_not_installed_and_costs_little() -> None:
    judging = "import flashmoe_science.problem, flashmoe_science.store, flashmoe_science.judge.verdicts, flashmoe_science.proof"
    (_, package), (_, modules) = brought("import flashmoe_science", judging)
    assert "importlib.metadata" not in package
    assert not {"torch", "triton"} & {*package, *modules}


def test_a_public_name_is_quick_brings_the_library_alone_and_integrations_change_nothing() -> None:
    integrations = "import flashmoe_science.integrations.torch_sdpa, flashmoe_science.integrations.transformers"
    _, (seconds, public), (_, modules), _ = brought(
        "import torch", "from flashmoe_science import flash_attn_func", integrations, UNTOUCHED
    )
    assert seconds < 1.5
    assert "flashmoe_science.attention" in public
    # Of Triton what PyTorch's counter of operations brings, but no kernel, and not Gluon.
    kernels = ("flashmoe_science.ops.attention.forward", "flashmoe_science.ops.launch", "triton.experimental")
    assert not [name for name in public if name.startswith((*PROOF, *kernels, "flash_attn", "fa3_fwd_interface"))]
    assert "transformers" not in modules  # before it is registered


def test_calls_bring_no_other_package() -> None:
    """Beyond PyTorch, Triton and NumPy, and what those bring."""
    calls = """
import flashmoe_science as fms
q = torch.ones(1, 2, 8, 16)
fms.scaled_dot_product_attention(q, q, q, is_causal=True)
fms.flash_attn_func(q, q, q, window_size=(3, 0))
fms.fused_moe(torch.ones(3, 8), torch.ones(4, 16, 8), torch.ones(4, 8, 8), *fms.route(torch.ones(3, 4), 2))
"""
    (_, before), (_, modules) = brought("import torch, triton, numpy", calls)
    packages = {name.partition(".")[0] for name in modules} - {name.partition(".")[0] for name in before}
    ours, theirs = {"flashmoe_science"}, {"torch", "triton", "numpy"}
    assert packages - sys.stdlib_module_names - theirs == ours


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    assert dir(flashmoe_science) == sorted([*flashmoe_science.__all__, "__version__"])
    assert all(getattr(flashmoe_science, name) is not None for name in dir(flashmoe_science))
    assert not {"TYPE_CHECKING", "Any", "annotations"} & set(vars(flashmoe_science))
