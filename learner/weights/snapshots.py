"""Files of the current version for engines outside its view: new engines, and those whose transfer failed.

It runs in its own thread, so that neither a training step nor a wait for data delays it: an engine that needs the files
may be the only one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from learner.weights.base import Announcement, EngineLink
from protocol.errors import Fenced, StateLost, UserError
from protocol.messages import EngineInfo, NodeState, WeightUpdate
from protocol.runtime.redis.errors import RedisUnavailable

log = logging.getLogger(__name__)

LOOK_S = 0.25
LONGEST_PAUSE_S = 30.0
LEAVING = (NodeState.DRAINING, NodeState.GONE)
STARTING = ("launching", "reading")
"""Prefix of the detail of a SYNCING engine that is being launched: it reads the target again once it is up."""


class SnapshotWriter:
    """Finds engines that need files, and calls `write` for an announced version without files.

    write       the version's files, from the copy in main memory; None if its copy no longer exists
    patience_s  seconds that a serving engine which is behind waits for the next view
    """

    def __init__(
        self,
        link: EngineLink,
        announcement: Announcement,
        write: Callable[[WeightUpdate], WeightUpdate | None],
        *,
        patience_s: float,
    ) -> None:
        self._link, self._announcement, self._write, self._patience_s = link, announcement, write, patience_s
        self.written = 0
        self._since: tuple[WeightUpdate | None, float] = (None, 0.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread after the current write."""
        self._stop.set()
        self._thread.join(60.0)

    def _run(self) -> None:
        """Consume registrations; produce files and the target with their path; wait LOOK_S; unblocked by close."""
        pause_s = LOOK_S
        while not self._stop.wait(pause_s):
            try:
                self._turn()
                pause_s = LOOK_S
            except (RedisUnavailable, StateLost, Fenced, UserError) as error:
                log.debug("could not read the engines: %s", error)  # the training thread repairs this, or ends
            except OSError as error:
                pause_s = min(LONGEST_PAUSE_S, 4 * pause_s)
                log.error("could not write a snapshot: %s", error)

    def _turn(self) -> None:
        update = self._announcement.update
        if update is None or update.path:
            return
        if self._since[0] is not update:
            self._since = update, time.monotonic()
        engines = [e for e in self._link.engines() if self._needs(e, update)]
        pin = self._link.pin() if engines else None
        if needy := [e.id for e in engines if pin is None or not pin.holds_back(e.role, update.version)]:
            written = self._write(update)
            if written is not None and self._announcement.add_path(written):
                self.written += 1
                log.info("wrote %s for %s", update.version.label, ", ".join(needy))

    def _needs(self, engine: EngineInfo, update: WeightUpdate) -> bool:
        if engine.state in LEAVING or engine.version == update.version or engine.needs_broadcast:
            return False
        if engine.state is NodeState.LOADING:
            return False  # a member of the view that is about to resume
        if engine.state is NodeState.JOINING or (
            engine.state is NodeState.SYNCING and engine.detail.startswith(STARTING)
        ):
            return False
        serves = engine.state is NodeState.READY and engine.epoch == update.epoch
        return not serves or time.monotonic() > self._since[1] + self._patience_s
