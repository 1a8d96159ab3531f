"""Answers of other processes are read within a bound, chunked and compressed ones too."""

from __future__ import annotations

import gzip
import json
import socket

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from protocol.runtime.http.body import AnswerTooLarge, bounded_session, parse_json, read_bounded, read_start

LIMIT = 1 << 16


@pytest.fixture
async def server():
    sent = {"chunks": 0}

    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1 << 20):
            sent["chunks"] += 1
            await response.write(b"x" * 8192)
        return response

    async def zipped(_request):
        return web.Response(body=gzip.compress(bytes(8 << 20)), headers={"Content-Encoding": "gzip"})

    async def small(request):
        return web.Response(body=b"y" * LIMIT, headers={"Seen": request.headers.get("Accept-Encoding", "")})

    app = web.Application()
    app.router.add_get("/endless", endless)
    app.router.add_get("/zipped", zipped)
    app.router.add_get("/small", small)
    server = TestServer(app)
    await server.start_server()
    yield server, sent
    await server.close()


@pytest.mark.parametrize("path", ["/endless", "/zipped"])
async def test_an_answer_beyond_its_limit_is_refused(server, path):
    server, sent = server
    async with bounded_session() as session, session.get(server.make_url(path)) as response:
        with pytest.raises(AnswerTooLarge, match=r"exceeds 65536|compressed"):
            await read_bounded(response, LIMIT)
    assert sent["chunks"] < 4096  # it stopped reading: the server was not drained


async def test_an_answer_within_its_limit_is_whole(server):
    server, _ = server
    async with bounded_session() as session, session.get(server.make_url("/small")) as response:
        assert await read_bounded(response, LIMIT) == b"y" * LIMIT
        assert response.headers["Seen"] == "identity"
    async with bounded_session() as session, session.get(server.make_url("/endless")) as response:
        assert await read_start(response, 10) == "x" * 10


async def test_the_time_to_connect_ends_at_a_host_that_drops_packets():
    server = socket.create_server(("127.0.0.1", 0), backlog=0)
    url = f"http://127.0.0.1:{server.getsockname()[1]}/"
    waiting = [socket.socket() for _ in range(4)]
    try:
        for each in waiting:  # a full queue: the kernel drops the packets of further connections
            each.setblocking(False)
            each.connect_ex(server.getsockname())
        async with bounded_session(connect_s=0.5) as session:
            with pytest.raises(aiohttp.ConnectionTimeoutError):
                await session.get(url)
    finally:
        for each in [*waiting, server]:
            each.close()


@pytest.mark.parametrize("lone", ["\ud83d", "\ude00", "\ud83d\ud83d", "\ude00\ud83d"])
def test_lone_surrogates_of_an_answer_are_replaced_and_nothing_else(lone):
    sent = {"a" + lone + "b": [lone, {"text": f"x{lone}y \U0001f600 \\ud83d é"}, 1.5, None, True]}
    mark = "\ufffd" * len(lone)
    read = {"a" + mark + "b": [mark, {"text": f"x{mark}y \U0001f600 \\ud83d é"}, 1.5, None, True]}
    assert parse_json(json.dumps(sent).encode()) == read
    assert parse_json(json.dumps(read).encode()) == read


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[" * 100_000, b"\xff\xfe\x00", b'"\xff"', b"1" * 5000 + b"x", b'"\\ud83d']
)
def test_what_is_no_json_is_a_value_error(raw):
    with pytest.raises(ValueError):
        parse_json(raw)
