"""Outlier ejection of engines: failures add strikes, and an engine with too many gets no requests for a while.

Based only on the requests of this rollout server. Registration, state and version are tracked by the fleet. A restarted
engine (a new incarnation) starts without strikes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from protocol.runtime.timing import backoff_s

log = logging.getLogger(__name__)

HALF_LIFE_S = 30.0
"""Half-life of a strike, in seconds."""
LIMIT = 2.5
"""An engine with more strikes than this is ejected: after three in quick succession."""
EJECTION_S = 30.0
"""How long an engine stays ejected after too many strikes, in seconds."""
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 10.0
"""Back-off for an unreachable engine, in seconds: starts at the first value and doubles up to the second."""


AGAIN_S = 30.0
"""Each cause is logged at most once per engine in this time (seconds), with the number of suppressed messages."""
FORGET_AFTER = 1024


@dataclass
class _Record:
    strikes: float = 0.0
    at: float = 0.0
    ejected_until: float = 0.0
    unreachable: int = 0
    last_error: str = ""


class EngineHealth:
    """Strikes per engine incarnation. `key` is any string that identifies an incarnation of an engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self.total = 0
        """Strikes since the start, without decay."""

    def usable(self, key: str) -> bool:
        """Return whether the engine may get a request now."""
        return self._clock() >= self.ejected_until(key)

    def ejected_until(self, key: str) -> float:
        """Return the time of the clock from which the engine is usable, -inf if it was never ejected."""
        record = self._records.get(key)
        return record.ejected_until if record is not None else -math.inf

    def succeeded(self, key: str) -> None:
        """Record a successful request."""
        record = self._records.get(key)
        if record is not None:
            record.unreachable = 0

    def strike(self, key: str, why: str = "") -> None:
        """Record a timeout, a server error or invalid output."""
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
        """Eject an unreachable engine immediately, for a short time that grows with each failure."""
        now = self._clock()
        record = self._records.setdefault(key, _Record(at=now))
        record.last_error = why
        if now < record.ejected_until:
            return  # many requests in flight fail together: count it once
        record.unreachable += 1
        record.ejected_until = now + backoff_s(record.unreachable, FIRST_RETRY_S, LONGEST_RETRY_S)
        self.total += 1

    def strikes(self, key: str) -> float:
        """Return the strikes after decay."""
        record = self._records.get(key)
        if record is None:
            return 0.0
        return float(record.strikes * 0.5 ** ((self._clock() - record.at) / HALF_LIFE_S))

    def last_error(self, key: str) -> str:
        """Return the last failure, "" if there was none."""
        record = self._records.get(key)
        return record.last_error if record is not None else ""

    def retain(self, keys: set[str]) -> None:
        """Drop the records of all other incarnations."""
        for key in self._records.keys() - keys:
            del self._records[key]


class RateLimitedLog:
    """Rate-limited warnings about engines: hundreds of turns may fail for the same reason at once."""

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
            "engine %s: %s: %s%s", engine, cause, text, f" ({suppressed} more suppressed)" if suppressed else ""
        )
