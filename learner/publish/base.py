"""The seam to the transport of weights: a version and its tensors in, what engines must be told out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Protocol

from protocol.errors import ForayError
from protocol.messages import WeightUpdate
from protocol.versions import PolicyVersion

if TYPE_CHECKING:
    import torch


class BadWeights(ForayError):
    """A tensor is not finite: these weights must never reach an engine."""


class Publisher(Protocol):
    """A transport. What it returns is announced by the learner, fenced; until then no engine knows of it."""

    def publish(self, version: PolicyVersion, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate:
        """Makes `version` available. weights: Hugging Face name -> CPU tensor. Raises BadWeights, OSError."""
        ...

    def collect(self, in_use: Collection[PolicyVersion]) -> None:
        """Removes old versions, but for the newest few and those in use."""
        ...
