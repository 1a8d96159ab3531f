"""From the engine thread to the event loop: many letters, one wake-up.

A wake-up is a system call, at which the engine thread would hand the interpreter lock to the loop; done for each token
of each request it would cost more than the tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Inbox:
    """What is new of one call's requests: {number of the request: its output tokens so far}. Used on the loop only."""

    def __init__(self) -> None:
        self._news: dict[int, int] = {}
        self._waiting: asyncio.Future[None] | None = None

    def put(self, number: int, length: int) -> None:
        """Later news of a request replace earlier ones that nobody has taken."""
        self._news[number] = length
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> dict[int, int]:
        """All news; waits until there are some."""
        if not self._news:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        news, self._news = self._news, {}
        return news


class Mailbox:
    """`put` and `ring` are called by the engine thread; letters arrive in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[Inbox, int, int]] = deque()

    def put(self, addressee: Inbox, number: int, length: int) -> None:
        """Leave a letter; it is delivered at the next `ring`."""
        self._letters.append((addressee, number, length))

    def ring(self) -> None:
        """Have the loop deliver what lies here."""
        if self._letters:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._letters:
            addressee, number, length = self._letters.popleft()
            addressee.put(number, length)
