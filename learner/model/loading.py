"""Load the policy from a Hugging Face directory, and map its weights to that layout's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from learner.config.model import CriticSettings, ModelSettings
from learner.engine.accelerator import without_gpu
from learner.model.architecture import refuse_settings, without_dropout
from learner.model.lora import add_adapters
from learner.model.parity_check import settle_attention
from learner.model.policy import PolicyModel
from protocol.errors import UserError
from protocol.runtime.torch_safety import refuse_pickled


def load_policy(
    directory: Path, settings: ModelSettings, *, packed: bool = True, critic: CriticSettings | None = None
) -> PolicyModel:
    """Return the model in `directory` (Hugging Face layout), on the CPU.

    packed  whether rows will contain several trajectories
    critic  set if the model gets a value head (critic.backbone policy)
    Raises UserError if the model is missing, or would be scored wrongly.
    """
    causal = load_causal(directory, settings, packed=packed)
    policy = PolicyModel(causal, settings, critic)
    settle_attention(policy, directory, packed=packed)
    if settings.lora.rank:
        add_adapters(causal, settings.lora)
    return policy


def load_causal(directory: Path, settings: ModelSettings, *, packed: bool = False) -> Any:
    """Return transformers' model without dropout. Raises UserError if it is missing, not a text model, or does not
    support `packed` rows."""
    if not (directory / "config.json").is_file():
        raise UserError(
            f"no model found in {directory}",
            why="run.model must be a directory with config.json, weights and tokenizer",
            todo="set run.model=DIR",
        )
    refuse_pickled(directory)
    without_gpu()
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # progress bars clutter log files
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    refuse_settings(directory, config, settings.attention, packed=packed)
    without_dropout(config)
    try:
        causal = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=getattr(torch, settings.dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation=settings.attention,
        )
    except ValueError as error:  # no such attention for this architecture, or no causal model of it
        raise UserError(
            f"transformers cannot load {directory} ({config.model_type})",
            why=str(error)[:400],
            todo="try learner.model.attention=eager, or another model",
        ) from None
    if settings.gradient_checkpointing:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    return causal


def as_saved(causal: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `weights` of `causal` with the names and shapes of `save_pretrained`, which engines read.

    transformers stacks the weights of experts, which a checkpoint keeps separate: one tensor may become several, not
    copied if contiguous. For most models nothing changes.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in weights:
        for saved, part in revert_weight_conversion(causal, {name: tensor}).items():
            yield saved, part.contiguous()
