"""What the engine needs from a Hugging Face `config.json`: sizes, rotary settings, biases. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import UserError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: `kind` is default, linear or llama3; the last four numbers are llama3's."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family (RMSNorm, rotary, grouped-query attention, SwiGLU). Sizes in elements."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def parameters(self) -> int:
        """Weights in all, biases and norms left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


def read_model_config(directory: Path) -> ModelConfig:
    """`directory/config.json` as ModelConfig. Raises UserError when missing, malformed or of another family."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise UserError(
            f"cannot read {path}", why=error.strerror or str(error), todo="point --model-path at a model directory"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON", why=str(error)) from None
    try:
        return _convert(raw)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path} does not describe a usable model", why=f"{type(error).__name__}: {error}") from None


def _convert(raw: dict[str, Any]) -> ModelConfig:
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"model type {family!r} is not supported", todo="use one of " + ", ".join(FAMILIES))
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"activation {raw['hidden_act']!r} is not supported", todo="use a model with silu")
    # Qwen2 configs carry a sliding_window number that only counts when use_sliding_window is on.
    if raw.get("use_sliding_window", family == "mistral") and raw.get("sliding_window"):
        raise UserError("sliding-window attention is not supported", todo="set sliding_window to null")
    heads = int(raw["num_attention_heads"])
    bias = bool(raw.get("attention_bias", False))
    config = ModelConfig(
        family=family,
        vocab=int(raw["vocab_size"]),
        hidden=int(raw["hidden_size"]),
        intermediate=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        context=int(raw["max_position_embeddings"]),
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=True if family == "qwen2" else bias,
        o_bias=False if family == "qwen2" else bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
    )
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise ValueError("heads must be a multiple of key/value heads and head_dim even")
    return config


def _rope(raw: dict[str, Any]) -> Rope:
    # transformers 5 writes rope_parameters; before, rope_theta stood alone beside rope_scaling
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise UserError(f"rotary scaling {kind!r} is not supported", todo="use default, linear or llama3")
    return Rope(
        theta=float(given.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(given.get("factor", 1.0)),
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        original_length=int(given.get("original_max_position_embeddings", 8192)),
    )
