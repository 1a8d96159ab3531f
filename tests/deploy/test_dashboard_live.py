"""The dashboard passes on what rollout servers say of trajectories in flight, and how one grows."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from foray.dashboard import source
from protocol.runtime.http.auth import Access
from protocol.runtime.http.server import auth_middleware, listening
from protocol.runtime.net import free_port
from rollout_server.api import live
from rollout_server.api.app import ROUTE_ROLES
from rollout_server.api.live import LiveFeed
from rollout_server.rollout.live import LiveGroups
from tests.support.dashboard_run import dashboard, events, served_at, write_run
from tests.support.messages import make_task
from tests.support.waiting import eventually

At = Callable[..., Path]
VIEWER = {"Authorization": f"Bearer {secrets.token_urlsafe(32)}"}


class Rollout:
    """A rollout server's feed: `turns` has the tokens so far of each session."""

    def __init__(self) -> None:
        self.groups, self.turns = LiveGroups(), dict[str, list[int]]()
        self.feed = LiveFeed(self.groups, self.turn_so_far, self.count_so_far, decode)

    def turn_so_far(self, session: str) -> tuple[str, list[int]] | None:
        return ("engine-1", self.turns[session]) if session in self.turns else None

    def count_so_far(self, session: str) -> tuple[str, int] | None:
        return ("engine-1", len(self.turns[session])) if session in self.turns else None

    @asynccontextmanager
    async def serving(self, access: Access) -> AsyncIterator[str]:
        async def listing(_: web.Request) -> web.Response:
            return web.json_response(await self.feed.listing())

        app = web.Application(middlewares=[auth_middleware(access, ROUTE_ROLES, default="operator")])
        app.router.add_get("/v1/live", listing)
        app.router.add_get("/v1/live/trajectory", self.feed.serve)
        async with listening(app, "127.0.0.1", 0, access=access, setting="", todo="") as server:
            yield server.url


def decode(ids: Sequence[int]) -> str:
    return "".join(f"<b>{number}</b>" for number in ids)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "POLL_S", 0.01)


@pytest.fixture
def at() -> Iterator[At]:
    with ExitStack() as held:
        yield lambda run_dir, *urls: held.enter_context(served_at(run_dir, *urls))


