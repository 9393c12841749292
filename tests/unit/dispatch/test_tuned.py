"""Files of tuned entries are foreign: a wrong field is named and the file ignored; what is right serves as a record does."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.dispatch.select import Decision, select
from flashmoe_science.dispatch.table import Table, committed_table
from flashmoe_science.dispatch.tuned import TunedError, folder, known_table, read_tuned
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.operations import operation, parse_problem

PROBLEM = "attn b3 h7 q777 d64 fp16"
L4 = gpu_named("l4")
OWN = replace(L4, name="rtx-4000", product="NVIDIA RTX 4000")  # a card that the package does not list
(TRITON,) = (kernel for kernel in operation("attention").ours() if kernel.name == "fwd_triton")
CONFIG = TRITON.configs(parse_problem(PROBLEM), L4)[1]
ENTRY: dict[str, Any] = {
    "gpu": "l4", "problem": PROBLEM, "kernel": "fwd_triton", "config": str(CONFIG), "ratio": 1.5, "time_ns": 4000, "run": "r-1",
}  # fmt: skip
PEER = {"kernel": "sdpa", "config": "", "ratio": 1.2, "problem": PROBLEM, "backend": "PyTorch's cuDNN backend"}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder().mkdir(parents=True)
    known_table.cache_clear()
    yield
    known_table.cache_clear()


def write(*entries: object, name: str = "l4", gpu: object = None, schema: object = 1, **more: object) -> Path:
    path = folder() / f"{name}.json"
    content = {"schema": schema, "gpu": name if gpu is None else gpu, "entries": [*entries], **more}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def decide(problem: str, gpu: Any = L4) -> Decision:
    op = operation("attention")
    return select(parse_problem(problem), gpu, known_table(), op.ours(), op.fallback())


def test_an_entry_serves_its_problem_and_near_ones_on_its_card_and_says_so() -> None:
    before = decide(PROBLEM)
    known_table.cache_clear()
    write(ENTRY | {"peers": [PEER]})
    for problem, basis in ((PROBLEM, "measured"), ("attn b3 h7 q800 d64 fp16", "modelled")):
        decision = decide(problem)
        assert (decision.kernel, decision.config, decision.basis, decision.record) == ("fwd_triton", CONFIG, basis, "r-1")
        assert decision.reason.endswith("4.00 us, tuned on this machine")
    assert (before.kernel, before.config) != ("fwd_triton", CONFIG)
    assert len(known_table().entries) == len(committed_table().entries) + 1
    assert "tuned" not in decide(PROBLEM, gpu_named("rtx4090")).reason  # of the same architecture


def test_it_replaces_what_is_committed_and_serves_a_card_that_the_package_does_not_list() -> None:
    committed = next(one for one in committed_table().entries if one.gpu == "h200")
    write(ENTRY | {"gpu": "h200", "problem": str(committed.problem)}, name="h200")
    write(ENTRY | {"gpu": OWN.name}, name=OWN.name)
    exact = known_table().exact("h200", committed.problem)
    assert exact is not None
    assert (exact.run, len(known_table().entries)) == ("r-1", len(committed_table().entries) + 1)
    assert "tuned on this machine" in decide(PROBLEM, OWN).reason


def test_nothing_is_read_where_it_is_turned_off_or_there_is_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    write(ENTRY)
    monkeypatch.setenv("FLASHMOE_TUNED", "0")
    assert known_table() is committed_table()
    known_table.cache_clear()
    monkeypatch.delenv("FLASHMOE_TUNED")

    def none() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr("flashmoe_science.dispatch.tuned.user_cache", none)
    assert known_table() is committed_table()


@pytest.mark.parametrize("change", [{"kernel": "no_such"}, {"config": "block_m=7"}, {"config": "m=1"},
                                    {"kernel": "fwd_gluon_sm90", "config": "block_n=128"}])  # fmt: skip
def test_a_kernel_or_a_config_that_the_package_does_not_offer_here_is_passed_over(change: dict[str, str]) -> None:
    write(ENTRY | change)
    assert "tuned" not in decide(PROBLEM).reason


@pytest.mark.parametrize(
    ("entries", "about", "words"),
    [
        ([ENTRY], {"schema": 2}, "schema is 2; it must be 1"),
        ([ENTRY], {"schema": True}, "schema is True; it must be 1"),
        ([ENTRY], {"gpu": "h200"}, "gpu is 'h200'; in a file of that name it must be 'l4'"),
        ([ENTRY], {"more": 1}, "the file has the field 'more'; it may have schema, gpu, entries"),
        ([7], {}, "entry 1: it is 7; it must be an object"),
        ([ENTRY, ENTRY], {}, f"entry 2: problem '{PROBLEM}' is given twice"),
        ([ENTRY | {"gpu": "h200"}], {}, "entry 1: gpu is 'h200'; it must be the file's, 'l4'"),
        ([{k: v for k, v in ENTRY.items() if k != "run"}], {}, "entry 1: it lacks run"),
        ([ENTRY | {"os": "x"}], {}, "entry 1: it has the field 'os'; it may have gpu, problem"),
        ([ENTRY | {"problem": "attn b1"}], {}, "entry 1: problem 'attn b1' lacks"),
        ([ENTRY | {"problem": "op mine fp32 flops1 bytes1"}], {}, "it must be of an operation of this package"),
        ([ENTRY | {"problem": ["attn"]}], {}, "entry 1: problem is ['attn']; it must be a text"),
        (
            [ENTRY | {"kernel": "a\x1b[31mb"}],
            {},
            r"entry 1: kernel is 'a\x1b[31mb'; it must be a text of at most 500 printable",
        ),
        ([ENTRY | {"run": "x" * 999}], {}, "...; it must be a text of at most 500 printable characters"),
        ([ENTRY | {"run": "two words"}], {}, "entry 1: run is 'two words'; it must be a name"),
        ([ENTRY | {"config": "block_m"}], {}, "entry 1: config word 'block_m' is not name=integer"),
        ([ENTRY | {"time_ns": True}], {}, "entry 1: time_ns is True; it must be an integer from 1 to"),
        ([ENTRY | {"time_ns": 0}], {}, "entry 1: time_ns is 0; it must be an integer from 1 to"),
        ([ENTRY | {"ratio": float("inf")}], {}, "entry 1: ratio is inf; it must be a number above 0"),
        ([ENTRY | {"ratio": 10**400}], {}, "it must be a number above 0"),
        ([ENTRY | {"peers": {}}], {}, "entry 1: peers is {}; it must be a list"),
        ([ENTRY | {"peers": [PEER | {"ratio": None}]}], {}, "entry 1: ratio is None; it must be a number above 0"),
        ([ENTRY | {"peers": [{"kernel": "sdpa"}]}], {}, "entry 1: a peer lacks config, ratio, problem"),
    ],
)
def test_a_wrong_field_is_named(entries: list[object], about: dict[str, Any], words: str) -> None:
    path = write(*entries, **about)
    with pytest.raises(TunedError) as refusal:
        read_tuned(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert words in str(refusal.value)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "Expecting property name"),
        (b"\xff", "can't decode byte"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "the file is []; it must be an object"),
        (b'{"schema": 1, "gpu": "l4", "entries": 3}', "entries is 3; it must be a list"),
    ],
)
def test_what_is_no_such_file_is_ignored_with_one_warning(content: bytes, words: str) -> None:
    (folder() / "l4.json").write_bytes(content)
    write(ENTRY | {"gpu": OWN.name}, name=OWN.name)
    with pytest.warns(UserWarning, match="what was tuned on this machine is ignored") as caught:
        table = known_table()
    assert len(caught) == 1
    assert words in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert known_table() is table
    assert [one.gpu for one in table.entries if one.tuned] == [OWN.name]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser reads any file")
def test_a_file_that_cannot_be_read_is_refused() -> None:
    path = write(ENTRY)
    path.chmod(0)
    with pytest.raises(TunedError, match="permission denied"):
        read_tuned(path)


def test_a_file_that_is_too_large_is_not_read() -> None:
    path = folder() / "l4.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(TunedError, match="it may have"):
        read_tuned(path)


def test_a_pipe_is_not_waited_for() -> None:
    os.mkfifo(path := folder() / "l4.json")
    with pytest.raises(TunedError, match="it is no regular file"):
        read_tuned(path)


def test_the_committed_table_is_none_of_it() -> None:
    assert isinstance(committed_table(), Table)
    assert not any(one.tuned for one in committed_table().entries)
