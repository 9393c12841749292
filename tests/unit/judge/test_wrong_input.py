"""What a command is asked wrongly: one line that says it, exit code 2, nothing printed, nothing written, no record judged."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.fabricated import Fabricate

KNOWN, OTHER, TINY = "attn b2 h8 q512 d64 fp16", "attn b2 h8 q1024 d64 fp16", "attn b1 h2 q16 d16 fp32"
OUR, FAULT = f"'{KNOWN}' --kernel fwd_triton", Path(__file__).parents[2] / "harness" / "faults" / "crashes.py"

WRONG = [
    ("provee", "provee"),
    ("--nonsense", "--nonsense"),
    ("explain", "Missing argument"),
    ("explain 'attn b1 h16'", "lacks q<n>, d<n>"),
    (f"explain '{KNOWN}' --gpu h9000", "gpu is 'h9000'; it must be one of"),
    (f"explain '{KNOWN}' --kernel fast", "kernel is 'fast'; it must be one of"),
    (
        "prove dokuments",
        "'dokuments' is neither a problem (those begin with 'attn' or 'attnbwd' or 'attnmerge' or 'moe' or 'moebwd' or 'op')",
    ),
    ("prove 'attn b1 h1 q8'", "problem 'attn b1 h1 q8' lacks d<n>"),
    (f"prove '{TINY} cp3'", "start it by torchrun --nproc-per-node 3 -m flashmoe_science prove"),
    ("prove context", "is of several GPUs; start it by torchrun --nproc-per-node 2 -m flashmoe_science prove context"),
    ("prove long", "suite 'long' needs a GPU, and there is none here"),
    (f"prove '{TINY}' --kernel fwd", "kernel is 'fwd'; it must be one of"),
    (f"prove '{TINY}' --kernel sdpa --against nobody", "--against is 'nobody'; for attention it must be one of"),
    (f"prove '{TINY}' --kernel sdpa --against fa3", "kernel 'fa3' cannot be measured here: fa3-fwd is not installed"),
    (f"prove '{TINY}' --kernel sdpa_cudnn", "kernel 'sdpa_cudnn' can serve none of the problems here"),
    (f"prove '{TINY}' --kernel sdpa --against sdpa", "--against leaves no rival for sdpa"),
    (f"prove '{TINY}' --quick --full", "--quick and --full are both given"),
    (f"prove '{TINY}' --budget 2usd", "--budget is '2usd'; it must be seconds"),
    (f"prove '{TINY}' --watchdog inf", "--watchdog is inf; it must be more than 0"),
    (f"prove '{TINY}' --seed {2**64}", "--seed is 18446744073709551616; it must be from 0 to"),
    (f"prove '{TINY}' --draw 3", "--draw samples around a suite, and none is named"),
    ("prove --resume absent", "--resume is 'absent', which is no folder; give the folder of a run"),
    (f"prove '{TINY}' --quick --resume plain", "--resume takes the options that the run was given; leave out"),
    (f"prove '{TINY}' --out plain/inside", "--out is 'plain/inside', which cannot be written"),
    ("prove nowhere.py:fn", "candidate 'nowhere.py:fn': there is no file 'nowhere.py'"),
    ("prove mine.py:", "candidate is 'mine.py:'; it must be my_module:function or path/to/file.py:function"),
    (f"prove {FAULT}:attention --against nowhere.py:fn", "there is no file 'nowhere.py'"),
    (f"prove {FAULT}:attention --kernel sdpa", "--kernel names a kernel of the package beside a function"),
    ("check word", "must be my_module:function"),
    (f"check {FAULT}:attention --problem 'attn b1'", "lacks"),
    (f"check {FAULT}:attention --watchdog inf", "--watchdog is inf"),
    ("fit", "--gpu is not given and this machine has no NVIDIA GPU; give one of "),
    ("fit --gpu v100", "gpu is 'v100'; it must be one of"),
    ("fit sdpa --gpu l4", "kernel is 'sdpa', a peer"),
    ("fit fwd_gluon_sm90 --gpu l4", "kernel 'fwd_gluon_sm90' cannot serve"),
    ("fit --gpu l4 --all", "--gpu is 'l4' and --all is given"),
    ("fit fwd_triton --gpu l4 --block 1", "--block is '1' and a kernel"),
    ("fit --gpu l4 --block nan", "--block is 'nan'; it must be KB[,THREADS[,REGISTERS[,BLOCKS]]], numbers of 1 or more"),
    ("fit --gpu l4 --block 1,0", "--block is '1,0'; it must be"),
    ("verdicts --evidence . --gpu h2000", "gpu is 'h2000'; it must be one of"),
    ("verdicts --evidence . --suite documets", "suite is 'documets'; it must be one of "),
    ("verdicts --evidence nowhere", "--evidence is 'nowhere', which is not a folder"),
    ("verdicts", "--evidence is 'evidence', which is not a folder; give one that holds run records (*.jsonl)"),
    ("report --evidence ''", "Invalid value for '--evidence': it is empty; give a folder"),
    ("report --evidence empty", "holds no records"),
    ("verdicts --evidence empty", "--evidence is 'empty', which holds no records (*.jsonl); run flashmoe prove to make some"),
    ("verdicts --evidence empty --json", "holds no records"),
    ("verdicts --evidence empty --suite long", "holds no records"),
    ("compare fwd_triton sdpa --evidence empty", "holds no records"),
    ("report --evidence . --out plain", "file exists"),
    ("claims --evidence .", "cannot read"),  # no claims.toml in the folder
    ("claims nowhere.toml --evidence .", "cannot read nowhere.toml: no such file"),
    ("compare fwd_triton --evidence .", "there is only one version; a comparison needs at least 2"),
    ("compare fwd_triton v9 --evidence .", "'v9' names no run"),
    ("compare fwd_triton fwd_triton --evidence .", "version 'fwd_triton' is given twice"),
    ("ratchet --runs . --file none.json", "does not exist; flashmoe ratchet --update makes it from the records"),
    ("ratchet --runs empty --update", "--runs is 'empty', which holds no records"),
    (f"ratchet --runs . --file new.json --update --accept '{OTHER}' --reason x", "has not regressed"),
    (f"diagnose '{TINY}' --recorded --evidence .", f"no record has '{TINY}'; to measure it here: --measure"),
    (f"diagnose '{KNOWN}' --kernel q --recorded --evidence .", "no record has kernel 'q'"),
    (f"diagnose '{KNOWN} cp2' --kernel q --recorded --evidence .", "is of 2 GPUs"),
    (f"diagnose '{KNOWN}' --measure --gpu h200", "--gpu is 'h200' with --measure"),
    (f"diagnose '{TINY}' --kernel sdpaa --measure", "kernel is 'sdpaa'; it must be one of"),
    (f"diagnose '{TINY}' --kernel fwd_triton --measure", f"kernel 'fwd_triton' cannot serve '{TINY}' here: "),
]  # fmt: skip
BEFORE_ANY_RECORD = [
    ("claims nowhere.toml --evidence .", "cannot read nowhere.toml"),
    ("ratchet --runs . --file none.json --accept all", "need each other"),
    ("ratchet --runs . --file none.json --accept 'attn b1' --reason because", "lacks"),
]
Flashmoe = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def here(recorded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of one run, an empty folder and a file, on a machine without a GPU."""
    folder = recorded(Fabricate().control().timed("fwd_triton", 20_000, "sdpa", 30_000), folder=tmp_path)
    (folder / "empty").mkdir()
    (folder / "plain").write_text("a file")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def refused(flashmoe: Flashmoe, words: str, said: str) -> None:
    code, out, err = flashmoe(*shlex.split(words))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("flashmoe: ")
    assert said in err
    assert {path.name for path in Path().iterdir()} == {"runs", "empty", "plain"}


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_it_is_one_line_and_exit_2(flashmoe: Flashmoe, words: str, said: str) -> None:
    refused(flashmoe, words, said)


@pytest.mark.parametrize(("words", "said"), BEFORE_ANY_RECORD)
def test_what_is_wrong_with_the_words_is_said_before_a_record_is_read(
    flashmoe: Flashmoe, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.setattr("flashmoe_science.cli.evidence.read_runs", lambda *_: pytest.fail("the records were read"))
    refused(flashmoe, words, said)
