"""Rollout servers as separate processes that are killed, suspended and stopped, and what the others take over."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from protocol import codec, events
from protocol.codec import decode
from protocol.keys import TASK_GROUP
from protocol.messages import GroupFailed, MetricsSnapshot, TrajectoryGroup
from protocol.runtime.redis.aio import RedisClient
from protocol.versions import PolicyVersion
from rollout_server.dispatch.publisher import GroupPublisher, tokens_of
from rollout_server.metrics import Stats
from tests.support import rollout_process
from tests.support.messages import make_group, make_task
from tests.support.waiting import eventually

V5 = PolicyVersion(1, 5)
CLOCK = (
    "import sys, time\n"
    "real, skew = time.time, float(sys.argv.pop(1))\n"
    "time.time = lambda: real() + skew\n"
    "from rollout_server.cli import main\n"
    "sys.exit(main())"
)
"""A rollout server on a host whose clock is wrong."""


@asynccontextmanager
async def process(
    world, model: Path, name: str, *settings: str, skew_s: float = 0.0
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A rollout server in a separate process, killed at the end if it still runs. Its log is NAME.log."""
    argv = [f"run.id={world.keys.run}", f"run.model={model}", f"run.redis_url={world.url}", f"rollout.id={name}"]
    argv += ["rollout.search.type=none", "rollout.episode.template=demo", "rollout.fleet_poll_s=0.05", *settings]
    argv += ["--port-file", str(model.parent / f"port-{name}")]
    child = start([sys.executable, "-c", CLOCK, str(skew_s), *argv], model.parent / f"{name}.log")
    try:
        yield child
    finally:
        child.kill()
        await asyncio.to_thread(child.wait, 10)


