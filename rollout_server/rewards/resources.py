"""Resources shared by rewards that call services: an HTTP session, and tasks that outlive a trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from protocol.runtime.http.body import bounded_session
from protocol.runtime.lifecycle import cancel_all

if TYPE_CHECKING:
    import aiohttp

CONNECT_S = 3.0
CONNECTIONS = 256


class RewardResources:
    """May be created outside an event loop. The session opens at the first request; the process closes it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def session(self) -> aiohttp.ClientSession:
        """The shared session. Callers set their own timeouts."""
        if self._session is None:
            self._session = bounded_session(connect_s=CONNECT_S, limit=CONNECTIONS)
        return self._session

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` as a separate task: the cancellation of one trajectory must not affect others that wait for it."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel requests and close the connections. Safe to call twice."""
        self._closed = True
        await cancel_all(self._tasks)
        if self._session is not None:
            await self._session.close()
            self._session = None
