"""The seam to algorithms: outcomes in, advantages out; token scores in, a loss out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from learner.advantages import Outcomes
from learner.aggregation import Aggregation


@dataclass(frozen=True)
class TokenInputs:
    """What a loss sees of one micro-batch: N trained tokens, all tensors [N].

    logprobs   float32 of the policy being trained, with gradient
    entropy    float32 of its distributions, with gradient where `needs_entropy_gradient`
    behaviour  float32 log-probs when the tokens were sampled
    old        float32 log-probs of the proximal policy
    reference  float32 log-probs of the frozen reference, None where the algorithm does not ask for one
    advantages float32
    weights    float32, share of each token in the loss of the whole batch (`learner.aggregation`)
    mask       bool, False only in dummies that fill up a rank
    trajectory int64, number of the token's trajectory in the batch
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    behaviour: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor | None
    advantages: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor
    trajectory: torch.Tensor


@dataclass(frozen=True)
class LossOutput:
    """The micro-batch's share in the loss of the batch, and what is to be reported of it.

    loss    scalar with gradient; the shares of all micro-batches add up to the loss of the batch
    sums    scalars without gradient, added up over the batch and divided by its number of trained tokens
    maxima  scalars without gradient, of which the largest in the batch is reported
    """

    loss: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """One way to learn from outcomes.

    aggregation, aggregation_length  how token losses become one number (`learner.aggregation`)
    epochs                           optimiser updates on each batch
    needs_reference                  whether `loss` reads `TokenInputs.reference`
    needs_entropy_gradient           whether the entropy is part of the loss
    recomputes_old                   whether the proximal policy is the learner's own, instead of the engines'
    """

    aggregation: Aggregation
    aggregation_length: int
    epochs: int
    needs_reference: bool
    needs_entropy_gradient: bool
    recomputes_old: bool

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """[n] float64, one for each trajectory; 0 for those that do not vote."""
        ...

    def loss(self, inputs: TokenInputs) -> LossOutput:
        """The loss of one micro-batch; no token of it may depend on another micro-batch."""
        ...
