"""A model of two layers with the tokenizer of the `bytes` kind (chat template, search_r1), for supervised training."""

from __future__ import annotations

from pathlib import Path

from tests.support.environments import write_tokenizer


def tiny_chat_model(directory: Path) -> Path:
    """Write it; returns `directory`."""
    import torch
    import transformers

    write_tokenizer(directory, "bytes")
    config = transformers.Qwen2Config(
        vocab_size=640, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, initializer_range=0.1, bos_token_id=None, eos_token_id=None,
        attention_dropout=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory
