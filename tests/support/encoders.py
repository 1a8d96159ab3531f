"""Tiny models made on the spot, for tests: real folders that transformers loads, with seeded random weights."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from retriever.encoder.transformer import quiet

HIDDEN, POSITIONS = 32, 64
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
Kind = Literal["BertModel", "DPRContextEncoder", "DPRQuestionEncoder", "BertForSequenceClassification"]


def tiny_model(folder: Path, kind: Kind = "BertModel", *, seed: int = 0, num_labels: int = 1) -> Path:
    """`folder`, filled: config.json, model.safetensors, tokenizer. 2 layers of 32, 64 positions, letters for words."""
    tokenizer = _tokenizer()
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 2 * HIDDEN,
        "max_position_embeddings": POSITIONS,
        # wide enough that other words give clearly other vectors
        "initializer_range": 0.3,
    }
    if kind.startswith("DPR"):
        config: Any = transformers.DPRConfig(**shape)
    else:
        config = transformers.BertConfig(**shape, num_labels=num_labels)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(config)
    torch.random.set_rng_state(state)
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def sentence_transformers_layout(
    folder: Path, pooling: dict[str, Any], *, normalize: bool = True, dense: int = 0, **said: Any
) -> Path:
    """`folder`, with modules.json, the Pooling step's configuration and what else sentence-transformers writes.

    dense  width of a Dense step with tanh and seeded weights; 0: none
    said   content of config_sentence_transformers.json
    """
    steps = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalize else [])]
    places = ["" if name == "Transformer" else f"{idx}_{name}" for idx, name in enumerate(steps)]
    modules = [
        {"idx": idx, "name": str(idx), "path": place, "type": f"sentence_transformers.models.{name}"}
        for idx, (name, place) in enumerate(zip(steps, places, strict=True))
    ]
    _write(folder / "modules.json", modules)
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": HIDDEN, **pooling})
    if dense:
        _write(
            folder / "2_Dense" / "config.json",
            {"in_features": HIDDEN, "out_features": dense, "bias": True, "activation_function": "torch.nn.Tanh"},
        )
        generator = torch.Generator().manual_seed(7)
        weights = {
            "linear.weight": torch.randn(dense, HIDDEN, generator=generator),
            "linear.bias": torch.randn(dense, generator=generator),
        }
        save_file(weights, folder / "2_Dense" / "model.safetensors")
    if said:
        _write(folder / "config_sentence_transformers.json", said)
    return folder


def _tokenizer() -> Any:
    letters = string.ascii_lowercase + string.digits + string.punctuation + "éß東京"
    vocabulary = [*_SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    words = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer(strip_accents=False)
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
