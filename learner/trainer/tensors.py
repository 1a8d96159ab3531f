"""Micro-batches on the device, and the forward results of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from learner.algorithms.base import TokenAdvantages, TokenScores
from learner.data.batch import MicroBatch
from learner.data.packing import holds_several


@dataclass(frozen=True)
class MicroBatchTensors:
    """A micro-batch on the device; fields as in `MicroBatch`. documents: None if no row contains two trajectories."""

    ids: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor | None
    index: torch.Tensor
    targets: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    rewards: torch.Tensor
    outcome: torch.Tensor
    lags: torch.Tensor
    trajectory: torch.Tensor
    turn: torch.Tensor
    end: torch.Tensor
    mask: torch.Tensor
    temperature: float

    @classmethod
    def of(cls, micro_batch: MicroBatch, temperature: float, device: torch.device) -> MicroBatchTensors:
        """Return the arrays as tensors."""
        moved = {
            name: torch.from_numpy(getattr(micro_batch, name)).to(device) for name in MicroBatch.__dataclass_fields__
        }
        packed = holds_several(micro_batch.documents, micro_batch.positions)
        documents = moved.pop("documents") if packed else None
        moved.pop("documents", None)
        return cls(**moved, documents=documents, mask=moved["weights"] > 0, temperature=temperature)

    @property
    def with_ends(self) -> MicroBatchTensors:
        """Return a copy whose `index` also has the states after truncated trajectories, behind the N tokens; their
        `targets` are token 0 and are not scored.
        """
        states = torch.unique(self.end[self.end >= 0])
        targets = torch.cat([self.targets, torch.zeros_like(states)])
        return replace(self, index=torch.cat([self.index, states]), targets=targets)

    def split_ends(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split the values of `with_ends` into [N] values of the tokens and [N] of the state after each one's
        trajectory, 0 where not requested.
        """
        known = self.end >= 0
        which = torch.unique(self.end[known], return_inverse=True)[1]
        own, after = values[: len(self.index)], values[len(self.index) :]
        last = torch.zeros_like(own)
        last[known] = after[which]
        return own, last

    def token_columns(self, **values: torch.Tensor | None) -> dict[str, np.ndarray[Any, Any] | None]:
        """Return [n] arrays of the tokens with a weight, for `TokenValues.add`: where they are, and `values` [N]."""
        position = self.positions.flatten()[self.index] + 1
        columns = {"trajectory": self.trajectory, "position": position, **values}
        return {
            name: None if column is None else column.detach()[self.mask].cpu().numpy()
            for name, column in columns.items()
        }

    @property
    def model_inputs(self) -> tuple[Any, ...]:
        """Return the first arguments of a model's forward pass."""
        return self.ids, self.positions, self.documents, self.index

    @property
    def policy_inputs(self) -> tuple[Any, ...]:
        """Return the arguments of a policy's forward pass, up to the entropy gradient."""
        return *self.model_inputs, self.targets, self.temperature


@dataclass(frozen=True)
class ForwardResult:
    """One micro-batch and its forward results. Fields as in `TokenScores` and `TopTokens`; top [N, k] int64."""

    tensors: MicroBatchTensors
    old: torch.Tensor | None = None
    values: torch.Tensor | None = None
    last_values: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    top: torch.Tensor | None = None
    reference_top: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    @property
    def token_scores(self) -> TokenScores:
        """Return the input of `Algorithm.compute_advantages`."""
        t = self.tensors
        return TokenScores(
            rewards=t.rewards,
            advantages=t.advantages,
            behaviour=t.behaviour,
            old=self.old,
            reference=self.reference,
            values=self.values,
            last_values=self.last_values,
            mask=t.mask,
            trajectory=t.trajectory,
            turn=t.turn,
        )


@dataclass(frozen=True)
class ForwardBatch:
    """The forward results of a rank batch, by minibatch."""

    minibatches: tuple[tuple[ForwardResult, ...], ...]

    @property
    def flat(self) -> list[TokenScores]:
        """Return every micro-batch, in order."""
        return [result.token_scores for part in self.minibatches for result in part]

    def with_advantages(self, advantages: Sequence[TokenAdvantages]) -> ForwardBatch:
        """Return a copy with advantages and returns, one for each of `flat`."""
        given = iter(advantages)
        return ForwardBatch(
            tuple(tuple(_with_advantages(result, next(given)) for result in part) for part in self.minibatches)
        )


def _with_advantages(result: ForwardResult, advantages: TokenAdvantages) -> ForwardResult:
    return replace(result, advantages=advantages.advantages, returns=advantages.returns)
