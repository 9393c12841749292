"""The mixture-of-experts kernels on a GPU: each case with each config, and what callers do to them."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.moe.cases import CASES, FORMAT_CASES, Case, changed, inputs_of, off, put, reference

import flashmoe_science as fm
from flashmoe_science.contract import built_in
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import AnyKernel
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.moe.call import MoEInputs, Tensors
from flashmoe_science.ops.moe.front.choose import PLANS
from flashmoe_science.ops.moe.front.kernels import ours

pytestmark = pytest.mark.gpu

LARGER = (
    Case("moe t260 e8 k2 d8 f8 bf16"),  # more pairs than one program sorts
    Case("moe t256 e128 k8 d2048 f768 bf16"),
    Case("moe t3000 e60 k4 d136 f96 fp16", routing="foreign"),
    Case("moe t700 e4 k2 d264 f200 bf16", routing="crowded"),
    Case("moe t700 e4 k2 d264 f200 fp16", routing="twice"),
    Case("moe t700 e4 k2 d264 f200 bf16", routing="foreign64"),
    Case("moe t400 e2 k2 d2880 f2880 bf16"),
    Case("moe t5 e300 k8 d1000 f520 fp32"),
    Case("moe t256 e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved"),
    Case("moe t3 e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved", routing="foreign"),
    Case("moe t700 e4 k2 d288 f224 bf16 w:mxfp4", routing="crowded"),
    Case("moe t100 e128 k8 d2048 f768 bf16 w:fp8_block"),
    Case("moe t700 e4 k2 d264 f200 bf16 w:fp8_block", routing="twice"),
    Case("moe t40 e16 k4 d2048 f768 bf16 w:fp8_block", routing="foreign"),
    Case("moe t100 e128 k8 d2048 f768 fp16 w:fp8_channel"),
    Case("moe t700 e4 k2 d264 f200 bf16 w:fp8_channel", routing="twice"),
    Case("moe t100 e128 k8 d2048 f768 bf16 w:int4_g128"),
    Case("moe t3 e16 k4 d2048 f768 bf16 w:int4_g32", routing="foreign"),
    Case("moe t700 e4 k2 d256 f384 fp16 w:int4_g128", routing="twice"),
)


def uniform(text: str, skewed: bool = False) -> MoEInputs:
    inputs = inputs_of(Case(text, routing="crowded" if skewed else "random"), "cuda")
    return changed(inputs, x=inputs.tensors.x / 3)


def called(one: MoEInputs) -> torch.Tensor:
    return fm.fused_moe(*one.tensors[:5])


@pytest.mark.parametrize("kernel", ours(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("case", [*CASES, *FORMAT_CASES, *LARGER], ids=str)
def test_a_case_is_right_with_every_config(case: Case, kernel: AnyKernel) -> None:
    problem, gpu = parse_problem(case.problem), current_gpu(torch.device("cuda"))
    if kernel.cannot(problem, gpu):
        pytest.skip("the kernel does not take the problem")
    for config in kernel.configs(problem, gpu):
        assert put(case, kernel, config, "cuda") == [], config


@pytest.mark.parametrize("kernel", ours(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("counts", [(191, 192, 193, 0), (385, 1, 128, 129), (0, 0, 64, 65), (384, 383, 577, 7)], ids=str)
def test_experts_whose_rows_end_about_a_tile_s_end(counts: tuple[int, ...], kernel: AnyKernel) -> None:
    """Rows of each expert next to the multiples of 64, 128 and 192, in a random order."""
    rows, of = sum(counts), "e4 k1 d264 f136 bf16"
    problem, gpu = parse_problem(f"moe t{rows} {of}"), current_gpu(torch.device("cuda"))
    if kernel.cannot(problem, gpu):
        pytest.skip("the kernel does not take the problem")
    inputs = uniform(f"moe t{rows} {of}")
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))[torch.randperm(rows)]
    inputs = changed(inputs, topk_ids=ids[:, None].int().cuda())
    of_128_rows = kernel.configs(parse_problem(f"moe t512 {of}"), gpu)
    for config in {*kernel.configs(problem, gpu), *of_128_rows}:
        got = kernel.run(inputs, config)
        assert off(got, inputs) is None, config
        assert torch.equal(got, kernel.run(inputs, config)), config


# Rows an expert: none, one, and those about which tiles of 16 to 128 rows are filled.
ROWS = (0, 1, 15, 16, 17, 0, 31, 32, 33, 63, 64, 65, 0, 127, 128, 129, 255, 256, 257, 0)


@pytest.mark.parametrize("kernel", ours(), ids=lambda kernel: kernel.name)
def test_any_number_of_rows_an_expert(kernel: AnyKernel) -> None:
    one = inputs_of(Case(f"moe t{sum(ROWS)} e{len(ROWS)} k1 d136 f72 bf16"), "cuda")
    if kernel.cannot(one.problem, current_gpu(torch.device("cuda"))):
        pytest.skip("the kernel does not take the problem")
    ids = torch.repeat_interleave(torch.arange(len(ROWS)), torch.tensor(ROWS))[torch.randperm(sum(ROWS))]
    one = changed(one, topk_ids=ids.int().cuda()[:, None].contiguous())
    right = reference(one)
    for config in kernel.configs(one.problem, current_gpu(torch.device("cuda"))):
        error = (kernel.run(one, config).double() - right).abs().max()
        assert error < 4 * 2.0**-8 * right.abs().max(), config


@pytest.mark.parametrize("tokens", [1, 4, 40, 2000])
def test_fifty_calls_on_two_streams_give_the_same_bits(tokens: int) -> None:
    """Through memory that other calls left full of what is no number."""
    one = uniform(f"moe t{tokens} e60 k4 d264 f200 bf16")
    logits = torch.randn(tokens, 60, device="cuda")

    def layer() -> torch.Tensor:
        weights, ids = fm.route(logits, 4, normalize="sum")
        return fm.fused_moe(*one.tensors[:3], weights, ids)

    first = layer()
    assert first.isfinite().all()
    torch.cuda.synchronize()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    results = []
    for turn in range(50):
        with torch.cuda.stream(streams[turn % 2]):
            full = [torch.full((2**size,), torch.nan, device="cuda") for size in (12, 16, 20, 23)]
            del full
            results.append(layer())
    torch.cuda.synchronize()
    assert all(torch.equal(first, one) for one in results)


@pytest.mark.parametrize("tokens", [3, 40, 2000])
def test_pairs_of_other_ranks_and_no_numbers_reach_nothing_else(tokens: int) -> None:
    """In memory full of what is no number: rows without an expert are not written, and not read."""
    one = uniform(f"moe t{tokens} e8 k4 d264 f200 bf16")
    ids = torch.where(torch.rand(tokens, 4, device="cuda") < 0.5, 8, one.tensors.topk_ids)
    ids[1] = -1
    one = changed(one, topk_ids=ids, topk_weights=torch.where(ids == 8, 0.0, one.tensors.topk_weights))
    x = one.tensors.x.clone()
    x[0] = torch.nan
    full = [torch.full((2**size,), torch.nan, device="cuda") for size in (12, 16, 20, 23)]
    del full
    whole, lost = called(one), called(changed(one, x=x))
    assert off(whole, one) is None
    assert (whole[1] == 0).all()
    assert torch.equal(lost[1:], whole[1:])
    assert lost[0].isnan().all() or (ids[0] == 8).all()


@pytest.mark.parametrize("tokens", [3, 40, 2000])
def test_weights_of_any_strides_are_served(tokens: int) -> None:
    """Last dimensions that are no rows in memory, of weights and states."""
    one = uniform(f"moe t{tokens} e8 k2 d264 f200 bf16")
    whole, (x, w1, w2, weights, ids, *_) = called(one), one.tensors

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, torch.full_like(tensor, torch.nan if tensor.is_floating_point() else -1)], -1)[..., 0]

    for strided in (
        changed(one, w1=apart(w1), w2=apart(w2)),
        changed(one, w1=w1.mT.contiguous().mT, w2=w2.mT.contiguous().mT),
        changed(one, x=apart(x), topk_ids=apart(ids), topk_weights=apart(weights)),
    ):
        got = called(strided)
        assert (got - whole).abs().max() < 4 * 2.0**-8 * whole.abs().max()


def test_other_devices_and_dtypes_are_refused_after_a_call_that_was_served() -> None:
    one = uniform("moe t40 e8 k2 d264 f200 bf16")
    names = ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights", "top_k_ids")
    given = dict(zip(names, one.tensors[:5], strict=True))
    fm.fused_moe(**given)
    for name, tensor in given.items():
        with pytest.raises(ValueError, match=f"{name} is on cpu|gate_up_proj is on cuda:0 and hidden_states on cpu"):
            fm.fused_moe(**given | {name: tensor.cpu()})
    for name in ("gate_up_proj", "down_proj"):
        with pytest.raises(TypeError, match=f"{name} has dtype torch.float16"):
            fm.fused_moe(**given | {name: given[name].half()})
    with pytest.raises(TypeError, match=r"top_k_ids has dtype torch\.int16"):
        fm.fused_moe(**given | {"top_k_ids": given["top_k_ids"].short()})
    with pytest.raises(ValueError, match="activation is 'swish'"):
        fm.fused_moe(**given, activation="swish")


@pytest.mark.parametrize("tokens", [1, 40, 3000])
def test_a_graph_captured_at_one_routing_is_right_at_others(tokens: int) -> None:
    one, other, skewed = (uniform(f"moe t{tokens} e16 k4 d256 f128 bf16", skewed) for skewed in (False, False, True))
    called(one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = called(one)
    none = other.tensors.topk_ids.new_full(other.tensors.topk_ids.shape, -1)
    for ids in (other.tensors.topk_ids.flip(0), skewed.tensors.topk_ids, none, one.tensors.topk_ids):
        one.tensors.topk_ids.copy_(ids)
        graph.replay()
        torch.cuda.synchronize()
        first = out.clone()
        assert torch.equal(first, called(one))
        if tokens < 3000:
            assert off(first, one) is None
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.parametrize("kernel", ours(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("text", ["moe t1 e128 k8 d512 f256 bf16 logits", "moe t500 e16 k4 d256 f128 fp16 zipf"])
def test_from_logits_a_call_is_the_router_and_the_experts(text: str, kernel: AnyKernel) -> None:
    """Launches overlap, and none reads before the one before it has written: each call has other logits."""
    problem, contract, device = parse_problem(text), built_in("moe"), torch.device("cuda")
    if kernel.cannot(problem, current_gpu(device)):
        pytest.skip("the kernel does not take the problem")
    config = kernel.configs(problem, current_gpu(device))[0]
    calls, right = [], []
    for seed in range(20):
        inputs = contract.inputs(problem, device, torch.Generator(device).manual_seed(seed))
        made = contract.for_kernel(problem, inputs)
        weights, ids = fm.route(inputs["router_logits"], problem.top_k, normalize="sum")
        torch.cuda.synchronize()
        given = MoEInputs(problem.from_ids(), Tensors(inputs["x"], inputs["w1"], inputs["w2"], weights, ids))
        right.append(kernel.run(given, config))
        torch.cuda.synchronize()
        calls.append((contract.planned(kernel, config, made), made))
    for _ in range(3):
        results = [call(made) for call, made in calls]
        torch.cuda.synchronize()
        assert all(torch.equal(got, one) for got, one in zip(results, right, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_new_number_of_tokens_waits_for_nothing_and_weights_are_not_copied() -> None:
    whole = uniform("moe t640 e16 k4 d1024 f512 bf16")
    x, _, _, weights, ids, *_ = whole.tensors
    called(whole)
    before, compiled = torch.cuda.memory_allocated(), set(PLANS)
    torch.cuda.reset_peak_memory_stats()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for tokens in (600, 601, 577):
            called(changed(whole, x=x[:tokens], topk_weights=weights[:tokens], topk_ids=ids[:tokens]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 2 * 640 * 4 * (2 * 512 + 1024) + 2 * 640 * 1024 * 2
    assert torch.cuda.memory_allocated() == before
    assert set(PLANS) == compiled


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, on the way
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_compiles_the_layer(mode: str) -> None:
    torch.manual_seed(0)
    layer = fm.FlashMoELayer(256, 128, 8, 2, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    with torch.no_grad():
        for tokens in (3, 50, 3):
            x = torch.randn(tokens, 256, dtype=torch.bfloat16, device="cuda")
            torch.testing.assert_close(compiled(x).clone(), layer(x), rtol=0.05, atol=0.02)


def test_gradients_are_served_by_pytorch_and_right() -> None:
    one = uniform("moe t50 e8 k2 d64 f48 bf16")
    x = one.tensors.x.clone().requires_grad_()
    out = fm.fused_moe(x, *one.tensors[1:5])
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    error = (out.double() - reference(one)).abs().max() / reference(one).abs().max()
    assert error < 6 * 2.0**-8


def test_offsets_beyond_2_to_the_31_elements() -> None:
    """The weights of one expert begin past the reach of 32 bits."""
    tokens, dim, width, experts = 4, 4096, 8192, 40  # 2.7e9 elements of gates and ups
    w1 = torch.zeros(experts, 2 * width, dim, dtype=torch.bfloat16, device="cuda")
    w2 = torch.zeros(experts, dim, width, dtype=torch.bfloat16, device="cuda")
    w1[-1].normal_().mul_(dim**-0.5)
    w2[-1].normal_().mul_(width**-0.5)
    for rows in (tokens, 100):
        x = torch.randn(rows, dim, dtype=torch.bfloat16, device="cuda")
        ids = torch.full((rows, 1), experts - 1, device="cuda")
        got = fm.fused_moe(x, w1, w2, torch.ones(rows, 1, device="cuda"), ids)
        gate, up = (x.float() @ w1[-1].float().T).chunk(2, -1)
        right = (torch.nn.functional.silu(gate) * up) @ w2[-1].float().T
        assert (got.float() - right).abs().max() < 6 * 2.0**-8 * right.abs().max()


@pytest.mark.parametrize("sizes", [(2056, 64), (64, 2056)], ids=["states", "activations"])
@pytest.mark.parametrize("kernel", [kernel for kernel in ours() if "grouped" in kernel.name], ids=lambda kernel: kernel.name)
def test_rows_between_the_products_beyond_2_to_the_31_elements(kernel: AnyKernel, sizes: tuple[int, int]) -> None:
    (dim, width), tokens, top_k, experts = sizes, 132_000, 8, 16
    x = torch.randn(tokens, dim, dtype=torch.bfloat16, device="cuda")
    w1 = (torch.randn(experts, 2 * width, dim, device="cuda") * dim**-0.5).bfloat16()
    w2 = (torch.randn(experts, dim, width, device="cuda") * width**-0.5).bfloat16()
    weights, ids = fm.route(torch.randn(tokens, experts, device="cuda"), top_k, normalize="sum")
    assert tokens * top_k * max(sizes) > 2**31
    got = fm.fused_moe(x, w1, w2, weights, ids, kernel=kernel.name)
    for part in (slice(0, 4), slice(tokens // 2, tokens // 2 + 4), slice(tokens - 4, tokens)):
        few = fm.fused_moe(x[part], w1, w2, weights[part].contiguous(), ids[part].contiguous(), kernel="moe_gemv_triton")
        assert (got[part].float() - few.float()).abs().max() < 6 * 2.0**-8 * few.float().abs().max()
