"""The services with tokens, over real HTTP: access by role, and that none starts open to the network."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from pydantic import TypeAdapter

from protocol.errors import UserError
from protocol.runtime.http.auth import ROLES, Access, Role, read_access, variable
from protocol.runtime.http.server import listening
from retriever.api.app import create_app
from retriever.api.base import RetrieverState
from retriever.config import RetrieverSettings
from retriever.server import running
from rollout_server.api.app import ROUTE_ROLES, build_app
from rollout_server.config import RolloutSettings
from rollout_server.cpu_engine.config import EngineSettings, read_keys
from rollout_server.search.client import HttpSearch, HttpSearchSettings

TOKENS: dict[Role, str] = {role: secrets.token_urlsafe(32) for role in ROLES}


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> None:
    for role, token in TOKENS.items():
        monkeypatch.setenv(variable(role), token)


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ROLES:
        monkeypatch.delenv(variable(role), raising=False)
        monkeypatch.delenv(f"{variable(role)}_FILE", raising=False)


@pytest.fixture
def retriever(tmp_path: Path) -> RetrieverSettings:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": str(n), "contents": f"fact {n} of many"}) + "\n" for n in range(5)))
    return RetrieverSettings(corpus=corpus, port=0)


async def _status(url: str, method: str, path: str, role: Role | None = None, **more: object) -> int:
    headers = {"Authorization": f"Bearer {TOKENS[role]}"} if role else {}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url + path, headers=headers, **more) as response,  # type: ignore[arg-type]
    ):
        return response.status


READS = [("GET", "/metrics"), ("GET", "/info"), ("GET", "/v1/models")]
SEARCHES = [("POST", "/retrieve"), ("POST", "/search"), ("POST", "/batch_search"), ("POST", "/v1/embeddings")]
SEARCHES += [("GET", "/passages"), ("GET", "/passages/1"), ("GET", "/no/such/path"), ("DELETE", "/retrieve")]


async def test_the_retriever_asks_for_the_right_role(locked: None, retriever: RetrieverSettings) -> None:
    async with running(retriever) as port:
        url = f"http://127.0.0.1:{port}"
        for path in ("/health", "/ready"):
            assert await _status(url, "GET", path) == 200
        for method, path in READS + SEARCHES:
            assert await _status(url, method, path) == 401, path
        for method, path in READS:
            assert await _status(url, method, path, "viewer") not in (401, 403), path
        for method, path in SEARCHES:
            assert await _status(url, method, path, "viewer") == 403, path
            for role in ("node", "operator"):
                assert await _status(url, method, path, role) not in (401, 403), (path, role)
        body = {"queries": ["fact 3"], "topk": 1}
        assert await _status(url, "POST", "/retrieve", "node", json=body) == 200


async def test_a_rollout_servers_searches_bring_its_token(locked: None, retriever: RetrieverSettings) -> None:
    async with running(retriever) as port:
        search = HttpSearch(HttpSearchSettings(urls=(f"http://127.0.0.1:{port}",), deadline_s=10))
        try:
            found = await search("fact 3")
            assert not found.error and found.passages
        finally:
            await search.close()


async def test_without_it_a_search_fails_by_name(
    locked: None, retriever: RetrieverSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(retriever) as port:
        for role in ROLES:
            monkeypatch.delenv(variable(role))
        urls = (f"http://127.0.0.1:{port}",)
        search = HttpSearch(HttpSearchSettings(urls=urls, deadline_s=4, outage_wait_s=0.2, attempts=1))
        try:
            assert (await search("fact 3")).error
        finally:
            await search.close()


async def test_a_body_is_not_read_before_the_token(locked: None, retriever: RetrieverSettings) -> None:
    async with running(retriever) as port:
        url = f"http://127.0.0.1:{port}"
        assert await _status(url, "POST", "/retrieve", data=b"[" * 100_000) == 401
        assert await _status(url, "POST", "/retrieve", "node", data=b"[" * 100_000) == 400, "deep nesting is no crash"


async def test_without_tokens_loopback_is_open_as_ever(unlocked: None, retriever: RetrieverSettings) -> None:
    async with running(retriever) as port:
        url = f"http://127.0.0.1:{port}"
        assert await _status(url, "POST", "/retrieve", json={"queries": ["fact 3"]}) == 200
        async with (
            aiohttp.ClientSession(headers={"Host": "evil.example"}) as session,
            session.get(url + "/info") as got,
        ):
            assert got.status == 403


@asynccontextmanager
async def _rollout(settings: RolloutSettings) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="in")

    access = read_access(os.environ)
    built = build_app(SERVED_BY_NOBODY, access)
    app = web.Application(middlewares=built.middlewares)
    for route in built.router.routes():
        if route.method != "HEAD" and route.resource is not None:
            app.router.add_route(route.method, route.resource.canonical, answer)
    async with listening(
        app, settings.host or "127.0.0.1", 0, access=access, setting="rollout.host", todo=""
    ) as listener:
        yield f"http://127.0.0.1:{listener.port}"


SERVED_BY_NOBODY = TypeAdapter(object).validate_python(object())
"""Replacements of the handlers: only their routes and the access check are tested here."""


async def test_the_rollout_server_asks_for_the_right_role(locked: None) -> None:
    async with _rollout(RolloutSettings()) as url:
        for path in ("/health", "/ready"):
            assert await _status(url, "GET", path) == 200
        for path in ("/status", "/metrics", "/v1/live", "/v1/live/trajectory"):
            assert [await _status(url, "GET", path, role) for role in (None, *ROLES)] == [401, 200, 200, 200]
        episodes = [await _status(url, "POST", "/v1/episodes", role) for role in (None, "viewer", "node", "operator")]
        assert episodes == [401, 403, 403, 200], "episodes cost money: they are the operator's"
        assert [await _status(url, "GET", "/other", role) for role in ("node", "operator")] == [403, 404]


def test_every_route_says_what_it_needs() -> None:
    """A route that is added and forgotten is the operator's (rollout server) or node's (retriever), never open."""
    routes = {
        r.resource.canonical for r in build_app(SERVED_BY_NOBODY, Access()).router.routes() if r.resource is not None
    }
    assert routes == {"/health", "/ready"} | ROUTE_ROLES.keys()
    served = create_app(RetrieverState(RetrieverSettings()), Access())
    assert {"/health", "/ready"} < {r.resource.canonical for r in served.router.routes() if r.resource is not None}


async def test_no_service_starts_open_to_the_network(unlocked: None, retriever: RetrieverSettings) -> None:
    with pytest.raises(UserError, match=r"retriever\.host = '0\.0\.0\.0' would expose"):
        async with running(retriever.model_copy(update={"host": "0.0.0.0"})):
            pass
    with pytest.raises(UserError, match=r"rollout\.host = '::' would expose"):
        async with _rollout(RolloutSettings(host="::")):
            pass
    with pytest.raises(UserError, match=r"without an API key"):
        read_keys(EngineSettings(model_path=Path("m"), host="0.0.0.0"), {})
    # the learner's metrics: test_listeners.py; nodes: tests/rollout_server/test_node_launch.py


async def test_with_a_token_they_do(locked: None, retriever: RetrieverSettings) -> None:
    async with running(retriever.model_copy(update={"host": "0.0.0.0"})) as port:
        assert await _status(f"http://127.0.0.1:{port}", "GET", "/info") == 401
    async with _rollout(RolloutSettings(host="0.0.0.0")) as url:
        assert await _status(url, "GET", "/status") == 401
