"""One request at one engine while it runs: what came, how long it may take, and how to end it from outside."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType

from rollout_server.engine.base import EngineError
from rollout_server.engine.received import Received

GRACE_S = 1.0
"""How long an engine may take to end a stream whose last chunk has come."""
RECHECK_S = 1.0
"""How often an engine that may be silent is looked at again."""


def _never() -> bool:
    return False


class Call:
    """`async with call:` around the request; ends it with an EngineError when a limit is reached or on `leave`.

    received   the caller's: whatever ends the call, the tokens are there
    timeout_s  for all of it
    stall_s    between two pieces of the answer, once the first has come
    may_pause  whether the engine is known to be silent for a reason (it loads weights); asked before it is a stall
    enough     asked after each piece of the answer: True ends the call at once, without an error
    """

    def __init__(
        self,
        received: Received,
        *,
        timeout_s: float,
        stall_s: float = math.inf,
        may_pause: Callable[[], bool] = _never,
        enough: Callable[[], bool] | None = None,
    ) -> None:
        self.received, self.enough = received, enough
        self._timeout_s, self._stall_s, self._may_pause = timeout_s, stall_s, may_pause
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(None)
        self._deadline = math.inf
        self.heard_at = -math.inf
        """When the last piece of the answer came, by the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        self._why: EngineError | None = None
        self._open = False

    def leave(self, cause: str, detail: str) -> None:
        """Ends the call from outside, with this error. Nothing happens when it has ended already."""
        if self._open:
            self._open = False
            self._why = EngineError(cause, self.received.engine, detail)
            self._scope.reschedule(self._loop.time())

    def heard(self) -> None:
        """A piece of the answer has come."""
        if self.heard_at == -math.inf and self._stall_s < self._timeout_s:
            self._arm(self._stall_s)
        self.heard_at = self._loop.time()
        if self.received.finish_reason and self._stall_s > GRACE_S:
            self._stall_s = GRACE_S
            self._arm(GRACE_S)

    async def __aenter__(self) -> Call:
        await self._scope.__aenter__()
        self._open = True
        self._deadline = self._loop.time() + self._timeout_s
        self._arm(self._timeout_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            if self._why is None:
                raise
            raise self._why from None

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Ends the call when a limit has been reached; else looks again when the next one may be."""
        now = self._loop.time()
        if now >= self._deadline:
            self.leave("timeout", f"not done within {self._timeout_s:g} s, {len(self.received.ids)} tokens")
            return
        due = self.heard_at + self._stall_s if self.heard_at > -math.inf else self._deadline
        if now >= due:
            if not self._may_pause():
                self.leave("stalled", f"silent for {self._stall_s:g} s after {len(self.received.ids)} tokens")
                return
            self.heard_at = now  # when it goes on it has the whole time again
            due = now + RECHECK_S
        self._arm(max(0.0, min(due, self._deadline) - now))
