"""The learning rate as a pure function of the number of updates done: there is no scheduler state to lose."""

from __future__ import annotations

import math

from learner.config_engine import OptimSettings


def learning_rate(settings: OptimSettings, done: int, total: int) -> float:
    """The rate of update number `done` (from 0) of `total`: linear warm-up, then constant, linear or cosine decay.

    The first update has lr / warmup, never 0; the decay reaches final_fraction * lr at the last update.
    A warm-up given as a fraction is rounded down to whole updates, as verl does.
    """
    warmup = settings.warmup_steps or int(settings.warmup_fraction * total)
    if done < warmup:
        return settings.lr * (done + 1) / warmup
    if settings.schedule == "constant":
        return settings.lr
    span = max(1, total - 1 - warmup)
    progress = min(1.0, (done - warmup) / span)
    falling = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.lr * (settings.final_fraction + (1.0 - settings.final_fraction) * falling)
