"""Our attention as a backend of vLLM, by the name "FMS".

vLLM finds ``register`` by the entry point ``vllm.general_plugins`` and calls it in each of its processes; with this package
and vLLM installed, ``LLM(model, attention_backend="FMS")`` and ``--attention-backend FMS`` work. The backend itself is in
``vllm_backend``, which is imported when a model asks for it.
"""

from __future__ import annotations

NAME = "FMS"
_BACKEND = "flashmoe_science.integrations.vllm_backend.FMSBackend"


def register() -> None:
    """Register the attention backend "FMS" with vLLM. A second call changes nothing.

    Raises:
        ImportError: vLLM is not installed, or its registry is not where 0.33 has it.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise ImportError(f"the attention backend {NAME!r} needs vLLM (0.33 was read): pip install vllm") from error
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, _BACKEND)
