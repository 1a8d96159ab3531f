"""One optimiser update of the policy, and one of the critic, with one part of a share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from learner.algorithms.base import Algorithm, LossOutput, TokenInputs, TopTokens
from learner.engine import Update
from learner.models import Models
from learner.scores import Prepared, ScoredShare
from learner.totals import Totals
from learner.valuing import value_output


@dataclass
class Learned:
    """What has come of the updates of a batch so far. applied: whether any of them moved the weights."""

    update: Update
    totals: Totals = field(default_factory=Totals)
    applied: bool = False
    facts: dict[str, float] = field(default_factory=dict)


def learn_part(number: int, share: ScoredShare, models: Models, algorithm: Algorithm, learned: Learned) -> None:
    """Gradients of every micro-batch of part `number`, then the update; collective. `learned` is brought up to date.

    While the critic warms up it alone is updated. An update whose gradient is not finite on any rank is not applied
    on any (`DeepSpeedEngine.step`).
    """
    warming = models.critic is not None and models.critic.warms_up
    for prepared in share.parts[number]:
        if not warming:
            output = policy_output(prepared, models, algorithm)
            models.policy.backward(output.loss)
            learned.totals.add(output)
        if models.critic is not None:
            output = models.critic.loss(prepared)
            models.critic.engine.backward(output.loss)
            learned.totals.add(replace(output, loss=torch.zeros(()) if not warming else output.loss))
    if models.critic is not None:
        critic = models.critic.engine.step()
        learned.facts |= {
            "critic_grad_norm": critic.grad_norm,
            "critic_skipped": float(not critic.applied),
            "critic_lr": critic.lr,
        }
        learned.update = critic
    if not warming:
        learned.update = models.policy.step()
        learned.facts["lr"] = learned.update.lr
    learned.applied |= learned.update.applied


def policy_output(prepared: Prepared, models: Models, algorithm: Algorithm) -> LossOutput:
    """The policy's loss on one micro-batch, that of a value head on it included."""
    t, needs = prepared.tensors, algorithm.needs
    scores = models.policy.forward(*t.scored, needs.entropy_gradient, 0, prepared.top)
    # Before a single update the proximal policy is the policy itself.
    proximal = scores.logprobs.detach() if prepared.old is None else prepared.old
    top = None
    if prepared.top is not None and prepared.reference_top is not None:
        inside = (prepared.top == t.targets[:, None]).any(-1)
        top = TopTokens(scores.at, prepared.reference_top, inside)
    output = algorithm.loss(
        TokenInputs(
            logprobs=scores.logprobs,
            entropy=scores.entropy,
            behaviour=t.behaviour,
            old=proximal if needs.old else t.behaviour,
            reference=prepared.reference,
            advantages=t.advantages if prepared.advantages is None else prepared.advantages,
            weights=t.weights,
            mask=t.mask,
            trajectory=t.trajectory,
            lags=t.lags,
            outcome=t.outcome,
            top=top,
        )
    )
    if scores.values is None:
        return output
    valued = value_output(scores.values, prepared, models.settings.critic)
    return replace(
        output,
        loss=output.loss + models.settings.critic.coefficient * valued.loss,
        sums=output.sums | valued.sums,
        ratios=output.ratios | valued.ratios,
    )
