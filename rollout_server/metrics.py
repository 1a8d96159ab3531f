"""Metrics of this process: written to Redis every second, and to Prometheus on request.

All components share one `Stats` object. A value is a counter since the start, or a gauge that is read on demand.
Nothing here influences behaviour.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable

from protocol import events
from protocol.errors import StateLost, UserError
from protocol.messages import MetricsSnapshot, Owner, Segment, Status, Trajectory
from protocol.runtime.metrics import Histogram, MetricsPage, WaitTimer
from protocol.runtime.redis import processes
from protocol.runtime.redis.aio import Backoff, RedisClient
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.runtime.redis.processes import PERIOD_S
from rollout_server.metric_tables import TABLES, WAITS

log = logging.getLogger(__name__)

RATE_WINDOW_S = 10.0
MEAN_OVER = 256
"""Number of trajectories in the running means of rewards."""


class Stats:
    """Counters, gauges, durations and waits of one process."""

    def __init__(self, process: str, process_id: str) -> None:
        self.process, self.id = process, process_id
        self.waits = WaitTimer()
        self.counts: Counter[str] = Counter()
        self.gauges: dict[str, Callable[[], float]] = {}
        """name -> function that reads the current value"""
        self.text: dict[str, Callable[[], str]] = {}
        self.histograms: dict[str, Histogram] = {}
        self._recent: dict[str, deque[float]] = {}
        self._started = time.monotonic()

    def observe(self, name: str, value: float) -> None:
        """Add a measurement to the running mean `name`."""
        self._recent.setdefault(name, deque(maxlen=MEAN_OVER)).append(value)

    def distribute(self, name: str, value: float) -> None:
        """Add a measurement to the histogram `name`, which must be in the table of this process."""
        if name not in self.histograms:
            self.histograms[name] = Histogram(TABLES[self.process][name].buckets)
        self.histograms[name].observe(value)

    def time(self, name: str, seconds: float) -> None:
        """Add a duration to the histogram `name`, and to the running mean `NAME_mean`."""
        self.distribute(name, seconds)
        self.observe(f"{name}_mean", seconds)

    def values(self) -> dict[str, float]:
        """Return the current values by name."""
        means = {name: sum(recent) / len(recent) for name, recent in self._recent.items()}
        gauges = {name: float(read()) for name, read in self.gauges.items()}
        return {name: float(n) for name, n in self.counts.items()} | means | gauges

    def snapshot(self) -> MetricsSnapshot:
        values, now = self.values(), time.monotonic()
        return MetricsSnapshot(
            process=self.process,
            id=self.id,
            # one clock reading for all, so that no wait can grow faster than the uptime
            uptime_s=now - self._started,
            values=values,
            waits=self.waits.seconds(now),
            text={name: read() for name, read in self.text.items()},
        )

    def count_segment(self, segment: Segment) -> None:
        """Count a new segment of a trajectory: a turn of the policy, or an observation."""
        if segment.owner is Owner.POLICY:
            self.counts["turns"] += 1
            self.counts["tokens_generated"] += len(segment.ids)
        else:
            self.counts["tokens_observed"] += len(segment.ids)

    def count_trajectory(self, trajectory: Trajectory) -> None:
        """Count a trajectory that has ended."""
        self.counts["trajectories"] += 1
        self.counts[f"ended_{trajectory.status}"] += 1
        if trajectory.status is Status.STALE:
            self.counts["stale"] += 1
        self.distribute("trajectory_turns", trajectory.turns)
        self.distribute("trajectory_searches", trajectory.searches)
        self.distribute("response_length_tokens", trajectory.num_sampled)
        if trajectory.status.is_valid:
            self.observe("reward_mean", trajectory.reward)
            self.distribute("reward", trajectory.reward)
            for part, value in trajectory.rewards.items():
                self.observe(f"reward/{part}", value)


class RateGauge:
    """Increase of a counter per second, over the last RATE_WINDOW_S. Call `tick` once per period."""

    def __init__(self, read: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._points: deque[tuple[float, float]] = deque([(clock(), read())])

    def tick(self) -> None:
        now = self._clock()
        self._points.append((now, self._read()))
        while len(self._points) > 2 and now - self._points[0][0] > RATE_WINDOW_S:
            self._points.popleft()

    def __call__(self) -> float:
        (t0, n0), (t1, n1) = self._points[0], self._points[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0


async def publish_metrics(redis: RedisClient, stats: Stats, rates: tuple[RateGauge, ...] = ()) -> None:
    """Consume `stats`; produce a snapshot in Redis every second; ended by cancellation.

    A snapshot that cannot be made is logged, once per type of error, and skipped. Also measures the delay of the event
    loop: a blocked loop does not renew leases.
    """
    backoff = Backoff("publishing metrics", stats.waits)
    lag, reported = 0.0, ""
    stats.gauges |= {"event_loop_lag_s": lambda: lag, "redis_refused": lambda: redis.refused}
    stats.text["redis_refusal"] = lambda: redis.refusal
    while True:
        for rate in rates:
            rate.tick()
        try:
            await processes.write(redis, stats.snapshot())
        except RedisUnavailable as error:
            await backoff.sleep(error)
        except UserError:
            raise
        except Exception as error:
            if reported != (reported := type(error).__name__):
                log.exception("cannot publish metrics")
        else:
            backoff.reset()
        before = time.monotonic()
        await asyncio.sleep(PERIOD_S)
        lag = max(0.0, time.monotonic() - before - PERIOD_S)


async def deregister_metrics(redis: RedisClient, stats: Stats) -> None:
    """Remove this process from the lists at shutdown. Raises RedisUnavailable."""
    await processes.remove(redis, stats.process, stats.id)


def prometheus_text(stats: Stats, run: str) -> bytes:
    """Return the body of `GET /metrics`. Every sample has the label `run`."""
    return page_of(stats, run).text()


def page_of(stats: Stats, run: str) -> MetricsPage:
    """Return the Prometheus metrics of a process."""
    return MetricsPage(
        f"foray_{stats.process}_", TABLES[stats.process], stats.snapshot, lambda: stats.histograms, {"run": run}, WAITS
    )


async def emit_event(redis: RedisClient, stats: Stats, kind: str, text: str) -> None:
    """Append an event to the run's history (`protocol/events.py`); count it as lost if Redis does not accept it."""
    flat = [part for pair in events.fields(stats.process, stats.id, kind, text).items() for part in pair]
    try:
        await redis.batch(("XADD", redis.keys.events, "MAXLEN", "~", events.MOST, "*", *flat))
    except (RedisUnavailable, StateLost, UserError) as error:
        log.info("could not write the event %r: %s", kind, error)
        stats.counts["events_lost"] += 1
