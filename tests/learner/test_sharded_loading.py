"""A model at ZeRO stage 3 is read from its files part by part: the same training, and no rank holds it whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from learner.config.learner import TrainerSettings
from learner.config.model import ModelSettings
from learner.model.loading import load_causal, load_policy
from learner.model.stored_weights import StoredWeights, empty_model
from learner.trainer.trainer import Trainer
from protocol.settings import RunSettings
from tests.support import sharded_ranks
from tests.support.forks import Zygote

SIZES: dict[str, Any] = {
    "vocab_size": sharded_ranks.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3Moe": EXPERTS,
    "Llama": {},
    "Gemma2": {"head_dim": 8},
    "Phi3": {},
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
    "Glm4Moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
}


def write(kind: str, directory: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
    """A model with random weights, in several files."""
    config = getattr(transformers, f"{kind}Config")(**SIZES | KINDS[kind] | sizes)
    torch.manual_seed(1)
    causal = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    causal.save_pretrained(directory, max_shard_size="4kB" if not sizes else "100MB")
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_and_buffer_is_read_as_transformers_loads_it(kind: str, tmp_path: Path) -> None:
    directory = write(kind, tmp_path)
    assert (directory / "model.safetensors.index.json").exists()
    loaded = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(directory, dtype=torch.float32)
    causal = empty_model(transformers.AutoConfig.from_pretrained(directory), dtype=torch.float32)
    assert all(p.untyped_storage().nbytes() == 4 for p in causal.parameters()), "one element each"
    stored = StoredWeights.of(directory, causal)
    assert stored is not None
    expected = dict(loaded.named_parameters())
    assert dict(causal.named_parameters()).keys() == expected.keys()
    for name, parameter in causal.named_parameters():
        whole = torch.full(parameter.shape, float("nan"))
        for rank in range(3):  # odd parts, which end within rows and experts
            stored.read(parameter, whole, rank * whole.numel() // 3, (rank + 1) * whole.numel() // 3)
        assert torch.equal(whole, expected[name]), name
    for (name, buffer), (_, own) in zip(loaded.named_buffers(), causal.named_buffers(), strict=True):
        assert torch.equal(buffer, own), name


@pytest.mark.parametrize("copied", [False, True], ids=["views", "copies"])
def test_a_part_is_read_without_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool) -> None:
    """Also where transformers makes the parts for saving contiguous."""
    chunk = torch.chunk
    if copied:
        monkeypatch.setattr(torch, "chunk", lambda *args, **named: [c.contiguous() for c in chunk(*args, **named)])
    causal = empty_model(transformers.AutoConfig.from_pretrained(write("Qwen3Moe", tmp_path)), dtype=torch.float32)
    stored = StoredWeights.of(tmp_path, causal)
    assert stored is not None
    experts = next(p for name, p in causal.named_parameters() if name.endswith("gate_up_proj"))
    whole = torch.full(experts.shape, float("nan"))
    stored.read(experts, whole, 0, whole.numel() // 4)
    assert [bool(expert.isnan().any()) for expert in whole] == [False, True, True, True]


def test_files_without_all_of_the_model_are_loaded_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write("Qwen2", tmp_path)
    index = directory / "model.safetensors.index.json"
    named = json.loads(index.read_text())
    named["weight_map"] = {name.removeprefix("model."): file for name, file in named["weight_map"].items()}
    config = transformers.AutoConfig.from_pretrained(directory)
    index.write_text(json.dumps(named))
    assert StoredWeights.of(directory, empty_model(config, dtype=torch.float32)) is None, "other names"
    write("Qwen2", tmp_path)
    wider = transformers.Qwen2Config(**SIZES | {"intermediate_size": 32})
    assert StoredWeights.of(directory, empty_model(wider, dtype=torch.float32)) is None, "other shapes"
    (directory / "pytorch_model.bin").unlink(missing_ok=True)
    assert load_causal(directory, ModelSettings(), sharded=True).stored is not None


def test_the_attention_is_settled_on_the_first_layers(tmp_path: Path) -> None:
    for kind in ("Qwen2", "Qwen3Moe", "Mixtral"):
        directory = write(kind, tmp_path / kind)
        whole, sharded = (load_policy(directory, ModelSettings(), sharded=sharded) for sharded in (False, True))
        assert sharded.stored is not None and whole.stored is None
        assert sharded.causal.config._attn_implementation == whole.causal.config._attn_implementation
        assert sharded.causal.config.num_hidden_layers == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3Moe"])
def test_four_ranks_train_publish_and_save_and_two_resume(kind: str, tmp_path: Path, zygote: Zygote) -> None:
    """Stage 3, gradient checkpointing, a sharded reference; compared with one rank that loads the model whole."""
    model = write(kind, tmp_path / "model")
    for ranks in (4, 2):
        zygote.run_ranks(sharded_ranks.__file__, ["train", str(model), str(tmp_path)], tmp_path, ranks)
    four, two = (json.loads((tmp_path / f"found.{ranks}.json").read_text()) for ranks in (4, 2))
    plain = sharded_ranks.SETTINGS | {"engine": {"zero_stage": 0}, "model": {}}
    alone = Trainer(RunSettings(model=model, steps=4), TrainerSettings.model_validate(plain))
    one = [value for n in range(3) for value in sharded_ranks.step(alone, n)]
    assert four == pytest.approx(one, rel=2e-3, abs=2e-6)
    assert two == pytest.approx(four[-2:], rel=2e-3, abs=2e-6)
    after = [json.loads((tmp_path / f"weights.{ranks}.json").read_text()) for ranks in (4, 2)]
    for name, tensor in alone.iter_weights():
        for weights in after:
            assert weights[name] == pytest.approx(tensor.flatten().tolist(), rel=2e-3, abs=2e-4), name
    published = getattr(transformers, f"{kind}ForCausalLM")
    causal, report = published.from_pretrained(tmp_path / "weights" / "v1.2", output_loading_info=True)
    assert not any(report.values()), "the names and shapes of the architecture"
    assert all(bool(p.isfinite().all()) for p in causal.parameters())


@pytest.mark.slow
def test_no_rank_holds_the_whole_model_while_it_loads(
    tmp_path: Path, zygote: Zygote, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of 560 MB in float32 on four ranks, in files of bfloat16."""
    sizes = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 9}
    write("Qwen2", tmp_path, **sizes, num_attention_heads=8, dtype=torch.bfloat16)
    write("Qwen2", tmp_path / "tiny")
    share = 2 * sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) / 4
    embedding = 32000 * 1024 * 4
    peak = {}
    with capsys.disabled():
        print(f"\n{4 * share / 1e6:.0f} MB of float32 weights on 4 ranks, private memory per rank in MB:")
        for name, env in (("whole", {"WHOLE": "1"}), ("sharded", {})):
            out = tmp_path / name
            out.mkdir()
            with zygote.ranks(sharded_ranks.__file__, ["memory", str(tmp_path), str(out)], out, 4, env) as ranks:
                for rank in ranks:
                    assert zygote.wait(rank, 280) == 0, [p.read_text()[-2000:] for p in out.glob("*.log")]
            found = [json.loads((out / f"memory.{rank}.json").read_text()) for rank in range(4)]
            for part in found[0]:
                peak[name, part] = max(rank[part]["peak"] for rank in found)
                held = max(rank[part]["held"] for rank in found)
                most, due = peak[name, part], share
                print(f"  {part} {name}: peak {most / 1e6:.0f}, held {held / 1e6:.0f}, share {due / 1e6:.0f}")
    assert peak["whole", "policy"] > 3.9 * share
    assert peak["sharded", "policy"] <= 2 * share
    assert peak["sharded", "reference"] <= share + embedding + 30e6, "its share and its largest layer"
