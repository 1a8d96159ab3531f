"""Rollout clients without engines: `python -m benchmarks.transport.client URL CLIENTS GROUP_SIZE TOKENS FIRST`.

Each leases a task, encodes a group for it and publishes it with the rollout server's client and publisher, until
SIGTERM. Then it prints one line of JSON: groups published, delay of the event loop, and memory of the process.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
import time
from collections import Counter
from typing import Any

from benchmarks.transport.chain import RUN, a_group
from protocol.keys import TASK_GROUP, Keys
from protocol.runtime.redis.aio import RedisClient
from rollout_server.dispatch.publisher import GroupPublisher
from rollout_server.metrics import Stats

TICK_S, BIN_S, BINS = 0.01, 0.0001, 100_000


async def client(url: str, number: int, message: Any, stats: Stats) -> None:
    """Lease tasks and publish groups until cancelled; wait for credit, and for free memory in Redis."""
    keys = Keys(RUN)
    redis = RedisClient(url, keys)
    sink = GroupPublisher(redis, stats)
    try:
        while True:
            for entry, fields in await redis.read(keys.tasks, TASK_GROUP, f"c{number}", 1):
                await sink.publish(entry.decode(), message.model_copy(update={"seq": int(fields[b"seq"])}))
    finally:
        await redis.aclose()


class Lateness:
    """Distribution of the event loop's delay in bins of BIN_S, so that its size does not grow with time."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self.most_s = 0.0

    async def watch(self) -> None:
        """Measure every TICK_S until cancelled."""
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late = max(0.0, time.perf_counter() - due)
            self._bins[min(BINS, int(late / BIN_S))] += 1
            self.most_s = max(self.most_s, late)

    def quantile(self, share: float) -> float:
        """Return the delay in seconds that `share` of the measurements do not exceed, to the precision of a bin."""
        left = share * self._bins.total()
        for number in sorted(self._bins):
            left -= self._bins[number]
            if left <= 0:
                return (number + 1) * BIN_S
        return 0.0


async def main(url: str, clients: int, group_size: int, tokens: int, first: int) -> None:
    stats, late = Stats("rollout", f"bench-{first}"), Lateness()
    message = a_group(group_size, tokens)
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    running = [asyncio.create_task(client(url, first + i, message, stats)) for i in range(clients)]
    running.append(asyncio.create_task(late.watch()))
    stopping = asyncio.create_task(over.wait())
    await asyncio.wait({stopping, *running}, return_when=asyncio.FIRST_COMPLETED)
    for task in (stopping, *running):
        task.cancel()
    ended = await asyncio.gather(*running, return_exceptions=True)
    broken = [repr(error) for error in ended if not isinstance(error, asyncio.CancelledError)]
    report = {
        "published": stats.counts["groups_published"],
        "duplicates": stats.counts["duplicates"],
        "waited_for_redis_s": stats.waits.seconds().get("redis", 0.0),
        "loop_lag_p50_s": late.quantile(0.5),
        "loop_lag_p99_s": late.quantile(0.99),
        "loop_lag_max_s": late.most_s,
        "rss_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "broken": broken,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    where, *numbers = sys.argv[1:]
    asyncio.run(main(where, *map(int, numbers)))
