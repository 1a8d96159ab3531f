"""What kinds of models the learner takes, judged by their configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protocol.errors import UserError


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


def without_dropout(config: Any) -> None:
    """Sets every dropout of a configuration to 0: dropout would make the ratio to the sampler's policy noise."""
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, name, 0.0)
