"""Adapters of many families: what is published, loaded by peft, is the trained model; so is the merged export."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from learner.config.model import DeepSpeedSettings, LoraSettings, ModelSettings, OptimSettings
from learner.engine import DeepSpeedEngine
from learner.engine.deepspeed import saved_buffers
from learner.model.export import export_adapter, export_model
from learner.model.loading import as_saved, load_policy
from learner.model.lora import adapter_only, add_adapters, merged, scale_of
from learner.weights.adapter import CONFIG, WEIGHTS, in_peft_names, peft_config
from protocol.errors import UserError
from tests.support.tiny_families import FAMILIES, VOCABULARY, write_family

LORA = LoraSettings(rank=4, alpha=8.0)
QUICK = {"qwen2", "qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe", "qwen2_moe", "granitemoehybrid", "zamba2"}
TRAINED = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss")
IDS = torch.arange(24)[None] * 5 % VOCABULARY


@torch.no_grad()
def logprobs(causal: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = causal.eval()(input_ids=IDS).logits.float().log_softmax(-1)
    return found


def load(directory: Path) -> torch.nn.Module:
    causal, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return causal  # type: ignore[no-any-return]


def by_peft(base: Path, adapter: Path) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        return PeftModel.from_pretrained(load(base), str(adapter))


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=4e-5)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
        for kind in sorted(FAMILIES.keys() - {"gpt2"})
    ],
)
def test_peft_and_the_merged_weights_compute_the_adapted_model(kind: str, tmp_path: Path) -> None:
    base = write_family(kind, tmp_path / "base")
    causal = load(base)
    plain = logprobs(causal)
    add_adapters(causal, LORA)
    assert logprobs(causal).equal(plain), "an adapter begins as 0"
    torch.manual_seed(1)
    for name, parameter in causal.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted = logprobs(causal)
    assert float((adapted - plain).abs().max()) > 0.1
    weights = [(name, p.detach()) for name, p in [*causal.named_parameters(), *saved_buffers(causal)]]
    published = dict(as_saved(causal, merged(weights, scale_of(LORA))))
    files = load_file(base / "model.safetensors")
    assert {name: t.shape for name, t in published.items()} == {name: t.shape for name, t in files.items()}
    adapter = dict(in_peft_names(adapter_only(weights)))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / CONFIG).write_text(peft_config(adapter, LORA.alpha, base))
    save_file(adapter, tmp_path / "adapter" / WEIGHTS)
    equal(logprobs(by_peft(base, tmp_path / "adapter")), adapted)
    save_file(published, base / "model.safetensors", metadata={"format": "pt"})
    equal(logprobs(load(base)), adapted)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", TRAINED)
def test_both_exports_of_a_trained_mixture_of_experts_are_the_trained_model(
    kind: str, stage: int, tmp_path: Path
) -> None:
    base = write_family(kind, tmp_path / "base")
    settings = ModelSettings(lora=LORA, attention="eager")
    engine = DeepSpeedEngine(
        load_policy(base, settings, packed=False, sharded=stage == 3), optim=OptimSettings(lr=0.05),
        engine=DeepSpeedSettings(zero_stage=stage), dtype="float32", total_updates=9, seed=0,
    )  # fmt: skip
    for _ in range(3):
        count = IDS.shape[1] - 1
        inputs = (IDS[:, :-1], torch.arange(count)[None], None, torch.arange(count), IDS[0, 1:], 1.0, False)
        engine.backward(-engine.forward(*inputs).logprobs.mean())
        assert engine.step().applied
    with torch.no_grad():
        trained = engine.forward(*inputs).logprobs
    engine.save_state(tmp_path / "state")
    engine.close()
    export_model(tmp_path / "state", base, settings, tmp_path / "merged")
    export_adapter(tmp_path / "state", base, settings, tmp_path / "adapter")
    assert float((trained - logprobs(load(base))[0, :-1].gather(1, IDS[0, 1:, None])[:, 0]).abs().max()) > 0.1
    for causal in (load(tmp_path / "merged"), by_peft(base, tmp_path / "adapter")):
        equal(logprobs(causal)[0, :-1].gather(1, IDS[0, 1:, None])[:, 0], trained)


def adapted(kind: str, tmp_path: Path, *names: str) -> set[str]:
    causal = load(write_family(kind, tmp_path / kind))
    add_adapters(causal, LORA.model_copy(update={"target_modules": names}))
    return {name.split(".")[-4] for name, p in causal.named_parameters() if p.requires_grad}


def test_what_gets_no_adapter_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "learner.model.lora")
    assert adapted("qwen2", tmp_path) > {"q_proj", "gate_proj"} and not caplog.messages
    assert adapted("glm4_moe", tmp_path) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    dense, experts = caplog.messages[::-1]
    assert "experts.down_proj, experts.gate_up_proj: experts and routers" in experts
    assert "shared_experts.gate_proj" in dense and "experts of a glm4_moe model" in dense
    assert {"gate_proj", "up_proj"} < adapted("qwen2_moe", tmp_path), "its shared expert"
    assert "mlp.shared_expert_gate" in caplog.messages[-1]
    assert not {"x_proj", "dt_proj", "out_proj"} & set(adapted("falcon_mamba", tmp_path))
    assert "mixer.dt_proj, mixer.out_proj, mixer.x_proj: Mamba's computation" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("kind", "names", "wrong", "why", "todo"),
    [
        ("qwen3_moe", ("q_proj", "gate_proj", "up_proj"), "gate_proj, up_proj", "experts", "k_proj"),
        ("mixtral", ("w1",), "w1", "no linear layer", "q_proj"),
        ("olmoe", ("experts",), "experts", "experts", "q_proj"),
        ("gpt_oss", ("gate_up_proj", "q_proj"), "gate_up_proj", "experts", "k_proj"),
        ("granitemoe", ("router",), "router", "", "q_proj"),  # transformers 5.19 has no linear layer in it
        ("qwen2", ("q_proj", "qproj"), "qproj", "no linear layer", "q_proj"),
        ("falcon_mamba", ("out_proj",), "out_proj", "Mamba", "in_proj"),
        ("gpt2", (), "not set", "transposed", "learner.model.lora.rank to 0"),
        ("gpt2", ("c_attn",), "c_attn", "transposed", "learner.model.lora.rank to 0"),
    ],
)
def test_names_that_cannot_have_adapters_are_one_user_error(
    kind: str, names: tuple[str, ...], wrong: str, why: str, todo: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        adapted(kind, tmp_path, *names)
    error = caught.value
    assert str(error.what) == f"no adapters for learner.model.lora.target_modules: {wrong}"
    assert why in str(error.why) and todo in str(error.todo)
