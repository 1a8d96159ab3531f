"""Divergences of the policy from a reference (pure torch): one file per family."""

from learner.algorithms.kl.controller import AdaptiveKl, FixedKl, KlController
from learner.algorithms.kl.estimators import (
    CAP,
    LOG_RATIO_LIMIT,
    KlKind,
    clamped,
    cut,
    kl_estimate,
    log_ratio,
    penalised,
    require_mask,
)
from learner.algorithms.kl.exact import topk_forward_kl, topk_reverse_kl

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
