"""Trajectories while they are generated: what the run's rollout servers answer to `/v1/live`, passed on.

Requests go only to servers registered in the run's Redis, with the viewer's token, for a request of a page.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from protocol.errors import UserError
from protocol.runtime.http import sse
from protocol.runtime.http.body import AnswerTooLarge, bounded_session, error_text, parse_json, read_bounded
from protocol.runtime.http.client import LARGEST_ANSWER

ANSWER_S = 3.0
"""Time for a server to answer."""
SILENCE_S = 60.0
"""A server sends at least a comment every 15 s; after this long without one it is given up."""
READ_S = 5.0
"""A page that reads nothing for this long is disconnected."""


class LiveProxy:
    """Asks the rollout servers of one run; `urls` reads their addresses from Redis. `lifetime`: its cleanup context."""

    session: aiohttp.ClientSession

    def __init__(self, urls: Callable[[], list[str]], headers: Mapping[str, str]) -> None:
        self._read_urls, self._headers = urls, headers

    async def lifetime(self, _: web.Application) -> AsyncIterator[None]:
        """Hold the connections while the application runs."""
        silence = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
        async with bounded_session(connect_s=ANSWER_S, headers=self._headers, timeout=silence) as self.session:
            yield

    async def listing(self, _: web.Request) -> web.Response:
        """Answer the groups in flight at each server; `error` if it does not answer."""
        asked = (self.read_list(url, "/v1/live", "groups") for url in await self.urls())
        return web.json_response({"servers": await asyncio.gather(*asked)})

    async def urls(self) -> list[str]:
        """Return the addresses of the servers."""
        return await asyncio.to_thread(self._read_urls)

    async def read_list(self, url: str, path: str, name: str) -> dict[str, Any]:
        """Return the list `name` in the answer of a server; `error` if it does not answer."""
        try:
            async with asyncio.timeout(ANSWER_S), self._get(f"{url}{path}", {}) as answer:
                answer.raise_for_status()
                said = parse_json(await read_bounded(answer, LARGEST_ANSWER))
                return {"url": url, "error": "", name: said[name]}
        except (aiohttp.ClientError, AnswerTooLarge, TimeoutError, ValueError, KeyError, TypeError) as error:
            return {"url": url, "error": str(error) or type(error).__name__, name: []}

    def _get(self, url: str, query: Mapping[str, int]) -> Any:
        return self.session.get(url, params=query, allow_redirects=False)

    async def watch(self, request: web.Request, server: int, seq: int, place: int) -> web.StreamResponse:
        """Pass on the events of one trajectory until it ends or the page leaves; `gone` if it is not in flight there.

        Raises UserError if the server does not answer.
        """
        urls = await self.urls()
        if server >= len(urls):
            raise UserError(f"the run has {len(urls)} rollout servers")
        try:
            async with self._get(f"{urls[server]}/v1/live/trajectory", {"seq": seq, "index": place}) as answer:
                if answer.status == 404:  # it may have ended since the list: the page expects that
                    return web.Response(
                        text=sse.event("gone", json.dumps(await what_was_said(answer))), headers=sse.HEADERS
                    )
                if answer.status != 200:
                    raise UserError(f"{urls[server]} refuses", why=await what_was_said(answer))
                return await pass_on(request, answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UserError(f"{urls[server]} does not answer", why=str(error)) from None


async def what_was_said(answer: aiohttp.ClientResponse) -> str:
    """Return the text of an error answer, or its status."""
    status = f"HTTP status {answer.status}"
    try:
        return error_text(await read_bounded(answer, LARGEST_ANSWER), status)
    except (aiohttp.ClientError, AnswerTooLarge):
        return status


async def pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Send the body of an answer as it arrives, until it ends or the page leaves."""
    response = web.StreamResponse(headers=sse.HEADERS)
    await response.prepare(request)
    try:
        async for chunk in answer.content.iter_any():
            await sse.write(request, response, chunk, READ_S)
    except (aiohttp.ClientError, ConnectionResetError, TimeoutError):
        # server or page has left; the status has been sent, so only a cut connection can tell the other one
        if request.transport is not None:
            request.transport.abort()
    return response
