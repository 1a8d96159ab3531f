"""The policy as a module that scores trained tokens: transformers inside, block-diagonal attention around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from learner.architecture import refuse_kind, without_dropout
from learner.attention import attention_mask
from learner.config_model import CriticSettings, ModelSettings
from learner.lora import add_adapters
from learner.scoring import Scores, score_hidden, wide
from learner.selfcheck import refuse_differences
from protocol.errors import UserError

PREFIX = "causal."
"""What PolicyModel adds to the names of transformers."""


class ValueHead(torch.nn.Linear):
    """Hidden states [N, H] to values [N] float32; all 0 at first, so that the first targets are the rewards themselves.

    scale  multiplies the output. AdamW's steps do not depend on the size of a gradient, and the weights start at 0: so
           this is a learning rate of `scale` times the optimiser's.
    """

    def __init__(self, width: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(width, 1, dtype=dtype)
        self.scale = scale
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[N] float32 whatever the weights' dtype: bfloat16 would round values to two digits."""
        return self.scale * F.linear(wide(input), wide(self.weight), wide(self.bias)).squeeze(-1)


class PolicyModel(torch.nn.Module):
    """A causal language model of transformers; `forward` gives the scores of the trained tokens only.

    value_head         makes `Scores.values`, of the state before each trained token
    backbone_gradient  share of the values' gradient that goes on into the language model
    """

    def __init__(
        self,
        causal: Any,
        settings: ModelSettings,
        value_head: ValueHead | None = None,
        backbone_gradient: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.value_head = value_head
        self.backbone_gradient = backbone_gradient
        self.vocabulary: int = causal.config.vocab_size
        self.chunk_bytes = settings.logit_chunk_bytes

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        documents: torch.Tensor | None,
        index: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        entropy_gradient: bool,
        top: int = 0,
        at_ids: torch.Tensor | None = None,
    ) -> Scores:
        """Scores of the N trained tokens.

        ids, positions [R, L] int64; documents [R, L] int64 or None when no row holds more than one trajectory;
        index [N] int64 into the flattened rows, targets [N] int64, at_ids [N, k] int64.
        """
        hidden = hidden_states(self.causal.base_model, ids, positions, documents)[index]
        scores = score_hidden(
            hidden,
            targets,
            output_layer(self.causal),
            temperature=temperature,
            vocabulary=self.vocabulary,
            chunk_bytes=self.chunk_bytes,
            entropy_gradient=entropy_gradient,
            top=top,
            at_ids=at_ids,
        )
        if self.value_head is None:
            return scores
        apart = hidden.detach()
        return scores._replace(values=self.value_head(apart + self.backbone_gradient * (hidden - apart)))


def hidden_states(
    backbone: Any, ids: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor | None
) -> torch.Tensor:
    """[R * L, H]: the last hidden states of a base model of transformers, rows one after the other."""
    mask = None if documents is None else attention_mask(documents, backbone.config, backbone.dtype)
    output = backbone(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, return_dict=True)
    hidden: torch.Tensor = output.last_hidden_state.flatten(0, 1)
    return hidden


def output_layer(causal: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Hidden states to logits, with what some models do to them besides: a factor (Cohere, Granite), a cap (Gemma)."""
    head, config = causal.get_output_embeddings(), causal.config
    factor = getattr(config, "logit_scale", None) or 1.0
    if config.model_type.startswith("granite"):
        factor /= getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    if factor == 1.0 and cap is None:
        return head  # type: ignore[no-any-return]

    def project(hidden: torch.Tensor) -> torch.Tensor:
        logits = wide(head(hidden)) * factor
        return logits if cap is None else cap * torch.tanh(logits / cap)

    return project


def load_policy(
    directory: Path, settings: ModelSettings, *, packed: bool = True, critic: CriticSettings | None = None
) -> PolicyModel:
    """The model in `directory` (Hugging Face layout), on the CPU.

    packed  whether rows of several trajectories will be given to it
    critic  where it is to carry a value head
    Raises UserError when the model is missing, or is of a kind that would be scored wrongly.
    """
    causal = load_causal(directory, settings)
    policy = PolicyModel(causal, settings)
    refuse_differences(policy, directory, packed=packed)
    if settings.lora.rank:
        add_adapters(causal, settings.lora)
    if critic is not None and critic.backbone == "policy":
        width = causal.get_output_embeddings().weight.shape[1]
        policy.value_head = ValueHead(width, critic.head_lr_scale, causal.dtype)
        policy.backbone_gradient = critic.backbone_gradient
    return policy


def load_causal(directory: Path, settings: ModelSettings) -> Any:
    """transformers' own model, without dropout. Raises UserError when it is missing or no text model."""
    if not (directory / "config.json").is_file():
        raise UserError(
            f"there is no model in {directory}",
            why="run.model must be a directory with config.json, weights and tokenizer",
            todo="give run.model=DIR",
        )
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar in a log file is noise
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    refuse_kind(directory, config, settings.attention)
    without_dropout(config)
    try:
        causal = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=getattr(torch, settings.dtype),
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation=settings.attention,
        )
    except ValueError as error:  # no such implementation of this architecture, or no causal model of it
        raise UserError(
            f"transformers cannot load {directory} ({config.model_type})",
            why=str(error)[:400],
            todo="try learner.model.attention=eager, or another model",
        ) from None
    if settings.gradient_checkpointing:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    return causal
