"""fp32_gluon_sm90: where it is chosen, what it takes and, on a Hopper GPU, its results."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from tests.unit.interpreter import Interpreter
from tests.unit.ops.attention.forward.cases import Case, examine, problem_of

import flashmoe_science as fm
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.ops.attention.forward.fp32_sm90 import config, planes
from flashmoe_science.ops.attention.forward.fp32_sm90.kernel import KERNEL
from flashmoe_science.ops.attention.problem import parse

H200 = gpu_named("h200")
BATCH, HEADS, HEADS_KV, QUERIES, KEYS, DIM, DIM_V = 2, 3, 1, 5, 7, 17, 6


@pytest.mark.parametrize(
    ("text", "suits"),
    [
        ("attn b2 h16 q4096 d128 fp32 causal", True),
        ("attn b1 h2 q300 d128 fp32", True),
        ("attn b1 h2 q200 d128 fp32", False),  # too few rows to be worth the planes
        ("attn b4 h8 q128 d64 fp32", False),  # of narrow heads
        ("attn b4 h8 q128 d128 fp32", True),
        ("attn b8 h32 q1 k8192 d128 fp32", False),  # decoding
        ("attn b1 h4 q64 k8192 d128 fp32", False),  # keys had better be split
    ],
)
def test_it_is_chosen_for_many_rows(text: str, suits: bool) -> None:
    assert KERNEL.suits(parse(text), H200) is suits


def test_it_serves_fp32_alone_and_on_hopper_alone() -> None:
    assert KERNEL.supports(parse("attn b1 h2 q64 d64 fp32"), H200) is None
    assert "not bf16" in str(KERNEL.supports(parse("attn b1 h2 q64 d64 bf16"), H200))
    assert "9.0" in str(KERNEL.supports(parse("attn b1 h2 q64 d64 fp32"), gpu_named("a100")))
    assert KERNEL.supports(parse("attn b1 h2 q64 d64 fp32 softcap5"), H200) is not None


def main() -> None:
    """Prints whether the planes add up to Q, K and V to the last bit."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, QUERIES, HEADS, DIM, generator=random).transpose(1, 2)
    k = torch.randn(BATCH, HEADS_KV, KEYS, DIM, generator=random)
    v = torch.randn(BATCH, HEADS_KV, KEYS, DIM_V, generator=random)
    v[0, 0, 0, :3] = torch.tensor([torch.finfo(torch.float32).max, torch.inf, 1e-30])  # the first would round to infinity
    tensors = {"q": q, "k": k, "v": v}
    written = [
        torch.full((3, *one.shape[:3], -(-one.shape[3] // 8) * 8), torch.nan, dtype=torch.bfloat16) for one in tensors.values()
    ]
    blocks = config.plane_blocks(BATCH * HEADS * QUERIES, BATCH * HEADS_KV * KEYS)
    planes.flashmoe_fp32_planes[(sum(blocks), 1, 1)](
        *tensors.values(), *written, *[step for one in tensors.values() for step in one.stride()[:3]],
        HEADS, HEADS_KV, BATCH * HEADS, BATCH * HEADS_KV, QUERIES, KEYS, *blocks[:2],
        D=DIM, DV=DIM_V, WIDTH=24, WIDTH_V=8, BLOCK_D=32, BLOCK_R=planes.SPLIT_ROWS, EARLY_START=False,
    )  # fmt: skip
    found = {}
    for (name, one), parts in zip(tensors.items(), written, strict=True):
        whole = torch.nn.functional.pad(one.double(), (0, parts.shape[-1] - one.shape[3]))
        found[name] = torch.equal(parts.double().sum(0), whole)
    print(json.dumps(found))


def test_the_planes_add_up_to_the_last_bit(interpreted: Interpreter) -> None:
    assert interpreted(__file__) == {"q": True, "k": True, "v": True}


def test_the_planes_take_six_bytes_a_number() -> None:
    one = parse("attn b2 h4 hk2 q300 k500 d40 dv24 fp32")
    (config,) = KERNEL.configs(one, H200)
    numbers = 2 * 4 * 300 * 40 + 2 * 2 * 500 * (40 + 24)
    assert 6 * numbers <= KERNEL.workspace(one, config) < 6 * numbers + 3 * 256


# On a GPU -------------------------------------------------------------------------------------------------------------------

SHAPES = (
    "attn b1 h2 q70 d128 fp32 causal",
    "attn b2 h4 hk2 q300 d64 fp32 bshd",
    "attn b1 h2 q257 k515 d96 fp32 causal",
    "attn b1 h3 q515 k130 d80 fp32 causal",  # rows and tiles that see no key
    "attn b1 h2 q333 k100 d40 fp32 causal-topleft",
    "attn b1 h2 q200 k1000 d17 dv31 fp32",
    "attn b1 h2 q200 k1000 d96 dv256 fp32",
    "attn b2 h2 q300 d192 dv128 fp32 causal",
    "attn b1 h2 q700 d160 fp32 causal",
    "attn b1 h4 hk1 q512 d256 fp32 causal",
    "attn b1 h1 q130 k1 d1 fp32",
    "attn b1 h1 q16384 d128 fp32 causal",  # over which the tensor cores' own sums would drift
)


@pytest.mark.gpu
@pytest.mark.parametrize("values", ["normal", "opposed", "large"])
@pytest.mark.parametrize("text", SHAPES)
def test_it_is_right(text: str, values: str) -> None:
    case = Case(text, None, values)
    one = problem_of(case)
    if reason := KERNEL.supports(one, current_gpu()):
        pytest.skip(reason)
    (config,) = KERNEL.configs(one, current_gpu())
    assert examine(KERNEL, config, case, torch.device("cuda")) == []


@pytest.mark.gpu
def test_a_number_that_bf16_would_round_to_infinity_stays_finite() -> None:
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda") for _ in range(3))
    if reason := KERNEL.supports(parse("attn b1 h2 q256 d64 fp32"), current_gpu()):
        pytest.skip(reason)
    v[0, 0, :, 3], v[0, 0, 7, 3] = 0.0, torch.finfo(torch.float32).max
    out = fm.scaled_dot_product_attention(q, k, v, kernel=KERNEL.name)
    right = torch.softmax(q[0, 0].double() @ k[0, 0].double().T / 8, 1)[:, 7] * v[0, 0, 7, 3].double()
    assert (out[0, 0, :, 3].double() / right - 1).abs().max() < 1e-5


if __name__ == "__main__":
    main()
