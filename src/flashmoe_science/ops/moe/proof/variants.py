"""Other ways to give the inputs of experts, each of which a kernel of others has got wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from flashmoe_science.ops.formats import SIDE
from flashmoe_science.ops.moe.call.formats import OF_FORMAT

Made = dict[str, torch.Tensor]
EQUAL_EXPERTS = "two experts that are equal, as are their logits"  # a gradient depends on which of them is chosen
SCALES, ZERO_POINTS, INPUT_SCALES = OF_FORMAT[:2], OF_FORMAT[2:4], OF_FORMAT[4:]


def _any_sum(made: Made) -> Made:
    """Routing weights twice to half as large, a token's each by another factor: a router need not normalise."""
    factors = torch.linspace(0.5, 2.0, made["topk_weights"].numel(), device=made["topk_weights"].device)
    return made | {"topk_weights": made["topk_weights"] * factors.view_as(made["topk_weights"])}


def _signed(made: Made) -> Made:
    """Every third routing weight zero, every third negative: a weight is a factor, whatever it is."""
    factors = torch.tensor([1.0, 0.0, -1.0], device=made["topk_weights"].device)
    places = torch.arange(made["topk_weights"].numel(), device=factors.device).view_as(made["topk_weights"])
    return made | {"topk_weights": made["topk_weights"] * factors[places % 3]}


def _twice(made: Made) -> Made:
    """Each token's first expert in its last place too."""
    made["topk_ids"][:, -1] = made["topk_ids"][:, 0]
    return made


def _one_is(number: Callable[[int], int]) -> Callable[[Made], Made]:
    """Every other token's last expert replaced by ``number`` of how many there are."""

    def change(made: Made) -> Made:
        made["topk_ids"][::2, -1] = number(made["w1"].shape[0])
        return made

    return change


def _no_expert(made: Made) -> Made:
    """The last token without an expert, as of a rank that has none of its experts."""
    made["topk_ids"][-1] = -1
    return made


def _wide(made: Made) -> Made:
    return made | {"topk_ids": made["topk_ids"].long()}


