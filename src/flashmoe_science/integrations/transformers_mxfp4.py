"""transformers' gpt-oss with its checkpoint's mxfp4 experts: no kernel from the hub, and nothing dequantised.

    from flashmoe_science.integrations.transformers import register
    from flashmoe_science.integrations.transformers_mxfp4 import kept_in_mxfp4

    register()
    with kept_in_mxfp4():
        model = AutoModelForCausalLM.from_pretrained("openai/gpt-oss-20b", experts_implementation="fms")

transformers' own mxfp4 quantizer downloads a kernel and copies the weights into its layout, or dequantises them. This one gives
an experts module parameters of the checkpoint's names and shapes, which transformers loads like any others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer

from flashmoe_science.integrations.transformers import NAME

_BLOCK, _BYTES = 32, 16  # columns of a block, and bytes of their codes


@contextmanager
def kept_in_mxfp4() -> Iterator[None]:
    """Within it ``from_pretrained`` loads mxfp4 checkpoints of gpt-oss unchanged; ``save_pretrained`` writes the same.

    Raises:
        ValueError: in ``from_pretrained``: another ``experts_implementation`` than "fms", ``dequantize=True``, a model without
            such experts, or a checkpoint without their tensors.
    """
    before = auto.AUTO_QUANTIZER_MAPPING["mxfp4"]
    auto.AUTO_QUANTIZER_MAPPING["mxfp4"] = _Kept
    try:
        yield
    finally:
        auto.AUTO_QUANTIZER_MAPPING["mxfp4"] = before


class _Kept(HfQuantizer):  # type: ignore[misc]
    """Loads and saves mxfp4 without a conversion."""

    is_trainable = False
    is_compileable = True

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        implementation = model.config._experts_implementation
        if implementation != NAME:
            raise ValueError(f"experts_implementation is {implementation!r}; experts that are kept in mxfp4 need {NAME!r}")
        if self.quantization_config.dequantize:
            raise ValueError("quantization_config has dequantize=True; experts that are kept in mxfp4 need it to be False")
        for experts in _experts_of(model).values():
            _hold_blocks(experts)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        for name, experts in _experts_of(model).items():
            for key, parameter in experts.named_parameters():
                if not getattr(parameter, "_is_hf_initialized", False):  # transformers sets it on what the checkpoint had
                    raise ValueError(f"the checkpoint has no {name}.{key}; experts that are kept in mxfp4 need it")


def _experts_of(model: Any) -> dict[str, Any]:
    """The experts modules by name. Raises ValueError of a model without."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, GptOssExperts)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no GptOssExperts, the one module that is kept in mxfp4")
    return found


def _hold_blocks(experts: Any) -> None:
    """Replace the weights [E, K, N] of a module by the checkpoint's codes [E, N, K / 32, 16] and scales [E, N, K / 32]."""
    for name in ("gate_up_proj", "down_proj"):
        of, columns, rows = getattr(experts, name).shape
        scales = torch.empty(of, rows, columns // _BLOCK, dtype=torch.uint8, device="meta")
        blocks = scales.new_empty(*scales.shape, _BYTES)
        delattr(experts, name)
        for suffix, one in (("blocks", blocks), ("scales", scales)):
            experts.register_parameter(f"{name}_{suffix}", torch.nn.Parameter(one, requires_grad=False))
    experts.is_transposed = False
    experts._is_hf_initialized = True  # transformers has no other initial values for it than of bf16 weights
