"""`estimate_memory` against torch's memory tracker, on fake tensors: the policy's own forward and backward pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.pages.hardware import SHAPES
from deploy.hardware.memory import EngineNeed, activation_bytes, cache_bytes, estimate_memory
from deploy.hardware.shape import ModelShape, read_shape
from learner.config.learner import LearnerSettings
from learner.config.model import LoraSettings, ModelSettings
from learner.model import attention
from learner.model.lora import add_adapters
from learner.model.policy import PolicyModel

WITHIN = 0.05


def test_parameters_are_those_of_the_published_models() -> None:
    counted = {name: shape_of(name).parameters for name in SHAPES}
    assert counted == {
        "Qwen2.5-0.5B": 494_032_768,
        "Qwen2.5-1.5B": 1_543_714_304,
        "Qwen2.5-3B": 3_085_938_688,
        "Qwen2.5-7B": 7_615_616_512,
        "Llama-3.2-3B": 3_212_749_824,
    }


MOE = {
    **{"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": False},
    **{"num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
}
OTHERS = {
    "qwen3": {**SHAPES["Qwen2.5-0.5B"], "model_type": "qwen3", "head_dim": 128, "num_hidden_layers": 2},
    "mistral": {
        **SHAPES["Qwen2.5-0.5B"],
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": MOE,
}


@pytest.mark.parametrize("name", OTHERS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    shape = read_shape(OTHERS[name])
    assert shape is not None
    assert shape.parameters == sum(p.numel() for p in on_meta(OTHERS[name], torch.bfloat16).parameters())


def test_unknown_and_incomplete_descriptions_have_no_shape() -> None:
    assert read_shape({"model_type": "gemma2", **MOE, "model_type": "gemma2"}) is None  # noqa: F601
    assert read_shape({"model_type": "qwen2", "hidden_size": 64}) is None
    assert read_shape(SHAPES["Qwen2.5-3B"] | {"num_attention_heads": 0}) is None
    assert read_shape({}) is None


def shape_of(name: str) -> ModelShape:
    shape = read_shape(SHAPES[name])
    assert shape is not None
    return shape


def on_meta(facts: dict[str, Any], dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts), dtype=dtype, attn_implementation="sdpa")


def tracked(
    facts: dict[str, Any], settings: ModelSettings, *, rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Return torch's peak bytes in one forward and backward pass beside weights and gradients, and those of the
    weights. Gradients exist before, as in every micro-batch but the first; every row has two trajectories."""
    causal = on_meta(facts, getattr(torch, settings.dtype))
    if settings.lora.rank:
        add_adapters(causal, settings.lora)
    spans = attention.Spans(((width // 2,) * 2,) * rows, ((True, True),) * rows, (((), ()),) * rows, torch.empty(0))
    monkeypatch.setattr(attention.Spans, "of", lambda documents, positions: spans)  # fake tensors have no values
    with FakeTensorMode(allow_non_fake_inputs=True):
        causal.to_empty(device="cpu").tie_weights()
        if settings.gradient_checkpointing:
            causal.gradient_checkpointing_enable({"use_reentrant": False})
        policy = PolicyModel(causal, settings).train()
        attention.use_spans(causal)
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
            else:  # the tracker registers hooks on every parameter, which a frozen one refuses
                ignored = lambda hook: SimpleNamespace(remove=lambda: None)  # noqa: E731
                parameter.register_hook = parameter.register_post_accumulate_grad_hook = ignored  # type: ignore
        ids = torch.zeros(rows, width, dtype=torch.long)
        index = torch.arange(rows * width)
        tracker = MemTracker()
        tracker.track_external(policy)
        with tracker:
            scores = policy(ids, ids.clone(), ids.clone(), index, index.clone(), 1.0, False)
            loss = scores.logprobs.sum()
            del scores
            loss.backward()
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    by_kind = {getattr(kind, "name", kind): size for kind, size in snapshot.items()}
    return by_kind["Total"] - by_kind["PARAM"] - by_kind["GRAD"], by_kind["PARAM"]


def compare(facts: dict[str, Any], settings: ModelSettings, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    shape = read_shape(facts)
    assert shape is not None
    peak, weights = tracked(facts, settings, rows=2, width=width, monkeypatch=monkeypatch)
    size = 2 if settings.dtype == "bfloat16" else 4
    expected = activation_bytes(
        shape,
        2 * width,
        size=size,
        checkpointing=settings.gradient_checkpointing,
        chunk=settings.logit_chunk_bytes,
        lora=settings.lora.rank,
    )
    print(f"{expected / 1e9:.3f} GB estimated, {peak / 1e9:.3f} GB by the tracker: {expected / peak - 1:+.2%}")
    assert weights == size * (shape.parameters + shape.adapters(settings.lora.rank))
    assert abs(expected / peak - 1) < WITHIN


@pytest.mark.slow  # one tensor at a time through the tracker: minutes for all layers of a large model
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_activations_are_those_of_the_tracker(name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, all tokens scored, the default chunk; all layers of the smallest model, eight of the others."""
    settings = ModelSettings(dtype="bfloat16", gradient_checkpointing=checkpointing, fp32_lm_head=False)
    layers = SHAPES[name]["num_hidden_layers"]
    facts = SHAPES[name] | {"num_hidden_layers": layers if name == "Qwen2.5-0.5B" else 8}
    compare(facts, settings, monkeypatch, width=4096)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("variant", ["lora", "small chunk", "short", "float32", "qwen3", "untied"])
def test_other_settings_are_those_of_the_tracker(
    variant: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SHAPES["Qwen2.5-0.5B"] | {"num_hidden_layers": 2}
    given: dict[str, Any] = {"dtype": "float32" if variant == "float32" else "bfloat16"}
    if variant == "lora":
        given["lora"] = LoraSettings(rank=32)
    if variant == "small chunk":
        given["logit_chunk_bytes"] = 1 << 28
    facts = {"qwen3": OTHERS["qwen3"] | {"num_hidden_layers": 2}, "untied": facts | {"tie_word_embeddings": False}}.get(
        variant, facts
    )
    settings = ModelSettings(gradient_checkpointing=checkpointing, fp32_lm_head=False, **given)
    compare(facts, settings, monkeypatch, width=256 if variant == "short" else 2048)


def learner(**given: Any) -> LearnerSettings:
    model = {"dtype": "bfloat16", "gradient_checkpointing": True, "fp32_lm_head": False, **given.pop("model", {})}
    given = {"engine": {"zero_stage": 2}, **given}
    return LearnerSettings.model_validate({"model": model, "batch": {"micro_batch_tokens": 16384}, **given})


def estimate(name: str, ranks: int, **given: Any) -> Any:
    return estimate_memory(
        shape_of(name), learner(**given), ranks=ranks, longest=4596, engine=EngineNeed(1, cache_tokens=100_000)
    )


def test_what_zero_partitions_falls_with_the_ranks() -> None:
    """Bytes per parameter (weights, gradients, optimizer) after Rajbhandari et al. 2020, with float32 gradients."""
    n = shape_of("Qwen2.5-7B").parameters
    bucket = 2 * 500_000_000
    for ranks in (1, 4, 8):
        two, three = (estimate("Qwen2.5-7B", ranks, engine={"zero_stage": stage}).policy for stage in (2, 3))
        assert (two.parameters, two.optimizer) == (2 * n, 12 * n // ranks)
        assert two.gradients == 4 * (n // ranks) + 2 * (n // ranks) + bucket
        assert three.optimizer == 12 * n // ranks and three.parameters < 2 * n // ranks + 3.2e9
        assert three.gradients == 4 * (n // ranks) + bucket


def test_offload_adapters_and_a_missing_reference_take_no_memory() -> None:
    full = estimate("Qwen2.5-3B", 1, engine={"zero_stage": 2}, algorithm={"type": "grpo", "kl": {"coefficient": 0.001}})
    n = shape_of("Qwen2.5-3B").parameters
    assert full.reference == 2 * n
    off = estimate("Qwen2.5-3B", 1, engine={"zero_stage": 2, "offload_optimizer": True})
    assert off.policy.optimizer == 0 and off.reference == 0 and off.learner < full.learner - 14 * n
    lora = estimate(
        "Qwen2.5-3B",
        1,
        engine={"zero_stage": 2},
        algorithm={"type": "grpo", "kl": {"coefficient": 0.001}},
        model={"lora": {"rank": 16}},
    )
    assert lora.reference == 0 and lora.policy.optimizer == 12 * shape_of("Qwen2.5-3B").adapters(16)
    own = estimate(
        *("Qwen2.5-3B", 1),
        engine={"zero_stage": 2},
        algorithm={"type": "grpo", "kl": {"coefficient": 0.001}},
        model={"lora": {"rank": 16}},
        reference={"model": "/models/teacher"},
    )
    assert own.reference == 2 * shape_of("Qwen2.5-3B").parameters, "adapters do not make it the policy itself"


def test_a_critic_doubles_what_is_kept_and_an_average_adds_a_quarter_of_it() -> None:
    kl = {"coefficient": 0.001, "type": "k1"}
    ppo = estimate("Qwen2.5-3B", 4, engine={"zero_stage": 3}, algorithm={"type": "ppo", "kl": kl})
    grpo = estimate("Qwen2.5-3B", 4, engine={"zero_stage": 3}, algorithm={"type": "grpo", "kl": {"coefficient": 0.001}})
    assert ppo.critic.kept == ppo.policy.kept and ppo.learner == grpo.learner + ppo.critic.kept
    head = estimate(
        *("Qwen2.5-3B", 4),
        engine={"zero_stage": 3},
        algorithm={"type": "ppo", "kl": kl},
        critic={"backbone": "policy"},
    )
    assert head.critic is None
    ema = estimate(
        "Qwen2.5-3B",
        4,
        engine={"zero_stage": 3},
        algorithm={"type": "ema_pg", "kl": {"coefficient": 0.001}},
        reference={"kind": "ema"},
    )
    assert ema.policy.optimizer - grpo.policy.optimizer == pytest.approx(shape_of("Qwen2.5-3B").parameters, abs=1)


def test_the_cache_is_what_sglang_reports() -> None:
    """Two tensors of [tokens, heads, dim] per layer; heads are shared by the ranks until each has one."""
    assert cache_bytes(shape_of("Qwen2.5-7B"), 1) == 2 * 28 * 4 * 128 * 2
    assert cache_bytes(shape_of("Qwen2.5-7B"), 8) == 2 * 28 * 1 * 128 * 2
    assert estimate("Qwen2.5-7B", 1).engine_cache == 100_000 * 57_344
