"""An online engine with pages, its memory of hits, its recordings on disk and its settings."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from protocol.errors import UserError
from retriever.backends.base import QueryFailure, QueryResult
from retriever.backends.web.backend import MAX_HIT_CHARS, WebBackend, hits_of, open_web
from retriever.backends.web.client import Secret
from retriever.backends.web.config import SearxngSettings, SerperSettings, WebSettings
from retriever.backends.web.provider import ProviderHit, ProviderRequest, WebSearchError
from retriever.backends.web.recordings import Recordings
from tests.support.web_search import FakeProvider, fake_provider

Open = Callable[..., AbstractAsyncContextManager[WebBackend]]


class Web:
    """A provider whose hits lead to an existing site (`url`) and to forbidden addresses."""

    def __init__(self, fake: FakeProvider, url: str) -> None:
        self.fake, self.url = fake, url
        self.visits: list[str] = []


@pytest.fixture
async def world() -> AsyncIterator[Web]:
    async with fake_provider("searxng", []) as fake:
        found = Web(fake, "")

        async def page(request: web.Request) -> web.Response:
            found.visits.append(request.path)
            if request.path == "/gone":
                return web.Response(status=410)
            html = f"<title>Title of {request.path}</title><p>Whole text of {request.path}"
            return web.Response(text=html, content_type="text/html")

        app = web.Application()
        app.router.add_get("/{path:.*}", page)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        fake.found = [
            ProviderHit("Answer", "42", box=True),
            ProviderHit("A", "snippet a", f"{found.url}/a"),
            ProviderHit("Gone", "snippet gone", f"{found.url}/gone"),
            ProviderHit("Evil", "snippet evil", "http://169.254.169.254/latest/meta-data/"),
        ]
        yield found
        await runner.cleanup()


@pytest.fixture
def opened(world: Web) -> Open:
    """The back-end; keyword arguments are settings, `pages` are added to those that allow the site."""

    @asynccontextmanager
    async def start(pages: dict[str, Any] | None = None, **fields: Any) -> AsyncIterator[WebBackend]:
        port = int(world.url.rpartition(":")[2])
        allowed = {"ports": [80, port], "allow_private": ["127.0.0.1/32"]} | (pages or {})
        given: dict[str, Any] = {"base_url": world.fake.url, "rate": 1000, "burst": 1000, "fetch_pages": True}
        backend = open_web(SearxngSettings.model_validate(given | {"pages": allowed} | fields))
        try:
            yield backend
        finally:
            await backend.close()

    return start


def contents(answer: QueryResult | QueryFailure) -> list[str]:
    assert isinstance(answer, QueryResult), answer
    return [json.loads(document)["contents"] for document in answer.documents]


def ids(answer: QueryResult | QueryFailure) -> list[str]:
    assert isinstance(answer, QueryResult), answer
    return [json.loads(document)["id"] for document in answer.documents]


SNIPPETS = ['"Answer"\n42', '"A"\nsnippet a', '"Gone"\nsnippet gone', '"Evil"\nsnippet evil']


async def test_a_found_page_is_fetched_by_its_id_and_only_then(opened: Open, world: Web) -> None:
    async with opened() as backend:
        (answer,) = await backend.search(["q"], 9)
        assert contents(answer) == SNIPPETS and not world.visits
        box, a, gone, evil = ids(answer)
        page = await backend.find(a)
        assert page is not None and page.id == a
        assert page.contents == '"Title of /a"\nWhole text of /a'
        snippet = await backend.find(box)
        assert snippet is not None and snippet.contents == SNIPPETS[0]
        for wanted, cause in ((gone, "http_410"), (evil, "refused")):
            with pytest.raises(WebSearchError) as raised:
                await backend.find(wanted)
            assert raised.value.failure.cause == cause
        assert await backend.find("url:0000000000000000") is None
        assert await backend.find(f"{world.url}/a") is None
        counters = backend.counters()
        assert (counters["pages"], counters["pages_failed"]) == (1, 2)
    assert world.visits == ["/a", "/gone"]


async def test_hits_can_carry_their_pages_and_keep_the_snippet_where_there_is_none(opened: Open, world: Web) -> None:
    async with opened(pages={"in_results": True}) as backend:
        (answer,) = await backend.search(["q"], 9)
        assert contents(answer) == [SNIPPETS[0], '"Title of /a"\nWhole text of /a', *SNIPPETS[2:]]
        assert backend.info()["causes"] == {"http_410": 1, "refused": 1}
    assert sorted(world.visits) == ["/a", "/gone"]


async def test_pages_are_recorded_and_replayed_too(opened: Open, world: Web, tmp_path: Path) -> None:
    async with opened(pages={"in_results": True}, record="record", recordings=tmp_path) as backend:
        before = await backend.search(["q"], 2)
    world.visits.clear()
    async with opened(pages={"in_results": True}, record="replay", recordings=tmp_path) as backend:
        assert await backend.search(["q"], 2) == before
        page = await backend.find(ids(before[0])[1])
        assert page is not None and page.contents == contents(before[0])[1]
    assert not world.visits and len(world.fake.seen) == 1


async def test_the_oldest_hits_are_forgotten(opened: Open, world: Web) -> None:
    async with opened(fetch_pages=False, remembered=2) as backend:
        (answer,) = await backend.search(["q"], 3)
        first, second, third = ids(answer)
        assert await backend.find(first) is None
        for known in (second, third):
            assert await backend.find(known) is not None
    assert not world.visits


def test_hits_are_one_a_page_without_empty_ones_and_of_bounded_length() -> None:
    box = ProviderHit("T", "x", "https://a.example/", box=True)
    found = [
        ProviderHit("", " "),
        box,
        ProviderHit("T", "x", "https://a.example/"),
        ProviderHit("U", "y", "https://a.example/"),
    ]
    hits = hits_of(
        [*found, ProviderHit("", "z" * 100_000, "https://b.example/"), ProviderHit("half \ud800", "\x00text", "")]
    )
    assert [hit.passage.contents[:12] for hit in hits] == ['"T"\nx', '"T"\nx', '""\nzzzzzzzzz', '"half ?"\ntex']
    assert len({hit.passage.id for hit in hits}) == 4
    assert len(hits[2].passage.text) == MAX_HIT_CHARS


def test_ids_are_the_same_in_every_process() -> None:
    (hit,) = hits_of([ProviderHit("T", "x", "https://en.wikipedia.org/wiki/Zola")])
    assert hit.passage.id == "url:09dd04b4388bf9d3"


def test_a_recording_is_whole_or_not_there_and_a_broken_one_is_garbage(tmp_path: Path) -> None:
    recordings = Recordings(tmp_path / "deep" / "er", "serper", writing=True)
    ask = ProviderRequest("https://a.example/search", {"q": "é \ud800"}, {"num": 3})
    with pytest.raises(WebSearchError, match="not_recorded"):
        recordings.load(ask)
    recordings.save(ask, {"organic": ["é \ud800"]})
    assert recordings.load(ask) == {"organic": ["é \ud800"]}
    assert [path.name for path in recordings.path(ask).parent.iterdir()] == [recordings.path(ask).name]
    for other in (
        ProviderRequest(ask.url, {"q": "e"}, ask.body),
        ProviderRequest("https://b.example/", ask.params, ask.body),
        ProviderRequest(ask.url),
    ):
        with pytest.raises(WebSearchError, match="not_recorded"):
            recordings.load(other)
    whole = recordings.path(ask).read_text()
    for broken in ("", whole[: len(whole) // 2], "[]", "{}", whole.replace("a.example", "b.example")):
        recordings.path(ask).write_text(broken)
        with pytest.raises(WebSearchError, match="garbage"):
            recordings.load(ask)


async def test_a_disk_that_takes_nothing_costs_the_recording_not_the_answer(
    opened: Open, world: Web, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "recordings"
    async with opened(pages={"in_results": True}, record="record", recordings=directory) as backend:
        directory.rmdir()
        (answer,) = await backend.search(["q"], 2)
        assert contents(answer)[1] == '"Title of /a"\nWhole text of /a'
        assert backend.counters()["unrecorded"] == 2 and backend.counters()["recorded"] == 0
    assert "could not record a reply" in caplog.text


def test_a_replay_without_its_directory_is_reported_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        open_web(SerperSettings(record="replay", recordings=tmp_path / "nowhere"))


def test_a_secret_shows_in_no_form() -> None:
    secret = Secret('a/b+c="d\\e')
    assert "a/b" not in repr(secret) + str(secret) + repr(vars(secret).keys())
    texts = [secret.reveal(), "x=a%2Fb%2Bc%3D%22d%5Ce&y", json.dumps({"key": secret.reveal()})]
    assert all("[key]" in secret.redact(text) and "b" not in secret.redact(text) for text in texts)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"type": "serper", "base_url": "https://me:secret@host/"}, "credentials"),
        ({"type": "serper", "base_url": "https://host/?key=1"}, "query"),
        ({"type": "serper", "base_url": "ftp://host/"}, "http://"),
        ({"type": "serper", "record": "auto"}, "recordings"),
        ({"type": "serper", "pages": {"in_results": True}}, "fetch_pages"),
        ({"type": "serper", "pages": {"allow_hosts": ["https://wikipedia.org"]}}, "without scheme"),
        ({"type": "serper", "api_key": "abc"}, "Extra inputs"),
        ({"type": "google_cse"}, "cx"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TypeAdapter(WebSettings).validate_python(fields)
