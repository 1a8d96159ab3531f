"""Model kinds that the learner supports, determined from their configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from protocol.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWED = (
    *("afmoe", "cohere2", "cwm", "exaone4", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss"),
    *("ministral", "mistral", "mixtral", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
    *("starcoder2", "vaultgemma"),
)
"""Model types whose sliding windows are tested (docs/models.md)."""
EAGER_ONLY = (
    *("bloom", "codegen", "deepseek_v4", "falcon_mamba", "gpt_neo", "gpt_oss", "gptj", "mamba", "mamba2", "mpt"),
    *("rwkv", "xglm", "xlstm"),
)
"""Causal models without torch's fused attention in transformers, known before loading. For other models the check at
load finds out."""
RECURRENT = (
    *("bamba", "falcon_h1", "falcon_mamba", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h"),
    *("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba"),
    "zamba2",
)
"""Causal models with a recurrent state: their config.json does not always list their layer kinds."""
UNSUITABLE = {"phimoe": "its router samples the experts of a token in training mode, so log-probs change at every call"}
"""Model types that the learner cannot train, with the reason."""
ALIBI_TWICE = "transformers adds its position bias (alibi) twice with eager attention, so that no reference is certain"


def refuse_settings(directory: Path, config: Any, attention: str, *, packed: bool) -> None:
    """Raise one UserError for what `refuse_kind` and, if rows are `packed`, `refuse_packing` report, naming all
    settings that the model needs."""
    found = []
    for refuses in (partial(refuse_kind, attention=attention), *((refuse_packing,) if packed else ())):
        try:
            refuses(directory, config)
        except UserError as error:
            found.append(error)
    if len(found) == 2:
        first, second = found
        why = f"{first.why}; and trajectories cannot be packed into its rows: {second.why}"
        raise UserError(first.what, why=why, todo=f"{first.todo}, and {second.todo}")
    if found:
        raise found[0]


def refuse_kind(directory: Path, config: Any, attention: str) -> None:
    """Raise UserError unless it is a causal language model of text that is computed as it was trained."""
    if quantised := getattr(config, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UserError(
            f"{directory} contains a quantised {config.model_type} model ({method or 'quantization_config'})",
            why="only weights of float32, float16 or bfloat16 can be trained and sent to engines",
            todo="use the original checkpoint in bfloat16, or convert this one (transformers: model.dequantize())",
        )
    falcon = ALIBI_TWICE if config.model_type == "falcon" and getattr(config, "alibi", False) else ""
    if why := UNSUITABLE.get(config.model_type, falcon):
        raise UserError(
            f"{directory} contains a {config.model_type} model, which cannot be trained",
            why=why,
            todo="use a model of another type",
        )
    other = next((name for name in ("vision_config", "audio_config") if getattr(config, name, None)), None)
    if config.is_encoder_decoder or other:
        what = "an encoder and a decoder" if config.is_encoder_decoder else f"a {other}"
        raise UserError(
            f"{directory} contains a {config.model_type} model with {what}",
            why="only causal language models of text are supported",
            todo="use a text-only model that AutoModelForCausalLM loads",
        )
    if attention != "eager" and getattr(config, "attn_logit_softcapping", None):
        raise UserError(
            f"{directory} contains a {config.model_type} model, which caps its attention scores",
            why=f"attention {attention} would silently ignore the cap",
            todo="set learner.model.attention to eager",
        )
    if attention != "eager" and config.model_type in EAGER_ONLY:
        raise no_attention(directory, config.model_type, attention)


def no_attention(directory: Path, kind: str, attention: str) -> UserError:
    """Return the error for a model that transformers computes with eager attention only."""
    return UserError(
        f"{directory} contains a {kind} model, for which transformers does not support attention {attention}",
        why="transformers implements only eager attention for this type",
        todo="set learner.model.attention to eager",
    )


def layer_kinds(config: Any) -> frozenset[str]:
    """Return the kinds of attention in the layers of a model with this configuration."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return frozenset(FULL if kind == "attention" else kind for kind in kinds)
    if getattr(config, "attention_chunk_size", None):
        return frozenset(["chunked_attention"])
    # Without a list of layers there is one kind: Mistral and Phi 3 set only the window.
    return frozenset([FULL if getattr(config, "sliding_window", None) is None else SLIDING])


def length_limit(config: Any) -> int:
    """Return the longest sequence for which the rotary embedding of a configuration does not depend on the other
    sequences of a call; 0 if it never does. Reads the attributes of transformers' object or those of config.json.
    """
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    limits = [0]
    for rope in (given, *(part for part in given.values() if isinstance(part, dict))):
        kind, key = rope.get("rope_type", rope.get("type")), "original_max_position_embeddings"
        if kind == "longrope":
            limits.append(rope.get(key) or getattr(config, key, None) or config.max_position_embeddings)
        elif kind == "dynamic":
            limits.append(config.max_position_embeddings)
    return min(filter(None, limits), default=0)


def refuse_context(directory: Path | str, config: Any, context: int) -> None:
    """Raise UserError if sequences of `context` tokens would change the rotary embedding of others in their batch."""
    limit = length_limit(config)
    if limit and context > limit:
        raise UserError(
            f"{directory} contains a {config.model_type} model that cannot be trained on {context} tokens",
            why=f"beyond {limit} tokens its rotary embedding depends on the other sequences of a batch",
            todo=f"set rollout.episode.max_context to {limit} or less, or use a model with another rotary embedding",
        )


def refuse_packing(directory: Path, config: Any) -> None:
    """Raise UserError if the model's layer kinds do not allow several trajectories in one row."""
    kinds, kind = layer_kinds(config), config.model_type
    if kind in RECURRENT:
        raise no_packing(directory, kind, "its layers carry a state from one token to the next")
    if others := kinds - {FULL, SLIDING}:
        raise no_packing(directory, kind, f"it has layers of {', '.join(sorted(others))}")
    if SLIDING in kinds and kind not in WINDOWED:
        raise no_packing(directory, kind, "packed rows with the sliding windows of this type are not tested")


def no_packing(directory: Path, kind: str, why: str) -> UserError:
    """Return the error for a model that needs one row per trajectory."""
    return UserError(
        f"{directory} contains a {kind} model, which cannot compute several trajectories in one row",
        why=why,
        todo="set learner.batch.row_tokens to 0 and learner.batch.share_prompts to false",
    )


def no_sharing(directory: Path, kind: str, why: str) -> UserError:
    """Return the error for a model that cannot compute several trajectories behind one prompt."""
    return UserError(
        f"{directory} contains a {kind} model, which cannot share a prompt among trajectories",
        why=why,
        todo="set learner.batch.share_prompts to false",
    )


def without_dropout(config: Any) -> None:
    """Set every dropout and jitter of a configuration to 0: noise that the engines' policy does not have."""
    for name, value in list(vars(config).items()):
        if ("drop" in name or "jitter" in name) and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, name, 0.0)
