"""A TCP proxy with network faults, between a process and Redis (or an engine).

    client ==> Link (listens on a port of its own) ==> server
                 ^ `weather`: what happens to what passes

All links run in one event loop in one thread (`Links`); the driver sets their weather from outside. Each kind of
weather counts its effects (`Link.counts`), as evidence that the fault happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from resp import Commands, words

CHUNK = 64 << 10
T = TypeVar("T")


@dataclass(frozen=True)
class Weather:
    """The faults of a link.

    down         connections are cut and new ones are reset
    hole         traffic is held in both directions without an error; afterwards it is delivered, as in TCP
    latency_s    delay of every chunk
    bytes_per_s  bandwidth; 0: unlimited
    cut_reply    drop the reply to the next command that contains this word, and reset the connection: the command was
                 executed, but the client does not know. b"" for none
    limit        reset a connection after this many bytes from the client, also within a command; 0: never
    """

    down: bool = False
    hole: bool = False
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    cut_reply: bytes = b""
    limit: int = 0


FAIR = Weather()


class Link:
    """One proxied address. Everything but `port` belongs to the loop's thread. `commands`: it speaks Redis."""

    def __init__(self, name: str, target: tuple[str, int], *, commands: bool) -> None:
        self.name, self.target, self._commands = name, target, commands
        self.port = 0
        self.weather = FAIR
        self.counts: Counter[str] = Counter()
        self.last_publish = b""
        """The bytes of the last complete `foray_publish`, which a server would send again to publish twice."""
        self._open: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.reset()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def set(self, weather: Weather) -> None:
        """From now on."""
        self.weather = weather
        self._changed.set()
        self._changed = asyncio.Event()
        if weather.down:
            self.reset()

    def reset(self) -> int:
        """Reset all connections now, and return their number."""
        cut = len(self._open)
        for writer in tuple(self._open):
            _abort(writer)
        self._open.clear()
        self.counts["reset"] += cut
        return cut

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._carry(reader, writer)
        except asyncio.CancelledError:
            _abort(writer)  # the links are closing: do not wait for this connection
        finally:
            self._tasks.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.weather.down:
            self.counts["refused"] += 1
            _abort(writer)
            return
        try:
            await self._passable()
            server_reader, server_writer = await asyncio.open_connection(*self.target, limit=CHUNK)
        except OSError:
            self.counts["unreachable"] += 1
            _abort(writer)
            return
        self._open |= {writer, server_writer}
        condemned = asyncio.Event()
        ways = {
            asyncio.ensure_future(self._up(reader, server_writer, condemned)),
            asyncio.ensure_future(self._down(server_reader, writer, condemned)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, server_writer):
                self._open.discard(end)
                _abort(end)

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, condemned: asyncio.Event) -> None:
        """Client to server. Sets `condemned` once the command whose reply is to be lost has been passed on."""
        parser, sent = (Commands() if self._commands else None), 0
        while data := await reader.read(CHUNK):
            await self._delay(len(data))
            limit = self.weather.limit
            if limit and sent + len(data) > limit:
                writer.write(data[: max(0, limit - sent)])
                await writer.drain()
                self.counts["cut_in_the_middle"] += 1
                return
            sent += len(data)
            for command in parser.feed(data) if parser else ():
                self._look_at(command, condemned)
            writer.write(data)
            await writer.drain()

    def _look_at(self, command: bytes, condemned: asyncio.Event) -> None:
        word = self.weather.cut_reply
        if b"foray_publish" in command[:80]:
            self.last_publish = command
        if word and word in words(command, 2):
            condemned.set()
            self.weather = FAIR

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, condemned: asyncio.Event) -> None:
        """Server to client."""
        while data := await reader.read(CHUNK):
            if condemned.is_set():
                self.counts["reply_cut"] += 1
                return
            await self._delay(len(data))
            writer.write(data)
            await writer.drain()

    async def _delay(self, size: int) -> None:
        weather = self.weather
        if weather.hole:
            self.counts["held"] += size
        await self._passable()
        if weather.latency_s:
            self.counts["late"] += 1
            await asyncio.sleep(weather.latency_s)
        if weather.bytes_per_s:
            self.counts["slowed"] += size
            await asyncio.sleep(size / weather.bytes_per_s)

    async def _passable(self) -> None:
        while self.weather.hole:
            await self._changed.wait()


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with RST, like a machine that has disappeared."""
    end = writer.get_extra_info("socket")
    if end is not None:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Links:
    """All links, and the thread they run in. `with Links() as links: links.add(...)`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self.links: dict[str, Link] = {}

    def add(self, name: str, port: int, *, commands: bool = True) -> Link:
        """A link to 127.0.0.1:`port`, open."""
        link = Link(name, ("127.0.0.1", port), commands=commands)
        self._do(link.start())
        self.links[name] = link
        return link

    def set(self, name: str, weather: Weather) -> None:
        """Change a link's weather; it is in effect when this returns."""
        self._do(_soon(lambda: self.links[name].set(weather)))

    def reset(self, name: str) -> int:
        """Cuts every connection of a link; how many."""
        return self._do(_soon(self.links[name].reset))

    def counts(self, name: str) -> Counter[str]:
        """What a link has done so far."""
        return self._do(_soon(lambda: Counter(self.links[name].counts)))

    def last_publish(self, name: str) -> bytes:
        """The last publication that went by."""
        return self._do(_soon(lambda: self.links[name].last_publish))

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def __enter__(self) -> Links:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for link in self.links.values():
            self._do(link.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


async def _soon(call: Any) -> Any:
    return call()
