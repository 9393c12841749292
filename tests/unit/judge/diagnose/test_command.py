"""``flashmoe diagnose``: from the records, for real on a CPU, and what a change gave."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.fabricated import Fabricate

from flashmoe_science.hardware import probe
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.measure import request
from flashmoe_science.measure.profile import profile as ceilings
from flashmoe_science.records import CallPathRow, CeilingRow, ProfileRow
from flashmoe_science.store import read_run

PROBLEM = "attn b1 h1 q512 d64 fp16"
ABOUT = (PROBLEM, "--kernel", "fwd_triton")
ROOT = Path(__file__).parents[4]
Flashmoe = Callable[..., tuple[int, str, str]]


@pytest.fixture
def record(recorded: Callable[..., Path]) -> Callable[..., Path]:
    """Writes a run in which fwd_triton takes so long beside fa3's 30 us, in so many blocks of 128 threads."""

    def write(run: str, started: str, microseconds: int, digest: str, blocks: int) -> Path:
        made, time = Fabricate(run, started, suite="custom"), 1000 * microseconds
        for rival, rival_time in (("fwd_triton", time), ("fa3", 30_000)):  # the first is its control
            made.timed("fwd_triton", time, rival, rival_time, problem=PROBLEM, noise=0)
        made.timed("fwd_triton", 80_000, "fa3", 90_000, problem=PROBLEM, noise=0, clock="eager")
        made.header = made.header.model_copy(update={"source_digest": digest})
        for place, row in enumerate(made.rows):
            if isinstance(row, CallPathRow):
                launch = row.launches[0].model_copy(update={"grid": (blocks, 1, 1), "shared_bytes": 0, "registers": 64})
                made.rows[place] = row.model_copy(update={"launches": [launch]})
        return recorded(made)

    return write


@pytest.fixture
def history(record: Callable[..., Path]) -> Path:
    return record("r1", "2026-01-01T00:00:00+00:00", 40, "before", blocks=8)


def test_a_diagnosis_by_the_records_alone(history: Path, flashmoe: Flashmoe) -> None:
    code, out, err = flashmoe("diagnose", *ABOUT, "--recorded", "--evidence", history)
    assert (code, err) == (0, "")
    assert "40 us on the graph clock; 80 us on the eager clock; 8 blocks of 128 threads" in out
    assert "no counters: it was not profiled" in out
    assert "supported  the grid is smaller than the GPU: 8 blocks" in out
    assert "\x1b" not in out
    (found,) = json.loads(flashmoe("diagnose", *ABOUT, "--recorded", "--evidence", history, "--json")[1])
    by = {one["key"]: one for one in found["hypotheses"]}
    assert by["small-grid"]["evidence"].startswith("8 blocks on 132 SMs")
    assert {one["status"] for one in by.values()} == {"supported", "ruled out", "untested"}
    assert found["roofline"]["needs"][0]["ceiling"]["measured"] is False


def test_what_a_change_gave_stands_below_the_plan(history: Path, record: Callable[..., Path], flashmoe: Flashmoe) -> None:
    record("r2", "2026-02-01T00:00:00+00:00", 20, "after", blocks=132)
    code, out, _ = flashmoe("diagnose", *ABOUT, "--recorded", "--evidence", history)
    assert (code, "gained: 2.00x [1.999 to 2.001] by all that changed since run r1" in " ".join(out.split())) == (0, True)
    (found,) = json.loads(flashmoe("diagnose", *ABOUT, "--recorded", "--evidence", history, "--json")[1])
    assert "serial-loop" in found["gained"]["changes"]
    assert found["gained"]["ratio"] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("words", [(PROBLEM,), ("documents",)])
