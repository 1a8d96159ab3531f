"""One listener for all services: who may listen, what is refused, and a server in a thread."""

from __future__ import annotations

import asyncio
import logging
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from protocol.errors import UserError
from protocol.runtime.http.auth import Access
from protocol.runtime.http.server import ThreadedServer, announce, auth_middleware, http_url, listening

TOKEN = "0123456789-abcdefghijklmnop-0123456789"
HERE: dict[str, Any] = {"access": Access(), "setting": "x.host", "todo": "choose another x.port"}


def app(access: Access = Access()) -> web.Application:  # noqa: B008 (immutable)
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="in")

    made = web.Application(middlewares=[auth_middleware(access, {"/a": "viewer"}, default="operator")])
    made.router.add_get("/a", answer)
    made.router.add_get("/b", answer)
    return made


def get(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


async def test_it_answers_while_the_block_runs() -> None:
    async with listening(app(), "127.0.0.1", 0, **HERE) as listener:
        assert listener.url == f"http://127.0.0.1:{listener.port}"
        assert await asyncio.to_thread(get, f"{listener.url}/a") == 200
        await listener.close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", listener.port), timeout=5).close()


async def test_a_taken_address_is_explained() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="cannot listen on") as caught:
        async with listening(app(), "127.0.0.1", taken.getsockname()[1], **HERE):
            pass
    assert caught.value.todo == "choose another x.port" and caught.value.why


async def test_beyond_loopback_a_token_is_needed() -> None:
    with pytest.raises(UserError, match=r"x\.host"):
        async with listening(app(), "0.0.0.0", 0, **HERE):
            pass


async def test_a_route_takes_its_role_and_any_other_the_default() -> None:
    access = Access({"viewer": TOKEN})
    async with listening(app(access), "127.0.0.1", 0, **HERE) as listener:
        for path, bare, viewer in (("/a", 401, 200), ("/b", 401, 403)):
            assert await asyncio.to_thread(get, listener.url + path) == bare
            assert await asyncio.to_thread(get, listener.url + path, Authorization=f"Bearer {TOKEN}") == viewer


def test_a_server_in_a_thread_answers_until_it_is_closed_and_may_be_closed_twice() -> None:
    server = ThreadedServer(listening(app(), "127.0.0.1", 0, **HERE), "test")
    assert get(f"{server.url}/a") == 200
    server.close()
    server.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5).close()


def test_a_server_in_a_thread_raises_where_it_is_made() -> None:
    with pytest.raises(UserError, match=r"x\.host"):
        ThreadedServer(listening(app(), "0.0.0.0", 0, **HERE), "test")


def test_the_port_is_written_for_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        announce(logging.getLogger("x"), "::1", 7, tmp_path / "new" / "port")
    assert (tmp_path / "new" / "port").read_text() == "7\n" and http_url("::1", 7) in caplog.text
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["port"]
