"""Forward passes without gradient over a rank's batch before its first update: policy, critic and reference."""

from __future__ import annotations

from dataclasses import replace

import torch

from learner.algorithms.base import Algorithm, Requirements
from learner.data.batch import RankBatch
from learner.trainer.critic import Critic
from learner.trainer.models import Models
from learner.trainer.tensors import ForwardBatch, ForwardResult, MicroBatchTensors


def forward_batch(rank_batch: RankBatch, models: Models, algorithm: Algorithm) -> ForwardBatch:
    """Run the models that the algorithm needs over every micro-batch; collective at ZeRO stage 3.

    One model after the other over the whole rank batch, so that unused models can be offloaded.
    """
    requirements = algorithm.requirements
    minibatches = [
        [ForwardResult(MicroBatchTensors.of(m, rank_batch.temperature, models.device)) for m in minibatch]
        for minibatch in rank_batch.minibatches
    ]
    if _needs_policy_pass(requirements, models, updates=algorithm.epochs * len(minibatches)):
        minibatches = [[_policy_pass(p, models, requirements) for p in minibatch] for minibatch in minibatches]
    if models.critic is not None:
        minibatches = [[_critic_pass(p, models.critic) for p in minibatch] for minibatch in minibatches]
    if models.reference is not None:
        models.reference.onload()
        minibatches = [[_reference_pass(p, models, requirements) for p in minibatch] for minibatch in minibatches]
        models.reference.offload()
    return ForwardBatch(tuple(tuple(minibatch) for minibatch in minibatches))


def _needs_policy_pass(requirements: Requirements, models: Models, *, updates: int) -> bool:
    # With a single update the proximal policy is the update's own forward pass, detached.
    heads = requirements.values and models.critic is None
    return (
        (requirements.old and updates > 1)
        or requirements.old_for_advantages
        or heads
        or (requirements.top > 0 and requirements.top_of == "policy")
    )


@torch.no_grad()
def _policy_pass(result: ForwardResult, models: Models, requirements: Requirements) -> ForwardResult:
    t, top = result.tensors, requirements.top if requirements.top_of == "policy" else 0
    if not requirements.values or models.critic is not None:
        scores = models.policy.forward(*t.policy_inputs, False, top)
        return replace(result, old=scores.logprobs, top=scores.top)
    scores, n = models.policy.forward(*t.with_ends.policy_inputs, False, top), len(t.index)
    values, last = t.split_ends(scores.values)
    likeliest = None if scores.top is None else scores.top[:n]
    return replace(result, old=scores.logprobs[:n], top=likeliest, values=values, last_values=last)


def _critic_pass(result: ForwardResult, critic: Critic) -> ForwardResult:
    t = result.tensors
    values, last = t.split_ends(critic.values(*t.with_ends.model_inputs))
    return replace(result, values=values, last_values=last)


def _reference_pass(result: ForwardResult, models: Models, requirements: Requirements) -> ForwardResult:
    assert models.reference is not None
    top = requirements.top if requirements.top_of == "reference" else 0
    scores = models.reference.scores(*result.tensors.policy_inputs, False, top=top, at_ids=result.top)
    chosen = scores.top if top else result.top
    return replace(result, reference=scores.logprobs, top=chosen, reference_top=scores.at)
