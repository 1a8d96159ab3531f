"""One optimiser update of the policy, and one of the critic, on one minibatch; metrics from sums over the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from learner.algorithms.base import Algorithm, LossOutput, TokenInputs, TopTokens
from learner.algorithms.losses import VarianceSums, WeightSums, effective_sample_size, explained_variance
from learner.data.token_values import TokenValues
from learner.engine import OptimizerUpdate
from learner.trainer.critic import value_loss_output
from learner.trainer.models import Models
from learner.trainer.tensors import ForwardBatch, ForwardResult


@dataclass
class MetricSums:
    """Sums of the `LossOutput`s of one pass over `tokens` tokens. Names are in order of first occurrence."""

    tokens: int = 0
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, output: LossOutput) -> None:
        """Add the output of a micro-batch."""
        self.loss += float(output.loss.detach())
        for name, value in output.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, (above, below) in output.ratios.items():
            before = self.ratios.get(name, (0.0, 0.0))
            self.ratios[name] = (before[0] + float(above), before[1] + float(below))
        for name, value in output.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, -math.inf), float(value))

    def sums_list(self) -> list[float]:
        """Return the values to be summed over the ranks, in the order that `report` expects."""
        return [self.tokens, self.loss, *self.sums.values(), *(x for pair in self.ratios.values() for x in pair)]

    def report(self, sums: list[float], maxima: list[float]) -> dict[str, float]:
        """Return the metrics by name, from the values of all ranks.

        ess                 effective sample size as a share of the tokens, (sum w)^2 / (n sum w^2)
        explained_variance  1 - var(R - V) / var(R); 0 where returns do not vary
        """
        num_tokens, loss, *rest = sums
        count = len(self.sums)
        found = {"loss": loss, **{name: rest[i] / num_tokens for i, name in enumerate(self.sums)}}
        for i, name in enumerate(self.ratios):
            above, below = rest[count + 2 * i : count + 2 * i + 2]
            if below:
                found[name] = above / below
        _derive(found)
        return found | dict(zip(self.maxima, maxima, strict=True))


def _derive(found: dict[str, float]) -> None:
    """Replace sums over the whole batch by metrics derived from them; these do not depend on the scale."""
    square = found.pop("ratio_square", None)
    if square is not None:
        sums = (torch.tensor(x, dtype=torch.float64) for x in (found["ratio_mean"], square, 1.0))
        found["ess"] = effective_sample_size(WeightSums(*sums))
    if "return_square" in found:
        names = ("return_square", "value_error", "value_error_square")
        pieces = (1.0, found["return_mean"], *(found.pop(name) for name in names))
        sums = (torch.tensor(x, dtype=torch.float64) for x in pieces)
        found["explained_variance"] = explained_variance(VarianceSums(*sums))


@dataclass
class UpdateResult:
    """Result of the updates of a batch so far.

    update       the last one
    minibatches  number of minibatches, from the first, in an applied update
    tokens       collects the values of trained tokens
    """

    update: OptimizerUpdate
    tokens: TokenValues | None = None
    totals: MetricSums = field(default_factory=MetricSums)
    minibatches: int = 0
    facts: dict[str, float] = field(default_factory=dict)


def update_minibatch(
    number: int, forwards: ForwardBatch, models: Models, algorithm: Algorithm, result: UpdateResult
) -> None:
    """Accumulate gradients over minibatch `number`, then update; collective. Adds to `result`.

    During its warm-up only the critic is updated. An update with a non-finite gradient on any rank is not applied
    on any rank (`DeepSpeedEngine.step`); if it is the policy's, the critic is not updated either.
    """
    critic, part = models.critic, forwards.minibatches[number]
    warming = critic is not None and critic.is_warming_up
    result.totals.tokens += sum(int(forward.tensors.mask.sum()) for forward in part)
    if not warming:
        for forward in part:
            output = policy_loss_output(forward, models, algorithm, result.tokens)
            models.policy.backward(output.loss)
            result.totals.add(output)
        result.update = models.policy.step()
        result.facts["lr"] = result.update.lr
    if critic is not None and (warming or result.update.applied):
        for forward in part:
            output = critic.loss(forward)
            critic.engine.backward(output.loss)
            result.totals.add(replace(output, loss=torch.zeros(()) if not warming else output.loss))
        update = critic.engine.step()
        result.facts |= {
            "critic_grad_norm": update.grad_norm,
            "critic_skipped": float(not update.applied),
            "critic_lr": update.lr,
        }
        if warming:
            result.update = update
    if result.update.applied:
        result.minibatches = max(result.minibatches, number + 1)


def policy_loss_output(
    forward: ForwardResult, models: Models, algorithm: Algorithm, tokens: TokenValues | None = None
) -> LossOutput:
    """Return the policy's loss on one micro-batch, including that of a value head. Add its values to `tokens`."""
    t, requirements = forward.tensors, algorithm.requirements
    scores = models.policy.forward(*t.policy_inputs, requirements.entropy_gradient, 0, forward.top)
    advantages = t.advantages if forward.advantages is None else forward.advantages
    if tokens is not None:
        tokens.add(**t.token_columns(logprob=scores.logprobs, reference=forward.reference, advantage=advantages))
    # With a single update the proximal policy is the policy itself.
    proximal = scores.logprobs.detach() if forward.old is None else forward.old
    top = None
    if forward.top is not None and forward.reference_top is not None:
        inside = (forward.top == t.targets[:, None]).any(-1)
        top = TopTokens(scores.at, forward.reference_top, inside)
    output = algorithm.loss(
        TokenInputs(
            logprobs=scores.logprobs,
            entropy=scores.entropy,
            behaviour=t.behaviour,
            old=proximal if requirements.old else t.behaviour,
            reference=forward.reference,
            advantages=advantages,
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
    valued = value_loss_output(scores.values, forward, models.settings.critic)
    return replace(
        output,
        loss=output.loss + models.settings.critic.coefficient * valued.loss,
        sums=output.sums | valued.sums,
        ratios=output.ratios | valued.ratios,
    )
