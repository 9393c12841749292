"""``experts_implementation="fms"`` of transformers' models against its "eager", and the refusal of what is not served."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig
from transformers.activations import ACT2FN
from transformers.integrations import moe as hf_moe
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeExperts
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts

from flashmoe_science.integrations import transformers as ours

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
CONFIGS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=8),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, head_dim=16, intermediate_size=48, moe_intermediate_size=24, num_experts=8),
    "gpt-oss": GptOssConfig(**SIZES, head_dim=16, intermediate_size=48, num_local_experts=8, sliding_window=8),
    "deepseek-v3": DeepseekV3Config(
        **{**SIZES, **LATENT, "num_key_value_heads": 4}, intermediate_size=48, moe_intermediate_size=24, n_routed_experts=8,
        n_group=2, topk_group=1, first_k_dense_replace=1,
    ),
}  # fmt: skip
TOKENS = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    ours.register()
    yield
    ours._cached_layout.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are so small that threads would wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An entry a call of ``fused_moe``."""
    seen: list[Any] = []
    real = ours.fused_moe
    monkeypatch.setattr(ours, "fused_moe", lambda *args, **kwargs: seen.append(kwargs) or real(*args, **kwargs))
    return seen


def model_of(family: str, implementation: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """As ``model_like``, of a family."""
    return model_like(CONFIGS[family], implementation, dtype, device)


def model_like(config: PreTrainedConfig, implementation: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A model whose experts matter: random weights and biases, in which logits are near 1."""
    config = copy.deepcopy(config)  # the model keeps it, and with it the name of the implementation
    model = AutoModelForCausalLM.from_config(config, experts_implementation=implementation).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        random = torch.randn(parameter.shape, generator=generator) / (parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 4)
        parameter.data = random + (1.0 if parameter.dim() == 1 else 0.0)
    return model.to(device, dtype)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS.to(model.device)).logits.double().cpu()


def root_mean_square(tensor: torch.Tensor) -> float:
    return tensor.square().mean().sqrt().item()


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_and_greedy_tokens_are_those_of_eager_in_fp32(family: str, calls: list[Any]) -> None:
    eager, fms = model_of(family, "eager"), model_of(family, "fms")
    expected = logits(eager)
    assert not calls
    torch.testing.assert_close(logits(fms), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == (1 if family == "deepseek-v3" else 2)  # DeepSeek's first layer is dense
    greedy = [one.generate(TOKENS, max_new_tokens=6, do_sample=False) for one in (eager, fms)]
    assert torch.equal(*greedy)


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_in_bf16_are_as_near_to_fp32_as_those_of_eager(family: str) -> None:
    exact = logits(model_of(family, "eager"))
    eager, fms = (logits(model_of(family, one, torch.bfloat16)) for one in ("eager", "fms"))
    assert root_mean_square(fms - exact) <= 2 * root_mean_square(eager - exact)


@pytest.mark.gpu
@pytest.mark.parametrize("family", CONFIGS)
def test_on_a_gpu_logits_in_bf16_are_as_near_to_fp32_as_those_of_eager(family: str, calls: list[Any]) -> None:
    exact = logits(model_of(family, "eager"))
    eager, fms = (model_of(family, one, torch.bfloat16, "cuda") for one in ("eager", "fms"))
    assert root_mean_square(logits(fms) - exact) <= 2 * root_mean_square(logits(eager) - exact)
    assert calls
    tokens = fms.generate(TOKENS.cuda(), max_new_tokens=12, do_sample=False)
    assert tokens.shape == (2, TOKENS.shape[1] + 12)


@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_are_those_of_eager(family: str) -> None:
    models = [model_of(family, one) for one in ("eager", "fms")]
    assert [model.config._experts_implementation for model in models] == ["eager", "fms"]
    for model in models:
        model(TOKENS, labels=TOKENS).loss.backward()
    expected, got = (dict(model.named_parameters()) for model in models)
    assert any("experts" in name for name in got)
    for name, parameter in got.items():
        if expected[name].grad is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-5, msg=name)


def trained(model: Any, steps: int = 4) -> list[float]:
    """The losses of a few steps by AdamW, of models that have one with their router's, under gradient checkpointing."""
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    model.train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    for _ in range(steps):
        loss = model(TOKENS, labels=TOKENS, output_router_logits=hasattr(model.config, "router_aux_loss_coef")).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_trains_as_with_eager(family: str, calls: list[Any]) -> None:
    expected = trained(model_of(family, "eager"))
    assert not calls
    assert trained(model_of(family, "fms")) == pytest.approx(expected, rel=1e-4)
    assert calls
    assert expected[-1] < expected[0]


# Experts modules -------------------------------------------------------------------------------------------------------------

EXPERTS, TOP_K, DIM, WIDTH = 6, 2, 32, 16


class Config(SimpleNamespace):
    """What experts classes read of a configuration, whatever each calls it."""

    def __init__(self, act: str = "silu", implementation: str = "fms") -> None:
        experts = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), EXPERTS)
        widths = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), WIDTH)
        acts = dict.fromkeys(("hidden_act", "mlp_hidden_act"), act)
        super().__init__(
            **experts, **widths, **acts, hidden_size=DIM, moe_latent_size=None, swiglu_alpha=1.5, swiglu_limit=2.0,
            _experts_implementation=implementation,
        )  # fmt: skip


