"""What a person reads while it trains: one line a step, with who waits for whom in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WORDS = {
    "wait": "learner waits for rollouts",
    "compute": "rollouts wait for the learner",
    "publish": "publishing weights",
    "checkpoint": "writing a checkpoint",
    "redis": "waiting for Redis",
}
"""By the names of `seconds` in `metrics.jsonl`."""
BALANCED = 0.5
"""Below this share of the step, no single cause is called the bottleneck."""
SHOWN = {
    "reward_mean": ".3f",
    "reward/em": ".3f",
    "response_length_mean": ".0f",
    "searches_mean": ".1f",
    "lag_mean": ".1f",
    "lag_max": ".0f",
}
"""Fields of `metrics.jsonl` in the line of a step, under their names; one that was not measured is left out."""


def step_line(record: Mapping[str, Any], *, steps: int) -> str:
    """The line for the terminal of one record of `metrics.jsonl`; what is missing or null in it is left out."""
    parts = [f"step {int(record['step']):>{len(str(steps))}}/{steps}"]
    parts += [f"{name} {record[name]:{how}}" for name, how in SHOWN.items() if record.get(name) is not None]
    generated, total_s = record.get("tokens_generated_per_s"), record.get("step_s") or 0.0
    if generated is not None:
        parts.append(f"generated {_short(generated)} tok/s")
    if total_s:
        trained = (record.get("tokens_trained") or 0) / total_s
        parts += [f"trained {_short(trained)} tok/s", f"{total_s:.1f} s", bottleneck(record)]
    return "  ".join(part for part in parts if part)


def bottleneck(record: Mapping[str, Any]) -> str:
    """Who waits for whom, in words; "" in a replay, where nothing is waited for."""
    seconds = {name: s or 0.0 for name, s in (record.get("seconds") or {}).items() if name in WORDS}
    if "wait" not in seconds:
        return ""
    cause = max(seconds, key=lambda name: seconds[name])
    share = seconds.get(cause, 0.0) / max(record.get("step_s") or 0.0, 1e-9)
    return f"{WORDS[cause]} ({share:.0%})" if share >= BALANCED else "balanced"


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"
