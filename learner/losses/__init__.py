"""Losses of tokens, to be minimised (pure torch): one file a family."""

from learner.losses.entropy import entropy_sum
from learner.losses.offpolicy import (
    Level,
    Measure,
    RejectionLevel,
    WeightSums,
    at_level,
    effective_sample_size,
    keep_mask,
    masked,
    normalised,
    opsm,
    truncated,
    veto,
    weight_sums,
)
from learner.losses.proximal import proximal_interpolated
from learner.losses.second_moment import second_moment_bound
from learner.losses.segments import segment_count, segment_max, segment_mean, segment_sum
from learner.losses.sequence import gmpo, gspo
from learner.losses.surrogate import (
    Surrogate,
    clip_gain,
    clipped_surrogate,
    log_ratio,
    plain,
    weighted_sum,
)
from learner.losses.trust_region import Divergence, dppo, moved_too_far
from learner.losses.value import (
    ValueLoss,
    VarianceSums,
    explained_variance,
    value_loss,
    variance_sums,
)
from learner.losses.weighted import cispo, reinforce, sapo

__all__ = [
    "Divergence",
    "Level",
    "Measure",
    "RejectionLevel",
    "Surrogate",
    "ValueLoss",
    "VarianceSums",
    "WeightSums",
    "at_level",
    "cispo",
    "clip_gain",
    "clipped_surrogate",
    "dppo",
    "effective_sample_size",
    "entropy_sum",
    "explained_variance",
    "gmpo",
    "gspo",
    "keep_mask",
    "log_ratio",
    "masked",
    "moved_too_far",
    "normalised",
    "opsm",
    "plain",
    "proximal_interpolated",
    "reinforce",
    "sapo",
    "second_moment_bound",
    "segment_count",
    "segment_max",
    "segment_mean",
    "segment_sum",
    "truncated",
    "value_loss",
    "variance_sums",
    "veto",
    "weight_sums",
    "weighted_sum",
]
