"""Build the batch of a step from its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from learner.background_call import BackgroundCall
from learner.checkpoint.journal import BatchConditions
from learner.config.learner import LearnerSettings
from learner.data.batch import UnscaledBatch, prepare_batch
from learner.interfaces import TrainEngine
from protocol.messages import TrajectoryGroup
from protocol.settings import RunSettings


def batch_for_step(
    conditions: BatchConditions,
    groups: Sequence[TrajectoryGroup],
    engine: TrainEngine,
    run: RunSettings,
    settings: LearnerSettings,
    *,
    more_lag: int = 0,
) -> UnscaledBatch:
    """Build the batch of these groups: recorded inputs from `conditions`, the rest from the settings.

    more_lag  steps by which tokens may exceed `run.max_lag` (a replay that forms other batches)
    """
    return prepare_batch(
        groups,
        engine.algorithm,
        now_step=conditions.now_step,
        lineage=conditions.lineage if settings.on_orphan == "mask" else (),
        max_lag=run.max_lag + more_lag,
        settings=settings.batch,
        temperature=conditions.temperature,
        ranks=engine.world_size,
    )


@dataclass(frozen=True)
class BatchAhead:
    """A batch that is built before its step."""

    conditions: BatchConditions
    groups: list[TrajectoryGroup]
    call: BackgroundCall[UnscaledBatch]

    def fits(self, conditions: BatchConditions, groups: Sequence[TrajectoryGroup]) -> bool:
        """Return whether it was built for these conditions and these groups themselves."""
        return self.conditions == conditions and list(map(id, self.groups)) == list(map(id, groups))