class Experts(torch.nn.Module):
    """Experts in transformers' default layout."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = torch.nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, DIM))
        self.down_proj = torch.nn.Parameter(torch.empty(EXPERTS, DIM, WIDTH))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def decorated(base: type = Experts, decorate: Any = None, **flags: Any) -> type:
    """A class of experts with these flags; one that an older transformers lacks is set on the class."""
    decorate = decorate or hf_moe.use_experts_implementation
    supported = inspect.signature(decorate).parameters
    accepted = {name: flag for name, flag in flags.items() if name in supported}
    unknown = {name: flag for name, flag in flags.items() if name not in supported}
    return decorate(**accepted)(type("Stub", (base,), unknown))


def module_of(kind: type, act: str = "silu", implementation: str = "fms") -> Any:
    experts = kind(Config(act, implementation))
    generator = torch.Generator().manual_seed(2)
    for parameter in experts.parameters():
        parameter.data.normal_(generator=generator)
    return experts.requires_grad_(False)


def routed(tokens: int = 10) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
    return torch.randn(tokens, DIM, generator=generator), ids, torch.rand(tokens, TOP_K, generator=generator)


@pytest.mark.parametrize(
    ("kind", "act"),
    [
        *((decorated(), act) for act in ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu", "relu2")),
        (NemotronHExperts, "relu2"),  # no gate
        (AriaExperts, "silu"),  # transposed
        (OpenAIPrivacyFilterExperts, "silu"),  # transposed, biased, gpt-oss's gate, concatenated
        (MiniMaxM3VLExperts, "silu"),  # gpt-oss's gate by other names
        (Lfm2MoeExperts, "silu"),  # act_fn is a function
    ],
)
def test_every_layout_is_as_transformers_computes_it(kind: type, act: str) -> None:
    expected = module_of(kind, act, "batched_mm")(*routed())
    torch.testing.assert_close(module_of(kind, act)(*routed()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", [None, True])  # with which a module's floats, such as gpt-oss's limit, are symbols
@pytest.mark.parametrize("kind", [decorated(), OpenAIPrivacyFilterExperts])
def test_experts_compile_into_one_graph(kind: type, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    experts = module_of(kind)
    compiled = torch.compile(experts, backend="eager", fullgraph=True, dynamic=dynamic)
    assert torch.equal(compiled(*routed()), experts(*routed()))


def test_pairs_of_other_ranks_add_nothing() -> None:
    states, ids, weights = routed()
    here = ids < 4
    experts = module_of(decorated())
    expected = experts(states, ids, weights * here)
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, torch.nn.Parameter(getattr(experts, name)[:4], requires_grad=False))
    experts.num_experts, experts._is_expert_parallel = 4, True
    got = experts(states, torch.where(here, ids, 4), weights.masked_fill(~here, torch.nan))
    torch.testing.assert_close(got, expected)


def test_states_of_another_dtype_are_cast_and_cast_back() -> None:
    states, ids, weights = routed()
    experts = module_of(decorated()).bfloat16()
    got = experts(states, ids, weights)
    assert got.dtype == torch.float32
    assert torch.equal(got, experts(states.bfloat16(), ids, weights).float())


class _Negated(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return -weight


def test_a_parametrized_weight_is_used_as_it_is_computed() -> None:
    experts = module_of(decorated())
    plain = experts(*routed())
    torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", _Negated())
    assert torch.equal(experts(*routed()), -plain)


class _Scaled(Experts):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.per_expert_scale = torch.nn.Parameter(torch.ones(EXPERTS))


class _Twice(Experts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return 2 * self.act_fn(gate) * up


class _ReadsMore(Experts):
    factor = 1.0

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.factor * self.act_fn(gate) * up


@pytest.mark.parametrize(
    ("kind", "act", "words"),
    [
        (decorated(has_post_expert_norm=True), "silu", "Stub: has_post_expert_norm is True, and only False is served"),
        (decorated(is_concatenated=False), "silu", "_apply_gate computes neither"),  # the default gate takes halves
        (decorated(has_gate=False), "relu2", "it has gate_up_proj, which would not be used"),
        (decorated(_Scaled), "silu", "it has per_expert_scale, which would not be used"),
        (decorated(_Twice), "silu", "_apply_gate computes neither"),
        (decorated(_ReadsMore), "silu", "no attribute 'factor'"),
        (DeepseekV4Experts, "silu", "_apply_gate computes neither"),
        (decorated(), "gelu_new", "act_fn is NewGELUActivation; those served are gelu, gelu_tanh, relu, relu2, silu"),
    ],
)
def test_what_is_not_served_is_refused_in_words(kind: type, act: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"experts_implementation='fms' cannot serve .*{re.escape(words)}"):
        module_of(kind, act)(*routed())


@pytest.mark.parametrize("flag", ["has_gate", "has_bias", "is_transposed", "is_concatenated"])
def test_a_flag_that_is_missing_is_named(flag: str) -> None:
    experts = module_of(decorated())
    delattr(experts, flag)
    with pytest.raises(ValueError, match=f"its {flag} is not True or False"):
        experts(*routed())


def test_a_gate_of_one_module_is_refused() -> None:
    experts = module_of(decorated())
    experts._apply_gate = lambda gate_up: gate_up[:, :WIDTH]
    with pytest.raises(ValueError, match="_apply_gate is set on the module"):
        experts(*routed())


def test_more_experts_than_weights_are_refused() -> None:
    experts = module_of(decorated())
    experts.num_experts = 2 * EXPERTS
    with pytest.raises(ValueError, match="num_experts 12, and weights of 6"):
        experts(*routed())


def test_a_change_of_a_module_is_seen() -> None:
    experts = module_of(decorated())
    before = experts(*routed())
    experts.act_fn = ACT2FN["gelu"]
    assert not torch.allclose(experts(*routed()), before)
    experts.is_transposed = True
    with pytest.raises(ValueError, match="must"):
        experts(*routed())


def later_decorator(
    *,
    is_concatenated: bool = True,
    is_transposed: bool = False,
    has_bias: bool = False,
    has_gate: bool = True,
    has_shared_bias: bool = False,
) -> Any:
    """transformers' decorator with one flag more."""
    today = hf_moe.use_experts_implementation(
        is_concatenated=is_concatenated, is_transposed=is_transposed, has_bias=has_bias, has_gate=has_gate
    )

    def wrapper(kind: type) -> type:
        class Later(today(kind)):  # type: ignore[misc]
            def __init__(self, config: Config) -> None:
                super().__init__(config)
                self.has_shared_bias = has_shared_bias

        return Later

    return wrapper


def test_a_flag_of_a_later_transformers_is_refused_where_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, biased = (module_of(decorated(decorate=later_decorator, has_shared_bias=one)) for one in (False, True))
    monkeypatch.setattr(hf_moe, "use_experts_implementation", later_decorator)
    monkeypatch.setattr(ours, "_UNSERVED_FLAGS", dict(ours._UNSERVED_FLAGS))
    ours.register()
    plain(*routed())
    with pytest.raises(ValueError, match="Later: has_shared_bias is True, and only False is served"):
        biased(*routed())


# Registering -----------------------------------------------------------------------------------------------------------------


def test_without_transformers_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match=r"needs transformers 5.10 or newer: pip install 'transformers>=5.10'"):
        ours.register()


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_moe, "use_experts_implementation", lambda kind=None, *, is_transposed=False, has_bias=False: kind)
    with pytest.raises(ImportError, match="the one installed is older"):
        ours.register()


def test_a_second_registration_changes_nothing() -> None:
    before = dict(hf_moe.ALL_EXPERTS_FUNCTIONS)
    ours.register()
    assert dict(hf_moe.ALL_EXPERTS_FUNCTIONS) == before
    assert before["fms"] is ours.experts_forward
