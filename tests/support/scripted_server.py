"""A server that tests script: it dies, and comes back at the same address."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from aiohttp import web


class ScriptedServer(ABC):
    """`async with Kind() as server: server.url ...`"""

    def __init__(self) -> None:
        self.url = ""
        self._port = 0
        self._runner: web.AppRunner | None = None

    @abstractmethod
    def _app(self) -> web.Application:
        """The application; created again at every start."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; on the same port when it listened before."""
        self._runner = web.AppRunner(self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Die: the port is closed, requests in flight lose their connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
