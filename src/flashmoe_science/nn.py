"""Modules: a mixture-of-experts layer of router, experts and, optionally, a shared expert for every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from flashmoe_science.moe import fused_moe, quantize_experts
from flashmoe_science.ops.calls import without_autocast
from flashmoe_science.ops.checks import check_flag, checked_tensor
from flashmoe_science.ops.moe.call import DTYPES, check_activation
from flashmoe_science.ops.moe.call.formats import OF_WEIGHTS
from flashmoe_science.ops.moe.route.route import route, route_with_losses
from flashmoe_science.ops.moe.route.spec import Normalize, Scoring, options_of


class RouterLosses(NamedTuple):
    """``balance_loss`` and ``z_loss`` of a layer's router: scalars, fp32 (fp64 for fp64), to be added to the model's loss."""

    balance: torch.Tensor
    z: torch.Tensor


class FlashMoELayer(nn.Module):
    """A gated mixture of experts, by ``route`` and ``fused_moe``, with weights in transformers' layout.

    State: ``router_weight`` [E, H], ``selection_bias`` [E] fp32 (if asked for; no gradient flows to it), ``gate_up_proj`` [E,
        2I, H], ``down_proj`` [E, H, I], and for a shared expert ``shared_gate_up_proj`` [1, 2S, H] and ``shared_down_proj`` [1,
        H, S]. The router is computed in fp32, under torch.autocast too; casting the layer leaves the selection bias fp32. After
        ``quantize`` both projections of the experts are codes, with scales and zero points.

    Args:
        hidden_size: H, the model's width.
        intermediate_size: I, an expert's width.
        num_experts: E.
        top_k: experts of a token.
        activation, alpha, limit: as ``fused_moe``.
        scoring, normalize, groups, top_k_groups, scaling_factor: as ``route``.
        selection_bias: whether the router has one, initially zero.
        shared_intermediate_size: S, the width of the expert for every token; 0 for none.
        recompute: as ``fused_moe``.
        dtype, device: of the weights.

    Raises:
        TypeError, ValueError: a size below 1, ``top_k`` above ``num_experts``, what ``fused_moe`` or ``route`` would refuse.
    """

    selection_bias: torch.Tensor | None
    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    gate_up_scale: torch.Tensor | None
    down_scale: torch.Tensor | None
    gate_up_zero_point: torch.Tensor | None
    down_zero_point: torch.Tensor | None
    weight_format: str | None = None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "silu",
        alpha: float = 1.702,
        limit: float = 7.0,
        scoring: Scoring = "softmax",
        normalize: Normalize = "sum",
        selection_bias: bool = False,
        groups: int = 1,
        top_k_groups: int | None = None,
        scaling_factor: float = 1.0,
        shared_intermediate_size: int = 0,
        recompute: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_experts": num_experts, "top_k": top_k}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} is {size!r}; it must be an integer above 0")
        if top_k > num_experts:
            raise ValueError(f"top_k is {top_k}; it must be at most num_experts, {num_experts}")
        shared = shared_intermediate_size
        if not isinstance(shared, int) or isinstance(shared, bool) or shared < 0:
            raise ValueError(f"shared_intermediate_size is {shared!r}; it must be an integer of at least 0")
        for name, flag in (("selection_bias", selection_bias), ("recompute", recompute)):
            check_flag(flag, name)
        if dtype not in (None, *DTYPES, torch.float64):
            raise TypeError(f"dtype is {dtype!r}; it must be float16, bfloat16, float32 or float64")
        check_activation(activation, alpha, limit)
        options_of(num_experts, selection_bias, top_k, scoring, normalize, groups, top_k_groups, scaling_factor)
        self.top_k = top_k
        self._experts: dict[str, Any] = {"activation": activation, "alpha": alpha, "limit": limit, "recompute": recompute}
        self._router = {
            "scoring": scoring, "normalize": normalize, "groups": groups, "top_k_groups": top_k_groups,
            "scaling_factor": scaling_factor,
        }  # fmt: skip

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

        self.router_weight = weight(num_experts, hidden_size)
        bias = torch.empty(num_experts, dtype=torch.float32, device=device) if selection_bias else None
        for name, buffer in {"selection_bias": bias, **dict.fromkeys(OF_WEIGHTS)}.items():
            self.register_buffer(name, buffer)
        self.gate_up_proj = weight(num_experts, 2 * intermediate_size, hidden_size)
        self.down_proj = weight(num_experts, hidden_size, intermediate_size)
        self.shared_gate_up_proj = weight(1, 2 * shared, hidden_size) if shared else None
        self.shared_down_proj = weight(1, hidden_size, shared) if shared else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights uniformly, as ``torch.nn.Linear`` draws its own; the selection bias becomes zero."""
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)
        for parameter in self.parameters():
            bound = parameter.shape[-1] ** -0.5
            nn.init.uniform_(parameter, -bound, bound)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FlashMoELayer:
        """Move or cast the layer by ``fn``, as ``to`` does. Buffers are only moved: experts are chosen in fp32, and codes and
        scales keep their format's dtypes."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            after = getattr(self, name)
            if after.dtype != buffer.dtype:
                setattr(self, name, buffer.to(after.device))
        return self

    def quantize(self, weight_format: str) -> FlashMoELayer:
        """Quantise the experts' weights in place, by ``quantize_experts``, for inference. Returns the layer.

        They become buffers without gradients, and casting the layer leaves them as they are. The router and the shared expert
        do not change. A quantised layer of the same sizes, also on the device "meta", loads the state.

        Raises:
            TypeError, ValueError: what ``quantize_experts`` refuses, a layer that is quantised already, and computed weights.
        """
        if self.weight_format is not None:
            raise ValueError(f"the layer's weights are in {self.weight_format!r} already; quantize takes a layer that is not")
        for name in ("gate_up_proj", "down_proj"):
            if name not in self._parameters:
                raise ValueError(f"{name} is computed, as by a parametrisation; quantize takes a layer whose parameter it is")
        made = quantize_experts(self.gate_up_proj, self.down_proj, weight_format)
        self.weight_format = made.pop("weight_format")
        for name, tensor in made.items():
            self._parameters.pop(name, None)
            self.register_buffer(name, tensor)
        # Those that are None last: torch.export, of PyTorch 2.13, gives others wrong places behind one.
        self._buffers = dict(sorted(self._buffers.items(), key=lambda item: item[1] is None))
        return self

    def router_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., E] fp32 (fp64 for fp64), of [..., H]: what ``balance_loss`` and ``forward`` are given."""
        self._check_states(hidden_states)
        with without_autocast(hidden_states):
            wide = torch.promote_types(hidden_states.dtype, torch.float32)
            return nn.functional.linear(hidden_states.to(wide), self.router_weight.to(wide))

    def forward(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor | None = None, *, return_losses: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, RouterLosses]:
        """The layer's output, shaped as ``hidden_states`` [..., H], and with ``return_losses`` its router's losses. Losses are
        results, not state: activation checkpointing counts nothing twice.

        Args:
            router_logits: [..., E], if computed before; computed by default.
        """
        ours = router_logits is None
        logits = self.router_logits(hidden_states) if ours else self._checked_logits(router_logits, hidden_states)
        losses: list[torch.Tensor] = []
        if return_losses:
            weights, ids, *losses = route_with_losses(logits, self.selection_bias, self.top_k, *self._router.values())
        else:
            weights, ids = route(logits, self.top_k, selection_bias=self.selection_bias, **self._router)  # type: ignore[arg-type]
        form: Any = {name: getattr(self, name) for name in OF_WEIGHTS} | {"weight_format": self.weight_format}
        out = fused_moe(hidden_states, self.gate_up_proj, self.down_proj, weights, ids, **form, **self._experts)
        if self.shared_gate_up_proj is not None and self.shared_down_proj is not None:
            out = out + self._shared(hidden_states, self.shared_gate_up_proj, self.shared_down_proj)
        return (out, RouterLosses(*losses)) if losses else out

    def _check_states(self, hidden_states: object) -> None:
        """Raise unless they are a tensor of the layer's width."""
        shape, width = tuple(checked_tensor("hidden_states", hidden_states).shape), self.router_weight.shape[1]
        if shape[-1:] != (width,):
            raise ValueError(f"hidden_states has shape {shape}; its last dimension must be hidden_size, {width}")

    def _checked_logits(self, router_logits: object, hidden_states: torch.Tensor) -> torch.Tensor:
        """The logits. Raises ValueError: not one for each token and each of the layer's experts."""
        self._check_states(hidden_states)
        logits = checked_tensor("router_logits", router_logits)
        wanted = *hidden_states.shape[:-1], self.router_weight.shape[0]
        if (shape := tuple(logits.shape)) != wanted:
            raise ValueError(f"router_logits has shape {shape}; it must be {wanted}, of tokens by num_experts")
        return logits

    def _shared(self, hidden_states: torch.Tensor, gate_up_proj: torch.Tensor, down_proj: torch.Tensor) -> torch.Tensor:
        """The shared expert."""
        one = torch.ones((*hidden_states.shape[:-1], 1), dtype=torch.float32, device=hidden_states.device)
        ids = torch.zeros_like(one, dtype=torch.int32)
        return fused_moe(hidden_states, gate_up_proj, down_proj, one, ids, **self._experts)

    def extra_repr(self) -> str:
        (experts, dim), width = self.router_weight.shape, self.gate_up_proj.shape[1]
        shared = "" if self.shared_down_proj is None else f", shared={self.shared_down_proj.shape[-1]}"
        form = "" if self.weight_format is None else f", {self.weight_format}"
        return f"hidden={dim}, intermediate={width // 2}, experts={experts}, top_k={self.top_k}{shared}{form}"
