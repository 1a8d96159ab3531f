"""Losses of tokens, to be minimised (pure torch): one file a family."""

from learner.losses.surrogate import Surrogate, clipped_surrogate, importance_weight, log_ratio, weighted_sum

__all__ = ["Surrogate", "clipped_surrogate", "importance_weight", "log_ratio", "weighted_sum"]
