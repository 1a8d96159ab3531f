"""A hostile engine, retriever, reward service or endpoint costs a request, not the memory of the process that asked."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from foray.commands.eval import _info
from foray.dashboard.live import LiveProxy
from foray.data.download import hub_listing
from foray.evaluation.models import only_model
from foray.watch.top import read_searches
from protocol.errors import ForayError, UserError
from protocol.messages import Question, Sampling
from protocol.runtime.episodes import evaluate
from protocol.runtime.http import client as http_client
from protocol.runtime.http.auth import Access
from protocol.runtime.http.body import bounded_session
from rollout_server.engine import client as engine_client
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import EngineError, GenerateRequest
from rollout_server.engine.client import SglangClient
from rollout_server.rewards import remote
from rollout_server.rewards.base import RewardError
from rollout_server.rewards.judge import JudgeSettings
from rollout_server.rewards.remote import JsonEndpoint
from rollout_server.rewards.resources import RewardResources
from rollout_server.search.base import SearchError
from rollout_server.search.transport import SearchTransport
from tests.support.elsewhere import elsewhere
from tests.support.scripted_server import ScriptedServer

PIECE = b"[" * (1 << 16)
MOST = 64 << 20
"""Bytes that the server offers; a client may take its limit, and what fits into the sockets between."""
LIMIT = 2 << 20


class Hostile(ScriptedServer):
    """Answers every request with `status` and an endless body, or with a gzip bomb of MOST bytes."""

    def __init__(self, attack: str, status: int = 200, kind: str = "application/json") -> None:
        super().__init__()
        self.attack, self.status, self.kind = attack, status, kind
        self.sent = 0

    def _app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": self.kind}
        if self.attack == "bomb":
            headers["Content-Encoding"] = "gzip"
            return web.Response(status=self.status, body=BOMB, headers=headers)
        response = web.StreamResponse(status=self.status, headers=headers)
        await response.prepare(request)
        try:
            while self.sent < MOST:
                self.sent += len(PIECE)
                await response.write(b"data: " + PIECE if self.sent == len(PIECE) else PIECE)
        finally:
            if request.transport is not None:
                request.transport.abort()  # nobody reads what is buffered
        return response


BOMB = gzip.compress(bytes(MOST))


@contextmanager
def bounded(server: Hostile) -> Iterator[None]:
    """Check that the block neither takes all bytes of the server nor holds them."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert server.sent < MOST / 2 and peak < MOST / 2, (server.sent, peak)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine_client, "LARGEST_ANSWER", LIMIT)
    monkeypatch.setattr("rollout_server.engine.decoding.LONGEST_LINE", LIMIT)
    monkeypatch.setattr("foray.data.download.LARGEST_LISTING", LIMIT)
    monkeypatch.setattr("foray.dashboard.live.LARGEST_ANSWER", LIMIT)
    monkeypatch.setattr("protocol.runtime.episodes.LARGEST_ANSWER", LIMIT)
    monkeypatch.setattr(http_client.read_json, "__defaults__", (LIMIT,))
    monkeypatch.setattr(remote, "MAX_BYTES", LIMIT)


async def generate(url: str) -> None:
    request = GenerateRequest(ids=[1], session="s", group="g", max_new_tokens=8, sampling=Sampling())
    async with bounded_session() as session:
        with pytest.raises(EngineError) as caught:
            await SglangClient(session, url, name="e").generate(request, version="1.0", timeout_s=30.0)
    assert caught.value.cause in ("bad_output", "http_500") and len(str(caught.value)) < 1000


async def control(url: str) -> None:
    async with bounded_session() as session:
        with pytest.raises(EngineError) as caught:
            await EngineAdmin(session, url, name="e").model_info(timeout_s=30.0)
        with pytest.raises(EngineError):
            await EngineAdmin(session, url, name="e").counter("n")
    assert caught.value.cause in ("bad_output", "http_500") and len(str(caught.value)) < 1000


async def search(url: str) -> None:
    transport = SearchTransport("search_r1", topk=3, max_bytes=LIMIT)
    try:
        with pytest.raises(SearchError):
            await transport.search(url, "q", 30.0)
    finally:
        await transport.close()


async def reward(url: str) -> None:
    resources = RewardResources()
    settings = JudgeSettings(url=url, model="m", attempts=1)
    try:
        with pytest.raises(RewardError):
            await JsonEndpoint(settings, "/v1/x", resources).ask({}, lambda reply: reply)
    finally:
        await resources.close()