def start(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(argv, stderr=file, cwd=log.parent)


def snapshot(world, name: str) -> dict[str, float]:
    """The counters of a rollout server, as it published them last."""
    raw = world.sync.get(world.keys.metrics("rollout", name))
    message = decode(raw) if raw else None
    return message.values if isinstance(message, MetricsSnapshot) else {}


def told(world) -> list[dict[str, str]]:
    """The run's history."""
    return [events.parse(fields) for _, fields in world.sync.xrange(world.keys.events)]


@pytest.mark.slow
@pytest.mark.fault(1)
async def test_tasks_of_a_killed_server_are_taken_over_and_nothing_is_partly_published(
    world, model: Path, tokens
) -> None:
    world.target(V5)
    async with rollout_process.talker(tokens, pace_s=0.1) as engine:
        world.register("e", engine.url, V5)
        world.issue(*(make_task(seq, group_size=2) for seq in range(1, 5)))
        async with process(world, model, "victim") as victim:
            await eventually(lambda: world.pending() == 4 and engine.tokens_made > 8, "it is in the middle of four", 30)
            victim.send_signal(signal.SIGKILL)
            await eventually(lambda: victim.poll() is not None, "it is dead")
        assert victim.returncode == -signal.SIGKILL and world.published() == []
        engine.pace_s = 0.0
        async with rollout_process.server(world, model, name="second", task_idle_ms=700) as (_, _):
            await eventually(lambda: len(world.published()) == 4, "another one takes over", 20)
            await eventually(lambda: snapshot(world, "second").get("reclaimed") == 4, "and counts them")
    groups = world.published()
    assert Counter(g.seq for g in groups) == Counter(range(1, 5)) and {g.producer for g in groups} == {"second"}
    assert all(isinstance(g, TrajectoryGroup) for g in groups) and world.pending() == 0


@pytest.mark.slow
@pytest.mark.fault(3, 32)
async def test_a_suspended_server_that_lost_its_tasks_learns_that_they_were_published(
    world, model: Path, tokens
) -> None:
    world.target(V5)
    async with rollout_process.talker(tokens, latency_s=0.8) as engine:
        world.register("e", engine.url, V5)
        world.issue(*(make_task(seq, group_size=2) for seq in (1, 2, 3)))
        async with process(world, model, "sleeper", "rollout.task_idle_ms=60000") as sleeper:
            await eventually(lambda: len(engine.requests) == 6, "three groups are under way", 30)
            sleeper.send_signal(signal.SIGSTOP)
            async with rollout_process.server(world, model, name="second", task_idle_ms=700) as (_, _):
                await eventually(lambda: len(world.published()) == 3, "another one takes over", 20)
            assert sleeper.poll() is None and {g.producer for g in world.published()} == {"second"}
            sleeper.send_signal(signal.SIGCONT)
            await eventually(lambda: snapshot(world, "sleeper").get("duplicates") == 3, "it wakes, and is too late", 20)
            assert snapshot(world, "sleeper")["groups_published"] == 0
            world.issue(make_task(4, group_size=2))
            await eventually(lambda: len(world.published()) == 4, "it works on as if nothing had been", 20)
    assert Counter(g.seq for g in world.published()) == Counter(range(1, 5)) and world.pending() == 0


@pytest.mark.slow
@pytest.mark.fault(2)
async def test_sigterm_under_load_releases_what_cannot_be_finished_and_ends_with_status_0(
    world, model: Path, tokens
) -> None:
    world.target(V5)
    async with rollout_process.talker(tokens, latency_s=60.0) as engine:
        world.register("e", engine.url, V5)
        world.issue(*(make_task(seq, group_size=2) for seq in range(1, 7)))
        settings = ("rollout.drain_s=1", "rollout.concurrency_groups=4", "rollout.task_idle_ms=600000")
        async with process(world, model, "leaver", *settings) as leaver:
            await eventually(lambda: world.pending() == 4 and len(engine.requests) == 8, "four are under way", 30)
            url = f"http://127.0.0.1:{(model.parent / 'port-leaver').read_text().strip()}"
            leaver.terminate()
            status = 0
            while status != 503:  # until the signal has been noticed
                async with aiohttp.ClientSession() as session, session.get(f"{url}/ready") as response:
                    status, body = response.status, await response.json()
            assert body["reasons"] == ["stopping"] and leaver.poll() is None
            await eventually(lambda: leaver.poll() is not None, "it ends", 20)
    assert leaver.returncode == 0, (model.parent / "leaver.log").read_text()
    assert world.pending() == 0 and world.published() == []
    # no need to wait for its lease timeout of ten minutes: its tasks are back at the end of the stream
    reader = world.client()
    entries = await reader.read(world.keys.tasks, TASK_GROUP, "anyone", 10)
    assert sorted(int(fields[b"seq"]) for _, fields in entries) == [1, 2, 3, 4, 5, 6]
    history = [(event["kind"], event["id"], event["text"]) for event in told(world)]
    assert history == [
        ("joined", "leaver", "rollout server leaver leases tasks"),
        ("left", "leaver", "stopped; 4 tasks released"),
    ]


@pytest.mark.slow
@pytest.mark.fault(44)
async def test_hosts_whose_clocks_are_two_hours_apart_work_together(world, model: Path, tokens) -> None:
    """Leases, registrations and the lists of the living go by the clock of Redis; durations by monotonic ones."""
    world.target(V5)
    idle = "rollout.task_idle_ms=1500"
    async with (
        rollout_process.talker(tokens, latency_s=0.1) as engine,
        process(world, model, "early", idle, "rollout.concurrency_groups=1", skew_s=-3600),
        process(world, model, "late", idle, "rollout.concurrency_groups=1", skew_s=+3600),
    ):
        world.register("e", engine.url, V5)
        both = {"rollout:early", "rollout:late"}

        def living() -> set[str]:
            now = world.sync.time()[0]
            return {name.decode() for name in world.sync.zrangebyscore(world.keys.processes, now, now + 60)}

        await eventually(lambda: living() == both, "each says that it lives, by the clock of Redis", 40)
        engine.latency_s = 1.2  # of two turns each; longer than the idle time: only leases that are renewed last
        world.issue(*(make_task(seq, group_size=2) for seq in (1, 2)))
        await eventually(lambda: len(world.published()) == 2, "each does one", 30)
        assert {g.producer for g in world.published()} == {"early", "late"}
        counts = [snapshot(world, name) for name in ("early", "late")]
        assert [(c["reclaimed"], c["leases_lost"], c["duplicates"]) for c in counts] == [(0, 0, 0)] * 2
        assert living() == both


@pytest.mark.slow
@pytest.mark.fault(46)
async def test_watchers_that_never_read_their_answers_block_no_other(world, model: Path, tokens) -> None:
    """A dashboard that hangs or is killed in the middle of an answer: 50 connections that ask and do not listen."""
    world.target(V5)
    stack = AsyncExitStack()
    async with rollout_process.talker(tokens) as engine, rollout_process.server(world, model) as (url, _), stack:
        world.register("e", engine.url, V5)
        host, port = url.removeprefix("http://").split(":")
        watchers = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(50)]
        for number, watcher in enumerate(watchers):
            watcher.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            watcher.sendall(f"GET /metrics HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode() * 200)
            if number % 2:
                watcher.close()  # gone before its answers are
        world.issue(*(make_task(seq, group_size=2) for seq in range(1, 6)))
        await eventually(lambda: len(world.published()) == 5, "groups are published all the same", 20)
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
            assert response.status == 200
        assert watchers[0].recv(15) == b"HTTP/1.1 200 OK", "there are answers that were not read"


@pytest.mark.fault(34)
async def test_a_group_of_40_mib_never_reaches_redis_and_its_seq_is_given_up_with_the_reason(world) -> None:
    redis, stats = world.client(), Stats("rollout", "me")
    world.issue(make_task(1))
    ((entry, _),) = await redis.read(world.keys.tasks, TASK_GROUP, "me", 1)
    group = make_group(1, run=world.keys.run, length=1_320_000)  # an id and a log-prob take 8 bytes
    assert 8 * tokens_of(group) > 40 << 20
    before = world.sync.info("memory")["used_memory"]
    assert await GroupPublisher(redis, stats).publish(entry.decode(), group) is True
    (message,) = world.published()
    assert isinstance(message, GroupFailed) and message.reason == "too_large"
    assert message.generated_tokens == 4 * 1_320_002 and f"the limit of {codec.MAX_BYTES}" in message.detail
    assert stats.counts["groups_failed"] == 1 and world.pending() == 0
    assert world.sync.info("memory")["used_memory"] - before < 1 << 20


async def test_an_event_that_redis_does_not_accept_is_counted_and_blocks_nothing(own_world) -> None:
    world = own_world
    redis, stats = RedisClient(world.url, world.keys), Stats("rollout", "me")
    publisher = GroupPublisher(redis, stats)
    await publisher.emit_event("joined", "x" * 2000)
    ((_, fields),) = world.sync.xrange(world.keys.events)
    assert events.parse(fields) == {"process": "rollout", "id": "me", "kind": "joined", "text": "x" * 500}
    world.sync.config_set("maxmemory", "1")
    await publisher.emit_event("joined", "no room")
    world.sync.config_set("maxmemory", "0")
    world.process.kill()
    await publisher.emit_event("joined", "not accepted")
    assert stats.counts["events_lost"] == 2
    await redis.aclose()
