"""What the router refuses: in one line that names the argument, what it was and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashmoe_science.ops.moe.route.losses import balance_loss, expert_load
from flashmoe_science.ops.moe.route.route import route

LOGITS, BIAS = torch.zeros(3, 16), torch.zeros(16)
REFUSED: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"router_logits": [1.0]}, TypeError, "router_logits is a list; it must be a torch.Tensor"),
    ({"router_logits": LOGITS.int()}, TypeError, "router_logits has dtype torch.int32; it must be torch.float32"),
    ({"router_logits": LOGITS.to_sparse()}, ValueError, r"a torch.sparse_coo tensor; it must be dense \(torch.strided\)"),
    ({"router_logits": torch.zeros(())}, ValueError, r"router_logits has shape \(\); it must be \[..., experts\]"),
    ({"router_logits": torch.zeros(3, 0)}, ValueError, r"router_logits has shape \(3, 0\); it must be \[..., experts\]"),
    ({"router_logits": LOGITS.to("meta")}, ValueError, "router_logits is on device meta; it must be on a CPU or a CUDA device"),
    ({"top_k": 0}, ValueError, "top_k is 0; it must be from 1 to 16, the number of experts"),
    ({"top_k": 17}, ValueError, "top_k is 17; it must be from 1 to 16"),
    ({"top_k": True}, TypeError, "top_k is True; it must be an integer from 1 to 16"),
    ({"top_k": 2.0}, TypeError, "top_k is 2.0; it must be an integer"),
    ({"top_k": None}, TypeError, "top_k is None; it must be an integer"),
    ({"scoring": "relu"}, ValueError, "scoring is 'relu'; it must be one of 'softmax', 'softmax_topk', 'sigmoid'"),
    ({"scoring": None}, TypeError, "scoring is None; it must be one of"),
    ({"scoring": ["softmax"]}, TypeError, r"scoring is \['softmax'\]; it must be one of"),
    ({"normalize": "max"}, ValueError, "normalize is 'max'; it must be one of 'none', 'sum'"),
    ({"normalize": True}, TypeError, "normalize is True; it must be one of 'none', 'sum'"),
    ({"groups": 3}, ValueError, "groups is 3 and there are 16 experts; the first must divide the second"),
    ({"groups": 0}, ValueError, "groups is 0; it must be from 1 to 16, the number of experts"),
    ({"groups": True}, TypeError, "groups is True; it must be an integer"),
    ({"groups": 4}, TypeError, "top_k_groups is None; it must be an integer from 1 to 4, groups"),
    ({"groups": 4, "top_k_groups": 5}, ValueError, "top_k_groups is 5; it must be from 1 to 4, groups"),
    ({"groups": 4, "top_k_groups": True}, TypeError, "top_k_groups is True; it must be an integer"),
    ({"top_k_groups": 2}, ValueError, "top_k_groups is 2; it must be from 1 to 1, groups"),
    (
        {"top_k": 5, "groups": 4, "top_k_groups": 1},
        ValueError,
        "top_k is 5; it must be at most 4, the experts of 1 of 4 groups",
    ),
    (
        {"scoring": "softmax", "groups": 4, "top_k_groups": 2},
        ValueError,
        "groups is given and scoring is 'softmax'; it must be",
    ),
    (
        {"scoring": "softmax", "selection_bias": BIAS},
        ValueError,
        "selection_bias is given and scoring is 'softmax'; it must be",
    ),
    ({"selection_bias": [0.0] * 16}, TypeError, "selection_bias is a list; it must be a torch.Tensor or None"),
    ({"selection_bias": BIAS.half()}, TypeError, "selection_bias has dtype torch.float16; it must be torch.float32"),
    ({"selection_bias": BIAS[:15]}, ValueError, r"selection_bias has shape \(15,\); it must be dense, of shape \(16,\)"),
    ({"selection_bias": BIAS[None]}, ValueError, r"selection_bias has shape \(1, 16\); it must be dense, of shape \(16,\)"),
    (
        {"selection_bias": BIAS.to("meta")},
        ValueError,
        "selection_bias is on meta and router_logits on cpu; they must be on",
    ),
    ({"scaling_factor": True}, TypeError, "scaling_factor is True; it must be a real number"),
    ({"scaling_factor": "2"}, TypeError, "scaling_factor is '2'; it must be a real number"),
    ({"scaling_factor": math.nan}, ValueError, "scaling_factor is nan; it must be finite"),
)


@pytest.mark.parametrize(("changed", "error", "words"), REFUSED, ids=[words[:60] for _, _, words in REFUSED])
def test_a_bad_argument_is_refused_in_one_line(changed: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"router_logits": LOGITS, "top_k": 2, "scoring": "sigmoid"} | changed
    route(LOGITS, 2, scoring="sigmoid")
    with pytest.raises(error, match=words) as raised:
        route(**arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: expert_load([0], 4), TypeError, "top_k_ids is a list; it must be a torch.Tensor"),
        (lambda: expert_load(LOGITS, 4), TypeError, "top_k_ids has dtype torch.float32; it must be torch.int32 or torch.int64"),
        (lambda: expert_load(torch.tensor(1), 4), ValueError, "top_k_ids has no dimension"),
        (lambda: expert_load(LOGITS.int(), 0), ValueError, "experts is 0; it must be at least 1"),
        (lambda: expert_load(LOGITS.int(), True), TypeError, "experts is True; it must be an integer at least 1"),
        (lambda: balance_loss(LOGITS, LOGITS), TypeError, "top_k_ids has dtype torch.float32"),
        (lambda: balance_loss(LOGITS.int(), LOGITS.int()), TypeError, "router_logits has dtype torch.int32"),
        (
            lambda: balance_loss(LOGITS, LOGITS[:2].int()),
            ValueError,
            r"shape \(2, 16\) and router_logits \(3, 16\); they must",
        ),
        (lambda: balance_loss(LOGITS, LOGITS.int().to("meta")), ValueError, "top_k_ids is on meta and router_logits on cpu"),
    ],
)
def test_a_bad_load_is_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
