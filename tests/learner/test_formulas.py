"""Formulas of verl, prime-rl, AReaL, slime and TRL as their settings reach them, against slow loops over single tokens.

Each goes the whole way: settings -> build() -> judge -> loss, in float64, whole and cut into two micro-batches, with
NaN wherever a token is masked. The loops are written from the papers' formulas (and what the peers' code was read to
compute); their gradients are those of one scalar a token.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from learner.algorithms import build_algorithm
from learner.algorithms.base import TokenInputs, TokenScores
from learner.algorithms.losses.second_moment import second_moment_bound
from learner.config.algorithm import AlgorithmSettings

LENGTHS = (5, 1, 7, 3, 4)
SPREADS = {"behaviour": 0.0, "recompute": 0.4}
PER_TOKEN = ("logprobs", "entropy", "behaviour", "old", "reference", "advantages", "token_weights")


def algorithm_of(**settings: Any) -> Any:
    """The algorithm, by the union that a settings file goes through."""
    return build_algorithm(TypeAdapter(AlgorithmSettings).validate_python(settings))


def tokens(seed: int, proximal: str = "behaviour") -> TokenInputs:
    """Five trajectories of odd numbers; log-ratios of about .6, so that bounds act; a third of the tokens masked, and
    one trajectory throughout, with NaN there."""
    draw = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)

    def normal(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(n, generator=draw, dtype=torch.float64)

    trajectory = torch.tensor([7 * i - 3 for i, size in enumerate(LENGTHS) for _ in range(size)])
    mask = (torch.rand(n, generator=draw) < 0.7) & (trajectory != 7 * 3 - 3)
    logprobs = -0.05 - normal(0.9).abs()
    behaviour = torch.minimum(logprobs - normal(0.6), torch.tensor(-0.01).double())
    old = torch.minimum(behaviour + normal(SPREADS[proximal]), torch.tensor(-0.01).double())
    given = {
        "logprobs": logprobs,
        "entropy": normal().abs(),
        "behaviour": behaviour,
        "old": behaviour if proximal == "behaviour" else old,
        "reference": logprobs - normal(0.5),
        "advantages": normal(),
        "token_weights": normal().abs() / n,
    }
    for tensor in given.values():
        tensor[~mask] = math.nan
    zeros, answer = torch.zeros(n, dtype=torch.int64), torch.full((n,), -1.0)
    return TokenInputs(**given, mask=mask, trajectory=trajectory, lags=zeros, turn=zeros, answer=answer)


def scored(x: TokenInputs) -> TokenScores:
    """The same tokens before the update. The policy is then `old`, or without a proximal policy what it still is."""
    recomputed = not torch.equal(x.old[x.mask], x.behaviour[x.mask])
    old = x.old if recomputed else x.logprobs.detach()
    turn = torch.zeros_like(x.trajectory)
    return TokenScores(x.entropy, x.advantages, x.behaviour, old, x.reference, None, x.mask, x.trajectory, turn)


def cut(x: TokenInputs, at: int) -> list[TokenInputs]:
    """Two micro-batches, between two trajectories."""
    names = (*PER_TOKEN, "mask", "trajectory", "lags", "turn", "answer")
    return [dataclasses.replace(x, **{n: getattr(x, n)[part] for n in names}) for part in (slice(at), slice(at, None))]


def found(algorithm: Any, pieces: list[TokenInputs]) -> tuple[float, list[float], float]:
    """Loss, gradient to the log-probs, and how many tokens were rejected."""
    algorithm.compute_advantages([scored(x) for x in pieces], lambda vector: vector)
    total, gradient, rejected = 0.0, [], 0.0
    for x in pieces:
        leaf = x.logprobs.detach().clone().requires_grad_()
        out = algorithm.loss(dataclasses.replace(x, logprobs=leaf))
        out.loss.backward()
        total += out.loss.item()
        gradient += leaf.grad.tolist()
        rejected += float(out.sums["rejected"])
    return total, gradient, rejected


class Token:
    """One token that is trained, as plain numbers but for `leaf`, its log-prob under the policy."""

    def __init__(self, x: TokenInputs, i: int, leaf: torch.Tensor) -> None:
        self.leaf, self.now = leaf, leaf.item()
        self.old, self.behaviour, self.reference, self.gain, self.share = (
            float(getattr(x, n)[i]) for n in ("old", "behaviour", "reference", "advantages", "token_weights")
        )
        self.trajectory = int(x.trajectory[i])

    @property
    def ratio(self) -> torch.Tensor:
        return (self.leaf - self.old).exp()

    @property
    def moved(self) -> float:
        return math.exp(self.now) - math.exp(self.old)


Slow = Callable[[list[Token]], list[Any]]
"""The loss of each token of the batch, before its weight."""


def check(settings: dict[str, Any], slow: Slow, seed: int, *, rejected: list[int] | None = None) -> None:
    """The loss is that of the loop, whole and cut; `rejected`: appends how many tokens were."""
    x = tokens(seed, settings.get("old_logprobs", "behaviour"))
    leaves = {
        i: torch.tensor(float(x.logprobs[i]), dtype=torch.float64, requires_grad=True)
        for i in x.mask.nonzero()[:, 0].tolist()
    }
    batch = [Token(x, i, leaf) for i, leaf in leaves.items()]
    wanted = sum(
        (t.share * value for t, value in zip(batch, slow(batch), strict=True)), torch.zeros((), dtype=torch.float64)
    )
    gradient = [0.0] * len(x.mask)
    for i, slope in zip(leaves, torch.autograd.grad(wanted, list(leaves.values()), allow_unused=True), strict=True):
        gradient[i] = 0.0 if slope is None else slope.item()
    for pieces in ([x], cut(x, LENGTHS[0] + LENGTHS[1])):
        loss, to_logprobs, out = found(algorithm_of(**settings), pieces)
        assert loss == pytest.approx(wanted.item(), rel=1e-9, abs=1e-10)
        assert to_logprobs == pytest.approx(gradient, rel=1e-9, abs=1e-10)
        if rejected is not None:
            rejected.append(int(out))


def trajectories(batch: list[Token]) -> list[list[Token]]:
    """By trajectory."""
    return [[t for t in batch if t.trajectory == n] for n in sorted({t.trajectory for t in batch})]


# --- losses ---


def prime_rl(batch: list[Token], *, threshold: float | None = None) -> list[torch.Tensor]:
    """prime-rl's default loss, or with a threshold its IPO: -A r keep + 0.001 log(r)^2, the second of every token."""
    losses = []
    for t in batch:
        if threshold is None:
            keep = t.moved <= 0.2 if t.gain > 0 else t.moved >= -0.2
        else:
            keep = abs(t.moved) <= threshold
        losses.append(-t.gain * t.ratio * keep + 1e-3 * (t.leaf - t.old) ** 2)
    return losses


