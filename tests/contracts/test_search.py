"""What every search owes, whichever is configured: one test for each member of the union."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, get_args

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_server.config_episode import SearchSettings
from rollout_server.search.base import SearchResult, SearchService

MEMBERS: list[Any] = list(get_args(get_args(SearchSettings)[0]))


async def retrieve(request: web.Request) -> web.Response:
    body = await request.json()
    hits = [{"document": {"id": "p", "contents": f'"{q}"\ntext'}, "score": 1.0} for q in body["queries"]]
    return web.json_response({"result": [[hit] for hit in hits]})


@pytest.fixture(params=MEMBERS, ids=lambda member: member.model_fields["type"].default)
async def search(request: pytest.FixtureRequest) -> AsyncIterator[SearchService]:
    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    async with TestServer(app) as server:
        given = {"urls": (str(server.make_url("")),)} if request.param.model_fields["type"].default == "http" else {}
        service = request.param(**given).build()
        yield service
        await service.close()


@pytest.mark.parametrize("query", ["emma", "", "x" * 100_000, "\x00\ud7ff\U0001f600", "</search>"])
async def test_any_query_has_a_result(search: SearchService, query: str) -> None:
    result = await search(query)
    assert isinstance(result, SearchResult)
    assert result.error == "" and result.latency_s >= 0
    assert all(passage.contents for passage in result.passages)


async def test_many_at_once_get_each_their_own(search: SearchService) -> None:
    results = await asyncio.gather(*(search(f"query {i}") for i in range(100)))
    titles = [r.passages[0].title for r in results if r.passages]
    assert titles in ([], [f"query {i}" for i in range(100)])


async def test_closing_twice_is_safe_and_a_search_after_it_does_not_raise(search: SearchService) -> None:
    await search("emma")
    await search.close()
    await search.close()
    assert isinstance(await search("emma"), SearchResult)
