"""Scripted servers in the event loop of a thread: they serve while the loop of the test stands still."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.scripted_server import ScriptedServer


@contextmanager
def elsewhere(*servers: ScriptedServer) -> Iterator[None]:
    """Run the servers in a thread until the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def each(method: str) -> None:
        await asyncio.gather(*(getattr(server, method)() for server in servers))
        await asyncio.sleep(0.05)  # transports close in a later iteration

    try:
        asyncio.run_coroutine_threadsafe(each("start"), loop).result(20)
        yield
    finally:
        asyncio.run_coroutine_threadsafe(each("stop"), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


def block(seconds: float) -> None:
    """Block the event loop that runs this, as a suspension of its process would."""
    time.sleep(seconds)
