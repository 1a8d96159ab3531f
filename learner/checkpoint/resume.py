"""Whether a checkpoint can be resumed with the settings of a start."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from learner.config.learner import LearnerSettings
from protocol.errors import UserError
from protocol.runtime.files import model_digest
from protocol.settings import RunSettings

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
    }


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
    if changed := [name for name in now if then.get(name, now[name]) != now[name]]:
        raise UserError(
            f"the run in {run.dir} was started with another {', '.join(changed)}: "
            + ", ".join(f"{str(then[name])[:12]}, not {str(now[name])[:12]}" for name in changed),
            why="its later steps would not be comparable with the earlier ones (a model is named by its digest)",
            todo=f"restore it, or {new}, from these weights with `foray export {run.dir} OUT` and run.model=OUT",
        )
    if facts["step"] > run.steps:
        todo = "raise run.steps"
        raise UserError(f"run.steps is {run.steps}, but the checkpoint is at step {facts['step']}", todo=todo)
