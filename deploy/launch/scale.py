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
from protocol.runtime.lifecycle import process_token

LOOK_S, ANSWER_S, RETRY_S = 2.0, 1.0, 60.0
"""Seconds between two looks at Redis, for its answer, and until jobs that were refused are tried again."""


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
    """Starts and drains engines of one run, and reads whether it shall stop. The owner calls `tick` periodically.

    add         starts the engine of this number; raises UserError if there is no place for it
    gone        is called with the name of an engine that has drained and ended
    jobs        brings engines that are jobs of a cluster to a number, and returns lines; raises UserError if it cannot
    leaving     engines that drain, by name: no longer of the supervisor, which would restart them
    stop_asked  whether `foray down` on another host asked this process to stop the run
    """

    def __init__(
        self,
        launch: LaunchSettings,
        supervisor: Supervisor,
        add: Callable[[int], None],
        gone: Callable[[str], None],
        redis_url: str,
        run: str,
        jobs: Callable[[int], list[str]] | None = None,
    ) -> None:
        self._limits, self._supervisor, self._jobs = launch.autoscale, supervisor, jobs
        self._add, self._gone = add, gone
        self._url, self._keys = redis_url, Keys(run)
        self.leaving: dict[str, Child] = {}
        self.stop_asked = False
        self._due, self._refused = 0.0, 0
        self._began = False
        self._requested: int | None = None
        self._jobs_for: int | None = None

    def tick(self) -> list[str]:
        """Follow the wanted number; return lines about what was done. Nothing while Redis does not answer."""
        if (now := time.monotonic()) < self._due:
            return []
        self._due = now + LOOK_S
        for name in [name for name, child in self.leaving.items() if child.poll() is not None]:
            del self.leaving[name]
            self._gone(name)
        wanted = self._wanted()
        if self._jobs is not None:
            return self._follow(self._jobs, wanted)
        running = sorted(self._numbers(self._supervisor.children))
        self._began |= bool(running)
        if not self._began or wanted is None or wanted == len(running):
            return []
        return list(self._drain(running[wanted:]) if wanted < len(running) else self._start(wanted, running))

    def _follow(self, jobs: Callable[[int], list[str]], wanted: int | None) -> list[str]:
        """Follow a request, and a change of the learner's number: its first one counts no jobs that still wait."""
        if self._requested is None and self._jobs_for is None:
            self._jobs_for = wanted
        if wanted is None or wanted == self._jobs_for:
            return []
        try:
            lines = jobs(wanted)
        except UserError as error:
            self._due += RETRY_S
            return [f"{error}: {error.why}. The number of engines stays; {error.todo or 'it is tried again'}"]
        self._jobs_for = wanted
        return lines

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

        with connect(self._url, timeout_s=ANSWER_S) as client:
            try:
                found: Any = client.hmget(self._keys.launcher, ["engines", "stop"])
                raw: Any = client.get(self._keys.metrics("learner", LEARNER_ID))
                reported = decode_as(MetricsSnapshot, raw).values.get("wanted_engines", 0.0) if raw else 0.0
            except (redis.RedisError, OSError, ProtocolError):
                return None
        asked, stop = found
        self.stop_asked |= stop == process_token().encode()
        self._requested = number_of(asked) if asked and asked.isdigit() and len(asked) < 5 else None
        return followed(self._requested, reported, least=self._limits.min, most=self._limits.max)
