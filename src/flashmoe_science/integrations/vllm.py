"""Our attention as a backend of vLLM, by the name "FMS".

vLLM finds ``register`` by the entry point ``vllm.general_plugins`` and calls it in each of its processes; with this package
and vLLM installed, ``LLM(model, attention_backend="FMS")`` and ``--attention-backend FMS`` work. The backend itself is in
``vllm_backend``, which is imported when a model asks for it.
"""

from __future__ import annotations

import warnings

NAME = "FMS"
_BACKEND = "flashmoe_science.integrations.vllm_backend.FMSBackend"


def register() -> None:
    """Register the attention backend "FMS" with vLLM. A second call changes nothing.

    Warns, and registers nothing, if vLLM is not installed, or its registry is not where 0.33 has it: an error of a plugin would
    end each process of vLLM, also for models with another backend.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        words = f"the attention backend {NAME!r} needs another vLLM (0.33 was read): {error}"
        warnings.warn(words, stacklevel=2)
        return
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, _BACKEND)
