"""What is announced, and by whom it may be changed: the training thread sets it, another thread may add a path."""

from __future__ import annotations

import threading

from learner.publish.base import Link
from protocol.messages import WeightUpdate


class Announcement:
    """The target as this learner last announced it. Thread-safe; Link's errors pass through."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._update: WeightUpdate | None = None
        self._state = ""

    @property
    def update(self) -> WeightUpdate | None:
        """What engines were told last."""
        return self._update

    def set(self, update: WeightUpdate, state: str) -> None:
        """Announces `update`; with the path that was found for it meanwhile, where it has none itself."""
        with self._lock:
            known = self._update
            if known is not None and known.version == update.version and not update.path:
                update = known
            self._link.target(update, state)
            self._update, self._state = update, state

    def improve(self, update: WeightUpdate) -> bool:
        """Announces `update` in place of the same version without a path; False when that is not the target."""
        with self._lock:
            known = self._update
            if known is None or known.version != update.version or known.path:
                return False
            self._link.target(update, self._state)
            self._update = update
            return True
