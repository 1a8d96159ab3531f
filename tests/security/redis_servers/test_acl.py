"""Redis users by role: each may do what its role needs, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import redis

from deploy.run.redis_server import check_server, ping
from deploy.run.snapshot import take_snapshot
from deploy.secrets.acl import REDIS_ROLES, rules
from deploy.secrets.env import login_at, read_env
from deploy.secrets.files import RedisEndpoint, write_secrets
from learner.config.learner import FilterSettings
from learner.data.filter import GroupFilter
from learner.delivery.consumer import StreamConsumer
from learner.delivery.dead_letters import DeadLetterStore, EventLog
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore
from protocol import functions
from protocol.codec import encode
from protocol.errors import UserError
from protocol.header import seal
from protocol.keys import TASK_GROUP, Keys
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState, ViewAnswer, WeightView
from protocol.runtime.redis import processes
from protocol.runtime.redis.aio import RedisClient
from protocol.runtime.redis.client import connect
from protocol.runtime.redis.server import function_library
from protocol.settings import REDIS_URL_VARIABLE, RunSettings
from protocol.versions import PolicyVersion
from protocol.weights import WeightBucket, WeightPlan
from rollout_server.dispatch.fleet import Fleet
from rollout_server.dispatch.leases import LeasePool, TaskLease
from rollout_server.dispatch.publisher import GroupPublisher
from rollout_server.metrics import Stats
from rollout_server.node.registry import Registry
from tests.support.messages import make_group, make_task

RUN = "t1"
KEYS = Keys(RUN)


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("secure") / "secrets"
    write_secrets(directory, RUN, RedisEndpoint(tls=False), force=False)
    return directory


@pytest.fixture(scope="session")
def urls(secrets: Path, tmp_path_factory: pytest.TempPathFactory, server_at: Any) -> Iterator[dict[str, str]]:
    """Role -> its URL of a Redis with the users that `foray init --secure` wrote."""
    folder = tmp_path_factory.mktemp("acl")
    with server_at(folder, "--aclfile", str(secrets / "users.acl")) as server:
        yield {role: login_at(server.url, read_env(secrets, role)[REDIS_URL_VARIABLE]) for role in REDIS_ROLES}


@pytest.fixture
def users(urls: dict[str, str]) -> Iterator[dict[str, redis.Redis]]:
    """Role -> a client of it; the server is empty."""
    clients = {role: connect(url) for role, url in urls.items()}
    clients["admin"].flushall()
    clients["admin"].function_flush()
    yield clients
    for client in clients.values():
        client.close()


class RolloutHalf:
    """The leasing and publishing half of a rollout server, in a thread, with made-up groups."""

    def __init__(self, url: str) -> None:
        self._url, self._thread = url, threading.Thread(target=lambda: asyncio.run(self._play()))
        self._enough = threading.Event()
        self.stats = Stats("rollout", "r1")

    def __enter__(self) -> RolloutHalf:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._enough.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    async def _play(self) -> None:
        redis = RedisClient(self._url, KEYS)
        publisher, fleet = GroupPublisher(redis, self.stats), Fleet(redis, self.stats.waits, poll_s=0.05)
        tasks = LeasePool(redis, publisher, self.stats, consumer="r1", concurrency=4, idle_ms=2000)

        async def perform(lease: TaskLease) -> None:
            while fleet.table.target is None:  # noqa: ASYNC110 - the fleet polls by its own clock
                await asyncio.sleep(0.02)
            rewards = (1.0, 0.0, 0.0, 1.0)[: lease.task.group_size]
            made = make_group(lease.task.seq, rewards, run=RUN, version=fleet.table.target)
            tasks.finished(lease)
            question, attempt = lease.task.question, lease.task.attempt
            await publisher.publish(lease.entry, made.model_copy(update={"question": question, "attempt": attempt}))

        async with asyncio.TaskGroup() as group:
            leasing = group.create_task(tasks.lease_loop(group, perform))
            loops = [group.create_task(tasks.renew_loop()), group.create_task(fleet.follow())]
            await asyncio.to_thread(self._enough.wait)
            await publisher.emit_event("test", "the ring ran under its own user")
            tasks.stop()
            await leasing
            for loop in loops:
                loop.cancel()
        await tasks.deregister()
        await redis.aclose()


@pytest.mark.slow
def test_a_ring_runs_with_each_process_as_its_own_user(
    urls: dict[str, str],
    users: dict[str, redis.Redis],
    run: RunSettings,
    settings: Any,
    learn: Callable[..., int],
    files_of: Callable[[RunSettings], Any],
) -> None:
    run = run.model_copy(update={"redis_url": urls["learner"]})
    with RolloutHalf(urls["rollout"]) as rollouts:
        assert learn(run, settings) == 0
    files_of(run)
    assert rollouts.stats.counts["groups_published"] >= 12
    seen = take_snapshot(urls["viewer"], RUN, run.dir)
    assert not seen.error and seen.is_done and seen.learner is not None and seen.max_memory >= 0
    assert any(b"under its own user" in str(fields).encode() for _, fields in users["viewer"].xrange(KEYS.events))
    denied = [entry for entry in users["admin"].acl_log() if entry["username"] in ("learner", "rollout", "viewer")]
    assert denied == [], "no process used a command that it may not send"


async def test_a_node_registers_follows_and_answers_as_its_own_user(
    urls: dict[str, str], users: dict[str, redis.Redis]
) -> None:
    from rollout_server.metrics import deregister_metrics

    client, stats = RedisClient(urls["node"], KEYS), Stats("node", "e1")
    registry = Registry(client, lease_s=5)
    info = EngineInfo(id="e1", url="http://127.0.0.1:1", state=NodeState.READY, epoch=1, step=0, incarnation="i")
    await registry.register(info)
    target_view = await registry.target_view()
    assert target_view.target is None and target_view.view is None
    assert not await registry.held_back("rollout", PolicyVersion(1, 1))
    await processes.write(client, stats.snapshot())
    await GroupPublisher(client, stats).emit_event("test", "a node speaks")
    assert users["viewer"].hget(KEYS.engine("e1"), "b") == encode(info)
    await deregister_metrics(client, stats)
    await registry.deregister("e1")
    await client.aclose()
    assert users["viewer"].exists(KEYS.engine("e1")) == 0


@pytest.mark.parametrize("acl", ["of this Foray", "of an older one"])
async def test_learner_and_node_wake_each_other_as_their_own_users(
    urls: dict[str, str], users: dict[str, redis.Redis], acl: str
) -> None:
    bucket = WeightBucket(names=("a",), dtypes=("float32",), shapes=((2,),))
    plan = encode(WeightPlan(buckets=(bucket,)))
    view = WeightView(
        run=RUN, epoch=1, step=1, number=1, phase="prepare", members=("e1/i",), rank_offsets=(1,), group="g",
        address="127.0.0.1", port=1, world_size=2, plan=sha256(plan).hexdigest(),
    )  # fmt: skip
    older, now = acl == "of an older one", rules(RUN, "node")
    assert " +xread)" in now and " +xadd +fcall)" in now
    before = now.replace(" +xread)", " +get)").replace(" +xadd +fcall)", " +fcall)")
    users["admin"].execute_command("ACL", "SETUSER", "node", "clearselectors", *(before if older else now).split())
    store, client = RunStore(urls["learner"], RUN), RedisClient(urls["node"], KEYS)
    registry = Registry(client, lease_s=5)
    try:
        store.prepare()
        epoch = store.acquire("L", 0, 60_000, takeover=True)
        assert isinstance(epoch, int)
        store.set_owner(epoch, "L")
        waiting = asyncio.create_task(registry.woken(30))
        await asyncio.to_thread(store.view, view, 60.0, plan)
        await waiting
        assert await registry.buckets(view) == (bucket,)
        answer = ViewAnswer(member="e1/i", number=1, phase="prepared")
        await registry.answer(view, answer)
        heard, last = await asyncio.to_thread(store.next_answers, 1, 1, "0", 0.0 if older else 30.0)
        assert store.answers(1, 1) == {"e1/i": answer} and heard == ({} if older else {"e1/i": answer})
        assert store.next_answers(1, 1, last, 0.0) == ({}, last)
    finally:
        users["admin"].execute_command("ACL", "SETUSER", "node", "clearselectors", *now.split())
        await client.aclose()
        store.close()


async def test_a_retriever_registers_and_a_rollout_server_finds_it_each_as_its_own_user(
    urls: dict[str, str], users: dict[str, redis.Redis]
) -> None:
    retriever, rollout = (RedisClient(urls[role], KEYS) for role in ("retriever", "rollout"))
    text = {"url": "http://127.0.0.1:7", "state": "ready"}
    await processes.write(retriever, MetricsSnapshot(process="retriever", id="r1", text=text))
    assert await processes.ready_urls(rollout, "retriever") == ["http://127.0.0.1:7"]
    refused(users["rollout"], "SET", KEYS.metrics("retriever", "r2"), "forged")
    refused(users["node"], "SET", KEYS.metrics("retriever", "r2"), "forged")
    refused(users["retriever"], "GET", KEYS.issued)
    await processes.remove(retriever, "retriever", "r1")
    assert await processes.ready_urls(rollout, "retriever") == []
    await retriever.aclose()
    await rollout.aclose()


def test_an_operator_requeues_and_purges_and_can_do_no_more(
    urls: dict[str, str], users: dict[str, redis.Redis]
) -> None:
    operator = users["operator"]
    letter = users["rollout"].xadd(KEYS.dlq, {"seq": "3"})
    assert operator.sadd(KEYS.requeue, "3") == 1 and operator.smembers(KEYS.requeue) == {b"3"}
    assert operator.xrange(KEYS.dlq) and operator.xdel(KEYS.dlq, letter) == 1
    refused(operator, "XADD", KEYS.tasks, "*", "seq", "9")
    refused(operator, "DEL", KEYS.tasks)


def refused(client: redis.Redis, *command: Any) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command)


EVERY = [role for role in REDIS_ROLES if role != "admin"]
SERVER = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "maxmemory", "0"),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("EVAL", "return 1", "0"),
    ("SHUTDOWN", "NOSAVE"),
    ("ACL", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("SAVE",),
    ("REPLICAOF", "NO", "ONE"),
    ("FUNCTION", "FLUSH"),
    ("FUNCTION", "DELETE", "foray"),
    ("MONITOR",),
    ("PUBLISH", "c", "m"),
]


@pytest.mark.parametrize("role", EVERY)
@pytest.mark.fault(29, 51)
def test_no_role_of_a_run_may_change_the_server_or_another_run(
    users: dict[str, redis.Redis], urls: dict[str, str], role: str
) -> None:
    client, other = users[role], Keys("other")
    for command in SERVER:
        refused(client, *command)
    for command in (
        ("GET", other.issued),
        ("SET", other.issued, "9"),
        ("XRANGE", other.traj, "-", "+"),
        ("DEL", other.lease),
    ):
        refused(client, *command)
    if role != "learner":
        refused(client, "FUNCTION", "LOAD", "REPLACE", function_library())


def test_a_rollout_server_cannot_reach_what_is_the_learners(
    users: dict[str, redis.Redis], urls: dict[str, str]
) -> None:
    store = RunStore(urls["learner"], RUN)
    store.prepare()
    assert store.acquire("me", 0, 60_000, takeover=False) == 1
    store.set_owner(1, "me")
    rollout = users["rollout"]
    for command in (
        ("HSET", KEYS.lease, "token", "mine"),
        ("DEL", KEYS.lease),
        ("HSET", KEYS.target, "b", "x"),
        ("SET", KEYS.epoch, "99"),
        ("SET", KEYS.issued, "99"),
        ("XRANGE", KEYS.traj, "-", "+"),
        ("XREADGROUP", "GROUP", "learner", "L1", "STREAMS", KEYS.traj, ">"),
        ("DEL", KEYS.tasks),
        ("SET", KEYS.tasks, "x"),
        ("XTRIM", KEYS.traj, "MAXLEN", "0"),
        ("HSET", KEYS.engine("e1"), "b", "x"),
        ("HSET", KEYS.meta, "schema", "9.9"),
        ("SADD", KEYS.requeue, "1"),
        ("FCALL", functions.ACQUIRE, "2", KEYS.lease, KEYS.epoch, "thief", "0", "1000", "1"),
    ):
        refused(rollout, *command)
    assert store.holder() is not None and store.renew(60_000)
    store.close()


@pytest.fixture
def source(urls: dict[str, str], users: dict[str, redis.Redis], tmp_path: Path) -> Iterator[StreamConsumer]:
    """The learner's reader, under the learner's user."""
    store = RunStore(urls["learner"], RUN)
    store.prepare()
    assert store.acquire("me", 0, 60_000, takeover=False) == 1
    store.set_owner(1, "me")
    parts = {"dead_letters": DeadLetterStore(store, tmp_path / "dead.jsonl"), "event_log": EventLog(store)}
    yield StreamConsumer(store, DeliveryState(issued=9), RUN, GroupFilter(FilterSettings(), 1), capacity=9, **parts)
    store.close()


async def leased(client: RedisClient, source: StreamConsumer, seq: int) -> str:
    """The entry of a task of `seq` that the server behind `client` has leased."""
    source._store.reissue([(seq, encode(make_task(seq)))])
    ((entry, _),) = await client.read(KEYS.tasks, TASK_GROUP, "healthy", 1)
    return entry.decode()


async def test_a_rollout_user_cannot_stop_publishing_by_a_statistic(
    urls: dict[str, str], users: dict[str, redis.Redis], source: StreamConsumer
) -> None:
    assert users["rollout"].hincrby(KEYS.tokens, "published", 2**63 - 1) == 2**63 - 1
    client = RedisClient(urls["rollout"], KEYS)
    assert await GroupPublisher(client, Stats("rollout", "r")).publish(
        await leased(client, source, 1), make_group(1, run=RUN)
    )
    await client.aclose()
    source.tick()
    assert [e.seq for e in source.take(1, 0, max_lag=None, timeout_s=0.1)] == [1]


async def test_a_rollout_user_that_exhausts_the_stream_ids_stops_the_run_with_an_error_and_loses_nothing(
    urls: dict[str, str], users: dict[str, redis.Redis], source: StreamConsumer
) -> None:
    client, stats = RedisClient(urls["rollout"], KEYS), Stats("rollout", "r")
    entry = await leased(client, source, 1)
    users["rollout"].xadd(KEYS.traj, {"x": "y"}, id=f"{2**64 - 1}-{2**64 - 1}")
    publishing = asyncio.create_task(GroupPublisher(client, stats).publish(entry, make_group(1, run=RUN)))
    while not client.refusal:
        assert not publishing.done()
        await asyncio.sleep(0.01)
    assert f"`DEL {KEYS.traj}`" in client.refusal
    assert users["viewer"].xpending(KEYS.tasks, TASK_GROUP)["pending"] == 1
    with pytest.raises(UserError, match=KEYS.traj) as caught:
        source._store.snapshot()
    assert f"DEL {KEYS.traj}" in caught.value.todo
    users["learner"].delete(KEYS.traj)
    source._store.prepare()
    assert await publishing is True
    await client.aclose()


async def test_a_rollout_user_is_trusted_with_what_the_run_learns(
    urls: dict[str, str], users: dict[str, redis.Redis], source: StreamConsumer
) -> None:
    """As SECURITY.md says: it can forge a group of any open seq, and suppress the real one."""
    client = RedisClient(urls["rollout"], KEYS)
    entry = await leased(client, source, 5)
    header, body = seal(make_group(5, (1.0, 1.0, 1.0, 0.0), run=RUN))
    users["rollout"].xadd(KEYS.traj, {"seq": 5, "h": header, "b": body})
    assert await GroupPublisher(client, Stats("rollout", "r")).publish(entry, make_group(5, run=RUN))
    source.tick()
    assert [e.raw_header for e in source.take(1, 0, max_lag=None, timeout_s=0.1)] == [header]
    assert source._delivery.counters.duplicates == 1, "the true one came second"
    await client.aclose()


async def test_a_rollout_user_that_forges_tasks_kills_no_seq(
    urls: dict[str, str], users: dict[str, redis.Redis], source: StreamConsumer
) -> None:
    client, stats = RedisClient(urls["rollout"], KEYS), Stats("rollout", "r")
    entry, publisher = await leased(client, source, 5), GroupPublisher(client, stats)
    tasks = LeasePool(client, publisher, stats, consumer="r", concurrency=9, idle_ms=60_000)
    for _ in range(4):
        users["rollout"].xadd(KEYS.tasks, {"seq": 5, "b": b"junk"})
    for junk, fields in await client.read(KEYS.tasks, TASK_GROUP, "r", 9):
        assert await tasks._decode(junk.decode(), fields) is None
    source.tick()
    assert await publisher.publish(entry, make_group(5, run=RUN))
    source.tick()
    assert [e.seq for e in source.take(1, 0, max_lag=None, timeout_s=0.1)] == [5]
    assert source._delivery.counters.dead_letters == 4 and source._delivery.attempts == {}
    await client.aclose()


def test_a_ring_goes_on_while_a_rollout_user_forges_tasks(
    urls: dict[str, str],
    users: dict[str, redis.Redis],
    run: RunSettings,
    settings: Any,
    learn: Callable[..., int],
    files_of: Callable[[RunSettings], Any],
) -> None:
    run = run.model_copy(update={"redis_url": urls["learner"]})

    def forge(_: int) -> None:
        for seq in range(1, 13):
            users["rollout"].xadd(KEYS.tasks, {"seq": seq, "b": b"junk"})

    with RolloutHalf(urls["rollout"]):
        assert learn(run, settings, before=forge, pace_s=0.1) == 0
    assert files_of(run).facts["ledger"]["counts"]["dead"] == 0


def test_a_node_cannot_write_what_engines_must_load_or_publish_trajectories(users: dict[str, redis.Redis]) -> None:
    for command in (
        ("HSET", KEYS.target, "b", "x"),
        ("SET", KEYS.view, "x"),
        ("SET", KEYS.plan, "x"),
        ("XADD", KEYS.wake, "*", "n", "1"),
        ("XADD", KEYS.traj, "*", "seq", "1"),
        ("XADD", KEYS.tasks, "*", "seq", "1"),
        ("XREADGROUP", "GROUP", TASK_GROUP, "n", "STREAMS", KEYS.tasks, ">"),
        ("GET", KEYS.issued),
        ("SADD", KEYS.drain, "another"),
    ):
        refused(users["node"], *command)
    operator = users["operator"]
    assert operator.hset(KEYS.launcher, "engines", "2") == 1 and users["viewer"].hget(KEYS.launcher, "engines") == b"2"
    assert operator.hdel(KEYS.launcher, "engines") == 1
    for role in ("viewer", "node", "rollout", "retriever"):
        for field in ("engines", "stop"):
            refused(users[role], "HSET", KEYS.launcher, field, "3")
    assert users["learner"].hset(KEYS.launcher, "stop", "host:1:1") == operator.hdel(KEYS.launcher, "stop") == 1
    assert users["operator"].sadd(KEYS.drain, "e") == 1 and users["node"].srem(KEYS.drain, "e") == 1


def test_a_viewer_reads_and_writes_nothing(users: dict[str, redis.Redis]) -> None:
    assert users["viewer"].get(KEYS.issued) is None
    for command in (
        ("SET", KEYS.issued, "1"),
        ("XADD", KEYS.tasks, "*", "seq", "1"),
        ("SADD", KEYS.requeue, "1"),
        ("SADD", KEYS.drain, "1"),
        ("FCALL", functions.BEAT, "1", KEYS.tasks, "c", "0-1"),
        ("XACK", KEYS.tasks, TASK_GROUP, "0-1"),
    ):
        refused(users["viewer"], *command)


def test_without_a_password_there_is_no_door(urls: dict[str, str]) -> None:
    from protocol.runtime.redis.url import place_of, with_login

    for url in (
        place_of(urls["admin"]),
        with_login(urls["admin"], "admin", "guess"),
        with_login(urls["admin"], "x", "y"),
    ):
        client = connect(url)
        with pytest.raises(redis.AuthenticationError):
            client.ping()
        client.close()


def test_a_learner_with_a_viewers_password_gets_an_error(urls: dict[str, str]) -> None:
    store = RunStore(urls["viewer"], RUN)
    with pytest.raises(UserError, match="rejected the user") as caught:
        store.prepare()
    assert "function" in caught.value.why.lower() and "FORAY_REDIS_URL" in caught.value.todo
    store.close()


def test_the_launcher_may_look_as_the_viewer(urls: dict[str, str]) -> None:
    assert check_server(urls["viewer"]).startswith(("Redis", "Valkey"))
    assert ping(urls["viewer"]) == ""


def test_the_rules_of_a_run_name_no_other() -> None:
    assert "{a}:tasks" in rules("a", "rollout") and "{b}" not in rules("a", "rollout")
    assert replace(RedisEndpoint(), port=7).port == 7
