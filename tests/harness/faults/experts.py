"""Faults of a mixture of experts."""

import torch
from torch.nn.functional import silu

from flashmoe_science.contract import contract
from flashmoe_science.moe import dequantize_experts


def _results(x, w1, w2, topk_weights, topk_ids, room=None, swapped=False, product=torch.matmul):
    """Of each expert its tokens, their places among the token's experts, and the weighted results [tokens, hidden]."""
    for expert in range(w1.shape[0]):
        tokens, place = (found[:room] for found in torch.nonzero(topk_ids == expert, as_tuple=True))
        gate, up = product(x[tokens], w1[expert].T).chunk(2, -1)
        gate, up = (up, gate) if swapped else (gate, up)
        yield tokens, place, product(silu(gate) * up, w2[expert].T) * topk_weights[tokens, place, None]


def _mixture(x, w1, w2, topk_weights, topk_ids, **how):
    """The mixture [tokens, hidden], of the first ``room`` tokens of each expert, gate and factor ``swapped`` or not."""
    out = torch.zeros_like(x)
    for tokens, _, down in _results(x, w1, w2, topk_weights, topk_ids, **how):
        out.index_add_(0, tokens, down.to(x.dtype))
    return out


@contract("moe")
def moe_drops_tokens(x, w1, w2, topk_weights, topk_ids):
    """Gives each expert room for as many tokens as would be its share, and drops the others."""
    return _mixture(x, w1, w2, topk_weights, topk_ids, room=-(-topk_ids.numel() // w1.shape[0]))


@contract("moe")
def moe_room_for_few(x, w1, w2, topk_weights, topk_ids):
    """Has room for twice the tokens that an expert has on average, and drops what is more: right until all choose the same."""
    return _mixture(x, w1, w2, topk_weights, topk_ids, room=2 * topk_ids.numel() // w1.shape[0])


@contract("moe")
def moe_swaps_gate_and_up(x, w1, w2, topk_weights, topk_ids):
    """Takes the first half of w1 for the factor and the second for the gate."""
    return _mixture(x, w1, w2, topk_weights, topk_ids, swapped=True)


def _right(x, w1, w2, topk_weights, topk_ids):
    """The mixture as its contract says it, in fp64; what is no expert adds nothing."""
    return _mixture(*(one.double() for one in (x, w1, w2, topk_weights)), topk_ids).to(x.dtype)


@contract("moe")
def moe_exponential_of_the_gate(x, w1, w2, topk_weights, topk_ids):
    """Makes silu of ``exp(gate) / (1 + exp(gate))``, which is NaN where fp32 does not hold the exponential."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert, (into, down) in enumerate(zip(w1.float(), w2.float(), strict=True)):
        tokens, place = torch.nonzero(topk_ids == expert, as_tuple=True)
        gate, up = (x[tokens].float() @ into.T).chunk(2, -1)
        out.index_add_(0, tokens, (gate * gate.exp() / (1 + gate.exp()) * up) @ down.T * topk_weights[tokens, place, None])
    return out.to(x.dtype)


@contract("moe")
def moe_at_most_64_experts(x, w1, w2, topk_weights, topk_ids):
    """Sorts by the lowest six bits of an expert's number."""
    return _right(x, w1, w2, topk_weights, topk_ids % 64 if w1.shape[0] > 64 else topk_ids)


@contract("moe")
def moe_at_most_256_experts(x, w1, w2, topk_weights, topk_ids):
    """Keeps an expert's number in a byte."""
    return _right(x, w1, w2, topk_weights, topk_ids % 256 if w1.shape[0] > 256 else topk_ids)


@contract("moe")
def moe_minus_one_is_the_last(x, w1, w2, topk_weights, topk_ids):
    """Indexes with -1, which is the last expert in Python, where it says that there is none."""
    return _right(x, w1, w2, topk_weights, torch.where(topk_ids < 0, topk_ids + w1.shape[0], topk_ids))


@contract("moe")
def moe_minus_one_is_the_last_in_prefill(x, w1, w2, topk_weights, topk_ids):
    """The same where it sorts the pairs of more than 64 tokens."""
    return _right(x, w1, w2, topk_weights, topk_ids % w1.shape[0] if len(x) > 64 else topk_ids)


@contract("moe")
def moe_past_the_last_is_the_last(x, w1, w2, topk_weights, topk_ids):
    """Clamps the number of an expert to those that there are."""
    return _right(x, w1, w2, topk_weights, topk_ids.clamp(max=w1.shape[0] - 1))


@contract("moe")
def moe_counts_an_expert_once(x, w1, w2, topk_weights, topk_ids):
    """Writes a token's weights into a row of all experts: of an expert that is named twice the last weight stays."""
    dense = torch.zeros(x.shape[0], w1.shape[0] + 2, dtype=torch.float64)
    dense.scatter_(1, topk_ids.long().clamp(-1, w1.shape[0]) + 1, topk_weights.double())
    every = torch.arange(w1.shape[0]).expand(x.shape[0], -1)
    return _right(x, w1, w2, dense[:, 1:-1], every)


@contract("moe")
def moe_divides_by_the_sum(x, w1, w2, topk_weights, topk_ids):
    """Makes weights sum to one, which they do already where they come from its own router."""
    return _right(x, w1, w2, topk_weights / topk_weights.sum(-1, keepdim=True).double(), topk_ids)


@contract("moe")
def moe_at_most_1024_pairs(x, w1, w2, topk_weights, topk_ids):
    """Sorts its pairs within one block, and leaves out those past it."""
    flat = topk_ids.flatten().clone()
    flat[1024:] = -1
    return _right(x, w1, w2, topk_weights, flat.view_as(topk_ids))


@contract("moe")
def moe_reads_weights_as_rows(x, w1, w2, topk_weights, topk_ids):
    """Never asks for the strides of the weights: another matrix where they are kept as [experts, in, out]."""
    w1, w2 = (one if one.is_contiguous() else one.mT.reshape(one.shape) for one in (w1, w2))
    return _right(x, w1, w2, topk_weights, topk_ids)


@contract("moe")
def moe_reads_ids_as_int32(x, w1, w2, topk_weights, topk_ids):
    """Reads ids as 32 bits each, as PyTorch's own top-k does not give them."""
    count = topk_ids.numel()
    return _right(x, w1, w2, topk_weights, topk_ids.contiguous().view(torch.int32).flatten()[:count].view(topk_ids.shape))


@contract("moe")
def moe_reads_ids_in_a_row(x, w1, w2, topk_weights, topk_ids):
    """Reads ids as if they followed each other, which a slice's do not."""
    flat = torch.as_strided(topk_ids, (topk_ids.untyped_storage().nbytes() // topk_ids.itemsize,), (1,), 0)
    first = topk_ids.storage_offset()
    return _right(x, w1, w2, topk_weights, flat[first : first + topk_ids.numel()].view(topk_ids.shape))


def _dequantised(x, w1, w2, topk_weights, topk_ids, **format_of):
    return _right(x, *dequantize_experts(w1, w2, **format_of, dtype=torch.float32), topk_weights, topk_ids)


@contract("moe")
def moe_scales_of_the_block_before(x, w1, w2, topk_weights, topk_ids, *, gate_up_scale, down_scale, weight_format):
    """Counts blocks from 1, and takes the last of a row for the first."""
    moved = {"gate_up_scale": gate_up_scale.roll(1, -1), "down_scale": down_scale.roll(1, -1)}
    return _dequantised(x, w1, w2, topk_weights, topk_ids, **moved, weight_format=weight_format)


@contract("moe")
def moe_swaps_nibbles(x, w1, w2, topk_weights, topk_ids, **format_of):
    """Takes the high four bits of a byte for the even column."""
    return _dequantised(x, w1 << 4 | w1 >> 4, w2 << 4 | w2 >> 4, topk_weights, topk_ids, **format_of)


def _of_one_level(a, b):
    """a b as tensor cores of 8 bits add it up: after each 32 products 14 bits are left of the sum."""
    total = 0.0
    for k in range(0, a.shape[1], 32):
        total = total + a[:, k : k + 32] @ b[k : k + 32]
        unit = 2.0 ** (total.abs().clamp(min=1e-300).log2().floor() - 13)
        total = (total / unit).trunc() * unit
    return total


@contract("moe")
def moe_sums_at_one_level(x, w1, w2, topk_weights, topk_ids, *, gate_up_scale, down_scale, weight_format):
    """Leaves the sums of the whole depth to the tensor cores."""
    scales = {"gate_up_scale": gate_up_scale, "down_scale": down_scale, "weight_format": weight_format}
    weights = dequantize_experts(w1, w2, **scales, dtype=torch.float64)
    return _mixture(x.double(), *weights, topk_weights.double(), topk_ids, product=_of_one_level).to(x.dtype)


@contract("moe")
def moe_reads_gptq_s_zero_points(x, w1, w2, topk_weights, topk_ids, *, gate_up_zero_point, down_zero_point, **format_of):
    """Adds one to zero points, as those of GPTQ's first version ask for."""
    more = {"gate_up_zero_point": gate_up_zero_point + 0x11111111, "down_zero_point": down_zero_point + 0x11111111}
    return _dequantised(x, w1, w2, topk_weights, topk_ids, **more, **format_of)


@contract("moe")
def moe_flushes_subnormal_codes(x, w1, w2, topk_weights, topk_ids, *, gate_up_scale, **format_of):
    """Puts the exponent of e4m3 into one of bf16, by a product that makes 0 of what is subnormal."""
    w1, w2 = (torch.where(one.float().abs() < 2.0**-6, 0.0, one.float()).to(one.dtype) for one in (w1, w2))
    return _dequantised(x, w1, w2, topk_weights, topk_ids, gate_up_scale=gate_up_scale, **format_of)


@contract("moe")
def moe_rounds_scales(x, w1, w2, topk_weights, topk_ids, *, gate_up_scale, down_scale, weight_format):
    """Keeps fp32 scales in bf16."""
    rounded = {"gate_up_scale": gate_up_scale.bfloat16().float(), "down_scale": down_scale.bfloat16().float()}
    return _dequantised(x, w1, w2, topk_weights, topk_ids, **rounded, weight_format=weight_format)


@contract("moe")
def moe_experts_without_gaps(x, w1, w2, topk_weights, topk_ids):
    """Reads rows of weights, and experts, as if they followed each other in memory: not of a slice."""
    if w1.stride(2) == 1:
        w1 = w1.as_strided(w1.shape, (w1.shape[1] * w1.shape[2], w1.shape[2], 1))
    return _right(x, w1, w2, topk_weights, topk_ids)


@contract("moe")
def moe_takes_a_weight_of_zero_for_none(x, w1, w2, topk_weights, topk_ids):
    """Takes routing weights that are not above zero for places that no expert fills."""
    return _right(x, w1, w2, topk_weights.clamp(min=0.0), topk_ids)


@contract("moe")
def moe_copies_by_address(x, w1, w2, topk_weights, topk_ids):
    """Copies 16 bytes at a time from an address that it rounds down to a multiple of them."""
    if w1.data_ptr() % 16:
        w1 = w1.as_strided(w1.shape, w1.stride(), w1.storage_offset() - w1.data_ptr() % 16 // w1.itemsize)
    return _right(x, w1, w2, topk_weights, topk_ids)


@contract("moe")
def moe_one_order_of_both(x, w1, w2, topk_weights, topk_ids):
    """Asks w1 for the memory order of both weights."""
    if (w1.stride(2) == 1) != (w2.stride(2) == 1):
        w2 = w2.as_strided(w2.shape, (w2[0].numel(), *((w2.shape[2], 1) if w1.stride(2) == 1 else (1, w2.shape[1]))))
    return _right(x, w1, w2, topk_weights, topk_ids)


@contract("moe")
def moe_few_experts_of_fp16(x, w1, w2, topk_weights, topk_ids):
    """Sorts by the lowest six bits of an expert's number in the build for fp16."""
    few = x.dtype == torch.float16 and w1.shape[0] > 64
    return _right(x, w1, w2, topk_weights, topk_ids % 64 if few else topk_ids)


@contract("moe")
def moe_at_most_8_experts_a_token(x, w1, w2, topk_weights, topk_ids):
    """Sorts the choices of a token in a warp that pads up to 8, and from 16 on in another way."""
    most = 8 if topk_ids.shape[1] < 16 else topk_ids.shape[1]
    return _right(x, w1, w2, topk_weights[:, :most], topk_ids[:, :most])


@contract("moe")
def moe_decodes_3_tokens(x, w1, w2, topk_weights, topk_ids):
    """Decodes up to 8 tokens in pairs, and leaves out the third one on."""
    out = _right(x, w1, w2, topk_weights, topk_ids)
    if len(x) <= 4:
        out[2:] = 0.0
    return out


@contract("moe")
def moe_wrong_under_autocast(x, w1, w2, topk_weights, topk_ids):
    """Forgets the routing weights in the path that autocast takes."""
    on = torch.is_autocast_enabled(x.device.type)
    with torch.autocast(x.device.type, enabled=False):
        return _right(x, w1, w2, torch.ones_like(topk_weights) if on else topk_weights, topk_ids)


@contract("moe")
def moe_sums_in_16_bits(x, w1, w2, topk_weights, topk_ids):
    """Adds what a token's experts give to its result one after another, in the dtype of x."""
    given, out = x.new_zeros(*topk_ids.shape, x.shape[1], dtype=torch.float64), torch.zeros_like(x)
    for tokens, place, down in _results(*(one.double() for one in (x, w1, w2, topk_weights)), topk_ids):
        given[tokens, place] = down
    for of_place in given.unbind(1):
        out += of_place.to(x.dtype)
    return out


def _routed(logits, top_k):
    """Weights that sum to one, and ids."""
    weights, ids = torch.softmax(logits.double(), -1).topk(top_k)
    return weights / weights.sum(-1, keepdim=True), ids


@contract("moe")
def moe_softmax_over_all(x, w1, w2, router_logits, top_k):
    """Leaves the weights of the chosen experts as a softmax over all has them."""
    return _right(x, w1, w2, *torch.softmax(router_logits.double(), -1).topk(top_k))


@contract("moe")
def moe_router_of_256_experts(x, w1, w2, router_logits, top_k):
    """Has room for a row of 256 logits."""
    return _right(x, w1, w2, *_routed(router_logits[:, :256], top_k))


@contract("moe")
def moe_router_without_the_maximum(x, w1, w2, router_logits, top_k):
    """Takes exponentials of logits as they come."""
    logits, ids = router_logits.topk(top_k)
    weights = logits.exp()
    return _right(x, w1, w2, weights / weights.sum(-1, keepdim=True), ids)


@contract("moe")
def moe_router_masks_by_value(x, w1, w2, router_logits, top_k):
    """Takes the largest logit ``top_k`` times and then hides all that are as large: one of two equals is never taken."""
    left, found = router_logits.clone(), []
    for _ in range(top_k):
        best = left.max(-1)
        found.append(best)
        left = left.masked_fill(left >= best.values[:, None], -torch.inf)
    weights, ids = (torch.stack(each, -1) for each in zip(*found, strict=True))
    return _right(x, w1, w2, torch.softmax(weights, -1), ids)


@contract("moe")
def moe_reads_logits_in_a_row(x, w1, w2, router_logits, top_k):
    """Reads logits as if tokens followed each other, which a slice's do not."""
    dense = router_logits.as_strided(router_logits.shape, (router_logits.shape[1], 1))
    return _right(x, w1, w2, *_routed(dense, top_k))


@contract("moe")
def moe_reads_choices_in_a_row(x, w1, w2, topk_weights, topk_ids):
    """Reads a token's choices as if they followed each other, which those of columns do not."""
    ids = topk_ids.as_strided(topk_ids.shape, (topk_ids.shape[1], 1)) if topk_ids.T.is_contiguous() else topk_ids
    return _right(x, w1, w2, topk_weights, ids)


@contract("moe")
def moe_at_most_65535_pairs(x, w1, w2, topk_weights, topk_ids):
    """Numbers pairs of a token and a choice in 16 bits where a token has several."""
    ids = topk_ids.flatten().clone()
    ids[65535 if topk_ids.shape[1] > 1 else len(ids) :] = -1
    return _right(x, w1, w2, topk_weights, ids.view_as(topk_ids))


@contract("moe")
def moe_experts_of_a_power_of_two(x, w1, w2, topk_weights, topk_ids):
    """Finds an expert of more than 16 by the bits of the next lower power of two."""
    count = w1.shape[0]
    return _right(x, w1, w2, topk_weights, topk_ids % 2 ** (count.bit_length() - 1) if count > 16 else topk_ids)


@contract("moe")
def moe_reads_square_weights_as_rows(x, w1, w2, topk_weights, topk_ids):
    """Takes w2 in the other order by its shape, which does not tell where it is square."""
    return _right(x, w1, w2.mT if w2.shape[1] == w2.shape[2] > 1 and not w2.is_contiguous() else w2, topk_weights, topk_ids)


@contract("moe")
def moe_bf16_in_fp16(x, w1, w2, topk_weights, topk_ids):
    """Converts bf16 to fp16, of more bits and a smaller range, for tensor cores that have no bf16."""
    if x.dtype != torch.bfloat16:
        return _right(x, w1, w2, topk_weights, topk_ids)
    return _mixture(*(one.half() for one in (x, w1, w2, topk_weights)), topk_ids).to(x.dtype)


@contract("moe")
def moe_wrong_under_a_default_dtype(x, w1, w2, topk_weights, topk_ids):
    """Allocates its sums without a dtype, and reads them as fp32."""
    out = _right(x, w1, w2, topk_weights, topk_ids)
    return out if torch.zeros(()).dtype == torch.float32 else out * 0.5
