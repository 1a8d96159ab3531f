"""Rate and budget by a clock that the tests move, and what a provider's Retry-After does. Nothing sleeps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from retriever.backends.web import client
from retriever.backends.web.client import LONGEST_PAUSE_S, Budget, ProviderClient, Secret, TokenBucket
from retriever.backends.web.config import SerperSettings
from retriever.backends.web.provider import ProviderHit, ProviderRequest, WebSearchError
from retriever.backends.web.providers.google import Serper
from tests.support.web_search import KEY, FakeProvider, fake_provider


class Clock:
    """Time that passes during sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
async def fake() -> AsyncIterator[FakeProvider]:
    async with fake_provider("serper", [ProviderHit("T", "text", "https://example.org")]) as provider:
        yield provider


@pytest.fixture
async def sender(
    fake: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., tuple[ProviderClient, Clock]]]:
    """A sender with the clock above; keyword arguments are settings."""
    made: list[ProviderClient] = []

    def make(backoff_s: float = 1.0, **fields: Any) -> tuple[ProviderClient, Clock]:
        clock = Clock()
        monkeypatch.setattr(client, "BACKOFF_S", backoff_s)
        given: dict[str, Any] = {"base_url": fake.url, "rate": 1000, "attempts": 3}
        settings = SerperSettings(**(given | fields))
        made.append(ProviderClient(settings, Serper(settings), Secret(KEY), clock=clock, sleep=clock.sleep))
        return made[-1], clock

    yield make
    for one in made:
        await one.close()


@given(st.floats(0.5, 50), st.integers(1, 8), st.lists(st.sampled_from([0.0, 0.01, 0.3, 2.0]), min_size=1, max_size=60))
def test_no_window_of_time_sees_more_than_burst_and_rate_allow(rate: float, burst: int, gaps: list[float]) -> None:
    clock = Clock()
    bucket = TokenBucket(rate, burst, clock)
    sent = []
    for gap in gaps:
        clock.now += gap
        sent.append(clock.now + bucket.reserve(1e9))
    assert sent == sorted(sent)
    for first, last in itertools.combinations(range(len(sent)), 2):
        assert last - first + 1 <= burst + (sent[last] - sent[first]) * rate + 1e-6


def test_a_burst_leaves_at_once_and_the_rest_at_the_rate() -> None:
    bucket = TokenBucket(4.0, 3, Clock())
    assert [bucket.reserve(10) for _ in range(6)] == pytest.approx([0, 0, 0, 0.25, 0.5, 0.75])


def test_a_turn_after_the_deadline_is_refused_and_not_used_up() -> None:
    bucket = TokenBucket(1.0, 1, Clock())
    assert bucket.reserve(0) == 0
    for _ in range(3):
        with pytest.raises(WebSearchError) as raised:
            bucket.reserve(0.5)
        assert raised.value.failure.cause == "timeout"
    assert bucket.reserve(1) == pytest.approx(1)


def test_a_pause_holds_everybody_up_but_not_for_ever() -> None:
    clock = Clock()
    bucket = TokenBucket(10.0, 5, clock)
    bucket.pause(7)
    bucket.pause(2)
    assert bucket.reserve(10) == pytest.approx(7)
    with pytest.raises(WebSearchError) as raised:
        bucket.reserve(3)
    assert raised.value.failure.cause == "http_429"
    bucket.pause(1e12)
    assert bucket.reserve(1e13) <= LONGEST_PAUSE_S + 1


def test_a_budget_is_spent_once() -> None:
    budget = Budget(SerperSettings(max_requests=2, cost_per_request=0.25))
    budget.spend()
    budget.spend()
    with pytest.raises(WebSearchError, match="quota"):
        budget.spend()
    assert budget.left == 0 and budget.requests == 2 and budget.cost == 0.5


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, None),
        ({"max_requests": 0}, 0),
        ({"max_cost": 0.3, "cost_per_request": 0.1}, 3),
        ({"max_cost": 1.0, "cost_per_request": 0.4, "max_requests": 5}, 2),
        ({"max_cost": 9.0, "cost_per_request": 0.4, "max_requests": 5}, 5),
    ],
)
def test_the_tighter_of_two_bounds_holds(fields: dict[str, Any], left: int | None) -> None:
    assert Budget(SerperSettings(**fields)).left == left


def test_a_bound_in_money_without_a_price_is_refused() -> None:
    with pytest.raises(ValueError, match="cost_per_request"):
        SerperSettings(max_cost=1.0)


async def test_the_rate_applies_to_all_callers(
    sender: Callable[..., tuple[ProviderClient, Clock]], fake: FakeProvider
) -> None:
    one, clock = sender(rate=2.0, deadline_s=60)
    begin = clock.now
    await asyncio.gather(*(one.send(ProviderRequest(fake.url, body={"q": str(i)})) for i in range(8)))
    # 2 at once, then one each half second
    assert clock.now - begin == pytest.approx(3.0) and len(fake.seen) == 8


