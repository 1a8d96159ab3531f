"""Groups one after another from object to object, and the same bytes with fewer guarantees, or none.

ours       `GroupPublisher`, `RunStore` and `read_entry`
unchecked  what any queue of objects does: msgpack of plain values, one transaction that adds the group and acknowledges
           the task, a read, a CRC-32, msgpack. No types, lengths or finiteness are checked, no lease, no counts
raw        bytes in, bytes out: nothing is encoded, and there are no tasks
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from benchmarks.base import Say
from deploy.launch.plan import ProcessSpec, Ready
from deploy.launch.process import Child
from deploy.launch.supervisor import Readiness, Supervisor
from deploy.run.redis_server import child_url, connect, find_server, redis_argv
from protocol.keys import TASK_GROUP, Keys

if TYPE_CHECKING:
    from benchmarks.transport.settings import TransportBench
    from learner.delivery.store import RunStore
    from protocol.messages import TrajectoryGroup


RUN = "bench"
LEASE_MS = 86_400_000


@dataclass
class TransportRing:
    """A Redis, and a run in it whose learner is this process."""

    url: str
    redis: Child
    store: RunStore
    supervisor: Supervisor


@contextmanager
def ring(directory: Path, maxmemory_mb: int, say: Say) -> Iterator[TransportRing]:
    """Start Redis like the launcher (append-only file, noeviction), with the run's functions, streams and lease."""
    from learner.delivery.store import RunStore

    url = child_url(directory)
    supervisor = Supervisor(is_ready=Readiness(url, RUN), ready_s=20.0, shutdown_s=10.0, say=say)
    try:
        argv = redis_argv(find_server().path, directory, url, maxmemory_mb=maxmemory_mb)
        child = supervisor.spawn(ProcessSpec("redis", "redis", argv, directory / "redis.log", Ready.PING, url))
        supervisor.await_ready(["redis"])
        store = RunStore(url, RUN)
        try:
            store.prepare()
            epoch = store.acquire("bench", 0, LEASE_MS, takeover=True)
            assert isinstance(epoch, int)
            store.set_owner(epoch, "bench")
            yield TransportRing(url, child, store, supervisor)
        finally:
            store.close()
    finally:
        supervisor.stop()


def a_group(group_size: int, tokens: int) -> TrajectoryGroup:
    """Return a group of trajectories of `tokens` tokens, about half sampled, the rest prompt and observation."""
    from tests.support.messages import make_group, make_trajectory

    half, quarter = tokens // 2, tokens // 4
    one = make_trajectory(
        1.0,
        prompt=range(quarter),
        first=range(8),
        observation=range(tokens - half - quarter),
        last=range(half - 8),
    )
    return make_group(1, run=RUN).model_copy(update={"trajectories": (one,) * group_size})


def a_task(seq: int, group_size: int) -> bytes:
    """Return the encoded task of `seq`."""
    from protocol.codec import encode
    from tests.support.messages import make_task

    return encode(make_task(seq, group_size=group_size))


BLOCK = 10
"""Groups per turn, alternating with the baseline, so that other load affects both."""


def chain(settings: TransportBench, directory: Path, say: Say) -> dict[str, dict[str, Any]]:
    """Return the figures by name: ours, unchecked, raw."""
    with ring(directory, settings.maxmemory_mb, say) as made:
        return asyncio.run(_chain(settings, made, say))


