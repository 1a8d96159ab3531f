"""Which engines deserve requests: strikes for bad behaviour, and a rest for those that have too many.

Local to one rollout server and about its own experience only: whether an engine is registered, READY and at the
right version is the fleet's business. A restarted engine (a new incarnation) starts with a clean slate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

HALF_LIFE_S = 30.0
"""A strike counts half after so long."""
LIMIT = 2.5
"""More than this much and the engine rests: three strikes in quick succession."""
REST_S = 30.0
"""How long an engine rests after too many strikes."""
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 10.0
"""An engine that could not be reached is tried again after the first, doubling up to the second."""


@dataclass
class _Record:
    strikes: float = 0.0
    at: float = 0.0
    rests_until: float = 0.0
    unreachable: int = 0
    last: str = ""


class Health:
    """Strikes by engine incarnation. `key` is any string that names one incarnation of one engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self.total = 0
        """Strikes since the start, decay left out."""

    def usable(self, key: str) -> bool:
        """Whether the engine may be given a request now."""
        record = self._records.get(key)
        return record is None or self._clock() >= record.rests_until

    def praise(self, key: str) -> None:
        """A request went well."""
        record = self._records.get(key)
        if record is not None:
            record.unreachable = 0

    def strike(self, key: str, why: str = "") -> None:
        """A time-out, a server error or bad output."""
        now = self._clock()
        record = self._records.setdefault(key, _Record(at=now))
        record.last = why
        record.strikes = self.strikes(key) + 1.0
        record.at = now
        self.total += 1
        if record.strikes > LIMIT:
            record.rests_until = now + REST_S
            record.strikes = 0.0

    def unreachable(self, key: str, why: str = "") -> None:
        """The engine could not be reached: out at once, for a short while that grows."""
        now = self._clock()
        record = self._records.setdefault(key, _Record(at=now))
        record.last = why
        if now < record.rests_until:
            return  # many requests in flight meet the same death: it counts once
        record.rests_until = now + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2**record.unreachable)
        record.unreachable += 1
        self.total += 1

    def strikes(self, key: str) -> float:
        """Strikes left after decay."""
        record = self._records.get(key)
        if record is None:
            return 0.0
        return float(record.strikes * 0.5 ** ((self._clock() - record.at) / HALF_LIFE_S))

    def last(self, key: str) -> str:
        """What went wrong last, "" when nothing has."""
        record = self._records.get(key)
        return record.last if record is not None else ""

    def forget_all_but(self, keys: set[str]) -> None:
        """Drops records of incarnations that are gone, so that they do not pile up."""
        for key in self._records.keys() - keys:
            del self._records[key]


# Log lines about engines, few enough to be read: hundreds of turns meet the same death at once.

log = logging.getLogger(__name__)

AGAIN_S = 30.0
"""The same about the same engine is said once in so long, with the number of times that it was not."""
FORGET_AFTER = 1024


class Notices:
    """`say(engine, cause, text)` logs a warning, unless it has just done so."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[tuple[str, str], tuple[float, int]] = {}

    def say(self, engine: str, cause: str, text: str) -> None:
        """engine and cause tell what counts as the same."""
        now = self._clock()
        at, unsaid = self._said.get((engine, cause), (-AGAIN_S, 0))
        if now - at < AGAIN_S:
            self._said[engine, cause] = (at, unsaid + 1)
            return
        if len(self._said) >= FORGET_AFTER:
            self._said.clear()
        self._said[engine, cause] = (now, 0)
        log.warning("engine %s: %s: %s%s", engine, cause, text, f" (and {unsaid} times before)" if unsaid else "")
