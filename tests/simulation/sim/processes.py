"""The simulated processes: a learner is the whole `learner.main`, a rollout server its tasks, publisher and fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sim.clock import Clock, Fiber, Process
from sim.engine import SimEngine
from sim.loop import VirtualLoop

from learner.config.learner import LearnerSettings
from protocol.errors import Fenced, ForayError, UserError
from protocol.keys import Keys
from protocol.messages import Task, TrajectoryGroup
from protocol.runtime.metrics import WaitTimer
from protocol.runtime.redis.aio import BLOCK_MS, RedisClient
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.settings import RunSettings
from rollout_server.dispatch.fleet import Fleet
from rollout_server.dispatch.leases import LeasePool
from rollout_server.dispatch.publisher import GroupPublisher
from rollout_server.dispatch.runner import TaskRunner
from rollout_server.metrics import Stats, publish_metrics
from rollout_server.rollout.group import GroupRejected

URL = "redis://127.0.0.1:1/0"


class SimShutdown:
    """protocol.runtime.lifecycle.DeferredShutdown, set by the fault plan."""

    def __init__(self) -> None:
        self.deferred = self.requested = False
        self.exit_code = 143

    def is_set(self) -> bool:
        return self.requested


class Learner(Process):
    """One life of a learner process. `outcome`: "" while it runs, then how it ended."""

    def __init__(self, clock: Clock, name: str, **clocks: float) -> None:
        super().__init__(name, **clocks)
        self.clock, self.stop = clock, SimShutdown()
        self.outcome = ""
        self.state: Any = None
        self.token = ""

    def start(
        self, run: RunSettings, settings: LearnerSettings, make_engine: Callable[[], SimEngine], *, takeover: bool
    ) -> None:
        """Start; the scheduler makes the first move."""
        import learner.main as service

        def live() -> None:
            try:
                code = service.serve(run, settings, takeover=takeover, make_engine=lambda *_: make_engine())  # type: ignore[arg-type,return-value]
                self.outcome = "stopped" if self.stop.requested else "done" if code == 0 else f"code {code}"
            except Fenced as error:
                self.outcome = f"fenced: {error}"
            except UserError as error:
                self.outcome = f"refused: {error}"
            except ForayError as error:
                self.outcome = f"failed: {type(error).__name__}: {error}"
            except Exception as error:
                self.outcome = f"broke: {type(error).__name__}: {error}"
                raise
            finally:
                self.clock.tell(f"ends: {self.outcome or 'killed'}")

        Fiber(self.clock, self, live, "train")


Roll = Callable[[Task, Fleet], Any]


class Rollouts(Process):
    """One life of a rollout server, on its own event loop. reports: whether it publishes its metrics."""

    concurrency, reports = 4, False

    def __init__(self, clock: Clock, name: str, run: RunSettings, roll: Roll, idle_ms: int, **clocks: float) -> None:
        super().__init__(name, **clocks)
        self.stats: Stats | None = None
        self.clock, self.loop = clock, VirtualLoop(clock, self)
        self._run, self._roll, self._idle_ms = run, roll, idle_ms
        self._asked = asyncio.Event()
        clock.current = self
        try:
            self._main = self.loop.create_task(self._live())
        finally:
            clock.current = None
        clock.movers.append(self.loop)

    @property
    def ended(self) -> bool:
        return self._main.done()

    def ask(self) -> None:
        """SIGTERM."""
        self._asked.set()

    async def _live(self) -> None:
        stats = self.stats = Stats("rollout", self.name)
        stats.waits = WaitTimer(lambda: self.clock.now + self.monotonic)  # the default is the real clock
        redis = RedisClient(URL, Keys(self._run.id))
        consumer = f"{self.name}-{self.clock.rng.getrandbits(24):x}"
        fleet, sink = Fleet(redis, stats.waits, poll_s=2.0), GroupPublisher(redis, stats, consumer=consumer)
        tasks = LeasePool(
            redis,
            sink,
            stats,
            consumer=consumer,
            concurrency=self.concurrency,
            idle_ms=self._idle_ms,
            backpressure=lambda: "engine" if fleet.table.target is None or sink.spool_full else "",
        )

        async def roll(task: Task, *_: object) -> TrajectoryGroup | GroupRejected:
            found: TrajectoryGroup | GroupRejected = await self._roll(task, fleet)
            return found

        work = TaskRunner(tasks, roll, sink, fleet, stats, max_lag=self._run.max_lag)
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(fleet.follow()), group.create_task(tasks.renew_loop())]
            loops += [group.create_task(publish_metrics(redis, stats))] if self.reports else []
            leasing = group.create_task(tasks.lease_loop(group, work))
            await self._asked.wait()
            tasks.stop()
            await asyncio.wait({leasing}, timeout=2 * BLOCK_MS / 1000)
            leasing.cancel()
            await tasks.drain(3.0, asyncio.Event())
            for loop in loops:
                loop.cancel()
            try:
                await tasks.deregister()
            except (RedisUnavailable, ForayError):
                pass  # as server.py does: the name of its consumer remains

    def problem(self) -> str:
        """The error that ended it, if any."""
        if self._main.done() and not self._main.cancelled() and self._main.exception() is not None:
            return repr(self._main.exception())
        return "; ".join(str(c.get("exception") or c.get("message")) for c in self.loop.errors)
