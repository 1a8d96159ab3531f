"""The guard before page fetches: a table of hostile addresses, rebinding names, redirects, bombs; over real HTTP."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from retriever.backends.web import pages as web_pages
from retriever.backends.web.config import PageSettings
from retriever.backends.web.pages import PageFetcher
from retriever.backends.web.provider import WebSearchError
from retriever.backends.web.ssrf import SsrfGuard, is_public

HOSTILE_URLS = [
    "ftp://example.org/",
    "file:///etc/passwd",
    "gopher://example.org:80/",
    "javascript:alert(1)",
    "data:text/html,hello",
    "//example.org/",
    "example.org",
    "",
    "http://",
    "http:///path",
    "http://user@example.org/",
    "http://user:pass@example.org/",
    "http://@example.org/",
    "http://example.org@127.0.0.1/",
    "http://127.0.0.1#@example.org/",
    "http://example.org\\@127.0.0.1/",
    "http:\\\\example.org/",
    "http://example.org/\r\nHost: x",
    "http://example.org/\x00",
    "http://exa mple.org/",
    " http://example.org/",
    "http://example.org:22/",
    "http://example.org:6379/",
    "http://example.org:0/",
    "http://example.org:99999/",
    "http://example.org:8080/",
    "http://127.0.0.1/",
    "http://127.1/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0x7f.0.0.1/",
    "http://0177.0.0.1/",
    "http://127.0.0.0x1/",
    "http://1.2.3/",
    "http://0/",
    "http://0.0.0.0/",
    "http://localhost%2f@example.org/",
    "http://%31%32%37.0.0.1/",
    "http://１２７.０.０.１/",
    "http://⑯⑨。254。⑯⑨。254/",
    "http://10.0.0.1/",
    "http://172.16.0.1/",
    "http://172.31.255.255/",
    "http://192.168.1.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://100.64.0.1/",
    "http://100.100.100.200/latest/meta-data/",
    "http://168.63.129.16/metadata",
    "http://192.0.0.192/",
    "http://198.18.0.1/",
    "http://192.88.99.1/",
    "http://224.0.0.1/",
    "http://255.255.255.255/",
    "http://[::1]/",
    "http://[::]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:8.8.8.8]/",
    "http://[::ffff:a00:1]/",
    "http://[::127.0.0.1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[64:ff9b::808:808]/",
    "http://[64:ff9b:1::1]/",
    "http://[2002:7f00:1::]/",
    "http://[2002:808:808::]/",
    "http://[2001:0:7f00:1::]/",
    "http://[2001:db8::1]/",
    "http://[3fff::1]/",
    "http://[fc00::1]/",
    "http://[fd00:ec2::254]/",
    "http://[fe80::1]/",
    "http://[fe80::1%25eth0]/",
    "http://[fec0::1]/",
    "http://[ff02::1]/",
    "http://[100::1]/",
    "http://[5f00::1]/",
    "http://[not-an-address]/",
    "http://example.org/" + "a" * 3000,
    "http://-example.org/",
    "http://exa_mple..org/",
]

PUBLIC_URLS = [
    "http://example.org/",
    "https://en.wikipedia.org/wiki/Émile_Zola?x=1&y=%20#part",
    "https://münchen.example/straße",
    "http://8.8.8.8/",
    "http://[2606:4700::1111]/",
    "http://EXAMPLE.org:80/@user",
    "https://example.org.:443/a",
]


@pytest.mark.parametrize("url", HOSTILE_URLS)
def test_hostile_addresses_are_refused(url: str) -> None:
    with pytest.raises(WebSearchError) as raised:
        SsrfGuard(PageSettings()).url(url)
    assert raised.value.failure.cause == "refused"


@pytest.mark.parametrize("url", PUBLIC_URLS)
def test_public_addresses_are_not(url: str) -> None:
    assert SsrfGuard(PageSettings()).url(url).scheme in ("http", "https")


@given(st.ip_addresses())
def test_nothing_that_the_standard_library_calls_special_is_public(address: Any) -> None:
    special = address.is_private or address.is_loopback or address.is_link_local or address.is_multicast
    special = special or address.is_reserved or address.is_unspecified
    assert not (special and is_public(address))


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://wikipedia.org/", True),
        ("https://en.wikipedia.org/", True),
        ("https://en.wikipedia.org./", True),
        ("https://notwikipedia.org/", False),
        ("https://wikipedia.org.evil.example/", False),
        ("https://evil.example/wikipedia.org", False),
        ("http://8.8.8.8/", False),
    ],
)
def test_an_allow_list_allows_a_host_and_what_is_below_it(url: str, allowed: bool) -> None:
    guard = SsrfGuard(PageSettings(allow_hosts=("Wikipedia.org",)))
    if allowed:
        assert guard.url(url)
    else:
        with pytest.raises(WebSearchError, match="refused"):
            guard.url(url)


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::ffff:8.8.8.8"], ["2606:4700::1111%eth0"], ["garbage"]]
)
def test_a_name_with_one_bad_address_is_refused_whole(addresses: list[str]) -> None:
    with pytest.raises(WebSearchError, match="refused"):
        SsrfGuard(PageSettings()).addresses(addresses)


def test_an_allowed_network_opens_itself_and_nothing_else() -> None:
    guard = SsrfGuard(PageSettings(allow_private=(ipaddress.ip_network("10.1.2.0/24"),)))
    assert guard.address("10.1.2.3") == "10.1.2.3"
    for other in ("10.1.3.1", "127.0.0.1", "::ffff:10.1.2.3", "64:ff9b::a01:203"):
        with pytest.raises(WebSearchError, match="refused"):
            guard.address(other)


HTML = "<html><head><title>Zola</title></head><body><p>Émile Zola</p></body></html>"


class Site:
    """A web site on 127.0.0.1 under any name, and a resolver with given answers."""

    def __init__(self) -> None:
        self.port = 0
        self.paths: list[str] = []
        self.hosts: list[str] = []
        self.lookups: list[str] = []
        self.answers: list[Sequence[str]] = []
        self.pages: dict[str, Callable[[], web.StreamResponse]] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        self.hosts.append(request.headers["Host"])
        if request.path == "/hang":
            await asyncio.sleep(60)
        if request.path == "/endless":
            response = web.StreamResponse(headers={"Content-Type": "text/plain"})
            await response.prepare(request)
            while True:
                await response.write(b"and so on " * 1000)
        make = self.pages.get(request.path)
        return make() if make else web.Response(text=HTML, content_type="text/html")

    async def lookup(self, host: str, port: int) -> Sequence[str]:
        self.lookups.append(host)
        return self.answers.pop(0) if self.answers else ["127.0.0.1"]

    def pages_of(self, **fields: Any) -> PageFetcher:
        """A reader that is allowed to come here, and to no other private place."""
        given: dict[str, Any] = {"ports": (self.port,), "allow_private": ("127.0.0.1/32",)}
        return PageFetcher(PageSettings.model_validate(given | fields), lookup=self.lookup)

    def url(self, path: str = "/", host: str = "site.example") -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    found = Site()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", found.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.port = runner.addresses[0][1]
    yield found
    await runner.cleanup()


async def refused(pages: PageFetcher, url: str) -> str:
    with pytest.raises(WebSearchError) as raised:
        await pages.read(url)
    return raised.value.failure.cause


async def test_a_page_is_read_at_the_address_that_was_resolved_and_checked(site: Site) -> None:
    page = await site.pages_of().read(site.url("/x?y=1", host="zola.example"))
    assert (page.title, page.text) == ("Zola", "Émile Zola")
    assert site.lookups == ["zola.example"] and site.hosts == [f"zola.example:{site.port}"]


async def test_without_the_allowance_the_same_page_is_refused(site: Site) -> None:
    assert await refused(site.pages_of(allow_private=()), site.url()) == "refused"
    assert await refused(site.pages_of(allow_private=()), site.url(host="127.0.0.1")) == "refused"
    assert not site.paths


async def test_a_rebinding_name_is_resolved_once_and_only_its_first_answer_counts(site: Site) -> None:
    site.answers = [["127.0.0.1"], ["169.254.169.254"], ["10.0.0.1"]]
    await site.pages_of().read(site.url(host="rebind.example"))
    assert site.lookups == ["rebind.example"] and len(site.paths) == 1
    # now its answer is a private one: refused before anything is connected to
    assert await refused(site.pages_of(), site.url(host="rebind.example")) == "refused"
    assert len(site.paths) == 1


async def test_the_connector_goes_to_the_checked_address_whatever_the_url_says(site: Site) -> None:
    import aiohttp

    guard = SsrfGuard(PageSettings.model_validate({"allow_private": ["127.0.0.0/8"]}))
    for host, url in [("a.example", site.url(host="b.example")), ("127.0.0.2", site.url(host="127.0.0.1"))]:
        async with aiohttp.ClientSession(connector=guard.connector(host, "127.0.0.2")) as session:
            with pytest.raises((aiohttp.ClientConnectionError, WebSearchError)):
                await session.get(url)
    assert not site.paths


@pytest.mark.parametrize(
    "target",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]:{port}/",
        "http://127.0.0.2:{port}/",
        "http://127.1:{port}/",
        "http://site.example:6379/",
        "file:///etc/passwd",
        "gopher://site.example:{port}/",
        "http://user@site.example:{port}/",
        "\\\\169.254.169.254\\x",
    ],
)
async def test_a_redirect_is_checked_as_the_first_address_was(site: Site, target: str) -> None:
    location = target.replace("{port}", str(site.port))
    site.pages["/from"] = lambda: web.Response(status=302, headers={"Location": location})
    assert await refused(site.pages_of(), site.url("/from")) == "refused"
    assert site.paths == ["/from"]


async def test_a_redirect_to_a_name_that_is_private_is_refused(site: Site) -> None:
    site.pages["/from"] = lambda: web.Response(status=302, headers={"Location": site.url("/to", host="inner.example")})
    site.answers = [["127.0.0.1"], ["10.0.0.1"]]
    assert await refused(site.pages_of(), site.url("/from")) == "refused"
    assert site.lookups == ["site.example", "inner.example"] and site.paths == ["/from"]


async def test_redirects_are_followed_up_to_their_limit(site: Site) -> None:
    for i in range(6):
        target = f"/{i + 1}"
        site.pages[f"/{i}"] = lambda target=target: web.Response(status=301, headers={"Location": target})  # type: ignore[misc]
    assert (await site.pages_of().read(site.url("/3"))).title == "Zola"
    assert await refused(site.pages_of(), site.url("/2")) == "redirects"


async def test_a_compressed_bomb_is_cut(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_pages, "MAX_CHARS", 1 << 20)
    monkeypatch.setattr(web_pages, "MAX_BYTES", 1 << 18)
    bomb = gzip.compress(b"<p>" + b"bomb " * (4 << 20))
    headers = {"Content-Encoding": "gzip", "Content-Type": "text/html"}
    site.pages["/bomb"] = lambda: web.Response(body=bomb, headers=headers)
    page = await site.pages_of().read(site.url("/bomb"))
    assert 0.2 * 2**20 < len(page.text) <= 0.25 * 2**20


async def test_a_page_without_an_end_is_left_when_there_is_enough_of_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_pages, "MAX_CHARS", 1 << 20)
    monkeypatch.setattr(web_pages, "MAX_BYTES", 100_000)
    page = await site.pages_of().read(site.url("/endless"))
    assert len(page.text) == pytest.approx(100_000, abs=10)


async def test_a_text_is_cut_at_its_characters(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_pages, "MAX_CHARS", 10)
    site.pages["/long"] = lambda: web.Response(text="é" * 1000)
    assert (await site.pages_of().read(site.url("/long"))).text == "é" * 10


@pytest.mark.parametrize("kind", ["image/png", "application/pdf", "application/json", "text/css"])
async def test_only_texts_are_read(site: Site, kind: str) -> None:
    site.pages["/x"] = lambda: web.Response(body=b"x", content_type=kind)
    assert await refused(site.pages_of(), site.url("/x")) == "content_type"


async def test_what_is_not_there_has_its_name(site: Site) -> None:
    site.pages["/404"] = lambda: web.Response(status=404)
    assert await refused(site.pages_of(), site.url("/404")) == "http_404"
    assert await refused(site.pages_of(timeout_s=0.1), site.url("/hang")) == "timeout"
    site.answers = [[]]
    assert await refused(site.pages_of(), site.url()) == "unreachable"
    gone = site.pages_of(ports=(9,))
    assert await refused(gone, "http://site.example:9/") == "unreachable"


async def test_a_name_that_does_not_resolve_is_unreachable() -> None:
    assert await refused(PageFetcher(PageSettings(timeout_s=5)), "http://nowhere.invalid/") == "unreachable"


async def test_the_systems_resolver_is_guarded_too(site: Site) -> None:
    pages = PageFetcher(PageSettings.model_validate({"ports": [site.port]}))
    assert await refused(pages, f"http://localhost:{site.port}/") == "refused"
    assert not site.paths
