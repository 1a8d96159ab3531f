"""The critic: a value for the state before each trained token, with its own backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from learner.config.model import CriticSettings, LoraSettings, ModelSettings
from learner.engine import DeepSpeedEngine
from learner.model.loading import load_settled
from learner.model.policy import ValueHead, backbone, hidden_states
from learner.model.stored_weights import StoredWeights


class ValueModel(torch.nn.Module):
    """A base model of transformers and a linear head; without the language model's output layer."""

    def __init__(self, backbone: Any, width: int, stored: StoredWeights | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        self.stored = stored
        self.head = ValueHead(width, backbone.dtype)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, document_ids: torch.Tensor | None, index: torch.Tensor
    ) -> torch.Tensor:
        """Return [N] float32: values of the states at `index`, each computed from the tokens before its token.

        Inputs as in `PolicyModel.forward`.
        """
        values: torch.Tensor = self.head(hidden_states(self.backbone, ids, positions, document_ids)[index])
        return values


def load_critic(
    run_model: Path,
    critic: CriticSettings,
    model: ModelSettings,
    *,
    packed: bool = True,
    shared: bool = False,
    sharded: bool = False,
) -> ValueModel:
    """Return the critic before training: the model in `critic.model` or `run_model`, with a head of zeros, on the CPU.

    Without adapters: all of it is trained. `sharded` as `load_settled`. Raises UserError as `load_policy` does.
    """
    directory = critic.model or run_model
    settings = model.model_copy(update={"lora": LoraSettings()})
    causal = load_settled(directory, settings, packed=packed, shared=shared, sharded=sharded)
    return ValueModel(backbone(causal), causal.get_output_embeddings().weight.shape[1], causal.stored)


class Critic:
    """A value model with its own optimiser, over the same packed rows as the policy.

    updates_per_step  optimiser updates per step, for a warm-up counted in steps
    """

    def __init__(self, engine: DeepSpeedEngine, settings: CriticSettings, *, updates_per_step: int) -> None:
        self.engine, self.settings = engine, settings
        self._warmup = settings.warmup_steps * updates_per_step

    @property
    def is_warming_up(self) -> bool:
        """Return whether only the critic is trained."""
        return self.engine.updates < self._warmup
