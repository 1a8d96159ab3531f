"""Log lines about engines, few enough to be read: hundreds of turns meet the same death at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

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