def verl_dppo(batch: list[Token], *, kind: str) -> list[torch.Tensor]:
    """verl's dppo_tv and dppo_kl: weight sg(min(r, 2)) inside; the paper's value, its gradient."""
    losses = []
    for t in batch:
        q, p = math.exp(t.old), math.exp(t.now)
        if kind == "tv":
            size = abs(t.moved)
        else:
            size = q * (t.old - t.now) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        outside = (t.gain > 0 and p > q and size > 0.1) or (t.gain <= 0 and p < q and size > 0.05)
        weight = min(t.ratio.item(), 2.0)
        losses.append(t.leaf * 0 if outside else -t.gain * weight * (1 + t.leaf - t.now))
    return losses


def prime_rl_ref_kl(batch: list[Token], *, tau: float = 1.0) -> list[torch.Tensor]:
    """prime-rl's ref_kl: the advantage of a token is tau log(reference / policy); no reward."""
    losses = []
    for t in batch:
        keep = t.moved >= -0.2
        losses.append(-tau * (t.reference - t.now) * t.ratio * keep + 1e-3 * (t.leaf - t.old) ** 2)
    return losses


def dro(batch: list[Token]) -> list[torch.Tensor]:
    """verl's DRO with beta 0.3."""
    return [-(t.gain * t.leaf - 0.15 * (t.leaf - t.old) ** 2) for t in batch]


