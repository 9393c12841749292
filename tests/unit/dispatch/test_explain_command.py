"""``flashmoe explain`` from the command line."""

from __future__ import annotations

import json

import pytest

from flashmoe_science.cli.main import main
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.hardware.gpus import GPUS, gpu_named
from flashmoe_science.operations import operation, parse_problem

OURS = operation("attention").ours()
PROBLEM = "attn b1 h16 q4096 d128 bf16 causal"


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as leaving:
        main(["explain", *arguments])
    printed = capsys.readouterr()
    assert isinstance(leaving.value.code, int)
    return leaving.value.code, printed.out, printed.err


@pytest.mark.parametrize("gpu", ["l4", "a100", "h200", "b200"])
def test_every_kernel_of_ours_is_chosen_or_said_why_not(gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = explain(capsys, PROBLEM, "--gpu", gpu, "--json")
    assert code == 0
    answer = json.loads(out)
    assert set(answer) == {"problem", "gpu", "kernel", "config", "basis", "record", "reason", "others"}
    assert (answer["problem"], answer["gpu"]) == (PROBLEM, gpu)
    assert {answer["kernel"], *answer["others"]} == {kernel.name for kernel in OURS}
    assert (answer["basis"] == "measured") == (committed_table().exact(gpu, parse_problem(PROBLEM)) is not None)
    chosen = next(kernel for kernel in OURS if kernel.name == answer["kernel"])
    assert chosen.supports(parse_problem(PROBLEM), gpu_named(gpu)) is None


def test_the_plain_answer_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(explain(capsys, PROBLEM, "--gpu", "l4", "--json")[1])
    out = explain(capsys, PROBLEM, "--gpu", "NVIDIA L4")[1]
    for word in (PROBLEM, "NVIDIA L4", answer["kernel"], answer["config"], answer["basis"], answer["reason"]):
        assert word in out
    for name, why in answer["others"].items():
        assert f"{name}: {why}" in out


def test_a_requested_kernel_is_explained_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(explain(capsys, PROBLEM, "--gpu", "l4", "--kernel", "fwd_triton", "--json")[1])
    assert (answer["kernel"], answer["basis"]) == ("fwd_triton", "requested")
    code, out, err = explain(capsys, PROBLEM, "--gpu", "l4", "--kernel", "fwd_gluon_sm90")
    assert (code, out) == (2, "")
    assert "fwd_gluon_sm90" in err
    assert "compute capability 9.0" in err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("attn b1 h16",), "lacks q<n>, d<n>"),
        ((PROBLEM, "--gpu", "h9000"), f"gpu is 'h9000'; it must be one of {', '.join(GPUS)}"),
        ((PROBLEM, "--kernel", "fast"), "kernel is 'fast'; it must be one of"),
        ((), "PROBLEM"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = explain(capsys, *arguments)
    assert (code, out) == (2, "")
    assert what.lower() in err.lower()
    assert err.count("\n") == 1
