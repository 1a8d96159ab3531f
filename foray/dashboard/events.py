"""Server-sent events of a run: new steps, versions, engines, problems, state.

One task looks at the run once a second while anyone listens, whatever their number. Events have ids; a client that
reconnects with `Last-Event-ID` gets what it missed, or `reload` if that is no longer kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from foray.dashboard.source import RunData
from foray.watch.status import state
from protocol.runtime.http import sse

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
HEARTBEAT_S = 15.0
"""A comment is sent after this long without an event, so that proxies and clients know that the connection lives."""
READ_S = 60.0
"""A client that reads nothing for this long is disconnected."""
KEPT = 500
"""Number of events that a client may miss."""
CLIENTS = 64


class EventFeed:
    """The events of one run and the clients that read them. `run` is its task."""

    def __init__(self, data: RunData) -> None:
        self._data = data
        self._boot = secrets.token_hex(4)
        self._events: deque[tuple[int, str, str]] = deque(maxlen=KEPT)
        self._count = 0
        self._clients = 0
        self._changed = asyncio.Condition()
        self._known: dict[str, Any] = {}

    @property
    def listened(self) -> bool:
        """Return whether a client is connected."""
        return self._clients > 0

    async def run(self) -> None:
        """Look at the run until cancelled. A failure is logged, and the next look tries again."""
        while True:
            if self.listened:
                try:
                    await self.look()
                except Exception:
                    log.exception("cannot read the run")
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """Compare the run with the last look and add an event for each difference."""
        now = await asyncio.to_thread(self._read)
        new = [(kind, value) for kind, value in now.items() if self._known.get(kind) != value]
        self._known = now
        async with self._changed:
            for kind, value in new:
                self._count += 1
                self._events.append((self._count, kind, json.dumps(value)))
            self._changed.notify_all()

    def _read(self) -> dict[str, Any]:
        self._data.read_steps()
        snapshot, waits = self._data.snapshot()
        engines = [
            {"id": e.id, "state": str(e.state), "version": e.version.label, "running": e.running, "waiting": e.waiting}
            for e in snapshot.engines
        ]
        version = {
            "version": snapshot.target.version.label if snapshot.target else None,
            "state": snapshot.target_state,
        }
        return {
            "step": self._data.steps.last,
            "state": {"state": state(snapshot), "waits": waits},
            "version": version,
            "engines": engines,
            "problems": self._data.problems(),
            "index": self._data.index.progress,
        }

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer `GET /events` until the client leaves."""
        if self._clients >= CLIENTS:
            return web.json_response({"error": f"{CLIENTS} clients are connected already"}, status=503)
        response = web.StreamResponse(headers=sse.HEADERS)
        self._clients += 1
        try:
            await response.prepare(request)
            await self._stream(request, response, request.headers.get("Last-Event-ID", ""))
        except ConnectionResetError:
            pass  # the client has left
        finally:
            self._clients -= 1
        return response

    async def _stream(self, request: web.Request, response: web.StreamResponse, last_id: str) -> None:
        async def send(text: str) -> None:
            await sse.write(request, response, text.encode(), READ_S)

        boot, _, digits = last_id.partition("-")
        known = boot == self._boot and digits.isdecimal() and len(digits) < 18
        position = int(digits) if known else self._count
        if last_id and (not known or (self._events and position < self._events[0][0] - 1)):
            position = self._count
            await send(self._message(position, "reload", "{}"))
        else:
            await send(self._message(position, "hello", json.dumps(self._hello())))
        while True:
            new = [event for event in self._events if event[0] > position]
            for number, kind, text in new:
                await send(self._message(number, kind, text))
                position = number
            if new:
                continue
            try:
                async with asyncio.timeout(HEARTBEAT_S), self._changed:
                    await self._changed.wait_for(partial(self._is_behind, position))
            except TimeoutError:
                await send(sse.KEEPALIVE)

    def _is_behind(self, position: int) -> bool:
        return self._count > position

    def _hello(self) -> Mapping[str, Any]:
        return {"heartbeat_s": HEARTBEAT_S, "interval_s": INTERVAL_S}

    def _message(self, number: int, kind: str, text: str) -> str:
        return sse.event(kind, text, f"{self._boot}-{number}")
