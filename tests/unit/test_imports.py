"""What importing costs and brings, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import flashmoe_science

HEAVY = {"torch", "triton"}


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_judges_half_runs_where_torch_is_not_installed_and_costs_little() -> None:
    assert "importlib.metadata" not in modules_after("import flashmoe_science")
    judging = "import flashmoe_science.problem, flashmoe_science.store, flashmoe_science.judge.verdicts, flashmoe_science.proof"
    assert not HEAVY & modules_after(judging)


def test_a_public_name_brings_the_library_and_nothing_of_the_proof() -> None:
    loaded = modules_after("from flashmoe_science import flash_attn_func")
    assert "torch" in loaded
    assert not [
        name for name in loaded if name.startswith(("flashmoe_science.measure", "flashmoe_science.judge", "scipy", "jinja2"))
    ]


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    assert dir(flashmoe_science) == sorted([*flashmoe_science.__all__, "__version__"])
    assert all(getattr(flashmoe_science, name) is not None for name in dir(flashmoe_science))
    assert not {"TYPE_CHECKING", "Any", "annotations"} & set(vars(flashmoe_science))