@pytest.mark.parametrize(("header", "waited"), [("4", 4.0), ("0", 0.0), ("nonsense", 0.0), ("-3", 0.0)])
async def test_retry_after_is_waited_for(
    sender: Callable[..., tuple[ProviderClient, Clock]], fake: FakeProvider, header: str, waited: float
) -> None:
    one, clock = sender(backoff_s=0.0)
    fake.script.append(web.json_response({}, status=429, headers={"Retry-After": header}))
    await one.send(ProviderRequest(fake.url, body={"q": "q"}))
    assert sum(clock.sleeps) == waited and len(fake.seen) == 2


async def test_retry_after_may_be_a_date(
    sender: Callable[..., tuple[ProviderClient, Clock]], fake: FakeProvider
) -> None:
    one, clock = sender(backoff_s=0.0)
    for seconds in (6, -600):
        date = format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)
        fake.script.append(web.json_response({}, status=503, headers={"Retry-After": date}))
        await one.send(ProviderRequest(fake.url, body={"q": "q"}))
    # a date has whole seconds
    assert 3.5 <= sum(clock.sleeps) <= 6


async def test_a_long_retry_after_ends_the_query_and_holds_up_the_next(
    sender: Callable[..., tuple[ProviderClient, Clock]], fake: FakeProvider
) -> None:
    one, clock = sender(deadline_s=30)
    fake.script.append(web.json_response({}, status=429, headers={"Retry-After": "3600"}))
    for _ in range(2):
        with pytest.raises(WebSearchError) as raised:
            await one.send(ProviderRequest(fake.url, body={"q": "q"}))
        assert raised.value.failure.cause == "http_429"
    assert len(fake.seen) == 1 and not clock.sleeps
    clock.now += LONGEST_PAUSE_S
    assert await one.send(ProviderRequest(fake.url, body={"q": "q"}))


async def test_pauses_grow_and_differ_by_chance(
    sender: Callable[..., tuple[ProviderClient, Clock]], fake: FakeProvider
) -> None:
    one, clock = sender(attempts=4, backoff_s=1.0)
    fake.script.extend([500] * 4)
    with pytest.raises(WebSearchError, match="http_500"):
        await one.send(ProviderRequest(fake.url, body={"q": "q"}))
    assert len(clock.sleeps) == 3 and len(set(clock.sleeps)) == 3
    for attempt, pause in enumerate(clock.sleeps):
        assert 0.5 * 2**attempt <= pause <= 1.5 * 2**attempt


async def test_no_attempt_begins_after_the_deadline(
    sender: Callable[..., tuple[ProviderClient, Clock]], fake: FakeProvider
) -> None:
    one, _ = sender(attempts=10, backoff_s=4.0, deadline_s=10.0)
    fake.script.extend([500] * 10)
    with pytest.raises(WebSearchError) as raised:
        await one.send(ProviderRequest(fake.url, body={"q": "q"}))
    assert raised.value.failure.cause == "http_500" and "no time" in raised.value.failure.detail
    assert len(fake.seen) <= 3


async def test_a_hanging_provider_is_given_up_at_the_deadline(fake: FakeProvider) -> None:
    settings = SerperSettings(base_url=fake.url, deadline_s=0.1, timeout_s=60)
    one = ProviderClient(settings, Serper(settings), Secret(KEY))
    fake.script.append("hang")
    with pytest.raises(WebSearchError) as raised:
        await one.send(ProviderRequest(fake.url, body={"q": "q"}))
    assert raised.value.failure.cause == "timeout"
    await one.close()


@pytest.mark.parametrize(
    ("status", "body"),
    [(400, {"message": "Not enough credits"}), (429, {"error": "NOT ENOUGH CREDITS"}), (402, {}), (432, {})],
)
async def test_an_account_without_credits_is_quota_and_not_retried(
    sender: Callable[..., tuple[ProviderClient, Clock]], fake: FakeProvider, status: int, body: dict[str, str]
) -> None:
    one, _ = sender()
    fake.script.append(web.json_response(body, status=status))
    with pytest.raises(WebSearchError) as raised:
        await one.send(ProviderRequest(fake.url, body={"q": "q"}))
    assert raised.value.failure.cause == "quota" and len(fake.seen) == 1


async def test_a_compressed_bomb_is_too_large_before_it_is_unpacked(
    sender: Callable[..., tuple[ProviderClient, Clock]], fake: FakeProvider
) -> None:
    one, _ = sender()
    bomb = web.Response(body=b'{"organic": "' + bytes(16 << 20) + b'"}', content_type="application/json")
    bomb.enable_compression(web.ContentCoding.gzip)
    fake.script.append(bomb)
    with pytest.raises(WebSearchError) as raised:
        await one.send(ProviderRequest(fake.url, body={"q": "q"}))
    assert raised.value.failure.cause == "too_large"


async def test_a_proxys_password_shows_nowhere(fake: FakeProvider) -> None:
    settings = SerperSettings(base_url="http://provider.invalid/search", attempts=1)
    proxy = Secret("http://user:pass-word-1@127.0.0.1:9")
    one = ProviderClient(settings, Serper(settings), Secret(KEY), proxy)
    with pytest.raises(WebSearchError) as raised:
        await one.send(ProviderRequest(settings.base_url, body={"q": "q"}))
    assert raised.value.failure.cause == "unreachable" and "pass-word" not in repr(raised.value)
    await one.close()
