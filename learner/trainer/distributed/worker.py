"""The learner's process on every rank but the first: no Redis and no delivery state, only training.

It ends on rank 0's command or when rank 0 is gone. Only rank 0 handles signals: a launcher sends SIGTERM to all ranks,
but rank 0 needs the others to finish its step and to write its last checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal

from learner.config.learner import LearnerSettings
from protocol.settings import RunSettings

log = logging.getLogger(__name__)


def ranks() -> tuple[int, int]:
    """Return (rank, number of ranks) from the launcher's environment; (0, 1) without a launcher."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def run_worker(run: RunSettings, settings: LearnerSettings) -> int:
    """Run the commands of rank 0; return 0 at the end. Raises RankLost, and UserError if the model is missing."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    from learner.trainer.distributed.leader import run_follower
    from learner.trainer.trainer import Trainer

    trainer = Trainer(run, settings, adapters=settings.publish.type == "adapter")
    log.info("ready as rank %d of %d", trainer.rank, trainer.world_size)
    run_follower(trainer)
    return 0
