"""The dashboard passes questions on to `foray serve`, and its answers as they come; the token stays in the server."""

from __future__ import annotations

import io
import json
import secrets
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from foray.dashboard.chat import ChatProxy
from protocol.runtime.http.auth import ROLES, Access, Role
from protocol.runtime.net import free_port
from tests.support.dashboard_run import dashboard, write_run
from tests.support.fake_serve import EMMA, HOLD, FakeServe, thinks
from tests.support.waiting import eventually

TOKEN = secrets.token_urlsafe(32)
ASKED = {"server": 0, "model": "emma", "messages": [{"role": "user", "content": "Who wrote Emma?"}]}


async def test_an_answer_is_passed_on_with_the_token_of_the_server(tmp_path: Path) -> None:
    async with (
        FakeServe(token=TOKEN) as server,
        dashboard(write_run(tmp_path / "run"), chat=ChatProxy([f"{server.url}/v1"], TOKEN)) as url,
        aiohttp.ClientSession(url) as session,
    ):
        async with session.get("/api/chat/models") as answer:
            (listed,) = (await answer.json())["servers"]
        assert [card["id"] for card in listed["data"]] == ["emma-bare", "emma"] and not listed["error"]
        async with session.post("/api/chat", json=ASKED | {"search": False}) as answer:
            assert answer.status == 200 and answer.content_type == "text/event-stream"
            text = await answer.text()
        assert TOKEN not in text + json.dumps(listed)
        events = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert [json.loads(event) for event in events[:-1]] == list(EMMA) and events[-1] == "[DONE]"
        messages = ASKED["messages"]
        sent = {"model": "emma", "messages": messages, "stream": True, "temperature": 0, "foray": {"search": False}}
        assert server.requests == [sent] and set(server.tokens) == {f"Bearer {TOKEN}"}


async def test_a_page_that_leaves_ends_the_answer(tmp_path: Path) -> None:
    async with (
        FakeServe([thinks("hm"), HOLD]) as server,
        dashboard(write_run(tmp_path / "run"), chat=ChatProxy([server.url])) as url,
        aiohttp.ClientSession(url) as session,
    ):
        async with session.post("/api/chat", json=ASKED) as answer:
            assert b"hm" in await answer.content.readline()
        await eventually(lambda: server.left == 1, "the server's slot is free")


WRONG: list[Any] = [
    None, [], {}, ASKED | {"server": 1}, ASKED | {"server": -1}, ASKED | {"messages": []}, ASKED | {"stream": False},
    ASKED | {"messages": [{"role": "system", "content": "x"}]},
]  # fmt: skip


async def test_what_is_wrong_is_explained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    async with FakeServe(token=TOKEN) as server:
        proxy = ChatProxy([server.url], "wrong")
        async with dashboard(run, chat=proxy) as url, aiohttp.ClientSession(url) as session:
            for body in WRONG:
                async with session.post("/api/chat", json=body) as answer:
                    assert answer.status == 400 and (await answer.json())["error"], body
            async with session.post("/api/chat", json=ASKED) as answer:
                assert answer.status == 400 and (await answer.json())["why"] == "no valid token"
            huge = io.BytesIO(json.dumps(ASKED | {"model": "y" * (1 << 20)}).encode())
            async with session.post("/api/chat", data=huge, headers={"Content-Type": "application/json"}) as answer:
                assert answer.status == 413
        assert not server.requests
    down = ChatProxy([f"http://127.0.0.1:{free_port()}"])
    async with dashboard(run, chat=down) as url, aiohttp.ClientSession(url) as session:
        async with session.post("/api/chat", json=ASKED) as answer:
            assert answer.status == 400 and "does not answer" in (await answer.json())["error"]
        async with session.get("/api/chat/models") as answer:
            (listed,) = (await answer.json())["servers"]
            assert listed["error"] and listed["data"] == []
    async with (
        dashboard(run) as url,
        aiohttp.ClientSession(url) as session,
        session.get("/api/chat/models") as answer,
    ):
        assert await answer.json() == {"servers": []}


@pytest.mark.parametrize(("role", "status"), [("viewer", 403), ("node", 403), ("operator", 200)])
async def test_only_an_operator_asks(tmp_path: Path, role: Role, status: int) -> None:
    tokens: dict[Role, str] = {each: secrets.token_urlsafe(32) for each in ROLES}
    headers = {"Authorization": f"Bearer {tokens[role]}"}
    async with (
        FakeServe(token=TOKEN) as server,
        dashboard(write_run(tmp_path / "run"), Access(tokens), ChatProxy([server.url], TOKEN)) as url,
        aiohttp.ClientSession(url, headers=headers) as session,
        session.post("/api/chat", json=ASKED) as answer,
    ):
        assert answer.status == status and len(server.requests) == (status == 200)
