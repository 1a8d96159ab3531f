"""A module and its optimiser over all ranks. DeepSpeed is imported in this package and nowhere else."""

from learner.engine.deepspeed import DeepSpeedEngine, OptimizerUpdate
from learner.engine.ranks import join_ranks, leave_ranks

__all__ = ["DeepSpeedEngine", "OptimizerUpdate", "join_ranks", "leave_ranks"]