async def read(session: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with session.get(path) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("secured", [False, True])
async def test_a_trajectory_is_followed_from_its_first_token_to_its_end(
    tmp_path: Path, at: At, redis_url: str, secured: bool
) -> None:
    access = Access({"viewer": VIEWER["Authorization"].removeprefix("Bearer ")}) if secured else Access()
    rollout, away = Rollout(), f"http://127.0.0.1:{free_port()}"
    task = make_task(7, group_size=2)
    async with rollout.serving(access) as url:
        run_dir = at(write_run(tmp_path / "run", redis_url=redis_url), url, away)
        async with (
            dashboard(run_dir, access) as shown,
            aiohttp.ClientSession(shown, headers=VIEWER if secured else {}) as session,
        ):
            with rollout.groups.running(task) as group:
                rollout.turns[group.trajectories[1].session] = [1, 2]
                status, found = await read(session, "/api/live")
                here, there = found["servers"]
                assert (status, here["error"], there["groups"]) == (200, "", []) and away[7:] in there["error"]
                assert [(g["seq"], g["question"]) for g in here["groups"]] == [(7, task.question.text)]
                assert [(t["state"], t["tokens"]) for t in here["groups"][0]["trajectories"]] == [
                    ("waiting", 0),
                    ("generating", 2),
                ]
                async with session.get("/api/live/0/7/1") as stream:
                    assert stream.content_type == "text/event-stream"
                    start, begun = await events(stream, 2)
                    rollout.turns[group.trajectories[1].session] = [1, 2, 3]
                    (grown,) = await events(stream, 1)
                    del rollout.groups[7]
                    (end,) = await events(stream, 1)
                    assert await stream.content.read() == b"", "nothing after the end"
            assert json.loads(start["data"])["question"] == task.question.text
            first, more = json.loads(begun["data"]), json.loads(grown["data"])
            assert (first["text"], first["append"], more["text"], more["append"]) == (
                "<b>1</b><b>2</b>", False, "<b>3</b>", True,
            )  # fmt: skip
            assert (end["event"], json.loads(end["data"])["status"]) == ("end", None)


@pytest.mark.parametrize(
    ("path", "said"),
    [("1/7/0", "does not answer"), ("2/7/0", "has 2 rollout servers"), ("0/x/0", "whole")],
)
async def test_what_is_not_there_is_explained(tmp_path: Path, at: At, redis_url: str, path: str, said: str) -> None:
    async with Rollout().serving(Access()) as url:
        run_dir = at(write_run(tmp_path / "run", redis_url=redis_url), url, f"http://127.0.0.1:{free_port()}")
        async with dashboard(run_dir) as shown, aiohttp.ClientSession(shown) as session:
            status, answer = await read(session, f"/api/live/{path}")
    assert status == 400 and said in answer["error"]


async def test_a_trajectory_that_has_ended_is_gone(tmp_path: Path, at: At, redis_url: str) -> None:
    async with Rollout().serving(Access()) as url:
        run_dir = at(write_run(tmp_path / "run", redis_url=redis_url), url)
        async with (
            dashboard(run_dir) as shown,
            aiohttp.ClientSession(shown) as session,
            session.get("/api/live/0/7/0") as stream,
        ):
            (gone,) = await events(stream, 1)
            assert gone["event"] == "gone" and "not in flight" in json.loads(gone["data"])


async def test_a_page_that_leaves_is_no_longer_a_watcher_of_the_server(tmp_path: Path, at: At, redis_url: str) -> None:
    rollout = Rollout()
    with rollout.groups.running(make_task(7, group_size=1)) as group:
        async with rollout.serving(Access()) as url:
            run_dir = at(write_run(tmp_path / "run", redis_url=redis_url), url)
            async with dashboard(run_dir) as shown, aiohttp.ClientSession(shown) as session:
                async with session.get("/api/live/0/7/0") as stream:
                    await events(stream, 1)
                    assert rollout.feed.watchers == 1
                # both sides notice when the next text is sent
                rollout.turns[group.trajectories[0].session] = [1]
                await eventually(lambda: not rollout.feed.watchers, "the watcher is gone")


async def test_only_the_viewers_token_goes_out_and_only_to_servers_registered_in_the_runs_redis(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "FRESH_S", 0.0)
    asked: list[str] = []

    async def listing(request: web.Request) -> web.Response:
        asked.append(request.headers.get("Authorization", ""))
        return web.json_response({"groups": []})

    tokens = {role: secrets.token_urlsafe(32) for role in ("viewer", "operator")}
    app = web.Application()
    app.router.add_get("/v1/live", listing)
    operator = {"Authorization": f"Bearer {tokens['operator']}"}
    async with listening(app, "127.0.0.1", 0, access=Access(), setting="", todo="") as server:
        run_dir = write_run(tmp_path / "run", redis_url=redis_url)
        forged = json.loads((run_dir / "run.json").read_text()) | {"rollouts": [server.url], "retrievers": [server.url]}
        (run_dir / "run.json").write_text(json.dumps(forged))
        for sent, found in ((tokens, [f"Bearer {tokens['viewer']}"]), ({"operator": tokens["operator"]}, [""])):
            async with (
                dashboard(run_dir, Access(sent)) as shown,
                aiohttp.ClientSession(shown, headers=operator) as session,
            ):
                with served_at(run_dir, server.url):
                    assert (await read(session, "/api/live"))[0] == 200 and asked == found
                assert await read(session, "/api/live") == (200, {"servers": []}), "its port may be another run's now"
                assert asked == found
            asked.clear()
