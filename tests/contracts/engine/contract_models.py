"""Small models on disk for the engine contract: random weights, real tokenizers, and copies with one thing wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from tests.support.environments import write_tokenizer

CORPUS = ["<search> who founded the city of müller </search>", "<answer> the 3 rivers 東京 </answer>"] * 4
CONTEXT = 1024
RANK, ALPHA = 4, 8


def write_model(path: Path, seed: int) -> Path:
    """A Qwen2 of 0.1 million parameters with a byte-level BPE tokenizer of 300 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    _save_weights(path, seed, tokenizer.get_vocab_size(), eos=0)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def write_word_model(path: Path, seed: int) -> Path:
    """The same with the demo's kind of tokenizer: a table of words, the protocol's tags among them."""
    path.mkdir(parents=True)
    write_tokenizer(path, "words")
    tokenizer = read_tokenizer(path)
    _save_weights(path, seed, tokenizer.get_vocab_size(), eos=tokenizer.token_to_id("<eos>"))
    return path


def _save_weights(path: Path, seed: int, vocab: int, eos: int) -> None:
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        # wide, so that two seeds differ in every log-prob
        initializer_range=0.15,
        eos_token_id=eos,
        dtype="float32",
    )
    disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(path)


def read_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor by its Hugging Face name."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def perturbed(source: Path, target: Path) -> Path:
    """A copy of a model whose every tensor is a little different."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(1)
    for file in target.glob("*.safetensors"):
        noisy = {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            for name, tensor in load_file(file).items()
        }
        save_file(noisy, file, metadata={"format": "pt"})
    return target


FAULTS = ("no directory", "missing", "unknown", "wrong shape", "not finite", "cut off", "other architecture")


def spoilt(source: Path, target: Path, fault: str) -> Path:
    """A copy of a model with one of FAULTS."""
    shutil.rmtree(target, ignore_errors=True)
    if fault == "no directory":
        return target
    shutil.copytree(source, target)
    file, name = target / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file)
    if fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        tensors["model.layers.9.odd.weight"] = torch.zeros(2)
    elif fault == "wrong shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    elif fault == "not finite":
        tensors[name][0, 0] = float("nan")
    elif fault == "other architecture":
        config: dict[str, Any] = json.loads((target / "config.json").read_text())
        config |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, file, metadata={"format": "pt"})
    if fault == "cut off":
        file.write_bytes(file.read_bytes()[:-1000])
    return target


def write_adapter(path: Path, base: Path, seed: int) -> Path:
    """A LoRA adapter of rank 4 on every linear layer of a decoder, in PEFT's layout."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in read_weights(base).items():
        if name.endswith("_proj.weight"):
            at = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * 0.3
            tensors[f"{at}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.3
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def merged(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The weights of `base` with the adapter added: W + alpha / r * B A."""
    weights, low = read_weights(base), load_file(adapter / "adapter_model.safetensors")
    for name, down in low.items():
        if name.endswith("lora_A.weight"):
            into = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            weights[into] = weights[into] + ALPHA / RANK * low[name.replace("lora_A", "lora_B")] @ down
    return weights
