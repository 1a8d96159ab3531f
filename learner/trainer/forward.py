"""Passes without gradient over a rank's batch before its first update: by policy, critic and reference."""

from __future__ import annotations

from dataclasses import replace

import torch

from learner.algorithms.base import Algorithm, Requirements
from learner.data.batch import RankBatch
from learner.trainer.critic import Critic
from learner.trainer.models import Models
from learner.trainer.tensors import ForwardBatch, ForwardResult, MicroBatchTensors


def forward_batch(share: RankBatch, models: Models, algorithm: Algorithm) -> ForwardBatch:
    """Scores of every micro-batch by whoever the algorithm needs; collective at ZeRO stage 3.

    One model after the other over the whole share, so that a model may leave the device while it is not used.
    """
    requirements = algorithm.requirements
    parts = [
        [ForwardResult(MicroBatchTensors.of(m, share.temperature, models.device)) for m in part]
        for part in share.minibatches
    ]
    if _policy_is_asked(requirements, models, updates=algorithm.epochs * len(parts)):
        parts = [[_by_policy(p, models, requirements) for p in part] for part in parts]
    if models.critic is not None:
        parts = [[_by_critic(p, models.critic) for p in part] for part in parts]
    if models.reference is not None:
        models.reference.wake()
        parts = [[_by_reference(p, models, requirements) for p in part] for part in parts]
        models.reference.sleep()
    return ForwardBatch(tuple(tuple(part) for part in parts))


def _policy_is_asked(requirements: Requirements, models: Models, *, updates: int) -> bool:
    # With a single update the proximal policy is what the update's own forward pass says, cut off from the gradient.
    heads = requirements.values and models.critic is None
    return (
        (requirements.old and updates > 1)
        or requirements.old_for_advantages
        or heads
        or (requirements.top > 0 and requirements.top_of == "policy")
    )


@torch.no_grad()
def _by_policy(prepared: ForwardResult, models: Models, requirements: Requirements) -> ForwardResult:
    t, top = prepared.tensors, requirements.top if requirements.top_of == "policy" else 0
    if not requirements.values or models.critic is not None:
        scores = models.policy.forward(*t.scored, False, top)
        return replace(prepared, old=scores.logprobs, top=scores.top)
    scores, n = models.policy.forward(*t.with_ends.scored, False, top), len(t.index)
    values, last = t.split_ends(scores.values)
    likeliest = None if scores.top is None else scores.top[:n]
    return replace(prepared, old=scores.logprobs[:n], top=likeliest, values=values, last_values=last)


def _by_critic(prepared: ForwardResult, critic: Critic) -> ForwardResult:
    t = prepared.tensors
    values, last = t.split_ends(critic.values(*t.with_ends.read))
    return replace(prepared, values=values, last_values=last)


def _by_reference(prepared: ForwardResult, models: Models, requirements: Requirements) -> ForwardResult:
    assert models.reference is not None
    top = requirements.top if requirements.top_of == "reference" else 0
    scores = models.reference.scores(*prepared.tensors.scored, False, top=top, at_ids=prepared.top)
    chosen = scores.top if top else prepared.top
    return replace(prepared, reference=scores.logprobs, top=chosen, reference_top=scores.at)