def of_trajectories(batch: list[Token], *, low: float, high: float, geometric: bool) -> list[torch.Tensor]:
    """GSPO, or GMPO (geometric), with one weight a trajectory: the geometric mean of old / behaviour, at most 2."""
    losses = []
    for one in trajectories(batch):
        weight = min(2.0, math.exp(sum(t.old - t.behaviour for t in one) / len(one)))
        gain = sum(t.gain for t in one) / len(one)
        for t in one:
            if geometric:
                moved = [u.leaf - u.old for u in one]
                worse = torch.minimum if gain > 0 else torch.maximum
                kept = [worse(x, x.clamp(-low, high)) for x in moved]
                losses.append(-weight * gain * (sum(kept) / len(kept)).exp())
            else:
                mean = sum(u.now - u.old for u in one) / len(one)
                ratio = (mean + t.leaf - t.now).exp()
                losses.append(weight * torch.maximum(-t.gain * ratio, -t.gain * ratio.clamp(1 - low, 1 + high)))
    return losses


TV = {"type": "dppo", "clip_low": 0.05, "clip_high": 0.1, "ratio_cap": 2.0}
LOSSES: dict[str, tuple[dict[str, Any], Slow]] = {
    "prime-rl default": ({"type": "dppo", "ratio_cap": 0, "drift_coefficient": 1e-3}, prime_rl),
    "prime-rl ipo": (
        {"type": "dppo", "symmetric": True, "clip_low": 0.1, "clip_high": 0.1, "ratio_cap": 0}
        | {"drift_coefficient": 1e-3},
        lambda batch: prime_rl(batch, threshold=0.1),
    ),
    "verl dppo_tv": (TV, lambda batch: verl_dppo(batch, kind="tv")),
    "verl dppo_kl": (TV | {"divergence": "kl"}, lambda batch: verl_dppo(batch, kind="kl")),
    "prime-rl ref_kl": ({"type": "distill"}, prime_rl_ref_kl),
    "prime-rl ref_kl, weighted": (
        {"type": "distill", "kl": {"coefficient": 0.3}},
        lambda batch: prime_rl_ref_kl(batch, tau=0.3),
    ),
    "gspo": (
        {"type": "gspo", "old_logprobs": "recompute", "clip_low": 0.2, "clip_high": 0.3},
        lambda batch: of_trajectories(batch, low=0.2, high=0.3, geometric=False),
    ),
    "gmpo": (
        {"type": "gmpo", "old_logprobs": "recompute"},
        lambda batch: of_trajectories(batch, low=0.4, high=0.4, geometric=True),
    ),
    "verl dro": ({"type": "reinforce", "old_logprobs": "behaviour", "drift_coefficient": 0.15}, dro),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_peers_are_those_of_a_slow_loop(name: str, seed: int) -> None:
    check(*LOSSES[name], seed)


# --- rejection ---


def ppo(t: Token) -> torch.Tensor:
    bounded = min(max(t.ratio.item(), 0.8), 1.28)
    acts = -t.gain * t.ratio.item() < -t.gain * bounded
    return t.leaf * 0 - t.gain * bounded if acts else -t.gain * t.ratio


def disagreement(t: Token, measure: str, proximal: str) -> float:
    """Between the engines and the policy, or the proximal one where there is one."""
    x = (t.old if proximal == "recompute" else t.now) - t.behaviour
    return {"ratio": math.exp(x), "k1": x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[measure]


GATHERED: dict[str, Callable[[list[float]], float]] = {
    "sequence": sum,
    "mean": lambda values: sum(values) / len(values),
    "max": max,
}


def kept_by(
    measure: str, level: str, high: float, proximal: str, low: float = 0.0
) -> Callable[[list[Token]], set[Token]]:
    """The tokens that stay."""

    def keep(batch: list[Token]) -> set[Token]:
        stay: set[Token] = set()
        for one in trajectories(batch):
            values = [disagreement(t, measure, proximal) for t in one]
            if level == "token":
                stay |= {t for t, v in zip(one, values, strict=True) if low <= v <= high}
            elif level == "ratio max":
                stay |= set(one) if all(low <= v <= high for v in values) else set()
            elif GATHERED[level](values) <= high:
                stay |= set(one)
        return stay

    return keep


def clipped_where(keep: Callable[[list[Token]], set[Token]]) -> Slow:
    def slow(batch: list[Token]) -> list[torch.Tensor]:
        stay = keep(batch)
        return [ppo(t) if t in stay else t.leaf * 0 for t in batch]

    return slow


BASE = {"type": "grpo", "dual_clip": 0, "correction": {"mode": "off"}}
LEVELS = {"token": 0.15, "sequence": 0.6, "mean": 0.1, "max": 0.3}


@pytest.mark.parametrize("proximal", SPREADS)
@pytest.mark.parametrize("measure", ["k2", "k3"])
@pytest.mark.parametrize("level", LEVELS)
def test_rejection_by_k2_and_k3_is_that_of_a_slow_loop(level: str, measure: str, proximal: str) -> None:
    high = LEVELS[level]
    settings = BASE | {"old_logprobs": proximal, "rejection": {"measure": measure, "level": level, "high": high}}
    rejected: list[int] = []
    for seed in range(3):
        check(settings, clipped_where(kept_by(measure, level, high, proximal)), seed, rejected=rejected)
    assert 0 < sum(rejected) < 6 * int(tokens(0).mask.sum())


def test_two_criteria_must_both_hold_as_in_verls_chains() -> None:
    """verl's `token_k1,seq_mean_k3`, and a third: the worst ratio of a trajectory."""
    rejection = {"level": "token", "low": 0.6, "high": 2.5, "also": [
        {"measure": "k3", "level": "mean", "high": 0.18},
        {"level": "max", "low": 0.45, "high": 2.2},
    ]}  # fmt: skip
    each = [
        kept_by("ratio", "token", 2.5, "behaviour", low=0.6),
        kept_by("k3", "mean", 0.18, "behaviour"),
        kept_by("ratio", "ratio max", 2.2, "behaviour", low=0.45),
    ]
    clipped = clipped_where(lambda batch: set.intersection(*(keep(batch) for keep in each)))
    alone = [0, 0, 0]
    for seed in range(8):
        # the drift is of every token, rejected or not
        settings = BASE | {"rejection": rejection, "drift_coefficient": 0.2}
        check(settings, lambda b: [x + 0.2 * (t.leaf - t.old) ** 2 for t, x in zip(b, clipped(b), strict=True)], seed)
        x = tokens(seed)
        batch = [Token(x, i, x.logprobs[i]) for i in x.mask.nonzero()[:, 0].tolist()]
        sets = [k(batch) for k in each]
        alone = [
            n + bool(set.intersection(*(o for o in sets if o is not s)) - s) for n, s in zip(alone, sets, strict=True)
        ]
    assert all(alone), "each of the three rejects what the others keep"


def whole_batch_kept_by(name: str, bound: float) -> Callable[[list[Token]], set[Token]]:
    """The tokens that stay by `rejection.veto` and `rejection.off_policy` (slime's OPSM)."""

    def keep(batch: list[Token]) -> set[Token]:
        stay: set[Token] = set()
        for one in trajectories(batch):
            drift = -sum(disagreement(t, "k1", "behaviour") for t in one) / len(one)
            worst = min(disagreement(t, "ratio", "behaviour") for t in one)
            stay |= {t for t in one if (worst >= bound if name == "veto" else t.gain >= 0 or drift <= bound)}
        return stay

    return keep


@pytest.mark.parametrize(("name", "bound"), [("veto", 0.45), ("off_policy", 0.02)])
def test_what_judges_a_trajectory_rejects_beside_the_criteria_for_tokens(name: str, bound: float) -> None:
    settings = BASE | {"rejection": {"level": "token", "low": 0.6, "high": 2.0, name: bound}}
    each = [kept_by("ratio", "token", 2.0, "behaviour", low=0.6), whole_batch_kept_by(name, bound)]
    alone = [0, 0]
    for seed in range(6):
        check(settings, clipped_where(lambda batch: each[0](batch) & each[1](batch)), seed)
        x = tokens(seed)
        batch = [Token(x, i, x.logprobs[i]) for i in x.mask.nonzero()[:, 0].tolist()]
        one, two = (keep(batch) for keep in each)
        alone = [alone[0] + len(two - one), alone[1] + len(one - two)]
    assert all(alone), "each rejects what the other keeps"


def test_criteria_that_make_no_sense_are_refused() -> None:
    for rejection, words in (
        ({"level": "mean"}, "geometric"),
        ({"level": "geometric", "measure": "k3", "high": 0.1}, "mean"),
        ({"level": "token", "measure": "k2"}, "needs rejection.high"),
        ({"also": [{"level": "mean"}]}, "geometric"),
    ):
        with pytest.raises(ValidationError, match=words):
            algorithm_of(type="grpo", rejection=rejection)
    with pytest.raises(ValidationError, match="second_moment"):
        algorithm_of(type="decoupled_ppo", rejection={"second_moment": 0.04})


# --- the second moment (M2PO) ---


def m2po(batch: list[Token], threshold: float, proximal: str) -> set[Token]:
    """AReaL: the largest log(w)^2 go, one after the other, until the mean of the rest is below the threshold."""
    rest = sorted(batch, key=lambda t: disagreement(t, "k2", proximal))
    while rest and sum(2 * disagreement(t, "k2", proximal) for t in rest) / len(rest) >= threshold:
        rest.pop()
    return set(rest)


@pytest.mark.parametrize("proximal", SPREADS)
@pytest.mark.parametrize("threshold", [0.02, 0.15, 50.0])
def test_the_second_moment_of_what_stays_is_bounded_over_the_whole_batch(threshold: float, proximal: str) -> None:
    """With PPO's clip as in AReaL, and without as in the paper (arXiv 2510.01161, M r A)."""
    common = {"old_logprobs": proximal, "correction": {"mode": "off"}, "rejection": {"second_moment": threshold}}
    rejected: list[int] = []

    def keep(batch: list[Token]) -> set[Token]:
        return m2po(batch, threshold, proximal)

    for seed in range(3):
        check(BASE | common, clipped_where(keep), seed, rejected=rejected)
        plain = {"type": "dppo", "clip_low": 1, "clip_high": 1, "ratio_cap": 0} | common
        check(plain, lambda batch: [-t.gain * t.ratio * (t in keep(batch)) for t in batch], seed)
    assert (sum(rejected) > 0) == (threshold < 1)


def test_the_bound_is_the_same_for_any_distribution_over_ranks() -> None:
    draw = torch.Generator().manual_seed(0)
    squares = torch.randn(500, generator=draw, dtype=torch.float64).square() * 0.1
    alone = second_moment_bound([squares], 0.04, lambda vector: vector)
    kept = sorted(squares.tolist())
    while sum(kept) / len(kept) >= 0.04:
        kept.pop()
    assert kept[-1] < alone < min(x for x in squares.tolist() if x > kept[-1])
    pieces = [[squares[:7], squares[7:7]], [squares[7:]], []]
    barrier, slots, out = threading.Barrier(3), [torch.zeros(0)] * 3, [0.0] * 3

    def rank(number: int) -> None:
        def total(vector: torch.Tensor) -> torch.Tensor:
            slots[number] = vector
            barrier.wait(30)
            together = torch.stack(slots).sum(0)
            barrier.wait(30)
            return together

        out[number] = second_moment_bound(pieces[number], 0.04, total)

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert out[0] == out[1] == out[2] == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize(
    ("squares", "stay"),
    [
        ([0.0, 0.0], 2),
        ([1.0, 1.0, 0.5], 0),
        ([0.3, 0.0], 1),
        ([], 0),
        ([400.0, 0.01], 1),
        ([1, 0.0399], 1),
        ([0.04, 0.04], 0),
    ],
)
def test_the_bound_at_its_edges(squares: list[float], stay: int) -> None:
    bound = second_moment_bound([torch.tensor(squares, dtype=torch.float64)], 0.04, lambda vector: vector)
    assert sum(x <= bound for x in squares) == stay
