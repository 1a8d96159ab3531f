"""Models of many families at ZeRO stage 3: read from their files with the dtypes of transformers, or loaded whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from learner.config.model import DeepSpeedSettings, ModelSettings, OptimSettings
from learner.engine import DeepSpeedEngine
from learner.model import loading
from learner.model.loading import load_policy, load_settled
from learner.model.stored_weights import StoredWeights, empty_model
from protocol.errors import UserError
from tests.support.tiny_families import FAMILIES, VOCABULARY, write_family

QUICK = {"deepseek_v3", "ernie4_5_moe", "falcon_h1", "gemma3n_text", "lfm2", "olmo_hybrid", "qwen3_next"}
REFUSED = {"phimoe", "nemotron_h", "zamba2"}
"""By the check at load (tests/learner/test_model_check.py)."""
BFLOAT16_IN_PARTS = {"ernie4_5_moe", "hunyuan_v1_moe", "olmo_hybrid"}
DEEP: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 4},
    "falcon_h1": {"num_hidden_layers": 4},
    "jamba": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
}


def families(quick: set[str], among: set[str] | None = None) -> list[Any]:
    return [
        pytest.param(kind, marks=() if kind in quick else pytest.mark.slow) for kind in sorted(among or set(FAMILIES))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", families(QUICK))
def test_values_and_dtypes_are_those_of_transformers(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = write_family(kind, tmp_path, dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    causal = empty_model(transformers.AutoConfig.from_pretrained(directory), dtype=dtype)
    assert all(p.untyped_storage().nbytes() <= 4 for p in causal.parameters()), "one element each"
    stored = StoredWeights.of(directory, causal)
    assert stored is not None
    own = dict(causal.named_parameters())
    for name, parameter in loaded.named_parameters():
        whole = torch.full(own[name].shape, float("nan"), dtype=own[name].dtype)
        stored.read(own[name], whole, 0, whole.numel())
        assert whole.dtype == parameter.dtype and whole.equal(parameter), name
    for (name, buffer), (_, same) in zip(loaded.named_buffers(), causal.named_buffers(), strict=True):
        assert buffer.dtype == same.dtype and buffer.equal(same), name


@pytest.mark.parametrize("kind", families({"falcon_h1"}, set(DEEP)))
def test_hybrids_are_settled_on_their_first_layers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, kind, FAMILIES[kind] | DEEP[kind])
    causal = load_settled(write_family(kind, tmp_path), ModelSettings(attention="eager"), packed=False, sharded=True)
    assert causal.stored is not None
    assert causal.config.num_hidden_layers == DEEP[kind]["num_hidden_layers"]


def test_a_model_that_cannot_be_cut_or_built_without_weights_is_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layers = ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention", "full_attention"]
    deep = FAMILIES["gemma4_text"] | {"num_hidden_layers": 5, "layer_types": layers}
    monkeypatch.setitem(FAMILIES, "gemma4_text", deep)
    settings = ModelSettings(attention="eager")
    causal = load_settled(write_family("gemma4_text", tmp_path / "gemma4"), settings, packed=False, sharded=True)
    assert causal.stored is None and causal.config.num_hidden_layers == 5
    assert "loaded whole on every rank: its first layers are no model by themselves" in caplog.text
    expected = load_file(tmp_path / "gemma4" / "model.safetensors")
    assert all(p.equal(expected[name]) for name, p in causal.named_parameters())

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("more than one element of the written-to tensor")

    monkeypatch.setattr(loading, "empty_model", fails)
    causal = load_settled(write_family("qwen2", tmp_path / "qwen2"), settings, packed=False, sharded=True)
    assert causal.stored is None and "cannot be built without its weights (RuntimeError: more than" in caplog.text


def test_codes_of_8_bit_floats_are_not_copied_as_weights(tmp_path: Path) -> None:
    file = write_family("qwen2", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file, metadata={"format": "pt"})
    causal = empty_model(transformers.AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16)
    assert StoredWeights.of(tmp_path, causal) is None


@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v3"])
def test_a_tensor_of_another_dtype_than_that_of_transformers_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_family(kind, tmp_path, torch.bfloat16)
    settings = ModelSettings(dtype="bfloat16", attention="eager")
    load_settled(directory, settings, packed=False, sharded=True)

    def computed(*names: Any, **options: Any) -> Any:
        causal = empty_model(*names, **options)
        for _, buffer in causal.named_buffers():
            buffer.data = buffer.data.to(torch.bfloat16)
        return causal

    monkeypatch.setattr(loading, "empty_model", computed)
    with pytest.raises(UserError, match=r"would be torch.bfloat16") as caught:
        load_settled(directory, settings, packed=False, sharded=True)
    assert "float32" in str(caught.value.why)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", sorted(BFLOAT16_IN_PARTS))
def test_weights_that_deepspeed_would_round_are_refused(kind: str, sharded: bool, tmp_path: Path) -> None:
    directory = write_family(kind, tmp_path, torch.bfloat16)
    with pytest.raises(UserError, match="weights in float32") as caught:
        load_policy(directory, ModelSettings(dtype="bfloat16", attention="eager"), packed=False, sharded=sharded)
    assert "learner.model.dtype" in str(caught.value.todo)
    assert load_policy(directory, ModelSettings(attention="eager"), packed=False, sharded=sharded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, "float32") for kind in sorted(FAMILIES.keys() - REFUSED)),
        *((kind, "bfloat16") for kind in sorted(FAMILIES.keys() - REFUSED - BFLOAT16_IN_PARTS)),
    ],
)
def test_stage_3_trains_and_publishes_as_stage_1_does(kind: str, dtype: str, tmp_path: Path) -> None:
    directory = write_family(kind, tmp_path, getattr(torch, dtype))
    ids, count = torch.arange(24)[None] * 5 % VOCABULARY, 23
    inputs = (ids[:, :-1], torch.arange(count)[None], None, torch.arange(count), ids[0, 1:], 1.0, False)
    found = []
    for stage in (1, 3):
        policy = load_policy(directory, ModelSettings(dtype=dtype, attention="eager"), packed=False, sharded=stage == 3)
        assert (policy.stored is not None) == (stage == 3)
        engine = DeepSpeedEngine(
            policy, optim=OptimSettings(lr=0.01), engine=DeepSpeedSettings(zero_stage=stage), dtype=dtype,
            total_updates=9, seed=0,
        )  # fmt: skip
        before = engine.forward(*inputs).logprobs
        engine.backward(-before.mean())
        assert engine.step().applied
        with torch.no_grad():
            found.append((before.detach(), engine.forward(*inputs).logprobs, dict(engine.iter_weights())))
        engine.close()
    (start, end, one), (start3, end3, three) = found
    assert start.equal(start3) and float((end - start).abs().max()) > 0.05
    torch.testing.assert_close(end3, end, rtol=0, atol=1e-3 if dtype == "float32" else 0.5)
    assert {name: (t.shape, t.dtype) for name, t in three.items()} == {n: (t.shape, t.dtype) for n, t in one.items()}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).state_dict()
    assert all(loaded[name.removeprefix("causal.")].dtype == tensor.dtype for name, tensor in three.items())
