"""Redis behind Sentinels, in a Cluster, behind an address that moves: the run goes on, and no seq is trained twice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis

from deploy.launcher.redis_server import ping
from learner.delivery.store import RunStore
from protocol.keys import Keys
from protocol.runtime.net import free_port
from protocol.runtime.redis.aio import RedisClient, RedisDown
from protocol.runtime.redis.client import connect
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.settings import RunSettings

SLOTS = 16384
SENTINEL = """\
sentinel monitor main 127.0.0.1 {port} 1
sentinel down-after-milliseconds main 400
sentinel failover-timeout main 2000
"""


@contextmanager
def player(tiny: ModuleType, url: str, run: str) -> Iterator[Any]:
    """The tiny rollout server at `url`, whatever kind that is."""
    made = tiny.Player({}, run)
    made._db.close()
    made._db = connect(url, run)
    with made:
        yield made


@pytest.fixture
def watched(tmp_path: Path, server_at: Any, until: Any) -> Iterator[Any]:
    """(URL, primary, replica, Sentinel): two servers, one the replica of the other, and a Sentinel."""
    with ExitStack() as stack:
        primary = stack.enter_context(server_at(tmp_path / "a", "--repl-diskless-sync-delay", "0"))
        option = ("--replicaof", f"127.0.0.1 {primary.port}")
        replica = stack.enter_context(server_at(tmp_path / "b", "--repl-diskless-sync-delay", "0", *option))
        (tmp_path / "s").mkdir()
        config = tmp_path / "s" / "sentinel.conf"
        config.write_text(SENTINEL.format(port=primary.port))
        sentinel = stack.enter_context(server_at(tmp_path / "s", str(config), "--sentinel"))
        until(lambda: replica.admin.info("replication")["master_link_status"] == "up", "the replica is in step")
        known = lambda: sentinel.admin.execute_command("SENTINEL REPLICAS", "main")  # noqa: E731
        until(lambda: len(known()) == 1 and "disconnected" not in str(known()), "the Sentinel knows the replica")
        yield f"redis+sentinel://127.0.0.1:{sentinel.port}/main", primary, replica, sentinel


@pytest.mark.fault(27)
def test_when_the_primary_dies_the_one_that_sentinels_promote_is_found(
    watched: Any,
    run: RunSettings,
    settings: Any,
    learn: Callable[..., int],
    tiny: ModuleType,
    books_of: Any,
    until: Any,
) -> None:
    url, primary, replica, _ = watched

    def kill(updates: int) -> None:
        if updates == 2:
            primary.process.kill()
            until(lambda: replica.admin.info("replication")["role"] == "master", "the replica is promoted")

    with player(tiny, url, run.id):
        assert learn(run.model_copy(update={"redis_url": url}), settings, before=kill) == 0
    books = books_of(run)
    assert books.epochs == sorted(set(books.epochs)), "no epoch comes twice"
    assert replica.admin.hget(Keys(run.id).target, "state") == b"done", "the run ended on the promoted one"


class Door:
    """An address that stays while the server behind it changes, as a load balancer's does; in a thread of its own."""

    def __init__(self, target: int) -> None:
        self.target, self.port = target, free_port()
        self._pipes: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Door:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def turn(self, target: int) -> None:
        """From now on to `target`; every connection is cut."""
        self.target = target
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(10)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._carry, "127.0.0.1", self.port)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        self._pipes |= {writer, far_writer}
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        except (OSError, RuntimeError):
            pass
        finally:
            self._pipes.discard(writer)
            writer.close()

    async def _cut(self) -> None:
        for writer in list(self._pipes):
            writer.transport.abort()
        self._pipes.clear()

    async def _close(self) -> None:
        self._server.close()
        await self._cut()
        await asyncio.sleep(0)
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


@pytest.mark.fault(27, 24)
def test_a_failover_to_a_replica_that_lags_costs_rollouts_and_repeats_no_epoch(
    tmp_path: Path,
    server_at: Any,
    run: RunSettings,
    settings: Any,
    learn: Callable[..., int],
    tiny: ModuleType,
    books_of: Any,
    until: Any,
) -> None:
    keys = Keys(run.id)
    with ExitStack() as stack:
        primary = stack.enter_context(server_at(tmp_path / "a", "--repl-diskless-sync-delay", "0"))
        replica = stack.enter_context(server_at(tmp_path / "b"))
        door = stack.enter_context(Door(primary.port))
        url = f"redis://127.0.0.1:{door.port}/0"

        def fail_over(updates: int) -> None:
            if updates == 1:
                replica.admin.replicaof("127.0.0.1", primary.port)
                until(lambda: replica.admin.info("replication")["master_link_status"] == "up", "in step")
                replica.admin.replicaof("NO", "ONE")  # from here on it lags
                primary.admin.set(keys.epoch, 7)  # learners that came and went since: the replica has seen none of them
            if updates == 4:
                primary.process.kill()
                door.turn(replica.port)
                raise tiny.Crash

        with player(tiny, url, run.id):
            with pytest.raises(tiny.Crash):
                learn(run.model_copy(update={"redis_url": url}), settings, before=fail_over)
            assert int(replica.admin.get(keys.epoch)) == 1, "the replica's epoch ran backwards"
            assert learn(run.model_copy(update={"redis_url": url}), settings) == 0
        books = books_of(run)
    assert books.epochs[0] == 1 and books.epochs == sorted(set(books.epochs)) and len(books.epochs) >= 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, server_at: Any, until: Any) -> Iterator[Any]:
    """(URL, nodes): two nodes, each with half of the slots."""
    with ExitStack() as stack:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        nodes = [stack.enter_context(server_at(tmp_path_factory.mktemp("node"), *options)) for _ in range(2)]
        for node, (first, last) in zip(nodes, ((0, SLOTS // 2 - 1), (SLOTS // 2, SLOTS - 1)), strict=True):
            node.admin.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
        nodes[0].admin.execute_command("CLUSTER MEET", "127.0.0.1", nodes[1].port)

        def whole() -> bool:
            return all(n.admin.cluster("info")["cluster_state"] == "ok" for n in nodes)

        until(whole, "the Cluster is whole")
        yield f"redis+cluster://127.0.0.1:{nodes[0].port}", nodes


def owner_first(nodes: list[Any], slot: int) -> list[Any]:
    """The node that serves `slot`, then the other."""
    return nodes if slot < SLOTS // 2 else nodes[::-1]


def move(slot: int, source: Any, target: Any) -> int:
    """Moves a slot as redis-cli's reshard does; how many keys went along."""
    ids = {node.port: node.admin.execute_command("CLUSTER MYID").decode() for node in (source, target)}
    target.admin.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[source.port])
    source.admin.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[target.port])
    moved = 0
    while names := source.admin.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
        source.admin.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names)
        moved += len(names)
    for node in (target, source):
        node.admin.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[target.port])
    return moved


