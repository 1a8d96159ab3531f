"""The learner's process on every rank but the first: no Redis and no delivery state, only training.

It ends on rank 0's command or when rank 0 is gone. Only rank 0 handles signals: a launcher sends SIGTERM to all ranks,
but rank 0 needs the others to finish its step and to write its last checkpoint.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from pathlib import Path

from learner.checkpoint.checkpoint import LOOK_S, VISIBLE_S
from learner.checkpoint.resume import use_dtype
from learner.config.learner import LearnerSettings
from protocol.errors import UserError
from protocol.runtime.files import durable_mkdir
from protocol.settings import RunSettings

log = logging.getLogger(__name__)


def ranks() -> tuple[int, int]:
    """Return (rank, number of ranks) from the launcher's environment; (0, 1) without a launcher."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def require_shared_folder(folder: Path, dtype: str = "") -> str:
    """Return rank 0's `dtype`: what `auto` stands for is decided once, not by each rank's own measurement; collective.

    Raises UserError on every rank unless all ranks see a file of rank 0 in `folder` and can write there: ranks with
    separate folders would each write a part of a checkpoint that no learner could load.
    """
    from learner.engine.ranks import join_ranks
    from learner.trainer.distributed.channel import RankChannel

    join_ranks()
    channel = RankChannel()
    durable_mkdir(folder)
    name = f".probe.{secrets.token_hex(8)}"
    if channel.rank:
        name, dtype = channel.receive()[0].split("/")
    probe = folder / name
    if not channel.rank:
        probe.touch()
        channel.send(f"{name}/{dtype}")
    deadline = time.monotonic() + VISIBLE_S
    while not probe.exists() and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    shared = probe.exists() and os.access(folder, os.W_OK)
    failures = channel.gather_errors(shared, f"{folder} is not the folder of rank 0, or not writable")
    if not channel.rank:
        probe.unlink()
    if failures:
        raise UserError(
            f"the ranks of the learner do not share the folder {folder}",
            why="each rank writes its part of a checkpoint there: " + "; ".join(failures),
            todo="set run.dir to a folder that all hosts of the learner mount",
        )
    return dtype


def run_worker(run: RunSettings, settings: LearnerSettings) -> int:
    """Run the commands of rank 0; return 0 at the end. Raises RankLost, and UserError if the model is missing."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    from learner.trainer.distributed.leader import run_follower
    from learner.trainer.trainer import Trainer

    settings = use_dtype(settings, require_shared_folder(run.checkpoint_dir))
    trainer = Trainer(run, settings, adapters=settings.publish.type == "adapter")
    log.info("ready as rank %d of %d", trainer.rank, trainer.world_size)
    run_follower(trainer)
    return 0
