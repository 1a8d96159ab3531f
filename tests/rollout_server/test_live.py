"""`GET /v1/live`: groups in flight, and the text of a trajectory while it is generated."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from protocol.messages import TrajectoryGroup
from protocol.runtime.http.server import listening
from protocol.versions import PolicyVersion
from rollout_server.api import live
from rollout_server.api.live import LiveFeed
from rollout_server.engine.client import EngineCall
from rollout_server.engine.decoding import ReceivedTokens, StreamDecoder
from rollout_server.environment.tokenizer import load_tokenizer
from rollout_server.rollout.live import LiveGroups, LiveTrajectory
from rollout_server.rollout.transcript import Transcript
from tests.support import engine_http, rollout_process
from tests.support.fake_engine import Fault, Generation
from tests.support.messages import make_task
from tests.support.waiting import eventually

V5 = PolicyVersion(1, 5)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "POLL_S", 0.01)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Each event of a stream: (name, data)."""
    kind = ""
    async for line in response.content:
        if line.startswith(b"event: "):
            kind = line[7:].decode().strip()
        elif line.startswith(b"data: "):
            yield kind, json.loads(line[6:])


class Reader:
    """What a page has after some events."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.facts: dict[int, dict[str, Any]] = {}
        self.grown = 0
        self.end: dict[str, Any] = {}

    def add(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "segment":
            number = data["segment"]
            self.texts[number] = (self.texts[number] if data["append"] else "") + data["text"]
            self.grown += not data["complete"]
            self.facts[number] = data
        elif kind == "end":
            self.end = data


async def read_to_the_end(url: str, seq: int, index: int) -> Reader:
    reader = Reader()
    place = f"{url}/v1/live/trajectory?seq={seq}&index={index}"
    async with asyncio.timeout(60), aiohttp.ClientSession() as session, session.get(place) as response:
        assert response.status == 200, await response.text()
        async for kind, data in events(response):
            reader.add(kind, data)
    return reader


async def listing(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/live") as response:
        assert response.status == 200
        return await response.json()  # type: ignore[no-any-return]


async def in_flight(url: str, state: str) -> dict[str, Any]:
    """The listing, once every trajectory is in `state`."""
    async with asyncio.timeout(20):
        while True:
            found = await listing(url)
            if found["groups"] and {t["state"] for g in found["groups"] for t in g["trajectories"]} == {state}:
                return found
            await asyncio.sleep(0.02)


async def watched_by(url: str, watchers: int) -> None:
    async with asyncio.timeout(20):
        while (await listing(url))["watchers"] != watchers:  # noqa: ASYNC110  # of another task
            await asyncio.sleep(0.02)


async def test_what_is_seen_with_the_cpu_engine_is_what_is_published(world, tmp_path: Path) -> None:
    (model := tmp_path / "policy").mkdir()
    engine_http.write_policy(model)
    world.target(V5)
    episode = {"template": "demo", "max_turns": 1, "max_new_tokens": 100, "max_context": 500, "max_obs_tokens": 60}
    async with (
        engine_http.serving(model, weight_version="1.5") as engine,
        rollout_process.server(world, model, episode=episode, stream_interval=2) as (url, _),
    ):
        await engine_http.post(engine, "/pause_generation")
        world.register("e", str(engine.make_url("")).rstrip("/"), V5)
        world.issue(make_task(1, group_size=2))
        (group,) = (await in_flight(url, "generating"))["groups"]
        assert (group["seq"], group["attempt"], len(group["trajectories"])) == (1, 1, 2)
        readers = [asyncio.create_task(read_to_the_end(url, 1, index)) for index in (0, 1)]
        await watched_by(url, 2)
        await engine_http.post(engine, "/continue_generation")
        seen = await asyncio.gather(*readers)
        await eventually(world.published, "the group is published")
        assert (await listing(url)) == {"watchers": 0, "groups": []}
    (made,) = world.published()
    assert isinstance(made, TrajectoryGroup)
    decode = load_tokenizer(model).decode
    for reader, trajectory in zip(seen, made.trajectories, strict=True):
        assert [reader.texts[n] for n in range(len(reader.texts))] == [
            decode(segment.ids.tolist()) for segment in trajectory.segments
        ]
        assert (reader.end["status"], reader.end["answer"]) == (str(trajectory.status), trajectory.answer)
        assert reader.facts[1]["version"] == "1.5" and reader.facts[1]["engine"] == "e"
    assert sum(reader.grown for reader in seen) > 3, "turns were seen while they grew"


async def test_the_list_has_turns_tokens_and_the_last_search(
    world, model: Path, tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineCall, "tokens_so_far", lambda call: pytest.fail("the list decodes a turn"))
    world.target(V5)
    async with (
        rollout_process.talker(tokens, pace_s=0.2) as engine,
        rollout_process.server(world, model, stream_interval=1) as (url, _),
    ):
        world.issue(make_task(7, group_size=1))
        waiting = (await in_flight(url, "waiting"))["groups"][0]["trajectories"][0]
        assert (waiting["turns"], waiting["engine"], waiting["status"]) == (0, "", None)
        world.register("e", engine.url, V5)
        rows = []
        while groups := (await listing(url))["groups"]:
            rows.append(groups[0]["trajectories"][0])
            await asyncio.sleep(0.05)
    counts = [row["tokens"] for row in rows]
    assert counts == sorted(counts) and len(set(counts)) >= 5, "it grows within turns"
    assert {"generating"} <= {row["state"] for row in rows} and {row["engine"] for row in rows} >= {"e"}
    assert (rows[-1]["turns"], rows[-1]["searches"], rows[-1]["last_query"]) in ((1, 1, "a b"), (2, 1, "a b"))


@pytest.mark.parametrize("kind", [{}, {"incremental": True}, {"exact": True}], ids=["sglang", "incremental", "exact"])
async def test_the_list_decodes_nothing_and_its_token_counts_are_right(
    kind: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, take = 0, StreamDecoder._take

    def counted(decoder: StreamDecoder, payload: bytes) -> None:
        nonlocal decoded
        decoded += len(payload)
        take(decoder, payload)

    monkeypatch.setattr(StreamDecoder, "_take", counted)
    for tokens in (100, 800):
        received = ReceivedTokens("e", 1000, label="1.5")
        decoder, generation = StreamDecoder(received), Generation({"rid": "r"}, range(1000))
        for n in range(10, tokens + 1, 10):
            generation.labels += ["1.5"] * 10
            generation.body["input_ids"], generation.body["sampling_params"] = [1], {"max_new_tokens": 1000}
            chunk = generation.chunk(
                "1.5", start=n - 10 if kind.get("incremental") else 0, exact=bool(kind.get("exact"))
            )
            decoder.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            before = decoded
            assert decoder.count() == n and decoded == before
        decoder.flush()
        assert decoder.count() == len(received.ids) == tokens


async def test_a_watcher_may_leave_and_there_are_not_too_many(
    world, model: Path, tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "WATCHERS", 1)
    world.target(V5)
    async with (
        rollout_process.talker(tokens, pace_s=0.3) as engine,
        rollout_process.server(world, model, stream_interval=1) as (url, _),
        aiohttp.ClientSession() as session,
    ):
        world.register("e", engine.url, V5)
        world.issue(make_task(1, group_size=2))
        await in_flight(url, "generating")
        place = f"{url}/v1/live/trajectory"

        async def status(query: str) -> int:
            async with session.get(f"{place}?{query}") as response:
                return response.status

        assert [await status(q) for q in ("seq=1", "seq=a&index=0", f"seq={'9' * 5000}&index=0")] == [400] * 3
        assert [await status(q) for q in ("seq=1&index=2", "seq=1&index=-1", "seq=2&index=0")] == [404] * 3
        async with session.get(f"{place}?seq=1&index=0") as response:
            kind, start = await anext(events(response))
            assert kind == "start" and (start["seq"], start["index"]) == (1, 0)
            assert await status("seq=1&index=1") == 503
            response.close()
        await watched_by(url, 0)
        await eventually(world.published, "the group is published", 20)
        assert await status("seq=1&index=0") == 404, "it is no longer in flight"


async def test_a_released_task_ends_the_stream(world, model: Path, tokens) -> None:
    world.target(V5)
    async with (
        rollout_process.talker(tokens, latency_s=60) as engine,
        rollout_process.server(world, model, drain_s=0) as (url, stop),
    ):
        world.register("e", engine.url, V5)
        world.issue(make_task(1, group_size=1))
        await in_flight(url, "generating")
        reading = asyncio.create_task(read_to_the_end(url, 1, 0))
        await watched_by(url, 1)
        stop.requested.set()
        reader = await reading
    assert reader.end == {"status": None, "cause": "released", "answer": "", "reward": 0.0}


@pytest.mark.parametrize("watched", [True, False])
async def test_malformed_tokens_end_a_call_the_same_way_watched_or_not(
    world, model: Path, tokens, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unwatched, nothing is decoded early."""
    early = list[EngineCall]()
    look = EngineCall.tokens_so_far
    monkeypatch.setattr(EngineCall, "tokens_so_far", lambda call: early.append(call) or look(call))

    def spoil(chunk: dict[str, Any]) -> dict[str, Any]:
        return chunk | {"output_ids": [10**6] * len(chunk["output_ids"])}

    world.target(V5)
    async with (
        rollout_process.talker(tokens, pace_s=0.1) as engine,
        rollout_process.server(world, model, stream_interval=1) as (url, _),
    ):
        engine.faults["/generate"] = Fault(after=2, spoil=spoil, times=1)
        reading = None
        if watched:
            world.issue(make_task(1, group_size=1))
            await in_flight(url, "waiting")
            reading = asyncio.create_task(read_to_the_end(url, 1, 0))
        else:
            world.issue(make_task(1, group_size=1))
        world.register("e", engine.url, V5)
        await eventually(world.published, "the group is published", 30)
        if reading is not None:
            assert (await reading).texts[1] == "<search> a b </search>"
    (made,) = world.published()
    assert isinstance(made, TrajectoryGroup) and [str(t.status) for t in made.trajectories] == ["answered"]
    assert bool(early) is watched


