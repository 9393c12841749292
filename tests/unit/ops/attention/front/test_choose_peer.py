"""Calls that go to a peer because records have it faster, and those that must not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.unit.ops.attention.calls import call_of

from flashmoe_science import explain, flash_attention_forward, flash_attn_func, scaled_dot_product_attention
from flashmoe_science.dispatch.table import parse_table
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.ops import choose as any_choice
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionOutput
from flashmoe_science.ops.attention.front import choose, kernels
from flashmoe_science.ops.attention.problem import AttentionProblem, parse
from flashmoe_science.ops.attention.proof.public_calls import public_call

if TYPE_CHECKING:
    from tests.unit.ops.attention.conftest import FakeKernel

PEER, OURS = 7.0, 16**-0.5  # what the outputs hold
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class FakePeer:
    """Stands for fa3: it writes 7, and the log-sum-exp where it is asked for, in the memory order [B, S, H, D]."""

    seen: list[AttentionProblem] = field(default_factory=list)
    missing: str | None = None

    def run(self, inputs: AttentionInputs, config: Config) -> AttentionOutput:
        self.seen.append(inputs.problem)
        out = torch.full_like(inputs.q.transpose(1, 2).contiguous(), PEER).transpose(1, 2)
        return AttentionOutput(out, torch.full(inputs.q.shape[:3], PEER) if inputs.return_lse else None)


@pytest.fixture
def peer(fake: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePeer]:
    """Two problems on which fa3 was faster than ours ("fake") in the memory order [B, H, S, D]."""
    peer = FakePeer()
    mine = replace(
        next(one for one in kernels.PEERS if one.name == "fa3"),
        supports=lambda problem, device: None,
        configs=lambda problem, device: (Config(),),
        run=peer.run,
        absent=lambda: peer.missing,
    )
    others = tuple(mine if one.name == "fa3" else one for one in kernels.PEERS)
    monkeypatch.setattr(kernels, "PEERS", others)
    monkeypatch.setattr(kernels, "ours", lambda: (fake.kernel(),))
    monkeypatch.setattr(choose, "gpu_of", lambda q: gpu_named("h200"))
    records(monkeypatch, table(*(entry(f"attn b2 h4 q{n} d16 fp32") for n in (32, 48))))
    monkeypatch.setenv("FLASHMOE_PEERS", "1")
    choose._measured_sizes.cache_clear()
    yield peer
    choose._measured_sizes.cache_clear()


def records(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    for module in (any_choice, choose):
        monkeypatch.setattr(module, "known_table", lambda: found)


def entry(problem: str, kernel: str = "fa3") -> dict[str, Any]:
    faster = {"kernel": kernel, "config": "", "ratio": 1.5, "problem": problem}
    return {"gpu": "h200", "problem": problem, "kernel": "fake", "config": "m=1", "run": "r1", "time_ns": 9, "peers": [faster]}


def table(*entries: dict[str, Any]) -> Any:
    return parse_table(json.dumps({"schema": 1, "entries": entries}), "fabricated")


def tensors(rows: int = 32, token_first: bool = False) -> Tensors:
    made = [torch.randn(2, 4, rows, 16) for _ in range(3)]
    return tuple(one.transpose(1, 2).contiguous().transpose(1, 2) if token_first else one for one in made)  # type: ignore[return-value]


def test_a_call_goes_to_the_peer_and_explain_says_so(peer: FakePeer, fake: FakeKernel) -> None:
    q, k, v = tensors()
    out = scaled_dot_product_attention(q, k, v)
    assert torch.all(out == PEER)
    assert out.is_contiguous()  # as the queries lie, not as the peer wrote
    assert (len(peer.seen), fake.launches) == (1, 0)
    decision = explain(q, k, v)
    assert (decision.kernel, decision.basis, decision.record) == ("fa3", "measured", "r1")
    assert "fa3, 1.50x ours (fake) on this problem on NVIDIA H200" in str(decision)
    assert len(peer.seen) == 1


def test_lengths_between_measured_ones_go_there_and_a_problem_further_off_does_not(peer: FakePeer, fake: FakeKernel) -> None:
    for rows, value in ((40, PEER), (39, PEER), (48, PEER), (200, OURS), (8, OURS)):
        assert torch.all(scaled_dot_product_attention(*tensors(rows)) == value), rows
    assert [problem.seqlen_q for problem in peer.seen] == [40, 39, 48]


def test_flash_attentions_function_goes_there_with_the_log_sum_exp(peer: FakePeer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [entry(f"attn b2 h4 q{n} d16 fp32 bshd") for n in (32, 48)]
    records(monkeypatch, table(*rows))
    views = [one.transpose(1, 2) for one in tensors(token_first=True)]
    result = flash_attn_func(*views, return_attn_probs=True)
    assert isinstance(result, tuple)
    assert all(torch.all(one == PEER) for one in result[:2])
    q, k, v = tensors(token_first=True)
    lse = torch.zeros(2, 4, 32)
    flash_attention_forward(q, k, v, lse, False, None)
    assert torch.all(lse == PEER)


def test_pytorchs_own_attention_goes_without_leave_but_never_with_the_log_sum_exp(
    peer: FakePeer, fake: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    records(monkeypatch, table(entry("attn b2 h4 q32 d16 fp32", "sdpa")))
    monkeypatch.delenv("FLASHMOE_PEERS")
    q, k, v = tensors()
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert explain(q, k, v).kernel == "sdpa"
    assert fake.launches == 0
    result = flash_attn_func(*(one.transpose(1, 2) for one in tensors(token_first=True)), return_attn_probs=True)
    flash_attention_forward(q, k, v, torch.zeros(2, 4, 32), False, None)
    assert isinstance(result, tuple)
    assert (torch.all(result[0] == OURS), fake.launches) == (True, 2)


@pytest.mark.parametrize("leave", [None, "0", ""])
def test_without_leave_ours_serves(peer: FakePeer, monkeypatch: pytest.MonkeyPatch, leave: str | None) -> None:
    monkeypatch.delenv("FLASHMOE_PEERS")
    if leave is not None:
        monkeypatch.setenv("FLASHMOE_PEERS", leave)
    q, k, v = tensors()
    assert torch.all(scaled_dot_product_attention(q, k, v) == OURS)
    assert "FLASHMOE_PEERS=1 is not set" in dict(explain(q, k, v).others)["fa3"]


def test_a_peer_that_is_not_installed_leaves_the_call_to_ours(peer: FakePeer) -> None:
    peer.missing = "fa3-fwd is not installed"
    q, k, v = tensors()
    assert torch.all(scaled_dot_product_attention(q, k, v) == OURS)
    assert dict(explain(q, k, v).others)["fa3"].endswith("but fa3-fwd is not installed")


def test_what_is_not_as_it_was_measured_stays_with_ours(peer: FakePeer, fake: FakeKernel) -> None:
    q, k, v = tensors()
    moved = torch.randn(2 * 4 * 32 * 16 + 1)[1:].view(2, 4, 32, 16)
    wide = torch.randn(2, 4, 32, 17)[..., :16]
    for call in (
        lambda: scaled_dot_product_attention(moved, k, v),
        lambda: scaled_dot_product_attention(q, wide, v),
        lambda: scaled_dot_product_attention(q, k[:, :1].expand(2, 4, 32, 16), v),
        lambda: scaled_dot_product_attention(q, k, v, scale=-1.0),
        lambda: scaled_dot_product_attention(*tensors(token_first=True)),
        lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    ):
        call()
    assert (fake.launches, peer.seen) == (7, [])


def test_a_kernel_asked_for_by_name_and_a_call_with_gradients_never_go_there(peer: FakePeer, fake: FakeKernel) -> None:
    q, k, v = tensors()
    assert torch.all(scaled_dot_product_attention(q, k, v, kernel="fake") == OURS)
    q.requires_grad_()
    scaled_dot_product_attention(q, k, v).sum().backward()
    assert q.grad is not None
    assert "gradients" in explain(q, k, v).reason
    assert (fake.launches, peer.seen) == (1, [])


def test_the_operator_keeps_what_fake_tensors_were_promised(peer: FakePeer) -> None:
    compiled = torch.compile(lambda q, k, v: scaled_dot_product_attention(q, k, v) * 1, backend="aot_eager", fullgraph=True)
    out = compiled(*tensors())
    assert torch.all(out == PEER)
    assert out.is_contiguous()
    with torch.no_grad():
        torch.library.opcheck(torch.ops.flashmoe.attention_forward, (*tensors(), "full"), test_utils="test_faketensor")


def test_the_call_that_the_harness_times_as_ours_is_ours(peer: FakePeer, fake: FakeKernel) -> None:
    """Failure planted: a peer behind the rows of our kernels."""
    q, k, v = tensors()
    problem = parse("attn b2 h4 q32 d16 fp32")
    call = public_call(problem, "fake")
    assert call is not None
    assert torch.all(call(call_of(problem, q, k, v, OURS)).out == OURS)
    assert (fake.launches, peer.seen) == (1, [])


def test_later_calls_find_themselves_bound_and_read_no_environment(peer: FakePeer, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_dot_product_attention(*tensors())
    monkeypatch.delenv("FLASHMOE_PEERS")
    monkeypatch.setattr(choose, "choose", None)
    assert torch.all(scaled_dot_product_attention(*tensors()) == PEER)
