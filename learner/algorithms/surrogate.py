"""What GRPO and its kin share: the clipped surrogate, the divergence from a reference, the entropy bonus."""

from __future__ import annotations

import torch

from learner.algorithms.base import LossOutput, TokenInputs
from learner.config_algorithm import SurrogateSettings
from learner.kl import kl_estimate
from learner.losses import Surrogate, clipped_surrogate, importance_weight, log_ratio, weighted_sum


class ClippedSurrogate:
    """loss = sum_i weight_i * (w_i * surrogate_i + kl_coefficient * kl_i - entropy_coefficient * entropy_i).

    w_i is 1 when the proximal policy is the behaviour policy: the surrogate's ratio then corrects for the sampler, and
    a second weight would correct twice.
    """

    def __init__(self, settings: SurrogateSettings) -> None:
        self.settings = settings
        self.aggregation = settings.aggregation
        self.aggregation_length = settings.aggregation_length
        self.epochs = settings.epochs
        self.needs_reference = settings.kl_coefficient > 0
        self.needs_entropy_gradient = settings.entropy_coefficient != 0
        self.recomputes_old = settings.old_logprobs == "recompute"

    def loss(self, inputs: TokenInputs) -> LossOutput:
        """The loss of one micro-batch (see the class)."""
        s, mask = self.settings, inputs.mask
        surrogate = clipped_surrogate(
            inputs.logprobs, inputs.old, inputs.advantages, mask, low=s.clip_low, high=s.clip_high
        )
        values = surrogate.loss
        if self.recomputes_old and s.importance_cap:
            values = values * importance_weight(inputs.old, inputs.behaviour, mask, s.importance_cap)
        total = weighted_sum(values, inputs.weights, mask)
        sums, maxima = self._report(inputs, surrogate)
        if s.entropy_coefficient:
            total = total - s.entropy_coefficient * weighted_sum(inputs.entropy, inputs.weights, mask)
        if inputs.reference is not None:
            divergence = kl_estimate(inputs.logprobs, inputs.reference, mask, s.kl_type)
            total = total + s.kl_coefficient * weighted_sum(divergence, inputs.weights, mask)
            sums["kl_reference"] = divergence.detach().sum()
        return LossOutput(total, sums, maxima)

    def _report(
        self, inputs: TokenInputs, surrogate: Surrogate
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        mask, logprobs = inputs.mask, inputs.logprobs.detach()
        # What the trainer and the engines disagree on: staleness and the numerics of two programs.
        gap = log_ratio(logprobs, inputs.behaviour, mask)
        sums = {
            "clip_fraction": surrogate.clipped.sum(),
            "ratio_mean": surrogate.ratio.sum(),
            "entropy": torch.where(mask, inputs.entropy.detach(), 0.0).sum(),
            "kl_behaviour": kl_estimate(inputs.behaviour, logprobs, mask, "k3").sum(),
            "logprob_gap": gap.abs().sum(),
        }
        return sums, {"ratio_max": surrogate.ratio.max(), "logprob_gap_max": gap.abs().max()}
