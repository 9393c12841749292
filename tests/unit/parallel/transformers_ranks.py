"""One rank of several: a transformers model whose experts are on the ranks, held to one process's."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeModel
from transformers.distributed.expert_parallel import apply_expert_parallelism

from flashmoe_science.integrations import transformers, transformers_parallel

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 24, "vocab_size": 50,
}  # fmt: skip


def main(group: dist.ProcessGroup, file: str) -> None:
    rank, ranks = group.rank(), group.size()
    transformers.register()
    transformers_parallel.register(max_tokens=12)
    torch.manual_seed(0)
    whole = Qwen3MoeModel._from_config(Qwen3MoeConfig(**SIZES), attn_implementation="eager", experts_implementation="fms")
    for one in whole.parameters():
        torch.nn.init.normal_(one, std=0.1)
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("tp", "ep"))
    plan = {name: "grouped_gemm" for name, _ in whole.named_parameters() if ".mlp.experts." in name}
    plan |= {name: "ep_dispatch_experts" for name, _ in whole.named_modules() if name.endswith("mlp.experts")}
    batches = torch.randint(50, (ranks, 11))
    wrong = {}
    # Each rank has a batch; or all ranks have one, of which each takes a part.
    for name, tp, own in (("batches", mesh["tp"], batches[rank, None]), ("one batch", mesh["ep"], batches[:1])):
        spread, plain = deepcopy(whole), deepcopy(whole)
        apply_expert_parallelism(spread, mesh["ep"], tp, plan, "fms")
        out, right = spread(own).last_hidden_state, plain(own).last_hidden_state
        found = [] if torch.allclose(out, right, rtol=1e-5, atol=1e-6) else ["the result is not one process's"]
        out.square().sum().backward()
        plain.zero_grad()
        plain(batches if name == "batches" else own).last_hidden_state.square().sum().backward()
        for (parameter, one), reference in zip(spread.named_parameters(), plain.parameters(), strict=True):
            if isinstance(one, DTensor):
                gradient = one.grad.full_tensor()
            elif name == "batches":
                dist.all_reduce(gradient := one.grad)
            else:
                gradient = one.grad
            if not torch.allclose(gradient, reference.grad, rtol=1e-3, atol=1e-4 * float(reference.grad.abs().max())):
                found.append(f"the gradient of {parameter} is not one process's")
        if found:
            wrong[name] = found
    assert not wrong, wrong
    dist.destroy_process_group()
