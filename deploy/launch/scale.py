"""Keep the number of training engines of a run at the number that is wanted: start more, drain the last ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from deploy.config import LaunchSettings, RunConfig
from deploy.launch.process import Child
from deploy.launch.supervisor import Supervisor
from deploy.run.redis_server import connect
from learner.delivery.dead_letters import LEARNER_ID
from protocol.codec import decode_as, number_of
from protocol.errors import ProtocolError, UserError
from protocol.keys import Keys
from protocol.messages import MetricsSnapshot

LOOK_S, ANSWER_S = 2.0, 1.0
"""Seconds between two looks at Redis, and the time for its answer."""


def followed(requested: int | None, reported: float, *, least: int, most: int) -> int | None:
    """Return how many engines to run: as `foray scale` requested, else as the learner reports, within the limits of
    `launch.autoscale`; None to change nothing.
    """
    if requested is not None:
        return requested
    return min(max(int(reported), least), most) if reported and most else None


def with_engines(config: RunConfig, engines: int) -> RunConfig:
    """Return the configuration with this many engines."""
    return config.model_copy(update={"launch": config.launch.model_copy(update={"engines": engines})})


class EngineScaler:
    """Starts and drains engines of one run. The owner calls `tick` periodically.

    add      starts the engine of this number; raises UserError if there is no place for it
    leaving  engines that drain, by name: no longer of the supervisor, which would restart them
    """

    def __init__(
        self, launch: LaunchSettings, supervisor: Supervisor, add: Callable[[int], None], redis_url: str, run: str
    ) -> None:
        self._limits, self._supervisor, self._add = launch.autoscale, supervisor, add
        self._url, self._keys = redis_url, Keys(run)
        self.leaving: dict[str, Child] = {}
        self._due, self._refused = 0.0, 0

    def tick(self) -> list[str]:
        """Follow the wanted number; return lines about what was done. Nothing while Redis does not answer."""
        if (now := time.monotonic()) < self._due:
            return []
        self._due = now + LOOK_S
        for name in [name for name, child in self.leaving.items() if child.poll() is not None]:
            del self.leaving[name]
        running = sorted(self._numbers(self._supervisor.children))
        wanted = self._wanted()
        if not running or wanted is None or wanted == len(running):
            return []
        return list(self._drain(running[wanted:]) if wanted < len(running) else self._start(wanted, running))

    def _start(self, wanted: int, running: list[int]) -> Iterator[str]:
        taken = {*running, *self._numbers(self.leaving)}
        for count in range(len(running), wanted):
            if self._refused and count >= self._refused:
                return
            number = next(n for n in range(1, len(taken) + 2) if n not in taken)
            if number > wanted:
                return  # the place is that of an engine that still drains
            try:
                self._add(number)
            except UserError as error:
                self._refused = count
                yield f"{error}: {error.why}. The run goes on with {count}; {error.todo}"
                return
            taken.add(number)
            yield f"engine-{number} starts: {wanted} engines are wanted"

    def _drain(self, numbers: list[int]) -> Iterator[str]:
        self._refused = 0
        for name in (f"engine-{number}" for number in numbers):
            child = self.leaving[name] = self._supervisor.children.pop(name)
            child.terminate()
            yield f"{name} drains and ends: its turns continue at the others"

    def _numbers(self, names: dict[str, Child]) -> Iterator[int]:
        return (number_of(name.removeprefix("engine-").encode()) for name in names if name.startswith("engine-"))

    def _wanted(self) -> int | None:
        import redis

        client = connect(self._url, timeout_s=ANSWER_S)
        try:
            asked: Any = client.hget(self._keys.scale, "engines")
            raw: Any = client.get(self._keys.metrics("learner", LEARNER_ID))
            reported = decode_as(MetricsSnapshot, raw).values.get("wanted_engines", 0.0) if raw else 0.0
        except (redis.RedisError, OSError, ProtocolError):
            return None
        finally:
            client.close()
        requested = number_of(asked) if asked and asked.isdigit() and len(asked) < 5 else None
        return followed(requested, reported, least=self._limits.min, most=self._limits.max)
