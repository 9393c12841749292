"""Which peer serves in place of ours: by a record of the very problem, by its neighbours, and what bars it."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from flashmoe_science.dispatch.peers import faster_peer
from flashmoe_science.dispatch.select import Decision
from flashmoe_science.dispatch.table import Table, parse_table
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import AnyKernel, Config, Kernel
from flashmoe_science.operations import parse_problem

OURS = Decision("fast", Config(m=1), "ours", "measured", "run0", (("portable", "fast is the fastest in record run0"),))
ONE, TWO, FAR = "attn b1 h8 q1024 d64 fp32", "attn b1 h8 q2048 d64 fp32", "attn b1 h8 q8192 d64 fp32"
BETWEEN = "attn b1 h8 q1500 d64 fp32"
CUDNN = {"kernel": "sdpa", "config": "", "ratio": 1.267, "backend": "PyTorch's cuDNN backend"}
FA3 = {"kernel": "fa3", "config": "num_splits=1", "ratio": 1.5}


def peer(name: str, replaces: Literal["never", "if allowed", "always"], absent: str | None = None, **config: int) -> AnyKernel:
    return Kernel(
        name=name,
        origin="peer",
        op="attention",
        about="",
        supports=lambda problem, device: "it takes no odd lengths" if problem.seqlen_q % 2 else None,
        configs=lambda problem, device: (Config(**config),),
        run=lambda inputs, config: None,
        launches=lambda problem, config, gpu: (),
        absent=lambda: absent,
        replaces_ours=replaces,
    )


PEERS = (peer("sdpa", "always"), peer("sdpa_math", "never"), peer("fa3", "if allowed", num_splits=0))


def table(*rows: tuple[str, list[dict[str, Any]]], gpu: str = "h200", kernel: str = "fast") -> Table:
    entries = [
        {"gpu": gpu, "problem": problem, "kernel": kernel, "config": "m=1", "run": f"run{i}", "time_ns": 1000,
         "peers": [{"problem": problem} | one for one in peers]}
        for i, (problem, peers) in enumerate(rows)
    ]  # fmt: skip
    return parse_table(json.dumps({"schema": 1, "entries": entries}), "fabricated")


def decide(
    problem: str, rows: Table, gpu: str | None = "h200", peers: tuple[AnyKernel, ...] = PEERS, **unable: str
) -> Decision:
    return faster_peer(OURS, parse_problem(problem), gpu and gpu_named(gpu), rows, peers, unable)


@pytest.fixture(autouse=True)
def _not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHMOE_PEERS", raising=False)


def test_a_record_of_the_very_problem_decides_and_names_the_backend_and_the_ratio() -> None:
    found = decide(ONE, table((ONE, [CUDNN])))
    assert (found.kernel, found.config, found.basis, found.record) == ("sdpa", Config(), "measured", "run0")
    assert found.reason == "PyTorch's cuDNN backend, 1.27x ours (fast) on this problem on NVIDIA H200"
    assert found.others == (("fast", "slower than sdpa in record run0"), *OURS.others)


@pytest.mark.parametrize(
    ("problem", "rows"),
    [
        (ONE, table((ONE, []))),  # nothing was faster there
        (ONE, table((ONE, []), (TWO, [CUDNN]), ("attn b1 h8 q512 d64 fp32", [CUDNN]))),  # the neighbours do not overrule it
        (ONE, table((ONE, [CUDNN]), gpu="h100")),
        (ONE, table((ONE, [CUDNN]), kernel="older")),  # what it was faster than is not what would serve
        (f"{ONE} bshd", table((ONE, [CUDNN]))),  # another memory order
        (ONE, table((ONE, [CUDNN | {"kernel": "sdpa_math"}]))),  # only by name
        (BETWEEN, table((ONE, [CUDNN]))),  # one neighbour is no two
        (BETWEEN, table((ONE, [CUDNN]), (TWO, []))),  # which must agree
        (BETWEEN, table((ONE, [CUDNN]), (FAR, [CUDNN]))),  # and be near
        *(
            (f"attn b1 {words}", table((ONE, [CUDNN]), (TWO, [CUDNN])))
            for words in ("h8 q1500 d64 bf16", "h8 q1500 d80 fp32", "h8 hk4 q1500 d64 fp32", "h8 q1500 d64 fp32 causal",
                          "h8 q1500 d64 fp32 bshd", "h8 q1500 d64 fp32 softcap30")
        ),
    ],
)  # fmt: skip
def test_ours_stays(problem: str, rows: Table) -> None:
    assert decide(problem, rows).kernel == OURS.kernel
    assert decide(problem, rows, gpu=None) == OURS


def test_neighbours_that_agree_decide_by_the_least_of_their_ratios() -> None:
    found = decide(BETWEEN, table((ONE, [CUDNN]), (TWO, [CUDNN | {"ratio": 1.1}]), (FAR, [])))
    assert (found.kernel, found.basis, found.record) == ("sdpa", "modelled", "run1")
    nearest = f"the nearest {TWO} on h200"
    assert found.reason == f"PyTorch's cuDNN backend, 1.10x ours (fast) or more on all 2 measured problems near it, {nearest}"
    assert found.others[0] == ("fast", "slower than sdpa in record run1")


def test_equal_lengths_say_nothing_of_others_under_a_causal_mask() -> None:
    rows = table((f"{ONE} causal", [CUDNN]), (f"{TWO} causal", [CUDNN]))
    assert decide("attn b1 h8 q1500 d64 fp32 causal", rows).kernel == "sdpa"
    assert decide("attn b1 h8 q1500 k1510 d64 fp32 causal", rows) == OURS


def test_another_package_needs_leave_and_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table((ONE, [FA3, CUDNN]))
    said = "fa3, 1.50x ours (fast) on this problem on NVIDIA H200, record run0"
    found = decide(ONE, rows)
    assert found.kernel == "sdpa"
    assert dict(found.others)["fa3"] == f"{said}, but FLASHMOE_PEERS=1 is not set, which allows it"
    monkeypatch.setenv("FLASHMOE_PEERS", "0")
    assert decide(ONE, rows).kernel == "sdpa"
    monkeypatch.setenv("FLASHMOE_PEERS", "1")
    found = decide(ONE, rows)
    assert (found.kernel, found.config) == ("fa3", Config(num_splits=1))
    missing = (peer("fa3", "if allowed", absent="fa3-fwd is not installed", num_splits=0),)
    found = decide(ONE, rows, peers=missing)
    assert (found.kernel, dict(found.others)["fa3"]) == ("fast", f"{said}, but fa3-fwd is not installed")


def test_a_peer_that_cannot_serve_or_has_another_config_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_PEERS", "1")
    odd = "attn b1 h8 q1025 d64 fp32"
    for found, why in (
        (decide(ONE, table((ONE, [CUDNN])), sdpa="it gives no log-sum-exp"), "it gives no log-sum-exp"),
        (decide(odd, table((odd, [CUDNN]))), "it takes no odd lengths"),
        (decide(ONE, table((ONE, [FA3 | {"config": "tiles=1"}]))), "it has no config tiles=1 any more"),
    ):
        assert found.kernel == "fast"
        assert found.others[-1][1].endswith(f"but {why}")
