"""Wait until something has become true: the only polling loops of the tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def wait_until(true: Callable[[], object], what: str, seconds: float = 60.0, said: Callable[[], str] = str) -> None:
    """Poll `true` until it holds. Raises AssertionError with `what`, and with what `said` returns, after `seconds`."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}\n{said()}".rstrip()
        time.sleep(0.02)


async def eventually(true: Callable[[], object], what: str, seconds: float = 10.0) -> None:
    """Poll `true` until it holds, as `wait_until` does, and let the event loop run meanwhile."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.01)
