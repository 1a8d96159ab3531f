"""Published names are those of the model's own files."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file

from learner.config.model import ModelSettings
from learner.model.loading import as_saved, load_policy

KINDS = {
    "qwen2": {},
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "gemma2": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_names_shapes_and_bits_are_those_of_the_files(kind, tmp_path):
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, bos_token_id=None, eos_token_id=None, pad_token_id=None, **KINDS[kind],
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    causal = load_policy(tmp_path, ModelSettings(attention="eager")).causal
    named = [(name, p.detach()) for name, p in causal.named_parameters()]
    found, files = dict(as_saved(causal, named)), load_file(tmp_path / "model.safetensors")
    assert found.keys() == files.keys()
    for name, tensor in files.items():
        assert found[name].equal(tensor)
        assert found[name].is_contiguous()
    if kind in ("qwen2", "gemma2"):
        assert list(found) == [name for name, _ in named], "the order stays"
    else:
        assert len(found) > len(named)
