"""A run of a candidate that is killed loses at most the row in hand, says nothing of a trial that it was in, and goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from flashmoe_science.measure.resume import CannotResume, check_same
from flashmoe_science.measure.trial.loading import files_digest

from flashmoe_science.judge.verdicts import verdicts_of
from flashmoe_science.measure.bench import bench_here
from flashmoe_science.records import DoneRow, PromiseRow, ResumeRow, TimingRow
from flashmoe_science.store import read_run

CANDIDATE = """
from torch.nn.functional import scaled_dot_product_attention

def attention(q, k, v, causal=False, softmax_scale=None):
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
"""
ONE, TWO = (f"attn b1 h1 q{rows} d8 fp32" for rows in (4, 8))


def test_a_trial_that_is_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file, path = tmp_path / "mine.py", tmp_path / "run.jsonl"
    file.write_text(CANDIDATE)
    spec = f"{file}:attention"
    program = Path(__file__).with_name("killed_trials.py")
    # The fourth timing row is the last of the second problem: its pair with a rival.
    done = subprocess.run(
        [sys.executable, str(program), str(path), spec, "3"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr

    path.with_suffix(".cut").rename(tmp_path / "cut.jsonl")
    cut = read_run(tmp_path / "cut.jsonl")
    assert cut.torn is not None
    assert [(row.problem, row.rival) for row in cut.rows if isinstance(row, TimingRow)] == [
        (ONE, spec),
        (ONE, "sdpa_math"),
        (TWO, spec),
    ]
    assert cut.done_by(spec) == {ONE}

    run = read_run(path)
    assert run.complete
    assert [row.again_of for row in run.rows if isinstance(row, ResumeRow)] == [{spec: [TWO]}]
    assert [(row.problem, row.rival) for row in run.voided if isinstance(row, TimingRow)] == [(TWO, spec)]
    assert [(row.problem, row.rival) for row in run.rows if isinstance(row, TimingRow)] == [
        (one, rival) for one in (ONE, TWO) for rival in (spec, "sdpa_math")
    ]
    assert [row.problem for row in run.rows if isinstance(row, DoneRow)] == [ONE, TWO]
    assert len([row for row in run.rows if isinstance(row, PromiseRow)]) == 1
    assert {(one.problem, one.kernel) for one in verdicts_of(run)} == {
        (one, kernel) for one in (ONE, TWO) for kernel in (spec, "sdpa_math")
    }

    bench = bench_here()
    check_same(run, bench, None, {spec: files_digest([spec])})
    file.write_text(CANDIDATE + "\n# faster now\n")
    with pytest.raises(CannotResume, match=r"mine\.py:attention has changed"):
        check_same(run, bench, None, {spec: files_digest([spec])})
