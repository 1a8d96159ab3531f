"""What kinds of models the learner takes, judged by their configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protocol.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWED = ("gemma2", "gemma3_text", "mistral", "phi3", "qwen2", "qwen3")
"""Model types whose sliding windows the tests know: few tokens would not show a window of thousands."""


def refuse_kind(directory: Path, config: Any, attention: str) -> None:
    """Raises UserError for what is no causal language model of text, or would not be computed as it was trained."""
    other = next((name for name in ("vision_config", "audio_config") if getattr(config, name, None)), None)
    if config.is_encoder_decoder or other:
        what = "an encoder and a decoder" if config.is_encoder_decoder else f"a {other}"
        raise UserError(
            f"{directory} holds a {config.model_type} model with {what}",
            why="only causal language models of text are trained",
            todo="use a model that AutoModelForCausalLM loads, without other parts",
        )
    if attention != "eager" and getattr(config, "attn_logit_softcapping", None):
        raise UserError(
            f"{directory} holds a {config.model_type} model, which caps its attention scores",
            why=f"attention {attention} would leave the cap out without a word",
            todo="set learner.model.attention to eager",
        )


def layer_kinds(config: Any) -> frozenset[str]:
    """Kinds of attention in the layers of a model with this configuration."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return frozenset(kinds)
    # Without a list of layers there is one kind: Mistral's and Phi 3's say so by the window alone.
    return frozenset([FULL if getattr(config, "sliding_window", None) is None else SLIDING])


def refuse_packing(directory: Path, config: Any) -> None:
    """Raises UserError for a model into whose rows trajectories cannot be packed, by the kinds of its layers."""
    kinds, kind = layer_kinds(config), config.model_type
    if kinds - {FULL, SLIDING} or (SLIDING in kinds and kind not in WINDOWED):
        raise no_packing(directory, kind, f"it has layers of {', '.join(sorted(kinds))}")


def no_packing(directory: Path, kind: str, why: str) -> UserError:
    """The error for a model that needs a row for each trajectory."""
    return UserError(
        f"{directory} holds a {kind} model, into whose rows trajectories cannot be packed",
        why=why,
        todo="set learner.batch.row_tokens to 0",
    )


def without_dropout(config: Any) -> None:
    """Sets every dropout of a configuration to 0: dropout would make the ratio to the sampler's policy noise."""
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, name, 0.0)
