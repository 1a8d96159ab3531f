"""Divergences of the policy from a reference (pure torch): one file a family."""

from learner.kl.estimators import LOG_RATIO_LIMIT, kl_estimate

__all__ = ["LOG_RATIO_LIMIT", "kl_estimate"]
