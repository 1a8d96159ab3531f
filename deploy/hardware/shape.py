"""The shape of a model, from its config.json: parameters by kind and the sizes that decide its activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Values of model_type whose parameters and activations are known here: pre-norm decoders with a gated MLP."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. Linear layers are (inputs, outputs) of one layer, without experts.

    hidden, layers, vocabulary  width, number of layers, rows of the embedding
    heads, kv_heads, head_dim   attention
    gated       width of the MLP, of all experts that a token passes together
    experts     parameters of all experts of a layer and of their router; 0 for a dense model
    bias        biases of a layer
    head_norm   query and key are normalised per head (Qwen3)
    tied        embedding and output layer are one matrix
    """

    hidden: int
    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: int
    experts: int
    bias: int
    head_norm: bool
    tied: bool

    @property
    def linear(self) -> tuple[tuple[int, int], ...]:
        """Return (inputs, outputs) of the linear layers of one layer."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = ((h, q), (h, kv), (h, kv), (q, h))
        return attention if self.experts else (*attention, (h, self.gated), (h, self.gated), (self.gated, h))

    @property
    def parameters(self) -> int:
        """Return the number of parameters, shared ones once."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norm else 0)
        layer = sum(a * b for a, b in self.linear) + self.experts + self.bias + norms
        return self.layers * layer + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def embedding(self) -> int:
        """Return the number of parameters of the embedding, the largest tensor."""
        return self.vocabulary * self.hidden

    def adapters(self, rank: int) -> int:
        """Return the number of parameters of LoRA adapters of this rank on all linear layers."""
        return self.layers * sum(rank * (a + b) for a, b in self.linear)


def read_shape(facts: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape that a config.json describes, None if its family is not in FAMILIES or a size is missing."""
    kind = facts.get("model_type")
    if kind not in FAMILIES:
        return None
    try:
        hidden, heads = int(facts["hidden_size"]), int(facts["num_attention_heads"])
        kv_heads, dim = int(facts.get("num_key_value_heads") or heads), int(facts.get("head_dim") or hidden // heads)
        gated, experts, bias = int(facts["intermediate_size"]), 0, 0
        if kind == "qwen3_moe":
            number, width = int(facts["num_experts"]), int(facts["moe_intermediate_size"])
            experts, gated = number * (3 * hidden * width + hidden), int(facts["num_experts_per_tok"]) * width
        if kind == "qwen2" or facts.get("attention_bias"):
            bias = (heads + 2 * kv_heads) * dim
        return ModelShape(
            hidden=hidden,
            layers=int(facts["num_hidden_layers"]),
            vocabulary=int(facts["vocab_size"]),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            gated=gated,
            experts=experts,
            bias=bias,
            head_norm=kind.startswith("qwen3"),
            tied=bool(facts.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
