"""Composition root of the node: one agent, its heartbeat and its metrics, until SIGTERM.

Redis: target, evaluation --> Agent.run --(HTTP)--> engine
                                 | EngineStatus
             registration <-- EngineStatus.heartbeat_loop          publish_metrics --> Redis: metrics
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from urllib.parse import urlsplit

from protocol.errors import UserError
from protocol.keys import Keys
from protocol.messages import EngineInfo, NodeState
from protocol.runtime.http.auth import read_access
from protocol.runtime.http.body import bounded_session
from protocol.runtime.http.server import EVERY_INTERFACE, http_url, reachable_url, service_host
from protocol.runtime.lifecycle import ShutdownSignal, shutdown_on_signals, unwrap_user_error
from protocol.runtime.net import free_port
from protocol.runtime.redis.aio import RedisClient
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.runtime.timing import ticking
from protocol.settings import RunSettings
from rollout_server.dispatch.fleet import RunCompatibility
from rollout_server.environment.tokenizer import load_tokenizer
from rollout_server.metrics import Stats, deregister_metrics, publish_metrics
from rollout_server.node.agent import Agent
from rollout_server.node.config import AttachedEngine, NodeSettings
from rollout_server.node.registry import Registry
from rollout_server.node.status import EngineStatus

log = logging.getLogger(__name__)


async def serve(run: RunSettings, settings: NodeSettings, *, stop: ShutdownSignal | None = None) -> None:
    """Run until SIGTERM or SIGINT (or `stop`). Raises UserError if the engine cannot be launched."""
    stop = stop or ShutdownSignal()
    host = service_host(settings.host, run.redis_url, read_access(os.environ), "engine.host")
    settings = settings.model_copy(update={"host": host})
    port, local, url = addresses(settings, run.redis_url)
    engine_id = settings.id or f"engine-{socket.gethostname()}-{port}"
    # rollout servers compare it: an engine with a different tokenizer would read other text
    fingerprint = load_tokenizer(run.model).fingerprint
    stats = Stats("node", engine_id)
    status = EngineStatus(
        EngineInfo(
            id=engine_id,
            url=url,
            state=NodeState.JOINING,
            tokenizer=fingerprint,
            role=settings.role,
            kind=settings.kind.type,
            max_running=settings.kind.max_running,
        )
    )
    for name in ("updates", "restarts", "strikes", "hangs"):
        stats.counts[name] = 0
    stats.gauges |= {"pause_s": lambda: status.pause_s, "load_s": lambda: status.load_s}
    stats.text["state"] = lambda: str(status.state)
    redis = RedisClient(run.redis_url, Keys(run.id))
    registry = Registry(redis, lease_s=settings.lease_s, compatibility=RunCompatibility(run))
    async with bounded_session() as session:
        agent = Agent(run, settings, registry, stats, session, status, url=local, port=port)
        try:
            # a node that was suspended does not blame its engine for that
            with shutdown_on_signals(stop), unwrap_user_error(), ticking():
                log.info("node of %s at %s", engine_id, url)
                async with asyncio.TaskGroup() as tasks:
                    running = [
                        tasks.create_task(agent.run(), name="agent"),
                        tasks.create_task(
                            status.heartbeat_loop(registry, stats.waits, every_s=settings.heartbeat_s), name="heartbeat"
                        ),
                        tasks.create_task(publish_metrics(redis, stats), name="metrics"),
                        tasks.create_task(agent.drain_on_request(stop.forced), name="drain"),
                    ]
                    await stop.requested.wait()
                    await agent.drain(stop.forced)
                    for task in running:
                        task.cancel()
        finally:
            await _deregister(registry, redis, stats, engine_id)
            await redis.aclose()


def addresses(settings: NodeSettings, redis_url: str) -> tuple[int, str, str]:
    """Return the engine's port, its base URL for this node, and its base URL for rollout servers."""
    if isinstance(settings.kind, AttachedEngine):
        parts = urlsplit(settings.kind.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"engine.kind.url = {settings.kind.url!r} is not a URL", todo="set a base URL, e.g. http://host:30000"
            )
        url = settings.kind.url.rstrip("/")
        return parts.port or 80, url, url
    port = settings.port or free_port(settings.host)
    local = http_url(EVERY_INTERFACE.get(settings.host, settings.host), port)
    if settings.advertise:
        return port, local, _advertised(settings.advertise, port)
    try:
        return port, local, reachable_url(settings.host, port, redis_url)
    except OSError as error:
        raise UserError(
            "cannot find the address of this host on the way to Redis",
            why=str(error),
            todo="set engine.advertise to an address that rollout servers can reach",
        ) from None


def _advertised(place: str, port: int) -> str:
    """Return the URL of `place`: HOST, HOST:PORT, an IPv6 address, or one in brackets with or without a port."""
    if place.rpartition("]")[2].count(":") == 1:
        return f"http://{place}"
    return http_url(place.strip("[]"), port)


async def _deregister(registry: Registry, redis: RedisClient, stats: Stats, engine_id: str) -> None:
    try:
        async with asyncio.timeout(3.0):
            await registry.deregister(engine_id)
            await deregister_metrics(redis, stats)
    except (RedisUnavailable, TimeoutError) as error:
        log.warning("could not deregister, the registration will expire: %s", error)
