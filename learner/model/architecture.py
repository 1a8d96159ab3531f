"""Model kinds that the learner supports, determined from their configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from protocol.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWED = ("gemma2", "gemma3_text", "gpt_oss", "mistral", "phi3", "qwen2", "qwen3")
"""Model types whose sliding windows are tested: a short check cannot reveal a window of thousands of tokens."""
EAGER_ONLY = (
    *("bloom", "codegen", "deepseek_v4", "falcon_mamba", "gpt_neo", "gpt_oss", "gptj", "mamba", "mamba2", "mpt"),
    *("recurrent_gemma", "rwkv", "xglm", "xlstm"),
)
"""Causal models without torch's fused attention in transformers, known before loading. For other models the check at
load finds out."""
RECURRENT = ("falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "rwkv", "xlstm")
"""Causal models with a recurrent state: their configuration does not always list their layer kinds."""


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
        return frozenset(kinds)
    # Without a list of layers there is one kind: Mistral and Phi 3 set only the window.
    return frozenset([FULL if getattr(config, "sliding_window", None) is None else SLIDING])


def refuse_packing(directory: Path, config: Any) -> None:
    """Raise UserError if the model's layer kinds do not allow several trajectories in one row."""
    kinds, kind = layer_kinds(config), config.model_type
    if kind in RECURRENT:
        raise no_packing(directory, kind, "its layers carry a state from one token to the next")
    if kinds - {FULL, SLIDING} or (SLIDING in kinds and kind not in WINDOWED):
        raise no_packing(directory, kind, f"it has layers of {', '.join(sorted(kinds))}")


def no_packing(directory: Path, kind: str, why: str) -> UserError:
    """Return the error for a model that needs one row per trajectory."""
    return UserError(
        f"{directory} contains a {kind} model, which cannot compute several trajectories in one row",
        why=why,
        todo="set learner.batch.row_tokens to 0 and learner.batch.share_prompts to false",
    )


def without_dropout(config: Any) -> None:
    """Set every dropout of a configuration to 0: dropout would add noise to the ratio to the engines' policy."""
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, name, 0.0)
