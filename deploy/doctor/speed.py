"""Checks of the speed of this machine's CPU: the dtypes of a run on it, and the time of a step."""

from __future__ import annotations

import os
from collections.abc import Iterator

from deploy.config import RunConfig
from deploy.doctor.finding import Finding
from deploy.hardware.run import cores, hosts_of
from deploy.hardware.speed import cpu_speed
from protocol.runtime.number_format import SMALL, stored_parameters
from protocol.runtime.progress import duration
from rollout_server.node.config import CpuEngine

TRAINED, READ = 6, 2
"""Operations a parameter and token: forward and backward pass, forward pass."""
SHARE = 0.3
"""Share of the speed of products that a step reaches (SmolLM2-135M on two cores: 0.28 to 0.9)."""


def machine() -> Iterator[Finding]:
    """Yield the speed of this CPU, if torch is installed here."""
    if (speed := cpu_speed()) is not None:
        yield Finding("cpu", "ok", f"{speed}; dtype auto is {speed.best}")


def findings(config: RunConfig) -> Iterator[Finding]:
    """Yield the dtypes of a run that computes on this CPU, its speed in them, and the time of a step; with auto
    resolved. Nothing for a model so small that its speed is that of calls."""
    kind, learner = config.engine.kind, config.learner
    used = {"engine.kind.dtype": kind.dtype} if isinstance(kind, CpuEngine) and config.engine_roles else {}
    if config.launch.learner and not hosts_of(config, os.environ):
        used["learner.model.dtype"] = learner.model.dtype
    parameters = stored_parameters(config.run.model)
    if not used or parameters < SMALL or (speed := cpu_speed()) is None:
        return
    tokens, count = config.rollout.episode.max_context, config.run.groups_per_step * config.run.group_size
    seconds = max(
        (TRAINED + READ) * parameters * count * tokens / (SHARE * 1e9 * cores() * getattr(speed, dtype))
        for dtype in used.values()
    )
    named = ", ".join(f"{name} {dtype}" for name, dtype in used.items())
    detail = f"{named} on {speed}; a step of {count} trajectories of {tokens:,} tokens: about {duration(seconds)}"
    if "bfloat16" in used.values() and speed.bfloat16 < speed.float32:
        yield Finding("dtype", "warn", detail, "set them to auto: bfloat16 is emulated on this CPU")
    else:
        yield Finding("dtype", "ok", detail)
