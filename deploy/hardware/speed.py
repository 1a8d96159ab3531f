"""The speed of this machine's CPU, the dtype of a run that follows from it, and the time that steps will take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from deploy.config import RunConfig
from deploy.doctor.finding import Finding
from deploy.hardware.run import cores, hosts_of
from learner.checkpoint.resume import began_with
from protocol.errors import UserError
from protocol.runtime.number_format import SMALL, CpuSpeed, Dtype, known_float32, stored_parameters
from protocol.runtime.progress import duration
from protocol.settings import Settings
from rollout_server.node.config import CpuEngine

MEASURE = (
    "import dataclasses, json, torch; from protocol.runtime.number_format import measure; "
    "print(json.dumps(dataclasses.asdict(measure(torch))))"
)
MEASURE_S = 120.0
TRAINED, READ = 6, 2
"""Operations a parameter and token: forward and backward pass, forward pass."""
SHARE = 0.3
"""Share of the speed of products that a step reaches (SmolLM2-135M on two cores: 0.28 to 0.9)."""


@cache
def cpu_speed() -> CpuSpeed | None:
    """Measure in a process of its own, so that this one does not hold torch; None if it is not installed here."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=MEASURE_S)
    return CpuSpeed(**json.loads(done.stdout)) if done.returncode == 0 else None


def with_dtypes(
    config: RunConfig, environ: Mapping[str, str] = os.environ, speed: Callable[[], CpuSpeed | None] = cpu_speed
) -> RunConfig:
    """Return `config` with the dtype that `auto` stands for, one for learner and embedded engine: as set for one of
    them, else that of the run's checkpoint, else what this machine is faster in. Unchanged while run.model is missing.
    """
    learner, kind = config.learner, config.engine.kind
    engine = kind.dtype if isinstance(kind, CpuEngine) and config.engine_roles else None
    trained = learner.model.dtype if config.launch.learner else None
    if "auto" not in (engine, trained) or not (config.run.model / "config.json").is_file():
        return config
    chosen = next((dtype for dtype in (trained, engine) if dtype not in ("auto", None)), None)
    chosen = chosen or _began(config) or _of_machine(config, bool(hosts_of(config, environ)) and engine is None, speed)
    update: dict[str, Settings] = {}
    if trained == "auto":
        own = chosen if learner.engine.zero_stage else "float32"
        model = learner.model.model_copy(update={"dtype": own})
        update["learner"] = learner.model_copy(update={"model": model})
    if engine == "auto":
        update["engine"] = config.engine.model_copy(update={"kind": kind.model_copy(update={"dtype": chosen})})
    return config.model_copy(update=update)


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


def _began(config: RunConfig) -> Dtype | None:
    try:
        return began_with(config.run) if config.launch.learner else None
    except (UserError, OSError):
        return None  # another check reports it


def _of_machine(config: RunConfig, gpu: bool, speed: Callable[[], CpuSpeed | None]) -> Dtype:
    if (config.launch.learner and not config.learner.engine.zero_stage) or known_float32(config.run.model):
        return "float32"
    found = None if gpu else speed()
    return "bfloat16" if gpu else found.best if found else "float32"
