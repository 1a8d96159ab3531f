"""The page `chat`: questions to running `foray serve`s, passed on with their token, which no page gets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import aiohttp
from aiohttp import web
from pydantic import BaseModel, Field, ValidationError

from foray.dashboard.live import LiveProxy, pass_on, what_was_said
from protocol.errors import UserError
from protocol.runtime.timing import loop_timeout

BODY_S = 30.0
"""Time for a question to arrive."""


class _PageMessage(BaseModel, extra="forbid"):
    role: Literal["user", "assistant"]
    content: str


class ChatQuestion(BaseModel, extra="forbid"):
    """What the page asks. server: its place in the list of servers; search: False answers without documents."""

    server: int = Field(ge=0)
    model: str
    messages: list[_PageMessage] = Field(min_length=1)
    search: bool = True


class ChatProxy(LiveProxy):
    """Passes on requests to the servers at `urls`."""

    def __init__(self, urls: Sequence[str] = (), token: str = "") -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        super().__init__(lambda: [url.rstrip("/").removesuffix("/v1") for url in urls], headers)

    async def models(self, _: web.Request) -> web.Response:
        """Answer the models of each server; `error` if it does not answer."""
        asked = (self.read_list(url, "/v1/models", "data") for url in await self.urls())
        return web.json_response({"servers": await asyncio.gather(*asked)})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Pass on an answer as it is generated. A page that leaves ends it. Raises UserError."""
        try:
            async with loop_timeout(BODY_S):
                asked = ChatQuestion.model_validate_json(await request.read())
        except ValidationError as error:
            raise UserError("this is no question to a model", why=str(error)[:300]) from None
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        body = asked.model_dump(include={"model", "messages"}) | {"stream": True, "temperature": 0}
        body |= {} if asked.search else {"foray": {"search": False}}
        servers = await self.urls()
        if asked.server >= len(servers):
            raise UserError(f"the dashboard knows {len(servers)} servers", todo="foray dashboard RUN --chat URL")
        url = servers[asked.server]
        try:
            async with self.session.post(f"{url}/v1/chat/completions", json=body, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise UserError(f"{url} refuses", why=await what_was_said(answer))
                return await pass_on(request, answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UserError(f"{url} does not answer", why=str(error)) from None
