"""Critics: values of the state before each trained token, by a separate backbone or a head on the policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from pydantic import ValidationError

from learner.config.model import CriticSettings, DeepSpeedSettings, LoraSettings, ModelSettings, OptimSettings
from learner.engine import DeepSpeedEngine, optimizer
from learner.model import policy as policy_model
from learner.model.loading import load_policy
from learner.model.policy import ValueHead
from learner.trainer.critic import load_critic
from protocol.errors import UserError

LENGTHS = (6, 9)


def save(directory: Path, seed: int = 0, width: int = 32) -> Path:
    config = transformers.Qwen2Config(
        vocab_size=61, hidden_size=width, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


def texts(changed: int | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randint(0, 61, (n,), generator=generator) for n in LENGTHS]
    if changed is not None:
        made[1][changed] += 1 if made[1][changed] < 60 else -1
    return made


def packed(changed: int | None = None) -> tuple[torch.Tensor, ...]:
    """Both texts in one row with two places of padding; every position of a text is requested."""
    filling = torch.zeros(2, dtype=torch.long)
    ids = torch.cat([*texts(changed), filling])[None]
    positions = torch.cat([*(torch.arange(n) for n in LENGTHS), filling])[None]
    document_ids = torch.cat([*(torch.full((n,), i) for i, n in enumerate(LENGTHS)), filling - 1])[None]
    return ids, positions, document_ids, torch.arange(sum(LENGTHS))


def random_head(head: ValueHead) -> None:
    torch.manual_seed(3)
    torch.nn.init.normal_(head.weight)
    torch.nn.init.constant_(head.bias, 0.25)


def test_values_are_zero_at_first_and_float32(directory):
    for dtype in ("float32", "bfloat16"):
        values = load_critic(directory, CriticSettings(), ModelSettings(dtype=dtype))(*packed())
        assert values.dtype == torch.float32
        assert values.tolist() == [0.0] * sum(LENGTHS)


def test_values_are_the_head_on_the_hidden_states_of_each_text_alone(directory):
    critic = load_critic(directory, CriticSettings(), ModelSettings())
    random_head(critic.head)
    base = transformers.AutoModel.from_pretrained(directory)
    hidden = torch.cat([base(text[None], use_cache=False).last_hidden_state[0] for text in texts()])
    expected = hidden @ critic.head.weight[0] + 0.25
    torch.testing.assert_close(critic(*packed()), expected, rtol=1e-4, atol=1e-4)


def test_a_value_knows_what_came_before_its_token_and_nothing_else(directory):
    critic = load_critic(directory, CriticSettings(), ModelSettings())
    random_head(critic.head)
    same = (critic(*packed()) == critic(*packed(changed=4))).tolist()
    at = LENGTHS[0] + 4
    assert all(same[:at]), "not the text beside it, and not what is to come"
    assert not any(same[at:])


def test_gradients_never_cross_into_the_text_beside_it(directory):
    critic = load_critic(directory, CriticSettings(), ModelSettings())
    random_head(critic.head)
    embedding = critic.backbone.get_input_embeddings()
    ids, *rest = packed()
    given = embedding(ids).detach().requires_grad_()
    embedding.forward = lambda _: given  # the embedded row itself, to see where its gradient comes from
    critic(ids, *rest)[: LENGTHS[0]].sum().backward()
    moved = given.grad[0].abs().sum(-1) > 0
    assert moved.tolist() == [True] * LENGTHS[0] + [False] * (LENGTHS[1] + 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_critic_learns_in_a_separate_engine(directory, stage):
    engine = DeepSpeedEngine(
        load_critic(directory, CriticSettings(), ModelSettings()), optim=OptimSettings(lr=0.01),
        engine=DeepSpeedSettings(zero_stage=stage), dtype="float32", total_updates=50, seed=0,
    )  # fmt: skip
    targets = torch.linspace(-1, 1, sum(LENGTHS))
    losses = []
    for _ in range(25):
        loss = (engine.forward(*packed()) - targets).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        assert engine.step().applied
    assert losses[-1] < 0.05 * losses[0]


def test_a_critic_of_another_model(directory, tmp_path):
    other = save(tmp_path, seed=1, width=16)
    critic = load_critic(directory, CriticSettings(model=other), ModelSettings())
    assert critic.head.weight.shape == (1, 16)


def test_adapters_are_for_the_policy_only(directory):
    critic = load_critic(directory, CriticSettings(), ModelSettings(lora=LoraSettings(rank=2)))
    assert all(p.requires_grad for p in critic.parameters())
    assert not any("lora" in name for name, _ in critic.named_parameters())


def test_a_missing_model_is_a_user_error(directory, tmp_path):
    with pytest.raises(UserError, match="no model found in"):
        load_critic(directory, CriticSettings(model=tmp_path), ModelSettings())


def scored(loss: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[str]]:
    """Values of a policy with a head, and the gradient of their sum (loss values) or of the log-probs'."""
    policy = load_policy(scored.directory, ModelSettings(), critic=CriticSettings(backbone="policy"))
    random_head(policy.value_head)
    ids, positions, document_ids, index = packed()
    scores = policy(ids, positions, document_ids, index, ids.flatten()[index], 1.0, False)
    getattr(scores, loss).sum().backward()
    return scores.values, {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_head_on_the_policy_shares_its_backbone_and_part_of_the_gradient(directory, share, monkeypatch):
    monkeypatch.setattr(policy_model, "BACKBONE_GRADIENT", share)
    scored.directory = directory
    values, gradient = scored("values")
    critic = load_critic(directory, CriticSettings(), ModelSettings())
    random_head(critic.head)
    expected = critic(*packed())
    expected.sum().backward()
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(gradient.pop("value_head.weight"), critic.head.weight.grad)
    gradient.pop("value_head.bias")
    whole = {f"causal.model.{n}": p.grad for n, p in critic.backbone.named_parameters()}
    for name, found in gradient.items():
        torch.testing.assert_close(found, share * whole[name], rtol=1e-4, atol=1e-5)
    assert (share == 0) == all(not g.any() for g in gradient.values())


def test_the_policys_loss_does_not_move_the_value_head(directory):
    scored.directory = directory
    assert not any("value_head" in name for name in scored("logprobs")[1])


def test_the_value_head_has_its_own_learning_rate(directory, monkeypatch):
    monkeypatch.setattr(optimizer, "BETA1", 0.0)
    policy = load_policy(directory, ModelSettings(), critic=CriticSettings(backbone="policy"))
    engine = DeepSpeedEngine(
        policy, optim=OptimSettings(lr=0.001, beta2=0.0, eps=1e-12), engine=DeepSpeedSettings(),
        dtype="float32", total_updates=5, seed=0,
    )  # fmt: skip
    ids, positions, document_ids, index = packed()
    scores = engine.forward(ids, positions, document_ids, index, ids.flatten()[index], 1.0, False)
    before = dict(engine.iter_weights())
    engine.backward((scores.values - 1).square().sum() + scores.logprobs.sum())
    engine.step()
    moved = {name: float((tensor - before[name]).abs().max()) for name, tensor in engine.iter_weights()}
    # without moments a step is the learning rate times the sign of the gradient
    assert moved["value_head.weight"] == pytest.approx(0.01, rel=1e-3)
    assert moved["causal.model.norm.weight"] == pytest.approx(0.001, rel=1e-3)


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValidationError, match="has no effect"):
        CriticSettings(backbone="policy", model=Path("somewhere"))


def test_a_critics_learning_rate_is_its_own_even_when_something_else_is_set():
    assert CriticSettings.model_validate({"optim": {"clip_norm": 3.0}}).optim.lr == CriticSettings().optim.lr == 1e-5
