"""The speed of this machine's CPU, the dtype of a run that follows from it, and the time that steps will take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache

from deploy.config import RunConfig
from deploy.hardware.run import hosts_of
from learner.checkpoint.resume import began_with
from protocol.errors import UserError
from protocol.runtime.number_format import CpuSpeed, Dtype, known_float32
from protocol.settings import Settings
from rollout_server.node.config import CpuEngine

MEASURE = (
    "import dataclasses, json, torch; from protocol.runtime.number_format import measure; "
    "print(json.dumps(dataclasses.asdict(measure(torch))))"
)
AT_ONCE = """
import sys, time, torch
best, matrix = {}, torch.ones(1024, 1024)
for threads in (1, int(sys.argv[1])) * 5:
    torch.set_num_threads(threads)
    began = time.perf_counter()
    matrix @ matrix
    best[threads] = min(best.get(threads, 1.0), time.perf_counter() - began)
print(best[1] / best[threads])
"""
MEASURE_S = 120.0


@cache
def cpu_speed() -> CpuSpeed | None:
    """Measure in a separate process, so that this one does not load torch; None if torch is not installed here."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=MEASURE_S)
    return CpuSpeed(**json.loads(done.stdout)) if done.returncode == 0 else None


def cores_at_once(cores: int) -> float:
    """Return how much faster `cores` threads multiply matrices than one: near 1 where two cores of a virtual machine
    are two threads of one physical core. `cores` if torch is not installed here."""
    words = [sys.executable, "-c", AT_ONCE, str(cores)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=MEASURE_S)
    return max(1.0, float(done.stdout)) if done.returncode == 0 else float(cores)


def with_dtypes(
    config: RunConfig, environ: Mapping[str, str] = os.environ, speed: Callable[[], CpuSpeed | None] = cpu_speed
) -> RunConfig:
    """Return `config` with the dtype that `auto` stands for, one for learner and CPU engine: as set for one of
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
