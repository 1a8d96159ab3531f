"""A simulated retriever with random latency that always returns the same three passages, on a real socket.

`python -m benchmarks.rollout.latency_search SCRIPT PORT`. A query selects its draw: "SEED TRAJECTORY TURN". A request
with many queries (the turn-barrier loop sends one per turn) uses one draw, that of its lowest trajectory: a batched
index answers them together, which favours the baseline.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from benchmarks.rollout.script import Script

PASSAGES, PASSAGE_WORDS = 3, 100
"""Number and length of the passages, as in Search-R1."""


def hits() -> bytes:
    """Return the hits of one query as JSON (`protocol.search`): made once, to cost no time per request."""
    body = " ".join("abcdefgh"[i % 8] for i in range(PASSAGE_WORDS))
    documents = [{"id": f"p{i}", "contents": f'"a b"\n{body}'} for i in range(PASSAGES)]
    return json.dumps([{"document": document, "score": 1.0} for document in documents]).encode()


class LatencySearch:
    """`POST /retrieve` with a latency."""

    def __init__(self, script: Script) -> None:
        self._draws, self._hits = script.draws, hits()

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/retrieve", self._retrieve)
        app.router.add_get("/health", self._ok)
        return app

    async def _retrieve(self, request: web.Request) -> web.Response:
        clock = asyncio.get_running_loop().time
        begun = clock()
        queries = (await request.json())["queries"]
        seed, trajectory, turn = min(tuple(int(word) for word in query.split()) for query in queries)
        await asyncio.sleep(begun + self._draws.search_s(seed, trajectory, turn) - clock())
        body = b'{"result": [' + b", ".join([self._hits] * len(queries)) + b"]}"
        return web.Response(body=body, content_type="application/json")

    async def _ok(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")


def main(argv: Sequence[str]) -> None:
    """Serve until SIGTERM."""
    search = LatencySearch(Script.load(Path(argv[0])))
    web.run_app(search.app(), host="127.0.0.1", port=int(argv[1]), access_log=None, print=None)


if __name__ == "__main__":
    main(sys.argv[1:])
