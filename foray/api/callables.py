"""Objects of this process that a run calls: its search engine and its reward, served by a thread on 127.0.0.1.

Nothing is pickled: the functions stay here, may use what the notebook holds, and end with it. The address has a secret
path, so that other users of the machine cannot call them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from aiohttp import web

from protocol.errors import UserError
from protocol.runtime.http.server import SERVER_OPTIONS, Listener, ThreadedServer, listening
from protocol.search import Passage
from rollout_server.rewards.base import RewardInput
from rollout_server.rewards.http import read_outcome

log = logging.getLogger(__name__)
MAX_BODY = 16 << 20

RewardFunction = Callable[[RewardInput], float]
"""Scores one trajectory. May block: it runs in a thread."""


class SearchEngine(Protocol):
    """Any object that finds passages. May block: it runs in a thread, several at the same time."""

    def search(self, query: str) -> Iterable[str | Mapping[str, Any] | Passage]:
        """Return passages, best first: texts, mappings (`contents`, or `title` and `text`; `id`), or `Passage`s."""


class CallableServer:
    """Serves `search` and `reward` under `search_url` (Search-R1's dialect) and `reward_url` (reward type `http`)."""

    def __init__(self, search: SearchEngine | None = None, reward: RewardFunction | None = None) -> None:
        self._search, self._reward = search, reward
        self.failure: Exception | None = None
        """The last exception that one of them raised."""
        secret = secrets.token_urlsafe(24)
        app = web.Application(client_max_size=MAX_BODY, handler_args=SERVER_OPTIONS)
        app.router.add_post(f"/{secret}/retrieve", self._retrieve)
        app.router.add_post(f"/{secret}/reward", self._score)
        self._server = ThreadedServer(self._listen(app), "foray-callables")
        self.search_url = f"{self._server.url}/{secret}"
        self.reward_url = f"{self.search_url}/reward"

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.close()

    @staticmethod
    def _listen(app: web.Application) -> AbstractAsyncContextManager[Listener]:
        return listening(app, "127.0.0.1", 0, access=None, setting="foray.api", todo="")

    async def _retrieve(self, request: web.Request) -> web.Response:
        body = await request.json()
        limit = int(body.get("topk") or 0) or None
        answers = [await self._found(str(query), limit) for query in body["queries"]]
        result = [[{"document": hit, "score": 0.0} for hit in hits or ()] for hits in answers]
        errors = [None if hits is not None else "callable" for hits in answers]
        return web.json_response({"result": result, "errors": errors})

    async def _found(self, query: str, limit: int | None) -> list[dict[str, str]] | None:
        assert self._search is not None
        try:
            hits = await asyncio.to_thread(lambda: list(self._search.search(query)))  # type: ignore[union-attr]
            return [as_document(hit, place) for place, hit in enumerate(hits[:limit])]
        except Exception as error:  # of the user's code
            self._note("search", error)
            return None

    async def _score(self, request: web.Request) -> web.Response:
        assert self._reward is not None
        outcome = read_outcome(await request.json())
        try:
            return web.json_response({"reward": float(await asyncio.to_thread(self._reward, outcome))})
        except Exception as error:  # of the user's code
            self._note("reward", error)
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=400)

    def _note(self, what: str, error: Exception) -> None:
        if self.failure is None:
            log.error("the %s function failed; further failures are only counted by the run", what, exc_info=error)
        self.failure = error


def as_document(hit: str | Mapping[str, Any] | Passage, place: int) -> dict[str, str]:
    """Return a hit of a search engine as a document. Raises UserError for another type."""
    match hit:
        case str():
            return {"id": str(place), "contents": hit}
        case Passage():
            return {"id": hit.id, "contents": hit.contents}
        case Mapping():
            text = hit.get("contents") or hit.get("text") or ""
            title = "" if hit.get("contents") else hit.get("title") or ""
            return {"id": str(hit.get("id", place)), "contents": f'"{title}"\n{text}' if title else str(text)}
    raise UserError(
        f"a search returned a {type(hit).__name__}", todo="return texts, mappings with `contents`, or foray.Passage"
    )
