"""Token vectors to one text vector. Sums run in float32 whatever the model computes in."""

from __future__ import annotations

from typing import Any

import torch

from retriever.encoder.table import Pooling


def pool(mode: Pooling, output: Any, mask: torch.Tensor) -> torch.Tensor:
    """float32 [n, hidden] from a model's output and the mask [n, length] of its tokens.

    Texts start at position 0 (padding is on the right) and have at least one token. ValueError where the model has no
    `pooler_output` but it is asked for.
    """
    if mode == "pooler":
        pooled = getattr(output, "pooler_output", None)
        if pooled is None:
            raise ValueError("the model gives no pooler_output")
        return torch.as_tensor(pooled).float()
    states: torch.Tensor = output.last_hidden_state.float()
    if mode == "cls":
        return states[:, 0]
    if mode == "last":
        return states[torch.arange(len(states), device=states.device), mask.sum(dim=1) - 1]
    inside = mask.unsqueeze(-1).bool()
    if mode == "max":
        return states.masked_fill(~inside, float("-inf")).amax(dim=1)
    return states.masked_fill(~inside, 0.0).sum(dim=1) / mask.sum(dim=1, keepdim=True)


class Dense(torch.nn.Module):
    """One Dense step of sentence-transformers: linear, then an activation out of torch.nn."""

    def __init__(self, linear: torch.nn.Linear, activation: torch.nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = linear, activation

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """float32 [n, in] to [n, out]."""
        result: torch.Tensor = self.activation(self.linear(vectors))
        return result
