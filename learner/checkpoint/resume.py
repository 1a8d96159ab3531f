"""Whether a checkpoint can be resumed with the settings of a start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from learner.checkpoint.checkpoint import Checkpoints
from learner.config.learner import LearnerSettings, TrainerSettings
from protocol.errors import UserError
from protocol.runtime.files import model_digest
from protocol.runtime.number_format import Dtype, DtypeSetting, resolve
from protocol.settings import RunSettings

log = logging.getLogger(__name__)
AnyTrainer = TypeVar("AnyTrainer", bound=TrainerSettings)
DTYPE = "learner.model.dtype"

_model_digest = cache(model_digest)
"""A run does not change its run.model, and many checkpoints name it."""


def defining_settings(run: RunSettings, settings: LearnerSettings) -> dict[str, Any]:
    """Return the settings that define a run, beside its questions and seed. Each checkpoint has them."""
    return {
        "run.model": _model_digest(run.model),
        "run.group_size": run.group_size,
        "run.groups_per_step": run.groups_per_step,
        "learner.algorithm.type": settings.algorithm.type,
        "learner.model.lora.rank": settings.model.lora.rank,
        DTYPE: settings.model.dtype,
    }


def began_with(run: RunSettings) -> Dtype | None:
    """Return the dtype of the run's checkpoint; None if there is none. Older ones do not name it: it was float32,
    unless it was set, as it still is. Raises UserError for a damaged checkpoint."""
    facts = Checkpoints(run.checkpoint_dir, 1).manifest()
    return None if facts is None else facts.get("defining", {}).get(DTYPE, "float32")


def with_dtype(run: RunSettings, settings: AnyTrainer) -> AnyTrainer:
    """Return `settings` with the dtype that `auto` stands for in this run, on this machine. Warn of a slow one."""
    given: DtypeSetting = settings.model.dtype
    if given == "auto":
        given = began_with(run) or ("auto" if settings.engine.zero_stage else "float32")
    dtype = resolve(given, run.model, log.warning, _torch, gpu=True)
    if dtype == settings.model.dtype:
        return settings
    log.info("learner.model.dtype: %s, chosen for this run and machine", dtype)
    return use_dtype(settings, dtype)


def use_dtype(settings: AnyTrainer, dtype: str) -> AnyTrainer:
    """Return `settings` with `dtype`."""
    return settings.model_copy(update={"model": settings.model.model_copy(update={"dtype": dtype})})


def _torch() -> Any:
    import torch

    return torch


def require_resumable(
    facts: Mapping[str, Any], checkpoint: str, run: RunSettings, settings: LearnerSettings, sampler: str
) -> None:
    """Raise UserError if the checkpoint with the manifest `facts` cannot be resumed with these settings.

    sampler  fingerprint of the run's questions and seed
    """
    new = "start a new run with another run.id and run.dir"
    if "replay" in facts:
        raise UserError(
            f"the checkpoint {checkpoint} is from a replay and has no delivery state",
            todo="set another run.dir for the run, and run.model to the replay's exported weights",
        )
    if facts["run"] != run.id:
        raise UserError(
            f"the checkpoint {checkpoint} belongs to run {facts['run']!r}, not to {run.id!r}",
            why="its seqs would be mistaken for this run's",
            todo="set another run.dir for each run",
        )
    if facts["sampler"] != sampler:
        raise UserError(
            "the questions or run.seed differ from those that the run started with",
            why="seq n would refer to another question than the one that was trained",
            todo=f"restore them, or {new}",
        )
    now, then = defining_settings(run, settings), facts.get("defining", {})
    if changed := [name for name in now if now[name] != "auto" and then.get(name, now[name]) != now[name]]:
        raise UserError(
            f"the run in {run.dir} was started with other settings: "
            + "; ".join(f"{name} {str(then[name])[:12]}, not {str(now[name])[:12]}" for name in changed),
            why="its later steps would not be comparable with the earlier ones (a model is named by its digest)",
            todo=f"restore them, or {new}, from these weights with `foray export {run.dir} OUT` and run.model=OUT",
        )
    if facts["step"] > run.steps:
        todo = "raise run.steps"
        raise UserError(f"run.steps is {run.steps}, but the checkpoint is at step {facts['step']}", todo=todo)
