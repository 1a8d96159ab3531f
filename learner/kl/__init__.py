"""Divergences of the policy from a reference (pure torch): one file a family."""

from learner.kl.controller import AdaptiveKl, FixedKl, KlController
from learner.kl.estimators import KlKind, kl_estimate
from learner.kl.masked import CAP, LOG_RATIO_LIMIT, clamped, cut, log_ratio, require_mask
from learner.kl.reward import penalised
from learner.kl.topk import topk_forward_kl, topk_reverse_kl

__all__ = [
    "CAP",
    "LOG_RATIO_LIMIT",
    "AdaptiveKl",
    "FixedKl",
    "KlController",
    "KlKind",
    "clamped",
    "cut",
    "kl_estimate",
    "log_ratio",
    "penalised",
    "require_mask",
    "topk_forward_kl",
    "topk_reverse_kl",
]