def test_by_the_records_too_the_librarys_choice_is_meant_and_a_suite_may_be_named(
    words: tuple[str, ...], history: Path, flashmoe: Flashmoe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The help promises both. fwd_triton is the only kernel on record, so the choice is made to be it."""
    asked = []

    def chosen(problem: object, gpu: Gpu | None) -> str:
        asked.append((str(problem), gpu and gpu.name))
        return "fwd_triton"

    monkeypatch.setattr(request, "default_kernel", chosen)
    code, out, err = flashmoe("diagnose", *words, "--gpu", "h200", "--evidence", history)
    assert (code, (PROBLEM, "h200") in asked) == (0, True)
    assert out.count(f"fwd_triton on {PROBLEM}, h200") == out.count(", h200\n") == 1
    assert (len(asked) == 1, err == "") == (words[0] == PROBLEM,) * 2
    if err:  # the rest of the suite is left out by name
        assert "left out: no record on h200 has kernel 'fwd_triton' on 'attn b1 h1 q4 d4 fp16'" in err


def test_what_no_record_speaks_of_is_said_with_what_to_do(history: Path, flashmoe: Flashmoe) -> None:
    code, _, err = flashmoe("diagnose", "attn b1 h1 q3 d4 fp16", "--evidence", history)
    assert (code, err.endswith("to measure it here: --measure, with a --kernel\n")) == (2, True)
    code, _, err = flashmoe("diagnose", "attn b1 h1 q3 d4 fp16", "--kernel", "sdpa", "--evidence", history)
    assert (code, err.endswith("kernels on record there: none; to measure it here: --measure\n")) == (2, True)


@pytest.mark.slow
@pytest.mark.skipif(probe.current_gpu() is not None, reason="on a GPU they measure")
def test_every_example_of_the_help_is_diagnosed_from_the_committed_records(flashmoe: Flashmoe) -> None:
    examples = [
        shlex.split(line) for line in flashmoe("diagnose", "--help")[1].splitlines() if line.startswith("    flashmoe ")
    ]
    assert len(examples) == 3
    assert [flashmoe(*words[1:], "--evidence", ROOT / "evidence")[0] for words in examples] == [0, 0, 0]


@pytest.mark.slow
def test_a_cpu_is_diagnosed_by_times_and_ceilings(flashmoe: Flashmoe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For real, in processes of their own: PyTorch's attention, a user's, and one that ends the process."""
    monkeypatch.setattr(ceilings, "_CPU_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "_CPU_MATRIX", 64)
    sdpa = "from torch.nn.functional import scaled_dot_product_attention as sdpa\n\n"
    of = "def fn(q, k, v, causal=False, softmax_scale=None):\n    "
    (tmp_path / "mine.py").write_text(f"{sdpa}{of}return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)\n")
    (tmp_path / "dies.py").write_text(f"import os\n\n{of}os._exit(7)\n")
    names, out = ("sdpa", f"{tmp_path}/mine.py:fn", f"{tmp_path}/dies.py:fn"), tmp_path / "out"
    kernels = [word for name in names for word in ("--kernel", name)]
    where = ("--out", out, "--evidence", tmp_path / "none")
    code, said, _ = flashmoe("diagnose", "attn b1 h2 q64 d32 fp32", "--measure", *kernels, *where, "--json")
    assert code == 1  # one does not run
    theirs, mine, dies = json.loads(said)
    assert [one["gpu"] for one in (theirs, mine, dies)] == ["cpu"] * 3
    assert {one["status"] for one in theirs["hypotheses"]} <= {"supported", "ruled out", "untested"}
    assert theirs["counters_absent"] == "there is no GPU here, and counters are a GPU's"
    assert (mine["time_ns"] > 0, dies["time_ns"]) == (True, None)
    refused = "it was refused: timing: it does not run on the eager clock: it ended the process with code 7"
    assert dies["cause"].startswith(refused)
    rows = read_run(out / "run-profile.jsonl").rows
    assert {row.name for row in rows if isinstance(row, CeilingRow)} == {"dram copy", "matmul fp32", "matmul bf16"}
    assert len([row for row in rows if isinstance(row, ProfileRow)]) == 2  # who dies has no call to look at


@pytest.mark.slow
def test_a_function_that_no_record_knows_is_looked_at_here(
    flashmoe: Flashmoe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "_CPU_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "_CPU_MATRIX", 64)
    spec = f"{ROOT / 'examples' / 'cpu_attention.py'}:attention"
    where = ("--out", tmp_path / "out", "--evidence", tmp_path / "none")
    code, said, _ = flashmoe("diagnose", "attn b1 h2 q16 d16 fp32", "--kernel", spec, *where)
    assert (code, f"{spec} on attn b1 h2 q16 d16 fp32, cpu" in " ".join(said.split())) == (0, True)
