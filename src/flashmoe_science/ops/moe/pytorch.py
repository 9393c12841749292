"""A mixture of experts by PyTorch's own operators, forward and backward: on the CPU, and where they are faster.

Rows are pairs of a token and a choice, sorted by expert as ``rows.py`` sorts them. A pair whose id is no expert's comes last:
no product computes it, and what memory has in its row is left out of every sum. Nothing waits for the host.

Weights in a format are dequantised as they are used: on a GPU all experts of a product, on the CPU those that have rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from flashmoe_science.ops.calls import is_plain, is_transformed, needs_grad
from flashmoe_science.ops.formats import Weights, columns_of, dequantized, dequantized_rows, quantized_rows
from flashmoe_science.ops.moe.call import Activation, Tensors
from flashmoe_science.ops.moe.call.adapters import NO_ADAPTERS, Adapters, LowRank
from flashmoe_science.ops.moe.call.backward import NEW, BackwardTensors, Gradients, Output, Sums, Wanted, gradients_like
from flashmoe_science.ops.operator import gradients
from flashmoe_science.ops.private import forward_level

_ALIGNED_BYTES = 16  # of the strides that PyTorch's grouped product takes


class Rows(NamedTuple):
    """here: [T, K], whether a pair has an expert here. pair, expert (E: none), inside ([P, 1], ``here``): of each row. ends:
    int32 [E], the row after each expert's last."""

    here: torch.Tensor
    pair: torch.Tensor
    expert: torch.Tensor
    inside: torch.Tensor
    ends: torch.Tensor

    def of_tokens(self, one: torch.Tensor) -> torch.Tensor:
        """The row of its token [P, ...] of each; zeros where the pair has no expert here."""
        return torch.where(self.inside, one[self.pair // self.here.shape[1]], 0.0)

    def of_experts(self, bias: torch.Tensor) -> torch.Tensor:
        """The bias of its expert [P, ...] of each; zeros where the pair has no expert here."""
        return torch.where(self.inside, self.each(bias), 0.0)

    def each(self, of_experts: torch.Tensor) -> torch.Tensor:
        """That of its expert [P, ...] of each; the last one's where the pair has no expert here."""
        return of_experts[self.expert.clamp(max=of_experts.shape[0] - 1)]

    def by_pair(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, K, ...] of rows [P, ...]; zeros where the pair has no expert here."""
        placed = torch.zeros_like(rows).index_copy(0, self.pair, torch.where(self.inside, rows, 0.0))
        return placed.view(*self.here.shape, rows.shape[1])


def _rows(ids: torch.Tensor, experts: int) -> Rows:
    here, numbers = (ids >= 0) & (ids < experts), torch.arange(experts, device=ids.device)
    expert, pair = torch.where(here, ids.long(), experts).flatten().sort(stable=True)
    ends = torch.searchsorted(expert, numbers, right=True).int()
    return Rows(here, pair, expert, (expert < experts)[:, None], ends)


def pytorch_moe(tensors: Tensors, activation: Activation, adapters: Adapters = NO_ADAPTERS) -> torch.Tensor:
    """The experts by grouped products on rows sorted by expert; differentiable in all but the ids.

    Where PyTorch's grouped product refuses (fp64, a stride of no multiple of 16 bytes, one of a gradient's too), every expert
    computes every row.
    """
    return saving_moe(tensors, activation, adapters)[0]


def saving_moe(tensors: Tensors, activation: Activation, adapters: Adapters = NO_ADAPTERS) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts, and the pre-activations as ``BackwardTensors`` has them."""
    _, w1, _, weights, ids, _, down_bias, *_ = tensors
    rows = _rows(ids, w1.shape[0])
    z = _pre_activations(tensors, rows, activation, adapters)
    _, w2 = _weights(tensors, activation)
    active = _as_multiplied(_activated_alike(z, activation), activation, tensors.down_input_scale, rows)
    down = _biased(_adapted(active, w2, adapters[1], rows), down_bias, rows)
    return weighted_sums(rows.by_pair(down), weights, rows.here), z


def weighted_sums(rows: torch.Tensor, weights: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    """[T, H]: a token's rows [T, K, H] times their weights [T, K], those summed that are ``here`` [T, K]; others are zeros."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return (rows.to(wide) * torch.where(here, weights.to(wide), 0.0)[:, :, None]).sum(1).to(rows.dtype)


def pre_activations(tensors: Tensors, activation: Activation) -> torch.Tensor:
    """The pre-activations in the layout of ``BackwardTensors``."""
    return _pre_activations(tensors, _rows(tensors.topk_ids, tensors.w1.shape[0]), activation)


def _pre_activations(tensors: Tensors, rows: Rows, activation: Activation, adapters: Adapters = NO_ADAPTERS) -> torch.Tensor:
    w1, _ = _weights(tensors, activation)
    x = _as_multiplied(rows.of_tokens(tensors.x), activation, tensors.gate_up_input_scale, rows)
    return _biased(_adapted(x, w1, adapters[0], rows), tensors.gate_up_bias, rows)


def _activated_alike(z: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``activate``, of each row the same bits whatever the others: on the CPU PyTorch computes exponentials of a thread's last
    elements by other instructions, whose last bit in fp32 differs."""
    if z.device.type == "cpu" and z.dtype == torch.float32:
        return activate(z.double(), activation).float()
    return activate(z, activation)


def _biased(products: torch.Tensor, bias: torch.Tensor | None, rows: Rows) -> torch.Tensor:
    return products if bias is None else products + rows.of_experts(bias).to(products.dtype)


def pytorch_backward(tensors: BackwardTensors, activation: Activation, wanted: Wanted, sums: Sums = NEW) -> Gradients:
    """The gradients from the pre-activations: five products at most, none for frozen weights; each sum in one order."""

    def of_weights(name: str, left: torch.Tensor, right: torch.Tensor, rows: Rows) -> None:
        of[name] = sums_of_products(left, right, rows, getattr(tensors, name[1:]))

    of = dict[str, torch.Tensor]()
    made = backward_by_rows(tensors, activation, wanted, of_weights) | of
    results = gradients_like(tensors, wanted, sums)._asdict()
    new = Gradients(*(None if like is None else _as(made[name], like) for name, like in results.items()))
    added = {name: one.add_(made[name]) for name, one in sums._asdict().items() if one is not None and name in made}
    return new._replace(**added)


def backward_by_rows(
    tensors: BackwardTensors,
    activation: Activation,
    wanted: Wanted,
    of_weights: Callable[[str, torch.Tensor, torch.Tensor, Rows], None],
    adapters: Adapters = NO_ADAPTERS,
) -> dict[str, torch.Tensor]:
    """The gradients by name, but of weights: for "dw1" and "dw2" ``of_weights(name, left, right, rows)`` is called, and the
    gradient is left^T right over the rows of each expert.

    With s the routing weights, a row of dout gives dA = dout W2, ds = <dA, A>, dZ = activation'(Z) (s dA), and the products
    dW2 = dout^T (s A), dW1 = dZ^T x, dx = dZ W1. Of ``w8a8`` A in ds is what was multiplied, and rounding's derivative is 1.
    """
    x, _, _, weights, ids, gate_up_bias, down_bias, *_, z, dout = tensors
    first, second = (None if one is None else one.transposed() for one in adapters)
    rows, wide = _rows(ids, tensors.w1.shape[0]), torch.promote_types(x.dtype, torch.float32)
    w1, w2 = _weights(tensors.of_call(), activation)
    z = _pre_activations(tensors.of_call(), rows, activation, adapters) if z is None else z
    scale = torch.where(rows.inside, weights.flatten()[rows.pair, None].to(wide), 0.0)  # [P, 1]
    of_out, z = rows.of_tokens(dout), torch.where(rows.inside, z, 0.0).to(wide)
    to_z, made = wanted.dx or wanted.dw1 or wanted.dgate_up_bias, dict[str, torch.Tensor]()
    of_active = None
    if to_z or wanted.dtopk_weights:  # rows that belong to no expert may be NaN, which torch.autograd.detect_anomaly reports
        of_active = torch.where(rows.inside, _adapted(of_out, w2.mT, second, rows), 0.0).to(wide)
    active, of_z = _activated(z, activation, None if of_active is None or not to_z else of_active * scale)
    if wanted.dw2:
        of_weights("dw2", of_out, (active * scale).to(x.dtype), rows)
    if wanted.dtopk_weights and of_active is not None:
        if activation.w8a8:
            active = _as_multiplied(active.to(x.dtype), activation, tensors.down_input_scale, rows)
        of_scale = (of_active * active).sum(1, keepdim=True)
        if down_bias is not None:
            of_scale += (of_out.to(wide) * rows.of_experts(down_bias).to(wide)).sum(1, keepdim=True)
        made["dtopk_weights"] = rows.by_pair(of_scale).squeeze(-1)
    if wanted.ddown_bias and down_bias is not None:
        made["ddown_bias"] = _sums(of_out.to(wide) * scale, rows)
    if of_z is not None:
        dz = of_z.to(x.dtype)
        if wanted.dx:
            made["dx"] = rows.by_pair(_adapted(dz, w1.mT, first, rows)).to(wide).sum(1)
        if wanted.dw1:
            of_weights("dw1", dz, rows.of_tokens(x), rows)
        if wanted.dgate_up_bias and gate_up_bias is not None:
            made["dgate_up_bias"] = _sums(of_z, rows)
    return made


def _activated(z: torch.Tensor, activation: Activation, into: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What z is activated to, and the gradient of z by that ``into`` it."""
    if into is None:
        return activate(z, activation), None
    (active,), (of_z,) = gradients(lambda z: (activate(z, activation),), [z], [into])
    return active.detach(), of_z


def _as(gradient: torch.Tensor, like: Output) -> torch.Tensor:
    """The gradient in that memory order and dtype."""
    shape, strides, dtype = like
    if (gradient.stride(), gradient.dtype) == (strides, dtype):
        return gradient
    return gradient.new_empty_strided(shape, strides, dtype=dtype).copy_(gradient)


def _adapted(rows: torch.Tensor, weights: torch.Tensor | _Dequantised, adapter: LowRank | None, of: Rows) -> torch.Tensor:
    """``products`` by the weights and what is beside them."""
    out = products(rows, weights, of)
    return out if adapter is None else out + adapter.scaling * products(products(rows, adapter.a, of), adapter.b, of)


class _Dequantised(NamedTuple):
    """Weights in a format as weights of the dtype, of an expert at a time."""

    weights: Weights
    dtype: torch.dtype
    halves: bool
    transposed: bool = False

    @property
    def mT(self) -> _Dequantised:  # as of a tensor
        return self._replace(transposed=not self.transposed)

    def width(self) -> int:
        """Columns of a product."""
        codes = self.weights.codes
        return columns_of(codes) if self.transposed else codes.shape[1]

    def of(self, expert: int) -> torch.Tensor:
        one = dequantized(self.weights.of(expert), self.dtype, self.halves)
        return one.mT if self.transposed else one

    def all(self) -> torch.Tensor:
        return torch.stack([self.of(expert) for expert in range(self.weights.codes.shape[0])])


def _weights(tensors: Tensors, activation: Activation) -> tuple[torch.Tensor | _Dequantised, torch.Tensor | _Dequantised]:
    """w1 and w2, of a format dequantised as they are used."""
    if (in_format := tensors.in_format()) is None:
        return tensors.w1, tensors.w2
    (first, second), dtype = in_format, tensors.x.dtype
    return _Dequantised(first, dtype, activation.halves), _Dequantised(second, dtype, halves=False)


def dequantised(tensors: Tensors, activation: Activation) -> Tensors:
    """The tensors with weights of the dtype of x: of a format all experts', dequantised, without what they had beside codes."""
    w1, w2 = (one if isinstance(one, torch.Tensor) else one.all() for one in _weights(tensors, activation))
    return Tensors(tensors.x, w1, w2, *tensors[3:7], None, None, None, None, *tensors[11:])


def products(rows: torch.Tensor, weights: torch.Tensor | _Dequantised, of: Rows) -> torch.Tensor:
    """rows[first:end] @ weights[expert].T of each expert; rows past the last expert's may have anything."""
    if isinstance(weights, _Dequantised):
        if rows.device.type != "cpu" or not is_plain(rows):
            return products(rows, weights.all(), of)
        *parts, others = rows.tensor_split(of.ends.long())
        made = [part @ weights.of(expert).T for expert, part in enumerate(parts) if len(part)]
        return torch.cat((*made, rows.new_zeros(len(others), weights.width())))
    if _is_grouped(rows, weights) and not _lacks_gradients(rows, weights):
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=of.ends)
    out = rows.new_zeros(rows.shape[0], weights.shape[1])
    for expert, weight in enumerate(weights):
        mine = (of.expert == expert)[:, None]
        out = torch.where(mine, torch.where(mine, rows, 0.0) @ weight.T, out)  # 0 times other rows may be NaN in a gradient
    return out


def sums_of_products(left: torch.Tensor, right: torch.Tensor, of: Rows, like: torch.Tensor) -> torch.Tensor:
    """left[first:end].T @ right[first:end] of each expert, zeros for one without rows, in the memory order of ``like``."""
    if like.stride(1) == 1 < like.stride(2):
        return sums_of_products(right, left, of, like.mT).mT
    if not _is_grouped(left.mT, right):
        mine = ((of.expert == one)[:, None] for one in range(like.shape[0]))
        return torch.stack([torch.where(one, left, 0.0).T @ torch.where(one, right, 0.0) for one in mine])
    made = F.grouped_mm(left.mT, right, offs=of.ends)
    return made.masked_fill_((of.ends.diff(prepend=of.ends.new_zeros(1)) == 0)[:, None, None], 0.0)  # unwritten on some GPUs


def _sums(rows: torch.Tensor, of: Rows) -> torch.Tensor:
    """rows[first:end].sum(0) of each expert."""
    offsets = torch.cat((of.ends.new_zeros(1), of.ends)).long()
    return torch.segment_reduce(rows, "sum", offsets=offsets, axis=0, unsafe=True, initial=0)


def _is_grouped(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether PyTorch's grouped product takes the operands."""
    # Its shape function, which torch.compile asks, has no dtype but bf16; it takes no fp64.
    if left.dtype == torch.float64 or not (left.dtype == torch.bfloat16 or is_plain(left, right)):
        return False
    return _is_laid_out(left) and _is_laid_out(right)


def _lacks_gradients(rows: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether PyTorch may be asked for a gradient that its grouped product lacks: any in forward mode, else one of a result
    whose rows are no multiple of 16 bytes apart."""
    if not torch.compiler.is_compiling() and forward_level._current_level >= 0:
        return True
    return needs_grad(rows, weights) and bool(weights.shape[1] * weights.element_size() % _ALIGNED_BYTES)


def _is_laid_out(one: torch.Tensor) -> bool:
    """Whether the last two dimensions are rows or columns that do not overlap, and strides are multiples of 16 bytes."""
    (rows, columns), (*outer, down, across) = one.shape[-2:], one.stride()
    if down == 1 and across >= max(1, rows):
        outer.append(across)
    elif across == 1 and down >= max(1, columns):
        outer.append(down)
    else:
        return False
    return not any(step * one.element_size() % _ALIGNED_BYTES for step in outer)


def add_bias(rows: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor | int) -> torch.Tensor:
    """Each row and its expert's bias, if there are biases, rounded as the rows are. A gradient is summed in fp32 on a GPU: that
    of an index, as transformers has it, is too far off."""
    if bias is None:
        return rows
    return rows + (F.embedding(experts, bias) if isinstance(experts, torch.Tensor) else bias[experts]).to(rows.dtype)


def as_multiplied(rows: torch.Tensor, activation: Activation, scale: torch.Tensor | None = None) -> torch.Tensor:
    """What weights are multiplied by: the rows, of ``w8a8`` as their e4m3 has them, of a static ``scale`` of each or of all."""
    return dequantized_rows(quantized_rows(rows, scale), rows.dtype) if activation.w8a8 else rows


def _as_multiplied(rows: torch.Tensor, activation: Activation, scale: torch.Tensor | None, of: Rows) -> torch.Tensor:
    """The same of rows by expert and the scales of experts [E]; its derivative is taken for 1."""
    if not activation.w8a8:
        return rows
    made = as_multiplied(rows.detach(), activation, None if scale is None else of.each(scale))
    return made + (rows - rows.detach()) if rows.requires_grad or is_transformed() else made


def _at_most(values: torch.Tensor, limit: float) -> torch.Tensor:
    """``values.clamp(max=limit)``, whose gradient at the limit is 1 to PyTorch 2.13 and 0 from 2.14 on. Here it is 1."""
    return torch.where(values > limit, limit, values)


def activate(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``Activation`` of the first product's result, rounded as the input dtype is."""
    if not activation.gated:
        gate, up = both, None
    elif activation.interleaved:
        gate, up = both[..., 0::2], both[..., 1::2]
    else:
        gate, up = both.chunk(2, -1)
    if activation.function == "clamped_silu":
        gate = _at_most(gate, activation.limit)
        up = None if up is None else -_at_most(-_at_most(up, activation.limit), activation.limit) + 1
        active = gate * torch.sigmoid(activation.alpha * gate)
    elif activation.function == "relu2":
        active = F.relu(gate).square()
    elif activation.function == "gelu_tanh":
        active = F.gelu(gate, approximate="tanh")
    elif activation.function == "gelu":
        active = F.gelu(gate)
    else:
        active = F.silu(gate) if activation.function == "silu" else F.relu(gate)
    return active if up is None else active * up
