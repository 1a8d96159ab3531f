"""The contract of searches: one test for each member of the union."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, get_args

import pytest

from rollout_server.search import REGISTRY, SearchSettings, build_search
from rollout_server.search.base import NoSearch, SearchResult, SearchService
from rollout_server.search.transport import PATHS
from tests.support.fake_search import FakeRetriever


def kind(member: Any) -> str:
    return str(member.model_fields["type"].default)


MEMBERS: list[Any] = list(get_args(get_args(SearchSettings)[0]))
WAYS = [(m, {"dialect": d}) for m in MEMBERS if kind(m) == "http" for d in PATHS]
WAYS += [(m, {}) for m in MEMBERS if kind(m) != "http"]


@pytest.fixture(params=WAYS, ids=lambda way: "-".join([kind(way[0]), *way[1].values()]))
async def search(request: pytest.FixtureRequest) -> AsyncIterator[SearchService]:
    async with FakeRetriever() as server:
        server.contents = lambda query, i: f'"{query}"\ntext'
        member, given = request.param
        service = build_search(member(**given, **({"urls": (server.url,)} if given else {})))
        yield service
        await service.close()


def test_the_registry_has_every_kind() -> None:
    assert set(REGISTRY) == set(MEMBERS)


@pytest.mark.parametrize("query", ["emma", "", "x" * 100_000, "\x00\ud7ff\U0001f600", "</search>"])
async def test_any_query_has_a_result(search: SearchService, query: str) -> None:
    result = await search(query)
    assert isinstance(result, SearchResult)
    assert result.error == "" and result.latency_s >= 0
    assert all(passage.contents for passage in result.passages)


async def test_many_at_once_get_each_their_own(search: SearchService) -> None:
    results = await asyncio.gather(*(search(f"query {i}") for i in range(100)))
    empty = isinstance(search, NoSearch)
    assert [r.passages[0].title if r.passages else "" for r in results] == [
        "" if empty else f"query {i}" for i in range(100)
    ]


async def test_closing_twice_is_safe_and_a_search_after_it_does_not_raise(search: SearchService) -> None:
    await search("emma")
    await search.close()
    await search.close()
    assert isinstance(await search("emma"), SearchResult)


async def test_it_reports_into_the_given_counters_and_has_no_outage(search: SearchService) -> None:
    counts: Counter[str] = Counter()
    gauges: dict[str, Callable[[], float]] = {}
    search.report(counts, gauges)
    await search("emma")
    assert search.outage == "" and all(isinstance(read(), int | float) for read in gauges.values())