@asynccontextmanager
async def served(feed: LiveFeed) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v1/live/trajectory", feed.serve)
    async with listening(app, "127.0.0.1", 0, access=None, setting="", todo="") as listener:
        yield listener.url


async def test_a_slow_watcher_is_dropped_and_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WRITE_S", 1.0)
    size, groups = 16_000_000, LiveGroups()
    feed = LiveFeed(groups, lambda session: None, lambda session: None, lambda ids: "x" * size)
    with groups.running(make_task(1, group_size=1)) as group:
        group.trajectories[0].transcript = Transcript([1], 10)
        async with served(feed) as url, aiohttp.ClientSession(read_bufsize=2 * size) as session:
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as slow:
                slow.sendall(b"GET /v1/live/trajectory?seq=1&index=0 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                await eventually(lambda: feed.watchers == 1, "it watches")
                async with session.get(f"{url}/v1/live/trajectory?seq=1&index=0") as response:
                    async with asyncio.timeout(20):
                        seen = await response.content.readexactly(size)
                    assert seen.startswith(b"event: start") and seen.endswith(b"x")
                await eventually(lambda: feed.watchers == 0, "the slow one is dropped", 20)
                slow.settimeout(10)
                got = await asyncio.to_thread(lambda: sum(map(len, iter(partial(slow.recv, 1 << 20), b""))))
                assert got < size, "what was buffered is gone, too"


def test_the_first_token_of_a_segment_is_shown() -> None:
    so_far: list[int] = []
    view = live._View(LiveTrajectory("s"), lambda session: (session, so_far), lambda ids: "x" * len(ids))
    assert list(view.new()) == []
    so_far.append(7)
    (event,) = view.new()
    assert (event["text"], event["tokens"], event["append"], event["complete"]) == ("x", 1, False, False)
    assert list(view.new()) == []