async def _chain(settings: TransportBench, made: TransportRing, say: Say) -> dict[str, dict[str, Any]]:
    from protocol.header import seal
    from protocol.runtime.redis.aio import RedisClient
    from rollout_server.dispatch.publisher import GroupPublisher
    from rollout_server.metrics import Stats

    keys = Keys(RUN)
    message = a_group(settings.group_size, settings.tokens)
    header, body = seal(message)
    client = RedisClient(made.url, keys)
    sink = GroupPublisher(client, Stats("rollout", "bench"))
    raw_client = connect(made.url)
    raw_client.xgroup_create("raw", "g", "0", mkstream=True)
    values = message.model_dump()
    spent: dict[str, dict[str, float]] = {"ours": {}, "unchecked": {}, "raw": {}}
    done = 0
    try:
        while done < settings.groups:
            count = min(BLOCK, settings.groups - done)
            seqs = range(2 * done + 1, 2 * (done + count) + 1)
            made.store.issue(0, [(seq, a_task(seq, settings.group_size)) for seq in seqs])
            leased = await client.read(keys.tasks, TASK_GROUP, "bench", 2 * count)
            for seq, (entry, _) in zip(seqs[:count], leased[:count], strict=True):
                await _ours(made, sink, entry.decode(), message.model_copy(update={"seq": seq}), spent["ours"])
            for entry, _ in leased[count:]:
                _unchecked(raw_client, keys.tasks, entry, values, spent["unchecked"])
            for _ in range(count):
                _raw(raw_client, header, body, spent["raw"])
            done += count
    finally:
        raw_client.close()
        await client.aclose()
    figures = {name: _figures(times, done, len(header) + len(body)) for name, times in spent.items()}
    say("chain, groups/s: " + ", ".join(f"{name} {one['groups_per_s']:.0f}" for name, one in figures.items()))
    return figures


async def _ours(made: TransportRing, sink: Any, entry: str, message: Any, spent: dict[str, float]) -> None:
    from learner.delivery.entry import read_entry
    from protocol.header import seal

    t0 = time.perf_counter()
    seal(message)  # `publish` repeats this: its time is subtracted below
    t1 = time.perf_counter()
    assert await sink.publish(entry, message)
    t2 = time.perf_counter()
    [(id_, fields)] = made.store.read(1)
    t3 = time.perf_counter()
    assert read_entry(id_, fields, RUN).message.seq == message.seq
    t4 = time.perf_counter()
    made.store.ack([id_])
    t5 = time.perf_counter()
    published = max(0.0, t2 - t1 - (t1 - t0))
    _add(spent, encode_s=t1 - t0, publish_s=published, read_s=t3 - t2, decode_s=t4 - t3, acknowledge_s=t5 - t4)


def _unchecked(client: Any, tasks: str, task: bytes, values: dict[str, Any], spent: dict[str, float]) -> None:
    t0 = time.perf_counter()
    body = msgpack.packb(values)
    header = msgpack.packb({"num_bytes": len(body), "crc": zlib.crc32(body)})
    t1 = time.perf_counter()
    with client.pipeline(transaction=True) as pipe:
        pipe.xadd("raw", {"h": header, "b": body})
        pipe.xack(tasks, TASK_GROUP, task)
        pipe.xdel(tasks, task)
        assert pipe.execute()[1:] == [1, 1]
    t2 = time.perf_counter()
    [(_, [(id_, fields)])] = client.xreadgroup("g", "c", {"raw": ">"}, count=1)
    t3 = time.perf_counter()
    assert msgpack.unpackb(fields[b"h"])["crc"] == zlib.crc32(fields[b"b"])
    assert msgpack.unpackb(fields[b"b"])["seq"] == values["seq"]
    t4 = time.perf_counter()
    client.xack("raw", "g", id_)
    client.xdel("raw", id_)
    t5 = time.perf_counter()
    _add(spent, encode_s=t1 - t0, publish_s=t2 - t1, read_s=t3 - t2, decode_s=t4 - t3, acknowledge_s=t5 - t4)


def _raw(client: Any, header: bytes, body: bytes, spent: dict[str, float]) -> None:
    t0 = time.perf_counter()
    client.xadd("raw", {"h": header, "b": body})
    t1 = time.perf_counter()
    [(_, [(id_, _)])] = client.xreadgroup("g", "c", {"raw": ">"}, count=1)
    t2 = time.perf_counter()
    client.xack("raw", "g", id_)
    client.xdel("raw", id_)
    _add(spent, publish_s=t1 - t0, read_s=t2 - t1, acknowledge_s=time.perf_counter() - t2)


def _add(spent: dict[str, float], **seconds: float) -> None:
    for name, value in seconds.items():
        spent[name] = spent.get(name, 0.0) + value


def _figures(spent: dict[str, float], groups: int, size: int) -> dict[str, Any]:
    seconds = sum(spent.values())
    each = {f"{name.removesuffix('_s')}_ms": 1000 * value / groups for name, value in spent.items()}
    return {
        "groups_per_s": groups / seconds,
        "mb_per_s": groups * size / seconds / 1e6,
        "bytes_per_group": size,
        **each,
    }
