"""Redis behind Sentinels, behind an address that moves: the run goes on, and no seq is trained twice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.run.redis_server import ping
from learner.delivery.store import RunStore
from protocol.keys import Keys
from protocol.runtime.net import free_port
from protocol.runtime.redis.aio import RedisClient
from protocol.runtime.redis.client import connect
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.settings import RunSettings
from tests.support import tiny_learner
from tests.support.waiting import wait_until

SENTINEL = """\
sentinel monitor main 127.0.0.1 {port} 1
sentinel down-after-milliseconds main 400
sentinel failover-timeout main 2000
"""


@contextmanager
def player(url: str, run: str) -> Iterator[Any]:
    """The tiny rollout server at `url`, whatever kind that is."""
    made = tiny_learner.Player({}, run)
    made._db.close()
    made._db = connect(url)
    with made:
        yield made


@pytest.fixture
def watched(tmp_path: Path, server_at: Any) -> Iterator[Any]:
    """(URL, primary, replica, Sentinel): two servers, one the replica of the other, and a Sentinel."""
    with ExitStack() as stack:
        primary = stack.enter_context(server_at(tmp_path / "a", "--repl-diskless-sync-delay", "0"))
        option = ("--replicaof", f"127.0.0.1 {primary.port}")
        replica = stack.enter_context(server_at(tmp_path / "b", "--repl-diskless-sync-delay", "0", *option))
        (tmp_path / "s").mkdir()
        config = tmp_path / "s" / "sentinel.conf"
        config.write_text(SENTINEL.format(port=primary.port))
        sentinel = stack.enter_context(server_at(tmp_path / "s", str(config), "--sentinel"))
        wait_until(lambda: replica.admin.info("replication")["master_link_status"] == "up", "the replica is in step")
        known = lambda: sentinel.admin.execute_command("SENTINEL REPLICAS", "main")  # noqa: E731
        wait_until(lambda: len(known()) == 1 and "disconnected" not in str(known()), "the Sentinel knows the replica")
        yield f"redis+sentinel://127.0.0.1:{sentinel.port}/main", primary, replica, sentinel


@pytest.mark.slow
@pytest.mark.fault(27)
def test_when_the_primary_dies_the_one_that_sentinels_promote_is_found(
    watched: Any,
    run: RunSettings,
    settings: Any,
    learn: Callable[..., int],
    files_of: Any,
) -> None:
    url, primary, replica, _ = watched

    def kill(updates: int) -> None:
        if updates == 2:
            primary.process.kill()
            wait_until(lambda: replica.admin.info("replication")["role"] == "master", "the replica is promoted")

    with player(url, run.id):
        assert learn(run.model_copy(update={"redis_url": url}), settings, before=kill) == 0
    files = files_of(run)
    assert files.epochs == sorted(set(files.epochs)), "no epoch comes twice"
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
    files_of: Any,
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
                wait_until(lambda: replica.admin.info("replication")["master_link_status"] == "up", "in step")
                replica.admin.replicaof("NO", "ONE")  # from here on it lags
                primary.admin.set(keys.epoch, 7)  # learners that came and went since: the replica has seen none of them
            if updates == 4:
                primary.process.kill()
                door.turn(replica.port)
                raise tiny_learner.Crash

        with player(url, run.id):
            with pytest.raises(tiny_learner.Crash):
                learn(run.model_copy(update={"redis_url": url}), settings, before=fail_over)
            assert int(replica.admin.get(keys.epoch)) == 1, "the replica's epoch ran backwards"
            assert learn(run.model_copy(update={"redis_url": url}), settings) == 0
        files = files_of(run)
    assert files.epochs[0] == 1 and files.epochs == sorted(set(files.epochs)) and len(files.epochs) >= 2


async def test_a_demoted_primary_is_left_by_both_clients(watched: Any) -> None:
    url, primary, replica, sentinel = watched
    store, client = RunStore(url, "t1"), RedisClient(url, Keys("t1"))
    store.prepare()
    blocked = asyncio.create_task(client.read(client.keys.tasks, "rollout", "r1", 1))
    sentinel.admin.execute_command("SENTINEL FAILOVER", "main")
    named = lambda: sentinel.admin.sentinel_get_master_addr_by_name("main")[1]  # noqa: E731
    await asyncio.to_thread(wait_until, lambda: named() == replica.port, "the Sentinel names the replica")
    primary.admin.replicaof("127.0.0.1", replica.port)  # the Sentinel would do so, ten seconds later
    try:
        assert await blocked == []
    except RedisUnavailable:
        pass  # the server became a replica, or the connection was cut
    deadline = time.monotonic() + 20
    while True:
        try:
            await client.batch(("SET", client.keys.evaluation, "new"))
            await asyncio.to_thread(store.prepare)
            break
        except RedisUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
    assert replica.admin.get(client.keys.evaluation) == b"new"
    await client.aclose()
    store.close()


async def test_when_no_sentinel_answers_that_is_an_outage() -> None:
    url, words = "redis+sentinel://127.0.0.1:1,127.0.0.1:2/main", "No master found for 'main'"
    assert words in ping(url)
    store, client = RunStore(url, "t1"), RedisClient(url, Keys("t1"))
    with pytest.raises(RedisUnavailable, match=words):
        store.issued()
    with pytest.raises(RedisUnavailable, match=words):
        await client.now()
    await client.aclose()
    store.close()
