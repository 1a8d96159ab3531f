"""Connections whose time limit does not count the time in which this process stood still."""

from __future__ import annotations

from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.tracing import Trace

from protocol.runtime.timing import loop_timeout


class LoopConnector(aiohttp.TCPConnector):
    """Connects within `connect_s` by `LoopClock`, name resolution and TLS included. `options`: of TCPConnector.

    Otherwise aiohttp raises ConnectionTimeoutError. The session needs no `sock_connect`: that would count standstills.
    """

    def __init__(self, connect_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._connect_s = connect_s

    async def _create_connection(
        self, request: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        async with loop_timeout(self._connect_s):
            return await super()._create_connection(request, traces, timeout)
