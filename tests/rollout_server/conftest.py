"""Runs in the session's Redis, and what the tests of leases and publishing need around it."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import redis
from aiohttp import web

from protocol.codec import decode, encode
from protocol.header import check_body, read_header
from protocol.keys import TASK_GROUP, TRAJ_GROUP, Keys
from protocol.messages import EngineInfo, GroupFailed, NodeState, Task, TrajectoryGroup, WeightUpdate
from protocol.runtime.redis import aio as redis_client
from protocol.runtime.redis.aio import RedisClient
from protocol.runtime.redis.server import function_library
from protocol.versions import PolicyVersion
from rollout_server.environment.tokenizer import TrajectoryTokenizer, load_tokenizer
from tests.support.environments import write_tokenizer
from tests.support.private_redis import redis_at

RUNS = itertools.count(1)


class RedisProcess:
    """A Redis that a test may kill and start again. Its append-only file survives."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "s"
        self.url = f"unix://{self.socket}"
        self._running = ExitStack()

    def start(self) -> None:
        self._running.enter_context(redis_at(self.directory, "--appendonly", "yes", "--appendfsync", "always"))

    def kill(self) -> None:
        self._running.close()


@pytest.fixture(autouse=True)
def short_blocking_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server stops when its blocked read returns; tests stop many."""
    monkeypatch.setattr(redis_client, "BLOCK_MS", 100)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model", "words")


@pytest.fixture
def tokens(model: Path) -> TrajectoryTokenizer:
    return load_tokenizer(model)


class World:
    """One run in Redis, seen from outside: what the learner and the nodes would write, and what came of it."""

    def __init__(self, url: str, process: RedisProcess | None = None, *, ready: bool = True) -> None:
        self._process = process
        self.keys = Keys(f"run-{next(RUNS)}")
        self.url = url
        self.sync = redis.Redis.from_url(url)
        self.clients: list[RedisClient] = []
        if ready:
            self.create()

    @property
    def process(self) -> RedisProcess:
        """The Redis of `own_world`."""
        assert self._process is not None, "the session's Redis is not to be killed"
        return self._process

    def create(self) -> None:
        """What the learner does at its start."""
        self.create_functions()
        self.sync.xgroup_create(self.keys.tasks, TASK_GROUP, "0", mkstream=True)
        self.sync.xgroup_create(self.keys.traj, TRAJ_GROUP, "0", mkstream=True)

    def create_functions(self) -> None:
        """The functions of this version, whatever was there."""
        self.sync.function_load(function_library(), replace=True)

    def client(self) -> RedisClient:
        """A client as a separate process would have."""
        self.clients.append(RedisClient(self.url, self.keys))
        return self.clients[-1]

    def issue(self, *tasks: Task) -> list[str]:
        """Puts tasks on the stream; their entry ids."""
        return [self.sync.xadd(self.keys.tasks, {"seq": t.seq, "b": encode(t)}).decode() for t in tasks]

    def published(self) -> list[TrajectoryGroup | GroupFailed]:
        """Every message on the trajectory stream, its header and checksum checked."""
        out: list[TrajectoryGroup | GroupFailed] = []
        for _, fields in self.sync.xrange(self.keys.traj):
            header = read_header(fields[b"h"])
            check_body(header, fields[b"b"])
            message = decode(fields[b"b"])
            assert isinstance(message, TrajectoryGroup | GroupFailed) and header.seq == message.seq
            out.append(message)
        return out

    def pending(self) -> int:
        return int(self.sync.xpending(self.keys.tasks, TASK_GROUP)["pending"])

    def target(
        self, version: PolicyVersion, path: str = "/nowhere", *, digest: str = "d", state: str = "ready"
    ) -> None:
        """What the learner says every engine should hold."""
        update = WeightUpdate(run=self.keys.run, epoch=version.epoch, step=version.step, digest=digest, path=path)
        self.sync.hset(self.keys.target, mapping={"b": encode(update), "state": state})

    def publish_weights(
        self, directory: Path, version: PolicyVersion, *, files: dict[str, bytes] | None = None, spoil: bool = False
    ) -> Path:
        """Writes a version as the learner does and makes it the target; `spoil`ed, its weights differ by one byte."""
        path = directory / f"v{version.label}"
        path.mkdir(parents=True)
        files = files or {"model.safetensors": b"weights of " + version.label.encode()}
        listed = {name: {"bytes": len(raw), "sha256": sha256(raw).hexdigest()} for name, raw in files.items()}
        digest = sha256(version.label.encode()).hexdigest()
        for name, raw in files.items():
            (path / name).write_bytes(raw[:-1] + b"!" if spoil and name == "model.safetensors" else raw)
        manifest = {"version": version.label, "digest": digest, "files": listed, "tensors": 1}
        (path / "manifest.json").write_text(json.dumps(manifest))
        self.target(version, str(path), digest=digest)
        return path

    def register(self, name: str, url: str, version: PolicyVersion, **facts: Any) -> EngineInfo:
        """What a node says of its engine, without a node."""
        given = {"state": NodeState.READY, "incarnation": "a"} | facts
        info = EngineInfo(id=name, url=url, epoch=version.epoch, step=version.step, **given)
        self.sync.hset(self.keys.engine(name), "b", encode(info))
        self.sync.zadd(self.keys.engines, {name: self.sync.time()[0] + 60})
        return info

    def registered(self, name: str) -> EngineInfo | None:
        """What the registration of an engine says now."""
        raw = self.sync.hget(self.keys.engine(name), "b")
        info = decode(raw) if raw else None
        assert info is None or isinstance(info, EngineInfo)
        return info


@pytest.fixture
async def world(redis_socket: str) -> AsyncIterator[World]:
    world = World(f"unix://{redis_socket}")
    yield world
    for client in world.clients:
        await client.aclose()
    world.sync.close()


@pytest.fixture
async def unprepared_world(redis_socket: str) -> AsyncIterator[World]:
    """A run whose learner has not started yet."""
    world = World(f"unix://{redis_socket}", ready=False)
    yield world
    for client in world.clients:
        await client.aclose()
    world.sync.close()


@pytest.fixture
async def own_world() -> AsyncIterator[World]:
    """A run on a Redis that the test may kill."""
    with tempfile.TemporaryDirectory(prefix="foray-") as directory:
        process = RedisProcess(Path(directory))
        process.start()
        try:
            world = World(process.url, process)
            yield world
            for client in world.clients:
                await client.aclose()
            world.sync.close()
        finally:
            process.kill()


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that close their connection when they have the last event, before the response has ended."""
    end = web.StreamResponse.write_eof

    async def write_eof(self: web.StreamResponse, data: bytes = b"") -> None:
        if self.content_type == "text/event-stream" and self._req is not None and self._req.transport is not None:
            self._req.transport.close()
        await end(self, data)

    monkeypatch.setattr(web.StreamResponse, "write_eof", write_eof)
