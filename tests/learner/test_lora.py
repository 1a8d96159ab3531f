"""Adapters: only they learn, they begin at nothing; the sum is published, or they themselves in PEFT's layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from learner.config.model import DeepSpeedSettings, LoraSettings, ModelSettings, OptimSettings
from learner.engine import DeepSpeedEngine
from learner.model.loading import load_policy
from learner.model.lora import adapter_only, adapters_off, merged, scale_of
from learner.model.policy import PREFIX, PolicyModel
from protocol.errors import UserError

RANK, ALPHA = 3, 12.0
LORA = LoraSettings(rank=RANK, alpha=ALPHA)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A tiny Qwen2: its attention has biases, and its embeddings are tied."""
    config = transformers.Qwen2Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("model")
    transformers.Qwen2ForCausalLM(config).save_pretrained(made)
    return made


def policy(directory: Path, lora: LoraSettings = LORA, **settings) -> PolicyModel:
    return load_policy(directory, ModelSettings(lora=lora, **settings))


def train(directory: Path, stage: int, updates: int = 3, lora: LoraSettings = LORA, **settings) -> DeepSpeedEngine:
    engine = DeepSpeedEngine(
        policy(directory, lora, **settings), optim=OptimSettings(lr=0.02), engine=DeepSpeedSettings(zero_stage=stage),
        dtype=settings.get("dtype", "float32"), total_updates=9, seed=0,
    )  # fmt: skip
    for _ in range(updates):
        engine.backward(-engine.forward(*inputs()).logprobs.mean())
        assert engine.step().applied
    return engine


def inputs() -> tuple:
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(9).repeat(2, 1)
    return ids, positions, None, torch.arange(17), ids.flatten()[1:], 1.0, False


def causal_weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {name.removeprefix(PREFIX): tensor for name, tensor in engine.iter_weights()}


def scores(module: PolicyModel) -> torch.Tensor:
    with torch.no_grad():
        return module(*inputs()).logprobs


def test_only_adapters_learn_and_at_first_they_change_nothing(directory):
    adapted = policy(directory)
    learning = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert learning == {name for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert len(learning) == 2 * 2 * 7, "two layers, seven matrices each, the output layer has none"
    assert scores(adapted).equal(scores(policy(directory, LoraSettings())))


def test_chosen_layers_only(directory):
    adapted = policy(directory, LoraSettings(rank=2, target_modules=("q_proj", "down_proj")))
    kinds = {name.split(".")[-4] for name, p in adapted.named_parameters() if p.requires_grad}
    assert kinds == {"q_proj", "down_proj"}


def test_layers_that_do_not_exist_are_a_user_error(directory):
    with pytest.raises(UserError, match="target_modules: Wqkv") as caught:
        policy(directory, LoraSettings(rank=2, target_modules=("Wqkv",)))
    assert "q_proj" in caught.value.render()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_merged_weights_are_a_plain_models(directory, stage, tmp_path):
    engine = train(directory, stage)
    found = list(merged(causal_weights(engine).items(), scale_of(LORA)))
    plain = policy(directory, LoraSettings())
    expected = dict(plain.causal.named_parameters())
    assert [name for name, _ in found] == list(expected), "the names and the order of a model without adapters"
    changed = {name for name, tensor in found if not tensor.equal(expected[name])}
    assert changed == {name for name in expected if "proj.weight" in name}
    with torch.no_grad():
        for name, tensor in found:
            expected[name].copy_(tensor)
        alone = plain(*inputs()).logprobs
        adapted = engine.forward(*inputs()).logprobs
    torch.testing.assert_close(alone, adapted, rtol=1e-4, atol=1e-5)
    assert (adapted - scores(policy(directory))).abs().max() > 0.1, "training did something"


def test_the_merged_sum_is_rounded_once(directory):
    engine = train(directory, 1, dtype="bfloat16")
    weights = causal_weights(engine)
    name = "model.layers.1.mlp.up_proj"
    a, b = (weights[f"{name}.lora_{half}.default.weight"].float() for half in "AB")
    exact = weights[f"{name}.base_layer.weight"].float() + (ALPHA / RANK) * (b @ a)
    found = dict(merged(weights.items(), scale_of(LORA)))[f"{name}.weight"]
    assert found.dtype == torch.bfloat16
    assert found.equal(exact.to(torch.bfloat16))


def test_before_training_the_merged_weights_are_the_models_own(directory):
    engine = train(directory, 0, updates=0)
    plain = dict(policy(directory, LoraSettings()).causal.named_parameters())
    for name, tensor in merged(causal_weights(engine).items(), scale_of(LORA)):
        assert tensor.equal(plain[name])


def test_an_adapter_without_its_other_half_is_an_error(directory):
    weights = list(causal_weights(train(directory, 0, updates=0)).items())
    for left_out in (".lora_A.", ".lora_B."):
        broken = [(name, t) for name, t in weights if not (left_out in name and ".0.self_attn.k_proj" in name)]
        with pytest.raises(ValueError, match=r"k_proj"):
            list(merged(broken, 1.0))


def test_the_adapter_alone_has_peft_s_names_and_shapes(directory):
    found = dict(adapter_only(causal_weights(train(directory, 0)).items()))
    assert len(found) == 28
    assert found["model.layers.0.mlp.down_proj.lora_A.weight"].shape == (RANK, 48)
    assert found["model.layers.0.mlp.down_proj.lora_B.weight"].shape == (32, RANK)


@pytest.mark.parametrize("stage", [0, 3])
def test_without_its_adapters_it_is_the_initial_model_and_afterwards_itself_again(directory, stage):
    engine = train(directory, stage)
    with torch.no_grad():
        before = engine.forward(*inputs()).logprobs
        with adapters_off(engine.module):
            off = engine.forward(*inputs()).logprobs
        assert engine.forward(*inputs()).logprobs.equal(before)
    torch.testing.assert_close(off, scores(policy(directory, LoraSettings())), rtol=1e-5, atol=1e-6)
    engine.backward(engine.forward(*inputs()).logprobs.mean())
    assert engine.step().applied, "and it can still learn"


@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_the_tied_ends_of_a_model_get_no_adapter(directory, layer):
    with pytest.raises(UserError, match=layer):
        policy(directory, LoraSettings(rank=2, target_modules=("q_proj", layer)))
