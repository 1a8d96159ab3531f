"""The critic: a value for the state before each trained token, by a backbone of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from learner.config_model import CriticSettings, LoraSettings, ModelSettings
from learner.model import PolicyModel, ValueHead, hidden_states, load_causal
from learner.selfcheck import settle_attention


class ValueModel(torch.nn.Module):
    """A base model of transformers and a linear head; the output layer of the language model is left out."""

    def __init__(self, backbone: Any, width: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = ValueHead(width, backbone.dtype)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor | None, index: torch.Tensor
    ) -> torch.Tensor:
        """[N] float32: values of the states that `index` names, each knowing only what comes before its token.

        Inputs as those of `PolicyModel.forward`.
        """
        values: torch.Tensor = self.head(hidden_states(self.backbone, ids, positions, documents)[index])
        return values


def load_critic(run_model: Path, critic: CriticSettings, model: ModelSettings, *, packed: bool = True) -> ValueModel:
    """The critic before training: the model in `critic.model` or `run_model`, with a head of zeros, on the CPU.

    Never with adapters: all of it is trained. Raises UserError as `load_policy` does.
    """
    directory = critic.model or run_model
    settings = model.model_copy(update={"lora": LoraSettings()})
    causal = load_causal(directory, settings)
    settle_attention(PolicyModel(causal, settings), directory, packed=packed)
    return ValueModel(causal.base_model, causal.get_output_embeddings().weight.shape[1])
