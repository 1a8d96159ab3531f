"""Read the model architecture from a Hugging Face `config.json`: sizes, rotary settings, biases. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from protocol.errors import UserError
from protocol.runtime.files import reading


@dataclass(frozen=True)
class Family:
    """Differences of a decoder family from Llama. The rest is in its config.json.

    norms     position of the norms around attention and MLP: before, after, or both
    qk_norm   norm of queries and keys: per head, over all heads together, or none
    windowed  layers with a sliding window if there is no `layer_types`: "all", "late" (from max_window_layers on),
              "even" (every second one before max_window_layers), or "unrotated" (those without rotary embedding)
    asks      the window applies only with use_sliding_window
    experts   how the files name experts (`loader.py`, EXPERTS); "" without experts
    shared    a shared expert (SwiGLU) for every token, with a separate gate
    normalized  default of `norm_topk_prob`
    """

    norms: Literal["before", "after", "both"] = "before"
    qk_norm: Literal["", "head", "all"] = ""
    fused: bool = False
    """The files have fused qkv_proj and gate_up_proj."""
    qkv_bias: bool | None = None
    """Default of `qkv_bias`, whether q, k and v (not out) have biases; None: `attention_bias` applies to all four."""
    mlp_bias: bool = False
    """Whether `mlp_bias` is used."""
    windowed: Literal["", "all", "late", "even", "pattern", "unrotated"] = ""
    asks: bool = True
    window: int | None = None
    """Its default."""
    eps: float = 1e-6
    """Default of `rms_norm_eps`."""
    attention_multiplier: float | None = None
    """Its default; None: head_dim ** -0.5."""
    theta: float = 10000.0
    norm_offset: float = 0.0
    """Offset added to the weights of norms."""
    activation: str = "silu"
    experts: Literal["", "gate_proj", "w1", "stacked"] = ""
    shared: bool = False
    normalized: bool = False


FAMILIES = {
    "gemma3_text": Family(
        norms="both",
        qk_norm="head",
        windowed="pattern",
        asks=False,
        window=4096,
        theta=1e6,
        norm_offset=1.0,
        activation="gelu_pytorch_tanh",
    ),
    "granite": Family(mlp_bias=True, attention_multiplier=1.0),
    "granitemoe": Family(attention_multiplier=1.0, experts="stacked", normalized=True),
    "llama": Family(mlp_bias=True),
    "mistral": Family(windowed="all", asks=False, window=4096),
    "mixtral": Family(qkv_bias=False, windowed="all", asks=False, eps=1e-5, theta=1e6, experts="w1", normalized=True),
    "olmo2": Family(norms="after", qk_norm="all", eps=1e-5),
    "olmoe": Family(qk_norm="all", eps=1e-5, experts="gate_proj"),
    "phi3": Family(fused=True, windowed="all", asks=False, eps=1e-5),
    "qwen2": Family(qkv_bias=True, windowed="late", window=4096),
    "qwen2_moe": Family(qkv_bias=True, windowed="even", window=4096, experts="gate_proj", shared=True),
    "qwen3": Family(qk_norm="head", windowed="late", window=4096),
    "qwen3_moe": Family(qk_norm="head", windowed="all", window=4096, experts="gate_proj"),
    "smollm3": Family(mlp_bias=True, windowed="unrotated", theta=2e6),
}
"""model_type -> its family."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `width` elements of each head. `kind`: default, linear or llama3; the last four
    fields are for llama3."""

    theta: float
    width: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class LayerPlan:
    """Settings of a layer: rotation (None: no positions), window (0: full attention), whether its MLP is a mixture of
    experts."""

    rope: Rope | None
    window: int
    experts: bool


@dataclass(frozen=True)
class Experts:
    """Mixture of experts (Shazeer et al. 2017): each token uses `chosen` of `count` SwiGLUs of width `intermediate`,
    weighted by the softmax of the router, over the chosen ones if `normalized`. `shared`: width of the shared one."""

    count: int
    chosen: int
    intermediate: int
    normalized: bool
    shared: int


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family (RMSNorm, rotary, grouped-query attention, gated MLP). Sizes in elements."""

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
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    plan: tuple[LayerPlan, ...]
    experts: Experts | None
    embedding_scale: float
    attention_scale: float
    residual_scale: float
    logits_scale: float

    @property
    def traits(self) -> Family:
        """The family of this model."""
        return FAMILIES[self.family]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def parameters(self) -> int:
        """Number of weights, without biases and norms."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + sum(attention + self._mlp_parameters(layer.experts) for layer in self.plan)

    def _mlp_parameters(self, sparse: bool) -> int:
        if sparse and self.experts is not None:
            e = self.experts
            return (e.count * (3 * e.intermediate + 1) + 3 * e.shared + bool(e.shared)) * self.hidden
        return 3 * self.hidden * self.intermediate

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of keys and values per token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


def read_model_config(directory: Path) -> ModelConfig:
    """Read `directory/config.json`. Raises UserError if it is missing, malformed or of an unsupported family."""
    path = directory / "config.json"
    try:
        with reading(path, "set --model-path to a model directory"):
            raw = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON", why=str(error)) from None
    try:
        return _convert(raw)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path} does not describe a usable model", why=f"{type(error).__name__}: {error}") from None


def _convert(raw: dict[str, Any]) -> ModelConfig:
    family = raw.get("model_type")
    traits = FAMILIES.get(family) if isinstance(family, str) else None
    if family is None or traits is None:
        raise UserError(f"model type {family!r} is not supported", todo="use one of " + ", ".join(FAMILIES))
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or traits.activation
    if activation != traits.activation:
        raise UserError(f"activation {activation!r} is not supported", todo=f"use a model with {traits.activation}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"):
        if raw.get(name):
            raise UserError(f"{name} is not supported", todo="use a model without it")
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    head_dim = int(raw.get("head_dim") or hidden // heads)
    bias = bool(raw.get("attention_bias", False))
    gemma = family == "gemma3_text"
    config = ModelConfig(
        family=family,
        vocab=int(raw["vocab_size"]),
        hidden=hidden,
        intermediate=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        context=int(raw["max_position_embeddings"]),
        eps=float(raw.get("rms_norm_eps", traits.eps)),
        tied=bool(raw.get("tie_word_embeddings", gemma or family == "smollm3")),
        qkv_bias=bias if traits.qkv_bias is None else bool(raw.get("qkv_bias", traits.qkv_bias)),
        o_bias=bias if traits.qkv_bias is None else False,
        mlp_bias=traits.mlp_bias and bool(raw.get("mlp_bias", False)),
        plan=_plan(raw, traits, head_dim),
        experts=_experts(raw, traits) if traits.experts else None,
        embedding_scale=hidden**0.5 if gemma else float(raw.get("embedding_multiplier", 1.0)),
        attention_scale=float(raw["query_pre_attn_scalar"]) ** -0.5
        if gemma
        else float(raw.get("attention_multiplier") or traits.attention_multiplier or head_dim**-0.5),
        residual_scale=float(raw.get("residual_multiplier", 1.0)),
        logits_scale=1 / float(raw.get("logits_scaling", 1.0)),
    )
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise ValueError("num_attention_heads must be a multiple of num_key_value_heads, and head_dim must be even")
    return config


def _experts(raw: dict[str, Any], traits: Family) -> Experts:
    return Experts(
        count=int(raw.get("num_experts") or raw["num_local_experts"]),
        chosen=int(raw["num_experts_per_tok"]),
        intermediate=int(raw.get("moe_intermediate_size") or raw["intermediate_size"]),
        normalized=bool(raw.get("norm_topk_prob", traits.normalized)),
        shared=int(raw["shared_expert_intermediate_size"]) if traits.shared else 0,
    )


def _plan(raw: dict[str, Any], traits: Family, head_dim: int) -> tuple[LayerPlan, ...]:
    layers = range(int(raw["num_hidden_layers"]))
    window = int(raw.get("sliding_window", traits.window) or 0)
    if not traits.windowed or (traits.asks and not raw.get("use_sliding_window")):
        window = 0
    kinds = raw.get("layer_types")
    late, pattern = int(raw.get("max_window_layers", 28)), int(raw.get("sliding_window_pattern", 6))
    rotated = raw.get("no_rope_layers") or [(i + 1) % int(raw.get("no_rope_layer_interval", 4)) for i in layers]
    given = raw.get("rope_parameters") or {}
    plan = []
    for i in layers:
        if kinds and traits.windowed != "all":
            slides = kinds[i] == "sliding_attention"
        else:
            slides = {
                "all": True,
                "late": i >= late,
                "even": not i % 2 and i < late,
                "pattern": bool((i + 1) % pattern),
                "unrotated": not rotated[i],
                "": False,
            }[traits.windowed]
        local = traits.windowed == "pattern" and slides
        # gemma3: transformers 5 has one set of rope_parameters per kind of layer
        own = given.get("sliding_attention" if local else "full_attention")
        scaled = {"rope_theta": raw.get("rope_local_base_freq", 10000.0)} if local and not own else own
        rope: Rope | None = _rope({**raw, "rope_parameters": scaled} if scaled else raw, traits, head_dim)
        if raw["model_type"] == "smollm3" and not rotated[i]:
            rope = None
        sparse = i not in (raw.get("mlp_only_layers") or []) and not (i + 1) % int(raw.get("decoder_sparse_step", 1))
        plan.append(LayerPlan(rope, window if slides else 0, bool(traits.experts) and sparse))
    return tuple(plan)


def _rope(raw: dict[str, Any], traits: Family, head_dim: int) -> Rope:
    # transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise UserError(f"rotary scaling {kind!r} is not supported", todo="use default, linear or llama3")
    share = given.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    return Rope(
        theta=float(given.get("rope_theta") or raw.get("rope_theta") or traits.theta),
        width=int(head_dim * float(share)),
        kind=kind,
        factor=float(given.get("factor", 1.0)),
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        original_length=int(given.get("original_max_position_embeddings", 8192)),
    )
