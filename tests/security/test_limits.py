"""Sizes, depths and times are bounded before decoding; names and paths cannot escape."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from safetensors.torch import save_file

from learner.config.learner import LearnerSettings
from protocol.errors import UserError
from protocol.runtime.config import read_tree, section
from protocol.runtime.http.auth import Access
from protocol.settings import RunSettings
from retriever.api import base
from retriever.api import base as app_base
from retriever.config import RetrieverSettings
from retriever.server import running
from rollout_server.api import app as rollout_app
from rollout_server.cpu_engine.model.loader import WeightsError, read_tensors
from rollout_server.cpu_engine.server.auth import guard
from rollout_server.cpu_engine.server.validation import read_object
from rollout_server.node.config import NodeSettings

DEEP = [b"[" * 200_000, b'{"a":' * 200_000, b'{"queries":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
POSTS = ("/retrieve", "/search", "/batch_search", "/v1/embeddings")


@pytest.fixture
async def retriever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(base, "MAX_BODY_BYTES", 1 << 20)
    for role in ("VIEWER", "NODE", "OPERATOR"):
        monkeypatch.delenv(f"FORAY_{role}_TOKEN", raising=False)
    (tmp_path / "c.jsonl").write_text('{"id": "1", "contents": "one fact"}\n')
    async with running(RetrieverSettings(corpus=tmp_path / "c.jsonl", port=0)) as port:
        yield f"http://127.0.0.1:{port}"


async def _post(url: str, body: bytes, **headers: str) -> tuple[int, str]:
    headers = {"Content-Type": "application/json"} | headers
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, data=io.BytesIO(body)) as response:
        return response.status, await response.text()


async def _well(url: str) -> None:
    assert (await _post(url + "/retrieve", b'{"queries": ["fact"]}'))[0] == 200


@pytest.mark.parametrize("body", DEEP, ids=["lists", "objects", "queries"])
async def test_deep_nesting_is_a_bad_request_and_no_crash(retriever: str, body: bytes) -> None:
    for path in POSTS:
        status, text = await _post(retriever + path, body)
        assert status in (400, 404), (path, status)
        assert "Traceback" not in text and len(text) < 2000
    await _well(retriever)


async def test_a_body_beyond_the_limit_is_refused_by_its_length_alone(retriever: str) -> None:
    for path in POSTS[:3]:
        assert (await _post(retriever + path, b" " * (1 << 20) + b"{}"))[0] == 413
    host, port = retriever.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(_head("/retrieve", 9999999999999))
    async with asyncio.timeout(10):
        assert b" 413 " in await reader.readline(), "it is not awaited, and takes no slot"
    writer.close()
    await _well(retriever)


@pytest.mark.parametrize(
    "request_line",
    [b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
     b"GET /info HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
     b"GET /info HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X%d: a\r\n" % n for n in range(20_000)) + b"\r\n",
     b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
     b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
    ids=["line", "header", "headers", "tls", "smuggled"],
)  # fmt: skip
async def test_what_is_no_sound_request_is_refused_or_hung_up_on(retriever: str, request_line: bytes) -> None:
    host, port = retriever.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request_line)
        async with asyncio.timeout(10):
            answer = await reader.read(4000)
        assert not answer or answer.split()[1].startswith(b"4"), answer[:200]
    except ConnectionError:
        pass  # it hung up in the middle
    finally:
        writer.close()
    await _well(retriever)


async def test_a_body_that_drips_in_is_left(retriever: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_base, "BODY_S", 0.1)
    assert await _drip(retriever, "/retrieve") == 408
    await _well(retriever)


async def test_the_rollout_server_leaves_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_app, "BODY_S", 0.1)
    app = web.Application()
    served = rollout_app.build_app(object(), Access())  # type: ignore[arg-type]  # not used: the body is checked first
    app.add_subapp("/r", served)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        assert await _drip(url, "/r/v1/episodes") == 408
        for body in DEEP:
            assert (await _post(url + "/r/v1/episodes", body))[0] == 400
    finally:
        await runner.cleanup()


def _head(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}")
    return "\r\n".join((*lines, "", "")).encode()


async def _drip(url: str, path: str) -> int:
    """Status of a request whose body has begun and does not go on."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(_head(path, 50) + b"{")
        async with asyncio.timeout(10):
            return int((await reader.readline()).split()[1])
    finally:
        writer.close()


async def test_the_engines_control_routes_take_no_deep_nesting() -> None:
    async def control(request: web.Request) -> web.Response:
        return web.json_response(await read_object(request))

    app = web.Application(middlewares=[guard("", "")], client_max_size=1 << 20)
    app.router.add_post("/pause_generation", control)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/pause_generation"
        for body in (*DEEP, b"[]", b"nonsense", b"\xff\xfe"):
            assert (await _post(url, body))[0] == 400
        assert (await _post(url, b" " * (2 << 20)))[0] == 413
    finally:
        await runner.cleanup()


async def test_no_request_makes_a_new_series_of_metrics(retriever: str) -> None:
    async def series() -> set[str]:
        async with aiohttp.ClientSession() as session, session.get(retriever + "/metrics") as response:
            return {line.rpartition(" ")[0] for line in (await response.text()).splitlines() if line[:1] != "#"}

    async def ask(n: int) -> None:
        await _post(retriever + "/retrieve", json.dumps({"queries": [f"query {n}"], "run": f"run-{n}"}).encode())
        await _post(f"{retriever}/no/such/{n}", b"{}")
        await _post(f"{retriever}/retrieve?x={n}", b"[]")
        async with aiohttp.ClientSession() as session, session.get(f"{retriever}/passages/{n + 100}"):
            pass

    await ask(0)
    before = await series()
    for n in range(1, 15):
        await ask(n)
    assert await series() == before and len(before) < 400


async def test_no_answer_is_a_page(retriever: str) -> None:
    """Untrusted text is returned as JSON only, so that a browser cannot execute it."""
    async with aiohttp.ClientSession() as session:
        for method in ("GET", "POST"):
            for path in ("/", "/info", "/metrics", "/passages/1", "/retrieve", "/<script>alert(1)</script>", "/health"):
                async with session.request(method, retriever + path) as response:
                    assert response.content_type in ("application/json", "text/plain"), path


EVIL = ("../x", "/etc/passwd", "a/b", "..", ".", "a\\b", "a\0b", "a\nb", "{run}", "a b", "A" * 300)


@pytest.mark.parametrize("name", EVIL)
def test_names_of_runs_and_engines_are_no_paths_and_no_patterns(name: str) -> None:
    with pytest.raises(ValueError, match=r"id|pattern|string"):
        RunSettings(id=name)
    if name not in ("..", "."):
        with pytest.raises(ValueError, match=r"id|pattern|string"):
            NodeSettings(id=name)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "sub/../../outside.safetensors"])
def test_shards_of_a_model_are_files_beside_their_index(tmp_path: Path, name: str) -> None:
    import torch

    inside = tmp_path / "model"
    inside.mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WeightsError, match="not the name of a file in the same directory"):
        read_tensors(inside)


def test_settings_cannot_make_objects_of_what_yaml_names(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("run: !!python/object/apply:os.system ['touch sprung']\n")
    with pytest.raises(UserError, match="not valid YAML"):
        read_tree(tmp_path / "c.yaml")
    with pytest.raises(UserError, match="not valid YAML"):
        read_tree(None, ["run.id=!!python/name:os.system"])
    with pytest.raises(UserError, match="unknown key"):
        section({"learner": {"trust_remote_code": True}}, "learner", LearnerSettings)
    assert not (tmp_path / "sprung").exists()
