"""A module and its optimiser over all ranks. Only this package imports DeepSpeed."""

from learner.engine.deepspeed import DeepSpeedEngine, OptimizerUpdate
from learner.engine.ranks import join_ranks, leave_ranks

__all__ = ["DeepSpeedEngine", "OptimizerUpdate", "join_ranks", "leave_ranks"]
