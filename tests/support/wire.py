"""A TCP proxy to Redis that can be cut. Only clients of its port are cut off."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any


class Wire:
    """`with Wire(socket) as wire`: `wire.port` forwards to the Redis at the unix socket; `cut` and `restore` the
    connection; `refused` counts the connections attempted meanwhile.
    """

    def __init__(self, socket: str) -> None:
        self._socket, self._loop = socket, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._open: set[asyncio.StreamWriter] = set()
        self._down = False
        self.port = self.refused = self.broken = 0

    def __enter__(self) -> Wire:
        self._thread.start()
        self._do(self._serve())
        return self

    def __exit__(self, *exc: object) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def cut(self) -> None:
        """Every connection breaks, and new ones do at once."""
        self._do(self._cut())

    def restore(self) -> None:
        """New connections pass again."""
        self._down = False

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    async def _serve(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        self._down = True
        self.broken += len(self._open) // 2
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def _end(self) -> None:
        self._server.close()
        await self._cut()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._down:
            self.refused += 1
            writer.transport.abort()
            return
        with contextlib.suppress(OSError, asyncio.CancelledError):
            far_reader, far_writer = await asyncio.open_unix_connection(self._socket)
            self._open |= {writer, far_writer}
            if self._down:  # cut while it was being made
                await self._cut()
                return
            await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()
            self._open.discard(writer)
