"""The learner's process on every rank but the first: no Redis, no delivery state, only the computing half.

It ends when rank 0 says so or is gone. Signals are rank 0's affair: a launcher sends SIGTERM to all ranks alike, and
rank 0 needs the others to finish its step and to write its last checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal

from learner.config.learner import LearnerSettings
from protocol.settings import RunSettings

log = logging.getLogger(__name__)


def ranks() -> tuple[int, int]:
    """(this process's rank, number of ranks) as the launcher says; (0, 1) without one."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def run_worker(run: RunSettings, settings: LearnerSettings) -> int:
    """Compute what rank 0 commands; return 0 at the end. Raises RankLost, and UserError when there is no such model."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    from learner.trainer.distributed.leader import run_follower
    from learner.trainer.trainer import Trainer

    trainer = Trainer(run, settings, adapters=settings.publish.type == "adapter")
    log.info("ready as rank %d of %d", trainer.rank, trainer.world_size)
    run_follower(trainer)
    return 0
