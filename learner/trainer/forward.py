"""Passes without gradient over a rank's batch before its first update: by policy, critic and reference."""

from __future__ import annotations

from dataclasses import replace

import torch

from learner.algorithms.base import Algorithm, Needs
from learner.data.batch import Share
from learner.trainer.critic import Critic
from learner.trainer.models import Models
from learner.trainer.tensors import Prepared, ScoredShare, Tensors


def score_share(share: Share, models: Models, algorithm: Algorithm) -> ScoredShare:
    """Scores of every micro-batch by whoever the algorithm needs; collective at ZeRO stage 3.

    One model after the other over the whole share, so that a model may leave the device while it is not used.
    """
    needs = algorithm.needs
    parts = [[Prepared(Tensors.of(m, share.temperature, models.device)) for m in part] for part in share.parts]
    if _policy_is_asked(needs, models, updates=algorithm.epochs * len(parts)):
        parts = [[_by_policy(p, models, needs) for p in part] for part in parts]
    if models.critic is not None:
        parts = [[_by_critic(p, models.critic) for p in part] for part in parts]
    if models.reference is not None:
        models.reference.wake()
        parts = [[_by_reference(p, models, needs) for p in part] for part in parts]
        models.reference.sleep()
    return ScoredShare(tuple(tuple(part) for part in parts))


def _policy_is_asked(needs: Needs, models: Models, *, updates: int) -> bool:
    # With a single update the proximal policy is what the update's own forward pass says, cut off from the gradient.
    heads = needs.values and models.critic is None
    return (needs.old and updates > 1) or needs.old_to_judge or heads or (needs.top > 0 and needs.top_of == "policy")


@torch.no_grad()
def _by_policy(prepared: Prepared, models: Models, needs: Needs) -> Prepared:
    t, top = prepared.tensors, needs.top if needs.top_of == "policy" else 0
    if not needs.values or models.critic is not None:
        scores = models.policy.forward(*t.scored, False, top)
        return replace(prepared, old=scores.logprobs, top=scores.top)
    scores, n = models.policy.forward(*t.with_ends.scored, False, top), len(t.index)
    values, last = t.split_ends(scores.values)
    likeliest = None if scores.top is None else scores.top[:n]
    return replace(prepared, old=scores.logprobs[:n], top=likeliest, values=values, last_values=last)


def _by_critic(prepared: Prepared, critic: Critic) -> Prepared:
    t = prepared.tensors
    values, last = t.split_ends(critic.values(*t.with_ends.read))
    return replace(prepared, values=values, last_values=last)


def _by_reference(prepared: Prepared, models: Models, needs: Needs) -> Prepared:
    assert models.reference is not None
    top = needs.top if needs.top_of == "reference" else 0
    scores = models.reference.scores(*prepared.tensors.scored, False, top=top, at_ids=prepared.top)
    chosen = scores.top if top else prepared.top
    return replace(prepared, reference=scores.logprobs, top=chosen, reference_top=scores.at)
