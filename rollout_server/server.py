"""Composition root of the rollout server. Its components and loops:

                    Redis {run}:tasks                      Redis wv:target, engines
                          | lease, reclaim                        | every 0.5 s
                          v                                       v
    renew_loop --> LeasePool.lease_loop                      Fleet.follow ---> FleetTable
                          | one per lease                         |
                          v                                       v
                      TaskRunner --> run_group --> generate --> Router ---(HTTP)---> engines
                          |           |
                          |           +--------> search -----(HTTP)---> retriever
                          v
                 GroupPublisher.publish ---> Redis {run}:traj

    loop             consumes              produces            waits for              unblocked by
    lease_loop       tasks                 a TaskRunner each   a slot, credit,        a group's end, the learner,
                                                               no backpressure of     the engines,
                                                               turns or searches      a successful probe
    renew_loop       leases in flight      idle times reset    a third of task_idle   the clock
    search.follow    retrievers            replicas in use        half a second          the clock
    Fleet.follow     engines, target       FleetTable          fleet_poll_s           the clock
    gate             FleetTable            accept / do not     a change               Fleet.follow
    publish_metrics  Stats                 metrics in Redis    one second             the clock
    HTTP             requests              episodes, status    -                      clients

Shutdown is the reverse: stop leasing, let groups finish for drain_s, release the rest, then cancel the loops.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from protocol.codec import SCHEMA_MAJOR
from protocol.errors import StateLost
from protocol.keys import Keys
from protocol.messages import EngineInfo, NodeState, Task, TrajectoryGroup
from protocol.run_meta import SEQUENCES
from protocol.runtime.http.auth import Access, engine_key, read_access
from protocol.runtime.http.body import bounded_session
from protocol.runtime.http.server import announce, listening, reachable_url, service_host
from protocol.runtime.lifecycle import ShutdownSignal, shutdown_on_signals, unwrap_user_error
from protocol.runtime.redis.aio import BLOCK_MS, Backoff, RedisClient, retry_until_available
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.runtime.redis.server import eviction_refusal, unknown_policy
from protocol.runtime.tracing import build_tracer
from protocol.settings import RunSettings
from rollout_server.agents.run import build_agents
from rollout_server.api.app import AppState, build_app
from rollout_server.api.episodes import Episodes
from rollout_server.api.evaluation_pin import EvaluationPin
from rollout_server.api.live import LiveFeed
from rollout_server.config import RolloutSettings
from rollout_server.dispatch.fleet import Fleet, RunCompatibility
from rollout_server.dispatch.leases import LeasePool
from rollout_server.dispatch.publisher import GroupPublisher
from rollout_server.dispatch.runner import TaskRunner
from rollout_server.engine.client import SglangClient
from rollout_server.engine.continuation import StopChecker
from rollout_server.engine.router import EngineClient, Router, TurnLimits, with_request_log
from rollout_server.environment.environment import Environment, build_environment
from rollout_server.instrumentation import InstrumentedSearch, with_instrumented_tools
from rollout_server.metrics import RateGauge, Stats, deregister_metrics, publish_metrics
from rollout_server.rollout.group import GroupRejected, run_group
from rollout_server.rollout.live import LiveGroups
from rollout_server.rollout.trajectory import OnProgress, ShouldStop, run_trajectory
from rollout_server.search import build_search
from rollout_server.search.base import SearchService
from rollout_server.search.client import HttpSearch

log = logging.getLogger(__name__)

PIECES, PIECE_BYTES = 16, 1 << 16
"""Samples of a weight file for the digest: number (at equal distances), and bytes of each."""
MOST_REFUSALS = 50
"""Maximum number of different Redis refusals written to the history: another client may cause many."""
COUNTERS = (
    *("groups_published", "groups_failed", "groups_rejected", "duplicates", "reclaimed", "leases_lost"),
    *("trajectories", "trajectories_cut", "turns", "tokens_generated", "tokens_observed", "stale"),
    *("unreadable_tasks", "tasks_released", "events_lost"),
)
"""Counters that exist from the start, as 0."""
RATES = {"tokens_generated": "tokens_generated", "trajectories": "trajectories", "groups": "groups_published"}
"""Name of a gauge `NAME_per_s` -> its counter."""


async def serve(
    run: RunSettings, settings: RolloutSettings, *, port_file: Path | None = None, stop: ShutdownSignal | None = None
) -> None:
    """Run until SIGTERM or SIGINT (or `stop`). Raises UserError for an error that the user must fix."""
    stop = stop or ShutdownSignal()
    stats = Stats("rollout", settings.id or f"{socket.gethostname()}-{os.getpid()}")
    for name in COUNTERS:
        stats.counts[name] = 0
    async with opened(run, settings, stats) as parts:
        with shutdown_on_signals(stop), unwrap_user_error():
            search = InstrumentedSearch(parts.search, stats)
            server = RolloutServer(run, settings, parts.environment, stats, parts.redis, search, parts.session)
            await server.run(stop, port_file, parts.following)


class Parts(NamedTuple):
    """What rollouts need of this process. `following`: a loop of the search, if it has one."""

    environment: Environment
    search: SearchService
    following: Coroutine[Any, Any, None] | None
    redis: RedisClient
    session: aiohttp.ClientSession


@asynccontextmanager
async def opened(run: RunSettings, settings: RolloutSettings, stats: Stats) -> AsyncIterator[Parts]:
    """Build what rollouts need, and close it after the block. Raises UserError as `build_environment`."""
    search = build_search(settings.search)
    retrievers = search if isinstance(search, HttpSearch) else None
    built = build_environment(settings.episode, run.model, urls=retrievers.urls if retrievers else None, day=run.date)
    environment = with_instrumented_tools(built, stats)
    redis = RedisClient(run.redis_url, Keys(run.id))
    try:
        async with bounded_session() as session:
            following = retrievers.follow(redis, stats.waits) if retrievers and retrievers.follows else None
            yield Parts(environment, search, following, redis, session)
    finally:
        await search.close()
        await environment.close()
        await redis.aclose()


def build_router(
    run: RunSettings,
    settings: RolloutSettings,
    environment: Environment,
    fleet: Fleet,
    stats: Stats,
    session: aiohttp.ClientSession,
) -> Router:
    """Return the router of a process to the engines of `fleet`, with its gauges in `stats`."""
    router = Router(
        fleet,
        _connecting(session, settings, fleet),
        stats.waits,
        max_lag=run.max_lag if settings.max_engine_lag is None else settings.max_engine_lag,
        limits=TurnLimits(
            *(settings.generate_timeout_s, settings.stall_s, settings.stream_interval, settings.generate_attempts),
            wait_s=settings.engine_wait_s,
        ),
        stop_checker=StopChecker(environment.tokenizer.decode, environment.tokenizer.eos_ids),
        adaptive=settings.adaptive,
        vocab_size=_vocab_size(run.model),
        tokenizer=environment.tokenizer.fingerprint,
        counts=stats.counts,
    )
    stats.gauges |= {
        "turns_waiting": lambda: router.waiting,
        "requests_in_flight": lambda: router.inflight.in_flight,
        "engine_strikes": lambda: router.health.total,
        "engines_routable": lambda: len(router.candidates(pinned=False)),
    }
    return router


class RolloutServer:
    """All components of the process, and the order in which they start and stop."""

    def __init__(
        self,
        run: RunSettings,
        settings: RolloutSettings,
        environment: Environment,
        stats: Stats,
        redis: RedisClient,
        search: InstrumentedSearch,
        session: aiohttp.ClientSession,
    ) -> None:
        self._run, self._settings, self._environment, self._stats = run, settings, environment, stats
        self._redis, self._search, consumer = redis, search, f"{stats.id}-{secrets.token_hex(4)}"
        self._agents = build_agents(settings.agent, environment, stats)
        stats.text["incarnation"] = lambda: consumer
        needs = SEQUENCES if self._agents else (SCHEMA_MAJOR, 0)
        self._live, self._compatibility = LiveGroups(), RunCompatibility(run, needs=needs, max_lag=run.max_lag)
        self._tracer = build_tracer(run, stats.process, stats.id, lambda: self._compatibility.lineage_id)
        self._fleet = Fleet(redis, stats.waits, poll_s=settings.fleet_poll_s, compatibility=self._compatibility)
        self._router = build_router(run, settings, environment, self._fleet, stats, session)
        self._publisher = GroupPublisher(redis, stats, consumer=consumer, spool_groups=settings.spool_groups)
        self._leases = LeasePool(
            redis,
            self._publisher,
            stats,
            consumer=consumer,
            concurrency=settings.concurrency_groups,
            idle_ms=settings.task_idle_ms,
            backpressure=self._backpressure,
        )
        self._work = TaskRunner(
            self._leases,
            self._roll,
            self._publisher,
            self._fleet,
            stats,
            max_lag=run.max_lag,
            oversample=settings.oversample,
            tracer=self._tracer,
        )
        stats.gauges |= self._tracer.counts() | {
            "groups_in_flight": lambda: len(self._leases.in_flight),
            "trajectories_in_flight": lambda: self._work.trajectories_in_flight,
        }

    async def run(
        self, stop: ShutdownSignal, port_file: Path | None, following: Coroutine[Any, Any, None] | None = None
    ) -> None:
        """Start everything, wait for `stop`, and shut down in order. `following`: a further loop, of the search."""
        rates = {
            f"{what}_per_s": RateGauge(partial(self._stats.counts.__getitem__, counter))
            for what, counter in RATES.items()
        }
        self._stats.gauges |= rates
        async with self._listening(stop, port_file), asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(self._fleet.follow(), name="fleet"),
                tasks.create_task(self._leases.renew_loop(), name="renew"),
                tasks.create_task(publish_metrics(self._redis, self._stats, tuple(rates.values())), name="metrics"),
                tasks.create_task(self._gate(), name="gate"),
                *([tasks.create_task(following, name="retrievers")] if following else []),
            ]
            leasing = tasks.create_task(self._leases.lease_loop(tasks, self._work), name="lease")
            await stop.requested.wait()
            self._leases.stop()
            # tasks from its last read are still started, and then finished or released
            await asyncio.wait({leasing}, timeout=2 * BLOCK_MS / 1000)
            leasing.cancel()
            await self._leases.drain(self._settings.drain_s, stop.forced, can_progress=self._can_progress)
            for loop in loops:
                loop.cancel()
            await self._leave()
            await asyncio.to_thread(self._tracer.close)

    def _backpressure(self) -> str:
        """Return what a new group would have to wait for; "" if it could start."""
        knows = self._fleet.looked and self._compatibility.is_met
        if self._publisher.spool_full or not knows:  # the first read shows whose run this is
            return "redis"
        if self._search.backpressure:
            return "retriever"
        return "backlog" if self._router.backpressure() else ""

    def _places(self) -> int | None:
        """Return the number of requests that training engines accept from this server; None: no limit."""
        limits = [self._router.inflight.limit(engine) for engine in self._router.candidates(pinned=False)]
        return None if None in limits else sum(limit or 0 for limit in limits)

    def _can_progress(self) -> bool:
        """Return whether a group in flight can finish."""
        return bool(self._router.candidates(pinned=False)) and not self._search.outage

    async def _gate(self) -> None:
        """Consume the engine table; produce permission to lease; wait for a change; ended by cancellation.

        The gate closes when the run is done, and opens when a learner starts again. Also writes each refusal of Redis
        to the history, once.
        """
        await self._refuse_eviction()
        await self._publisher.emit_event("joined", f"rollout server {self._stats.id} leases tasks")
        reported: set[str] = {""}
        while True:
            if (refusal := self._redis.refusal) not in reported and len(reported) < MOST_REFUSALS:
                reported.add(refusal)
                await self._publisher.emit_event("redis-refused", refusal)
            self._leases.accept(not self._fleet.table.done)
            await self._fleet.changed(timeout_s=1.0)

    async def _refuse_eviction(self) -> None:
        """Raise UserError if Redis may evict keys. Waits while Redis is unavailable."""
        url = self._run.redis_url
        policy = await retry_until_available(
            Backoff("reading the eviction policy of Redis", self._stats.waits), self._redis.eviction_policy
        )
        if not policy:
            log.warning("%s", unknown_policy(url))
        elif (evicts := eviction_refusal(policy, url)) is not None:
            raise evicts

    async def _roll(
        self, task: Task, should_stop: ShouldStop, on_progress: OnProgress
    ) -> TrajectoryGroup | GroupRejected:
        with self._live.running(task, self._settings.oversample) as live:
            return await run_group(
                self._environment,
                task,
                self._router,
                self._search,
                run=self._run.id,
                producer=self._stats.id,
                should_stop=should_stop,
                on_progress=on_progress,
                live=live,
                play_one=self._agents or run_trajectory,
                oversample=self._settings.oversample,
            )

    @asynccontextmanager
    async def _listening(self, stop: ShutdownSignal, port_file: Path | None) -> AsyncIterator[None]:
        """Serve the HTTP API inside the block. Raises UserError if the address cannot be used."""
        pin = EvaluationPin(
            self._redis,
            self._fleet,
            self._stats,
            max_s=self._settings.pin_max_s,
            wait_s=self._settings.engine_wait_s,
            tokenizer=self._environment.tokenizer.fingerprint,
        )
        model = await asyncio.to_thread(model_digest, self._run.model)
        episodes = Episodes(
            self._environment,
            self._router,
            self._search,
            self._fleet,
            pin,
            self._stats,
            policy=lambda: {"run": self._run.id, "lineage_id": self._compatibility.lineage_id, "model": model},
            wait_s=self._settings.engine_wait_s,
            places=self._places,
            play_one=self._agents or run_trajectory,
        )
        router, decode = self._router, self._environment.tokenizer.decode
        feed = LiveFeed(self._live, router.turn_so_far, router.count_so_far, decode)
        served = AppState(self._run.id, self._fleet, self._router, self._stats, episodes, feed, stop.requested.is_set)
        access = read_access(os.environ)
        host = service_host(self._settings.host, self._run.redis_url, access, "rollout.host")
        async with (
            self._agents.listening() if self._agents else nullcontext(),
            listening(
                build_app(served, access),
                host,
                self._settings.port,
                access=access,
                setting="rollout.host",
                todo="set another rollout.port, or 0 to pick a free one",
            ) as listener,
        ):
            announce(log, host, listener.port, port_file)
            url = self._reachable(host, listener.port)
            self._stats.text["url"] = lambda: url
            self._stats.text["state"] = lambda: str(NodeState.DRAINING if stop.requested.is_set() else NodeState.READY)
            yield

    def _reachable(self, host: str, port: int) -> str:
        """Return the URL at which the learner reaches this server; "" if it is unknown: validations ask another one."""
        try:
            return reachable_url(host, port, self._run.redis_url)
        except OSError as error:
            log.warning("cannot find the address of this host on the way to Redis: %s", error)
            return ""

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(3.0):
                await self._publisher.emit_event(
                    "left", f"stopped; {self._stats.counts['tasks_released']} tasks released"
                )
                await self._leases.deregister()
                await deregister_metrics(self._redis, self._stats)
        except (RedisUnavailable, StateLost, TimeoutError) as error:
            log.info("exited without deregistering in Redis: %s", error)


def model_digest(model: Path) -> str:
    """Return the sha256 (hex) over names, sizes and samples of the model files that influence its answers.

    Identifies the policy of an answer: a version is only unique within a run, and an untrained model is always 0.0.

    Weight files are sampled, since reading a large model takes minutes: training changes every tensor, so the samples
    differ. A directory may have no weights: a rollout server needs only the tokenizer.
    """
    digest = hashlib.sha256()
    for path in sorted((*model.glob("*.json"), *model.glob("*.jinja"), *model.glob("*.safetensors"))):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for piece in range(PIECES):
                file.seek(size * piece // PIECES)
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def _connecting(
    session: aiohttp.ClientSession, settings: RolloutSettings, fleet: Fleet
) -> Callable[[EngineInfo], EngineClient]:
    access = read_access(os.environ)
    connect: Callable[[EngineInfo], EngineClient] = partial(_connect, session, access, settings.stream_interval)
    if settings.journal_routes is None:
        return connect
    return with_request_log(connect, settings.journal_routes, fleet)


def _connect(session: aiohttp.ClientSession, access: Access, stream_interval: int, engine: EngineInfo) -> SglangClient:
    key = engine_key(access, engine.id, engine.incarnation)
    return SglangClient(
        session, engine.url, name=engine.id, adapter=engine.adapter, stream_interval=stream_interval, key=key
    )


def _vocab_size(model: Path) -> int | None:
    """Return the number of rows of the model's output layer; None without a config.json (no check then)."""
    try:
        size = json.loads((model / "config.json").read_bytes()).get("vocab_size")
    except (OSError, ValueError) as error:
        log.warning("token ids will not be checked against the vocabulary: %s", error)
        return None
    return int(size) if size else None
