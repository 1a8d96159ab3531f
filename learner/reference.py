"""The frozen reference: a copy of the initial policy that scores micro-batches and never learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from learner.config_model import ModelSettings
from learner.model import load_policy


class FrozenReference:
    """The model in a directory, on one device, whole on every rank."""

    def __init__(self, directory: Path, settings: ModelSettings, device: torch.device) -> None:
        self._module = load_policy(directory, settings).to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def logprobs(self, *inputs: Any) -> torch.Tensor:
        """[N] float32; takes what `PolicyModel.forward` takes."""
        scores: torch.Tensor = self._module(*inputs).logprobs
        return scores
