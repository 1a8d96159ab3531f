"""Shares of the gradient that one bad token gets by default, and without the bound; `-s` prints the table."""

from __future__ import annotations

import pytest
import torch

from learner.algorithms.base import TokenInputs
from learner.config_policy import GroupSettings

TOKENS = 10_000


class Judged(GroupSettings):
    """The defaults of every algorithm with PPO's clip."""

    def build(self):
        from learner.algorithms.grpo import Grpo

        return Grpo(self)


def one_bad_token(distance: float, *, reference: float | None = None) -> TokenInputs:
    """TOKENS tokens with A = +-1 and log-ratios of 0.05; the first has A = -1 and is `distance` above the engine's
    log-prob, or `reference` below the reference's."""
    torch.manual_seed(0)
    behaviour = torch.full((TOKENS,), -1.0, dtype=torch.float64)
    logprobs = behaviour + 0.05 * torch.randn(TOKENS, dtype=torch.float64)
    advantages = torch.where(torch.arange(TOKENS) % 2 == 0, -1.0, 1.0).double()
    logprobs[0] = behaviour[0] + distance
    other = logprobs + 0.05 * torch.randn(TOKENS, dtype=torch.float64)
    if reference is not None:
        other[0] = logprobs[0] + reference
    return TokenInputs(
        logprobs=logprobs.requires_grad_(),
        entropy=torch.zeros_like(behaviour),
        behaviour=behaviour,
        old=behaviour,
        reference=None if reference is None else other,
        advantages=advantages,
        weights=torch.full_like(behaviour, 1 / TOKENS),
        mask=torch.ones(TOKENS, dtype=torch.bool),
        trajectory=torch.arange(TOKENS) // 500,
        lags=torch.zeros(TOKENS, dtype=torch.int64),
        outcome=torch.zeros_like(behaviour),
    )


def judged(inputs: TokenInputs, **settings: object) -> tuple[float, float]:
    """(the first token's share in the norm of the gradient of log-probs, the loss)."""
    loss = Judged(**settings).build().loss(inputs).loss  # type: ignore[arg-type]
    loss.backward()
    gradient = inputs.logprobs.grad
    assert gradient is not None
    return float(gradient[0].abs() / gradient.norm()), loss.item()


@pytest.mark.parametrize("distance", [5.0, 8.0, 12.0])
def test_one_token_of_ten_thousand_is_no_gradient(distance: float) -> None:
    without, _ = judged(one_bad_token(distance), dual_clip=0)
    share, loss = judged(one_bad_token(distance))
    print(
        f"\nlog-ratio +{distance:g}, A = -1: {without:.2%} of the gradient's norm without dual clip, {share:.2%} with"
    )
    assert without > 0.5
    assert share == 0 and abs(loss) < 0.1
