"""Shares of the gradient that one bad token gets by default, and without the bound; `-s` prints the table."""

from __future__ import annotations

import pytest
import torch

from learner.algorithms import build_algorithm
from learner.algorithms.base import TokenInputs, TokenScores
from learner.algorithms.grpo import Grpo
from learner.config.algorithm import ReinforcePpSettings
from learner.config.policy import GroupSettings
from learner.model.logprobs import ScoringLinear, Wanted, score_fused

TOKENS = 10_000


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
        token_weights=torch.full_like(behaviour, 1 / TOKENS),
        mask=torch.ones(TOKENS, dtype=torch.bool),
        trajectory=torch.arange(TOKENS) // 500,
        lags=torch.zeros(TOKENS, dtype=torch.int64),
        turn=torch.zeros(TOKENS, dtype=torch.int64),
        answer=torch.full_like(behaviour, -1),
    )


def judged(inputs: TokenInputs, **settings: object) -> tuple[float, float]:
    """(the first token's share in the norm of the gradient of log-probs, the loss)."""
    loss = Grpo(GroupSettings(**settings)).loss(inputs).loss  # type: ignore[arg-type]
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


@pytest.mark.parametrize("kind", ["k3", "k3++", "k5"])
@pytest.mark.parametrize("distance", [10.0, 15.0, 19.9])
def test_one_token_far_from_the_reference_is_no_gradient(distance: float, kind: str) -> None:
    inputs = one_bad_token(0.0, reference=distance)
    share, loss = judged(inputs, kl={"coefficient": 1e-3, "type": kind})
    gap = inputs.reference[0] - inputs.logprobs[0].detach()  # what k3 alone would add: 1e-3 * (e^x - x - 1) / TOKENS
    alone = 1e-3 * (torch.expm1(gap)) / TOKENS
    rest = torch.cat([inputs.logprobs.grad[1:], alone.reshape(1)])
    print(f"\nreference / policy = e^{distance:g}, coefficient 1e-3, {kind}: {alone / rest.norm():.2%} -> {share:.2%}")
    assert alone / rest.norm() > 0.15
    assert share < 0.02 and abs(loss) < 0.1


def test_a_token_far_from_the_reference_takes_at_most_ten_off_the_reward() -> None:
    one, zero = torch.ones(3), torch.zeros(3)
    scored = TokenScores(
        rewards=torch.tensor([0.0, 0.0, 1.0]),
        advantages=one,
        behaviour=-one,
        old=-one,
        reference=torch.tensor([-1.0, 14.0, -1.0]),
        values=None,
        mask=one.bool(),
        trajectory=zero.long(),
        turn=zero.long(),
    )
    settings = ReinforcePpSettings(kl={"coefficient": 0.01, "type": "k3"}, whiten=False)
    (judged,), facts = build_algorithm(settings).compute_advantages([scored], lambda vector: vector)
    assert judged.advantages.tolist() == pytest.approx([0.9, 0.9, 1.0])
    assert facts["kl_reference"] == pytest.approx(10 / 3)


def test_log_probs_of_a_bfloat16_output_layer_are_exact() -> None:
    """V = 8192, logits of deviation 3.4: the error of log-probs of sampled tokens against float64, same weights."""
    torch.manual_seed(0)
    layer = ScoringLinear(256, 8192, bias=False, dtype=torch.bfloat16)
    torch.nn.init.normal_(layer.weight, std=3.4 / 16)
    hidden = torch.randn(512, 256).bfloat16()
    table = torch.log_softmax(hidden.double() @ layer.weight.detach().double().T, -1)
    targets = torch.multinomial(table.exp(), 1).squeeze(-1)
    errors = {}
    for layer.fp32 in (False, True):
        with torch.no_grad():
            found = score_fused(layer, hidden, Wanted(targets, None, 1.0, False, 0, 1 << 24)).logprobs
        errors[layer.fp32] = (found.double() - table.gather(-1, targets[:, None]).squeeze(-1)).abs()
    mean, worst = ({on: float(f(e)) for on, e in errors.items()} for f in (torch.mean, torch.max))
    print(
        f"\nbfloat16 output layer: log-probs wrong by {mean[False]:.2g} in the mean and {worst[False]:.2g} at most, "
        f"with float32 logits by {mean[True]:.2g} and {worst[True]:.2g}"
    )
    assert mean[False] > 5e-3, "what the setting is for"
    assert worst[True] < 1e-5
