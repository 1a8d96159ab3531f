"""Outlier ejection of engines: strikes for failures, and no requests for a while after too many.

Local to one rollout server and about its own experience only: whether an engine is registered, READY and at the
right version is the fleet's business. A restarted engine (a new incarnation) starts with a clean slate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

HALF_LIFE_S = 30.0
"""A strike counts half after this time."""
LIMIT = 2.5
"""An engine with more strikes than this is ejected: three in quick succession."""
EJECTION_S = 30.0
"""How long an engine is ejected after too many strikes."""
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 10.0
"""An engine that could not be reached is tried again after the first, doubling up to the second."""


AGAIN_S = 30.0
"""Seconds in which a cause is logged once for an engine, with the number of times that it was left out."""
FORGET_AFTER = 1024


@dataclass
class _Record:
    strikes: float = 0.0
    at: float = 0.0
    ejected_until: float = 0.0
    unreachable: int = 0
    last_error: str = ""


class EngineHealth:
    """Strikes by engine incarnation. `key` is any string that names one incarnation of one engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self.total = 0
        """Strikes since the start, decay left out."""

    def usable(self, key: str) -> bool:
        """Whether the engine may be given a request now."""
        record = self._records.get(key)
        return record is None or self._clock() >= record.ejected_until

    def succeeded(self, key: str) -> None:
        """Note a request that went well."""
        record = self._records.get(key)
        if record is not None:
            record.unreachable = 0

    def strike(self, key: str, why: str = "") -> None:
        """Note a time-out, a server error or bad output."""
        now = self._clock()
        record = self._records.setdefault(key, _Record(at=now))
        record.last_error = why
        record.strikes = self.strikes(key) + 1.0
        record.at = now
        self.total += 1
        if record.strikes > LIMIT:
            record.ejected_until = now + EJECTION_S
            record.strikes = 0.0

    def unreachable(self, key: str, why: str = "") -> None:
        """Eject an engine that could not be reached: at once, for a short while that grows."""
        now = self._clock()
        record = self._records.setdefault(key, _Record(at=now))
        record.last_error = why
        if now < record.ejected_until:
            return  # many requests in flight meet the same failure: it counts once
        record.ejected_until = now + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2**record.unreachable)
        record.unreachable += 1
        self.total += 1

    def strikes(self, key: str) -> float:
        """Strikes left after decay."""
        record = self._records.get(key)
        if record is None:
            return 0.0
        return float(record.strikes * 0.5 ** ((self._clock() - record.at) / HALF_LIFE_S))

    def last_error(self, key: str) -> str:
        """What went wrong last, "" when nothing has."""
        record = self._records.get(key)
        return record.last_error if record is not None else ""

    def retain(self, keys: set[str]) -> None:
        """Drop the records of all other incarnations."""
        for key in self._records.keys() - keys:
            del self._records[key]


class RateLimitedLog:
    """Warnings about engines, few enough to be read: hundreds of turns meet the same failure at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}

    def warning(self, engine: str, cause: str, text: str) -> None:
        """Log a warning, unless one with the same engine and cause was logged in the last AGAIN_S."""
        now = self._clock()
        at, suppressed = self._logged.get((engine, cause), (-AGAIN_S, 0))
        if now - at < AGAIN_S:
            self._logged[engine, cause] = (at, suppressed + 1)
            return
        if len(self._logged) >= FORGET_AFTER:
            self._logged.clear()
        self._logged[engine, cause] = (now, 0)
        log.warning(
            "engine %s: %s: %s%s", engine, cause, text, f" (and {suppressed} times before)" if suppressed else ""
        )