def _cancelling(made: Made) -> Made:
    """16-bit tokens whose first columns are large, and make products that those of the last columns cancel: what is added
    between has its part only in a sum of more bits than the result's. Not so large that parts of a sum may not be bf16."""
    x, count = made["x"], min(32, made["x"].shape[1] // 4)
    if x.dtype == torch.float32 or not count:
        return made
    x[:, :count] *= 2**7
    x[:, -count:] = -x[:, :count]
    if INPUT_SCALES[0] in made:
        made[INPUT_SCALES[0]] *= 2**7
    for name in ("w1", SCALES[0], ZERO_POINTS[0]):
        if name in made and made[name].dim() == 3:
            parts = count * made[name].shape[2] // x.shape[1] or 1
            made[name][..., -parts:] = made[name][..., :parts].clone()
    return made


def _subnormal(made: Made) -> Made:
    """Codes of e4m3 most of which are subnormal, of which a largest weight has 14 steps, under scales that are larger by as
    much."""
    if made["w1"].dtype != torch.float8_e4m3fn:
        return made
    codes = {name: (made[name].float() * 2.0**-14).to(torch.float8_e4m3fn) for name in ("w1", "w2")}
    return made | codes | {name: made[name] * 2.0**14 for name in SCALES}


def scales_between_two_of_bf16(made: Made) -> Made:
    """fp32 scales halfway between two numbers of bf16, those of every other 128 columns of w1 rounded up and the others down;
    codes without signs, and tokens whose products under the former take away half of those under the latter. So what rounding
    scales is off by adds up, to three times its part of the sum."""
    x, scale = made["x"], made.get(SCALES[0])
    if scale is None or scale.dtype != torch.float32 or made["w1"].dtype != torch.float8_e4m3fn:
        return made
    codes = {name: (made[name].view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn) for name in ("w1", "w2")}
    up = torch.arange(x.shape[1], device=x.device) // SIDE % 2 == (1 if scale.dim() == 3 else 2)
    less = torch.where(up, -0.5 * (~up).sum() / up.sum(), 1.0)
    scales = {name: torch.exp2(made[name].log2().round()) * (1 + 2.0**-8) for name in SCALES}
    if scale.dim() == 3:
        scales[SCALES[0]][..., 1::2] *= (1 + 3 * 2.0**-8) / (1 + 2.0**-8)
    return made | codes | scales | {"x": (x.abs() * less).to(x.dtype)}


def _of_tokens(made: Made) -> Made:
    """The tensors with a row a token."""
    return {name: made[name] for name in ("x", "topk_weights", "topk_ids", "router_logits") if name in made}


def _sliced(made: Made) -> Made:
    """All but weights in no format as the first columns of tensors twice as wide."""
    names = made.keys() - (set() if SCALES[0] in made else {"w1", "w2"})
    return made | {name: torch.cat((made[name], made[name]), -1)[..., : made[name].shape[-1]] for name in names}


def _in_columns(made: Made) -> Made:
    """Tokens as columns in memory, and with them their routing."""
    return made | {name: one.T.contiguous().T for name, one in _of_tokens(made).items()}


def _of_larger_weights(made: Made) -> Made:
    """Weights in no format as slices of larger ones: neither rows nor experts follow each other without gaps."""
    if SCALES[0] in made:
        return made

    def sliced(weights: torch.Tensor) -> torch.Tensor:
        rows_first = not weights.mT.is_contiguous()
        experts, rows, columns = weights.shape if rows_first else weights.mT.shape
        whole = weights.new_empty(experts, rows + 8, columns + 8)[:, :rows, :columns]
        return (whole if rows_first else whole.mT).copy_(weights)

    return made | {name: sliced(made[name]) for name in ("w1", "w2")}


def _of_one_tensor(made: Made) -> Made:
    """Tokens and weights in no format as views of one flat tensor that begin an element past where an allocator begins one, as
    of sharded training."""
    names = ["x"] if SCALES[0] in made else ["x", "w1", "w2"]
    whole = made["x"].new_empty(1 + sum(made[name].numel() for name in names))
    parts = whole[1:].split([made[name].numel() for name in names])
    views = {name: part.as_strided(made[name].shape, made[name].stride()) for name, part in zip(names, parts, strict=True)}
    return made | {name: view.copy_(made[name]) for name, view in views.items()}


def _two_orders(made: Made) -> Made:
    """w2 in no format with columns before rows in memory where w1 has rows before columns, or the other way round."""
    if SCALES[0] in made:
        return made
    w2 = made["w2"]
    return made | {"w2": w2.contiguous() if made["w1"].mT.is_contiguous() else w2.mT.contiguous().mT}


def _far_logits(made: Made) -> Made:
    """Router logits of every other token far above zero, the others' far below: a softmax is the same, exactly."""
    if "router_logits" in made:
        made["router_logits"][::2] += 256.0
        made["router_logits"][1::2] -= 256.0
    return made


def _equal(made: Made) -> Made:
    """The second expert a copy of the first, also in its logits: whichever of the two is chosen, the result is the same."""
    for name in made.keys() - _of_tokens(made).keys():
        made[name][1:2] = made[name][:1]
    if "router_logits" in made:
        made["router_logits"][:, 1:2] = made["router_logits"][:, :1]
    return made


OF_IDS: Mapping[str, Callable[[Made], Made]] = {
    "weights that do not sum to one": _any_sum,
    "weights of zero and below": _signed,
    "an expert named twice by a token": _twice,
    "ids of -1 (no expert)": _one_is(lambda experts: -1),
    "ids of E (no expert)": _one_is(lambda experts: experts),
    "a token of no expert (all its ids are -1)": _no_expert,
    "ids of int64": _wide,
}
VARIANTS: Mapping[str, Callable[[Made], Made]] = {
    **OF_IDS,
    "router logits far from zero": _far_logits,
    EQUAL_EXPERTS: _equal,
    "large products that cancel": _cancelling,
    "slices of larger tensors": _sliced,
    "tokens that are columns": _in_columns,
    "experts that are slices of larger ones": _of_larger_weights,
    "views of one flat tensor at an odd address": _of_one_tensor,
    "w1 and w2 in two memory orders": _two_orders,
    "e4m3 codes that are subnormal": _subnormal,
    "scales that bf16 does not have": scales_between_two_of_bf16,
}
