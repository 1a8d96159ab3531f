"""Registrations of services in Redis, as their processes write them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.run.redis_server import connect
from deploy.run.run_dir import locate
from deploy.run.snapshot import take_snapshot
from protocol.codec import encode
from protocol.keys import Keys
from protocol.messages import MetricsSnapshot, NodeState


@contextmanager
def registered(redis_url: str, run: str, process: str, *urls: str) -> Iterator[None]:
    """Register a process for each URL, named by its position, while the block runs."""
    client, keys = connect(redis_url), Keys(run)
    names = [(f"{process}-{number}", url) for number, url in enumerate(urls, start=1)]
    for name, url in names:
        text = {"url": url, "state": str(NodeState.READY), "incarnation": name}
        client.set(keys.metrics(process, name), encode(MetricsSnapshot(process=process, id=name, text=text)))
        client.zadd(keys.processes, {f"{process}:{name}": 1e10})
    try:
        yield
    finally:
        for name, _ in names:
            client.delete(keys.metrics(process, name))
            client.zrem(keys.processes, f"{process}:{name}")
        client.close()


def registered_urls(run_dir: Path, process: str) -> list[str]:
    """Return the addresses of a kind of process of the run in `run_dir`."""
    found = locate(Namespace(given=[str(run_dir)], config=None))
    return take_snapshot(found.redis_url, found.run.id).urls(process)
