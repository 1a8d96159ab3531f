"""The demo's policy: a Qwen2 of about 0.2 million parameters, small enough to train and to serve on one CPU core."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.demo.copying import lay_copying
from deploy.demo.vocabulary import EOS, PAD, ids_of_words, save_tokenizer

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

CONTEXT = 512
"""Longest sequence in tokens; the demo's longest trajectory is about half of it."""

THETA = 1e6
"""Rotary base: with the usual 1e4 too few channels of a head are slow enough to match words at any distance."""

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
}


def new_model(seed: int) -> Qwen2ForCausalLM:
    """A freshly initialised policy in float32, the same for the same seed."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    table = ids_of_words()
    config = Qwen2Config(
        vocab_size=len(table),
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        pad_token_id=table[PAD],
        bos_token_id=None,
        eos_token_id=table[EOS],
        attention_dropout=0.0,
        dtype="float32",
        **SHAPE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
        lay_copying(model, THETA)
    return model


def save_model(model: Qwen2ForCausalLM, directory: Path) -> None:
    """Write config, weights (safetensors), generation config and tokenizer in Hugging Face layout."""
    from learner.accelerator import without_gpu

    without_gpu()
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of less than a megabyte, in the middle of our own lines
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, safe_serialization=True)
    save_tokenizer(directory)
