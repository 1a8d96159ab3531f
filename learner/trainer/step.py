"""One training step of a rank: from its part of a batch to new weights.

rank_batch
  -> scores of the old policy, the critic and the reference (no gradient) -> advantages and returns (over all ranks)
  -> epochs x minibatches: gradients of all micro-batches, then one update of the policy and one of the critic
  -> the reference is updated; a sample is scored again; sums over all tokens and ranks become metrics
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from learner.algorithms.base import Algorithm, LossOutput, TokenInputs, TopTokens
from learner.algorithms.losses.policy import weighted_sum
from learner.algorithms.losses.value import value_loss, variance_sums
from learner.config.model import CriticSettings
from learner.data.batch import RankBatch
from learner.engine import OptimizerUpdate
from learner.trainer.metric_sums import VARIANCE, summed
from learner.trainer.models import Models
from learner.trainer.rescoring import rescore
from learner.trainer.scoring import ScoredTokens, score


@dataclass
class StepResult:
    """Result of a step, or of its updates so far.

    update          the last one
    batch           the micro-batches of the rank
    minibatches     number of minibatches, from the first, in an applied update
    tokens_trained  number of their tokens, over all ranks
    metrics         over all ranks, with the loss
    outputs         of the losses in the last epoch
    num_tokens      number of this rank's tokens in these
    """

    update: OptimizerUpdate
    batch: list[ScoredTokens]
    minibatches: int = 0
    tokens_trained: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    outputs: list[LossOutput] = field(default_factory=list)
    num_tokens: int = 0


def run_step(rank_batch: RankBatch, models: Models, algorithm: Algorithm) -> StepResult:
    """Update the weights with `rank_batch`, unless the first update is not finite; collective."""
    batch = score(rank_batch, models, algorithm)
    advantages, facts = algorithm.compute_advantages([tokens.scores for tokens in batch], models.policy.all_reduce)
    for tokens, found in zip(batch, advantages, strict=True):
        tokens.advantages, tokens.returns = found.advantages, found.returns
    result = run_updates(batch, len(rank_batch.minibatches), models, algorithm)
    if result.minibatches:
        algorithm.after_update()
        models.after_update()
        if models.settings.rescored_share and all(tokens.before is not None for tokens in batch[:1]):
            result.outputs.append(rescore(rank_batch, batch, models))
    trained = sum(tokens.num_weighted for tokens in batch if tokens.minibatch < result.minibatches)
    sums, result.tokens_trained = summed(result.outputs, result.num_tokens, trained, models.policy.all_reduce_scalars)
    result.metrics = sums | rank_batch.stats | facts | result.metrics
    return result


def run_updates(batch: list[ScoredTokens], minibatches: int, models: Models, algorithm: Algorithm) -> StepResult:
    """Run every epoch over every minibatch, until an update is not finite. minibatches: their number"""
    result = StepResult(OptimizerUpdate(0.0, False), batch)
    for _ in range(algorithm.epochs):
        result.outputs, result.num_tokens = [], 0
        for tokens in batch:
            tokens.logprobs = None
        for number in range(minibatches):
            minibatch = [tokens for tokens in batch if tokens.minibatch == number]
            update(minibatch, models, algorithm, result)
            if not result.update.applied:
                return result
            result.minibatches = max(result.minibatches, number + 1)
    return result


def update(minibatch: list[ScoredTokens], models: Models, algorithm: Algorithm, result: StepResult) -> None:
    """Accumulate gradients over `minibatch`, then update the policy and the critic; collective. Adds to `result`.

    During its warm-up only the critic is updated. An update with a non-finite gradient on any rank is not applied
    on any rank (`DeepSpeedEngine.step`); if it is the policy's, the critic is not updated either.
    """
    critic = models.critic
    warming = critic is not None and critic.is_warming_up
    result.num_tokens += sum(tokens.num_weighted for tokens in minibatch)
    if not warming:
        for tokens in minibatch:
            output = policy_loss(tokens, models, algorithm)
            models.policy.backward(output.loss)
            result.outputs.append(replace(output, loss=output.loss.detach()))
        result.update = models.policy.step()
        result.metrics["lr"] = result.update.lr
    if critic is not None and (warming or result.update.applied):
        for tokens in minibatch:
            output = critic_loss(critic.engine.forward(*tokens.inputs), tokens, critic.settings)
            critic.engine.backward(output.loss)
            result.outputs.append(replace(output, loss=output.loss.detach() if warming else torch.zeros(())))
        update = critic.engine.step()
        result.metrics |= {
            "critic_grad_norm": update.grad_norm,
            "critic_skipped": float(not update.applied),
            "critic_lr": update.lr,
        }
        if warming:
            result.update = update


def policy_loss(tokens: ScoredTokens, models: Models, algorithm: Algorithm) -> LossOutput:
    """Return the policy's loss on one micro-batch, with that of a value head."""
    needs, critic = algorithm.requirements, models.settings.critic
    scores = models.policy.forward(*tokens.policy_inputs, needs.entropy_gradient, 0, tokens.top)
    tokens.logprobs = scores.logprobs.detach()
    tokens.before = tokens.logprobs if tokens.before is None else tokens.before
    old, top = tokens.behaviour, None
    if needs.old:  # with a single update the proximal policy is the policy itself
        old = tokens.logprobs if tokens.old is None else tokens.old
    if tokens.top is not None and tokens.reference_top is not None:
        inside = (tokens.top == tokens.targets[:, None]).any(-1)
        top = TopTokens(scores.at, tokens.reference_top, inside)
    output = algorithm.loss(
        TokenInputs(
            logprobs=scores.logprobs,
            entropy=scores.entropy,
            behaviour=tokens.behaviour,
            old=old,
            reference=tokens.reference,
            advantages=tokens.advantages,
            token_weights=tokens.token_weights,
            mask=tokens.mask,
            trajectory=tokens.sequence,
            lags=tokens.lags,
            turn=tokens.turn,
            answer=tokens.answer,
            top=top,
        )
    )
    if scores.values is None:
        return output
    head = critic_loss(scores.values, tokens, critic)
    return replace(output, loss=output.loss + critic.coefficient * head.loss, sums=output.sums | head.sums)


def critic_loss(values: torch.Tensor, tokens: ScoredTokens, settings: CriticSettings) -> LossOutput:
    """Return the clipped loss of `values` on one micro-batch: those of a critic, or of the policy's value head.

    Metrics: its mean, its clip fraction, and the sums for the explained variance, which spans the batch
    (`learner.trainer.metric_sums`).
    """
    assert tokens.returns is not None and tokens.values is not None
    mask = tokens.mask
    found = value_loss(values, tokens.values, tokens.returns, mask, clip=settings.clip or None)
    return LossOutput(
        weighted_sum(found.loss, tokens.token_weights, mask),
        sums={
            "value_loss": torch.where(mask, found.loss.detach(), 0.0).sum(),
            "value_clip_fraction": found.clipped.sum(),
            "value_mean": torch.where(mask, tokens.values, 0.0).sum(),
            **dict(zip(VARIANCE, variance_sums(tokens.values, tokens.returns, mask)[1:], strict=True)),
        },
    )