async def live(url: str) -> None:
    proxy = LiveProxy(list, {})
    lifetime = proxy.lifetime(web.Application())
    await anext(lifetime)
    assert (await proxy.read_list(url, "/v1/live", "groups"))["error"]
    with pytest.raises(StopAsyncIteration):
        await anext(lifetime)


def said(kind: type[Exception], call: Callable[..., object], *args: object) -> str:
    """Return the message of the error that `call` raises. Keeps no error: it would hold the connection."""
    try:
        call(*args)
    except kind as error:
        return str(error)
    raise AssertionError("it raised nothing")


async def models(url: str) -> None:
    assert "cannot list the models" in await asyncio.to_thread(said, UserError, only_model, url)


async def hub(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", url)
        assert "cannot download" in await asyncio.to_thread(said, UserError, hub_listing, "models/a/b")


async def info(url: str) -> None:
    assert await asyncio.to_thread(_info, url) is None


async def counters(url: str) -> None:
    assert await asyncio.to_thread(read_searches, [url], timeout_s=10.0) == {}


async def episodes(url: str) -> None:
    questions = [Question(id="q", text="?", answers=("a",))]
    assert url in await asyncio.to_thread(said, ForayError, evaluate, url, questions)


CLIENTS: dict[str, Callable[[str], Awaitable[None]]] = {
    each.__name__: each for each in (generate, control, search, reward, live, models, hub, info, counters, episodes)
}


CASES = [(client, attack, status) for client in CLIENTS for attack in ("endless", "bomb") for status in (200, 500)]
# not decompressed, it is a stream that ends early, which is asked for again after a pause
CASES.remove(("episodes", "bomb", 200))


@pytest.mark.parametrize(("client", "attack", "status"), CASES)
async def test_a_body_without_end_and_a_gzip_bomb_cost_one_request(client: str, attack: str, status: int) -> None:
    server = Hostile(attack, status)
    with elsewhere(server), bounded(server):
        await CLIENTS[client](server.url)


@pytest.mark.parametrize("attack", ["endless", "bomb"])
async def test_an_event_without_end_ends_the_request(attack: str) -> None:
    server = Hostile(attack, kind="text/event-stream")
    with elsewhere(server), bounded(server):
        await generate(server.url)


@pytest.mark.parametrize(
    "kind", ["text/plain; charset=base64", "application/json; charset=rot13", "text/plain; charset=x"]
)
async def test_a_charset_that_no_text_has_is_no_error_of_ours(kind: str) -> None:
    class Odd(Hostile):
        async def _answer(self, request: web.Request) -> web.StreamResponse:
            return web.Response(body=b"{} \xff", headers={"Content-Type": kind})

    server = Odd("none")
    async with server, bounded_session() as session:
        with pytest.raises(EngineError) as caught:
            await EngineAdmin(session, server.url, name="e").model_info(timeout_s=5.0)
    assert caught.value.cause == "bad_output"


class Collector(Hostile):
    """Redirects every request to `target`, or answers {}; keeps the Authorization headers."""

    def __init__(self, target: str = "") -> None:
        super().__init__("none")
        self.target, self.seen = target, list[str]()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request.headers.get("Authorization", ""))
        if self.target:
            raise web.HTTPFound(self.target)
        return web.json_response({})


async def test_keys_and_tokens_stay_with_the_server_that_they_were_meant_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    other = Collector()
    with elsewhere(other):
        named = Collector(other.url + "/x")
        with elsewhere(named):
            await models(named.url)
            assert named.seen == ["Bearer sk-test"] and other.seen == []
            token = "t" * 40
            proxy = LiveProxy(list, Access({"viewer": token}).headers("viewer"))
            lifetime = proxy.lifetime(web.Application())
            await anext(lifetime)
            assert (await proxy.read_list(named.url, "/v1/live", "groups"))["error"]
            with pytest.raises(StopAsyncIteration):
                await anext(lifetime)
            assert named.seen[1:] == [f"Bearer {token}"] and other.seen == []
            await hub(named.url)  # follows redirects, as the hub's storage needs, and without the token
            assert named.seen[2:] == ["Bearer hf_test"] and other.seen == [""]


def test_sessions_that_decompress_answers_are_those_of_web_searches_only() -> None:
    root = Path(__file__).parents[2]
    packages = ("protocol", "rollout_server", "learner", "retriever", "deploy", "foray")
    found = {
        str(path.relative_to(root))
        for package in packages
        for path in (root / package).rglob("*.py")
        if "aiohttp.ClientSession(" in path.read_text()
    }
    web = {f"retriever/backends/web/{name}.py" for name in ("client", "pages")}  # they cap what they decompress
    assert found == {"protocol/runtime/http/body.py"} | web