@pytest.mark.slow
@pytest.mark.fault(27)
def test_a_run_follows_its_slot_through_a_cluster(
    cluster: Any, run: RunSettings, settings: Any, learn: Callable[..., int], tiny: ModuleType, books_of: Any
) -> None:
    url, nodes = cluster
    slot = redis.crc.key_slot(Keys(run.id).tasks.encode())
    source, target = owner_first(nodes, slot)
    moved: list[int] = []

    def reshard(updates: int) -> None:
        if updates == 2:
            moved.append(move(slot, source, target))

    with player(tiny, url, run.id):
        assert learn(run.model_copy(update={"redis_url": url}), settings, before=reshard) == 0
    books_of(run)
    assert moved and moved[0] >= 4, "streams and books were moved while the run went on"
    assert target.admin.hget(Keys(run.id).target, "state") == b"done"


@pytest.mark.slow
async def test_both_clients_read_write_and_wait_in_a_cluster(cluster: Any) -> None:
    url, nodes = cluster
    store, client = RunStore(url, "t2"), RedisClient(url, Keys("t2"))
    store.prepare()
    assert store.acquire("me", 0, 60_000, takeover=False) == 1
    store.set_owner(1, "me")
    assert store.issue(0, [(1, b"one"), (2, b"two")]) == 2, "FCALL of three keys"
    assert store.snapshot().tasks == frozenset({1, 2}), "a transaction"
    entries = await client.read(client.keys.tasks, "rollout", "r1", 5)
    assert [fields[b"seq"] for _, fields in entries] == [b"1", b"2"]
    assert await client.batch(("SET", client.keys.evaluation, "x"), ("GET", client.keys.evaluation), atomic=True)
    assert await client.now() > 0 and store.now() > 0
    slot = redis.crc.key_slot(client.keys.tasks.encode())
    source, target = owner_first(nodes, slot)
    move(slot, source, target)
    # each connection learns of it by one failed call, as of any lost connection
    assert await refound(lambda: client.batch(("GET", client.keys.evaluation)), RedisDown) == [b"x"]
    assert await refound(lambda: asyncio.to_thread(store.issued), RedisUnavailable) == 2
    await client.aclose()
    store.close()


async def refound(call: Callable[[], Any], away: type[Exception]) -> Any:
    """The answer, after `away` at least once."""
    failures, deadline = 0, time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            answer = await call()
        except away:
            failures += 1
        else:
            assert failures, "the connection to the old owner must have been refused"
            return answer
    raise AssertionError("never found again")


async def test_a_demoted_primary_is_left_by_both_clients(watched: Any, until: Any) -> None:
    url, primary, replica, sentinel = watched
    store, client = RunStore(url, "t1"), RedisClient(url, Keys("t1"))
    store.prepare()
    blocked = asyncio.create_task(client.read(client.keys.tasks, "rollout", "r1", 1))
    sentinel.admin.execute_command("SENTINEL FAILOVER", "main")
    named = lambda: sentinel.admin.sentinel_get_master_addr_by_name("main")[1]  # noqa: E731
    await asyncio.to_thread(until, lambda: named() == replica.port, "the Sentinel names the replica")
    primary.admin.replicaof("127.0.0.1", replica.port)  # the Sentinel would do so, ten seconds later
    try:
        assert await blocked == []
    except RedisDown:
        pass  # told that the server became a replica, or cut off
    deadline = time.monotonic() + 20
    while True:
        try:
            await client.batch(("SET", client.keys.evaluation, "new"))
            await asyncio.to_thread(store.prepare)
            break
        except (RedisDown, RedisUnavailable):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
    assert replica.admin.get(client.keys.evaluation) == b"new"
    await client.aclose()
    store.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis+sentinel://127.0.0.1:1/main", "no Sentinel says"),
        ("redis+cluster://127.0.0.1:1,127.0.0.1:2", "no node of the Cluster says"),
    ],
)
async def test_when_nobody_can_say_where_it_is_that_is_an_outage(url: str, words: str) -> None:
    assert words in ping(url)
    store, client = RunStore(url, "t1"), RedisClient(url, Keys("t1"))
    with pytest.raises(RedisUnavailable, match=words):
        store.issued()
    with pytest.raises(RedisDown, match=words):
        await client.now()
    await client.aclose()
    store.close()
