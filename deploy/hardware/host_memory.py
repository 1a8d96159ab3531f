"""Main memory of a run: what the learner keeps, and groups in Redis. Pure arithmetic."""

from __future__ import annotations

from deploy.config import RunConfig
from deploy.hardware.memory import weight_bytes
from protocol.runtime.number_format import stored_parameters

BYTES_PER_TOKEN = 8 * 1.25
"""4 for the id, 4 for the log-prob, and Redis' overhead: 266 kB of messages take 331 kB (measured)."""


def memory_needed(config: RunConfig) -> int:
    """Return the maximum bytes of groups in Redis: (max_lag + 1 + K) * B groups, with K steps between checkpoints, or
    2 K if the next one may be due while one is being written.

    Each group counts with its maximum length: G trajectories of `max_context` tokens.
    """
    unsaved = config.learner.checkpoint_every * (2 if config.learner.async_checkpoints else 1)
    groups = (config.run.max_lag + 1 + unsaved) * config.run.groups_per_step
    return int(groups * config.run.group_size * config.rollout.episode.max_context * BYTES_PER_TOKEN)


def memory_parts(config: RunConfig, parameters: float = 0) -> dict[str, int]:
    """Return what the learner of all ranks keeps in main memory, in bytes: {} if the model's size is unknown here.

    parameters     of the model; 0: as many as its files have

    snapshots      of the state, for checkpoints: float32 weights and two moments, and the moving average if there is
                   one; not for adapters, or without `async_checkpoints`
    optimizer      the same, if it is offloaded
    transfer copy  the weights, if they are broadcast
    """
    learner, model = config.learner, config.run.model
    parameters = parameters or stored_parameters(model)
    if not parameters or not config.launch.learner:
        return {}
    averaged = bool(learner.algorithm.kl.coefficient) and learner.reference.kind != "frozen"
    critic = learner.algorithm.type == "ppo" and learner.critic.backbone == "own"
    state = 0 if learner.model.lora.rank else int(parameters * (12 + 4 * averaged + 12 * critic))
    parts = {
        "snapshots": state if learner.async_checkpoints else 0,
        "the offloaded optimizer": state if learner.engine.offload_optimizer else 0,
        "the transfer copy": int(parameters * weight_bytes(learner)) if learner.publish.type == "distributed" else 0,
    }
    return {name: size for name, size in parts.items() if size}
