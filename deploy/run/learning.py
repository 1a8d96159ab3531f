"""What keeps a run from learning, whether it is about to collapse, and what to try: from its recent steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, variance

from deploy.run.history import RECENT, RunHistory

ENOUGH = 10
"""Steps before a run is judged: the first ones say little."""
SOLVED = 0.9
"""From this mean reward on, equal rewards, few searches and a low entropy are expected."""
MOST_DEAD, FEW = 0.01, 3
"""Share of questions without a result, and their number, above which they are a problem."""
PAGE = "docs/troubleshooting.md"
WINDOW = 10
"""Steps whose mean is compared with those of the windows before."""
BACK = 3
"""Windows between those whose rewards show whether the run still learns."""
CERTAIN, LIKELY = 4.0, 2.0
"""Standard errors of a difference of two windows that decide that a run collapses, or that its reward rises."""


@dataclass(frozen=True)
class Problem:
    """Something that stops or degrades the run, and what to do about it."""

    what: str
    todo: str


@dataclass(frozen=True)
class Sign:
    """A sign of collapse: the mean of a metric over the last window is worse than in the run's best window before, or
    than a bound.

    rises   whether a higher value is worse
    least   smallest difference that counts, in units of the metric
    factor  smallest difference as a share of the best window's value
    alone   whether it decides alone; otherwise two signs do
    bound   compared with instead of the best window
    """

    metric: str
    rises: bool
    least: float
    factor: float
    what: str
    alone: bool = False
    bound: float | None = None


SIGNS = (
    Sign("reward_mean", False, 0.05, 0.3, "the reward falls", alone=True),
    Sign("logprob_right", False, 0.05, 0.5, "right answers become less likely"),
    Sign("entropy", True, 0.1, 0.5, "the entropy rises"),
    Sign("grad_norm", True, 0.0, 2.0, "the gradient grows"),
    Sign("ratio_low", True, 0.01, 1.0, "ratios fall towards 0"),
    Sign("logprob_change", False, 0.0, 0.0, "steps make right answers less likely", bound=0.0),
    Sign("fell_turns", True, 0.0, 0.0, "most turns of right answers become less likely in a step", bound=0.5),
    Sign("thoughts_empty", True, 0.2, 1.0, "thoughts are empty"),
    Sign("turns_repeated", True, 0.1, 1.0, "turns are repeated"),
)


@dataclass(frozen=True)
class LearningState:
    """learning, stalled or collapsing, and the sign that decided; both empty before a run can be judged."""

    word: str = ""
    sign: str = ""


def learning_state(history: RunHistory) -> LearningState:
    """Return whether the run learns, by its last steps: each sign against the run's best window, the reward's rise."""
    signs = active_signs(history)
    if len(signs) > 1 or any(sign.alone for sign in signs):
        return LearningState("collapsing", "; ".join(signs.values()))
    rewards = _windows(history, "reward_mean")
    if len(rewards) < 2:
        return LearningState()
    now, before = rewards[-1], rewards[:-1][-BACK:][0]
    if fmean(now) >= SOLVED or fmean(now) - fmean(before) > LIKELY * _error(now, before):
        return LearningState("learning", f"mean reward {fmean(before):.3g} -> {fmean(now):.3g}")
    return LearningState("stalled", f"mean reward {fmean(before):.3g} -> {fmean(now):.3g} is no rise")


def active_signs(history: RunHistory) -> dict[Sign, str]:
    """Return the signs of collapse that show, with their figures."""
    return {sign: said for sign in SIGNS if (said := _said(sign, history))}


def _windows(history: RunHistory, metric: str) -> list[Sequence[float]]:
    """Return the last values of a metric in windows that do not overlap, the newest last; too few for one: none."""
    values = [float(r[metric]) for r in history.past if isinstance(r.get(metric), int | float)]
    return [values[begin:end] for begin, end in pairwise(range(len(values) % WINDOW, len(values) + 1, WINDOW))]


def _error(one: Sequence[float], other: Sequence[float]) -> float:
    return math.sqrt((variance(one) + variance(other)) / WINDOW)


def _said(sign: Sign, history: RunHistory) -> str:
    """Return the sign with its figures; empty: it does not show."""
    *before, now = _windows(history, sign.metric) or [()]
    if sign.bound is not None and now:
        before = [[sign.bound] * WINDOW]
    if not before:
        return ""
    best = (min if sign.rises else max)(before, key=fmean)
    worse = (fmean(now) - fmean(best)) * (1 if sign.rises else -1)
    if worse < max(sign.least, sign.factor * abs(fmean(best))) or worse <= CERTAIN * _error(now, best):
        return ""
    return f"{sign.what}: {sign.metric} {fmean(best):.3g} -> {fmean(now):.3g}"


def learning_problems(history: RunHistory) -> list[Problem]:
    """Return what keeps the run from learning, the worst first."""
    return [Problem(what, todo) for what, todo in _found(history)]


def _found(history: RunHistory) -> Iterator[tuple[str, str]]:
    if (now := learning_state(history)).word == "collapsing":
        what = f"the run is collapsing: {now.sign}"
        yield what, f'go back to an earlier checkpoint with another setting ({PAGE}, "The reward collapses")'
    dead, settled = history.last.get("dead", 0.0), history.last.get("settled", 0.0)
    if dead >= FEW and dead > MOST_DEAD * settled:
        what = f"{dead:.0f} of {settled:.0f} questions ({dead / settled:.1%}) failed and are not trained"
        yield what, "`foray dlq list` names the causes; for prompt_too_long raise rollout.episode.max_context"
    steps = replace(history, recent=history.past[-RECENT:])  # a restart begins an epoch, but the policy is the same
    reward, count = steps.mean("reward_mean"), len(steps.recent)
    if count < ENOUGH or (reward or 0.0) >= SOLVED:
        return
    means = {name: steps.mean(name) for name in ("reward_std", "searches_mean", "status/truncated", "entropy")}
    if reward is not None and means["reward_std"] == 0:
        what = f"nothing is learned: all rewards of the last {count} steps are equal ({reward:.3f})"
        yield what, f'read trajectories (`foray replay --show 3`), then {PAGE}, "The reward stays 0"'
    elif (share := steps.mean("zero_advantage_share")) is not None and share > 0.95:
        what = (
            f"{share:.0%} of the trajectories of the last {count} steps have no advantage: rewards in a group are equal"
        )
        yield what, "raise run.group_size, or choose questions that are neither all solved nor all failed"
    if (cut := means["status/truncated"]) is not None and cut > 0.5:
        what = f"{cut:.0%} of the trajectories of the last {count} steps are truncated"
        yield what, "raise rollout.episode.max_new_tokens and rollout.episode.max_context"
    if means["searches_mean"] == 0:
        todo = "see in `foray replay --show 3` why no search is recognised: rollout.episode.template, or another model"
        yield f"no trajectory of the last {count} steps has searched", todo
    if (entropy := means["entropy"]) is not None and entropy < 0.01:
        what = f"the entropy has collapsed to {entropy:.4f} nats per token, so that all answers are alike"
        yield what, f'go back to an earlier checkpoint and raise clip_high ({PAGE}, "The reward collapses")'
