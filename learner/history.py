"""The learner's lines in the run's history (`protocol/events.py`). They inform: one that is lost is no fault."""

from __future__ import annotations

import logging

from learner.redis_client import RedisUnavailable, RunStore
from learner.redis_errors import Tolerated
from protocol import events
from protocol.errors import StateLost

log = logging.getLogger(__name__)

LEARNER_ID = "0"
"""Rank in metrics and events: a restarted learner takes the place of its predecessor."""


class History:
    """Thread-safe."""

    def __init__(self, store: RunStore) -> None:
        self._store, self._tolerated = store, Tolerated()

    def tell(self, kind: str, text: str) -> None:
        """One line. Raises nothing."""
        fields = events.fields("learner", LEARNER_ID, kind, text)
        try:
            self._tolerated(lambda: self._store.add_event(fields))
        except (RedisUnavailable, StateLost) as error:
            log.info("the event %r is not told: %s", kind, error)
