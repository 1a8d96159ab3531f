"""What keeps a run from learning, from its recent steps, and what to try. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.run.history import RunHistory

ENOUGH = 10
"""Steps before a run is judged: the first ones say little."""
SOLVED = 0.9
"""From this mean reward on, equal rewards, few searches and a low entropy are expected."""
MOST_DEAD, FEW = 0.01, 3
"""Share of questions without a result, and their number, above which they are a problem."""
PAGE = "docs/troubleshooting.md"


@dataclass(frozen=True)
class Problem:
    """Something that stops or degrades the run, and what to do about it."""

    what: str
    todo: str


def learning_problems(history: RunHistory) -> list[Problem]:
    """Return what keeps the run from learning, the worst first."""
    return [Problem(what, todo) for what, todo in _found(history)]


def _found(history: RunHistory) -> Iterator[tuple[str, str]]:
    dead, settled = history.last.get("dead", 0.0), history.last.get("settled", 0.0)
    if dead >= FEW and dead > MOST_DEAD * settled:
        what = f"{dead:.0f} of {settled:.0f} questions ({dead / settled:.1%}) failed and are not trained"
        yield what, "`foray dlq list` names the causes; for prompt_too_long raise rollout.episode.max_context"
    reward, count = history.mean("reward_mean"), len(history.recent)
    if count < ENOUGH or (reward or 0.0) >= SOLVED:
        return
    means = {name: history.mean(name) for name in ("reward_std", "searches_mean", "status/truncated", "entropy")}
    if reward is not None and means["reward_std"] == 0:
        what = f"nothing is learned: all rewards of the last {count} steps are equal ({reward:.3f})"
        yield what, f'read trajectories (`foray replay --show 3`), then {PAGE}, "The reward stays 0"'
    elif (share := history.mean("zero_advantage_share")) is not None and share > 0.95:
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
