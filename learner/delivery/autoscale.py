"""How many engines a run can use: a vote on two snapshots of it, and votes in a row that become a number (pure).

The learner calls it and reports the number as `wanted_engines`; a launcher, KEDA or a user's scheduler follows. More
engines help if the learner waits for groups while turns wait for engines. One engine less is enough if the learner does
not wait and more than one engine would be idle all the time.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from protocol.messages import EngineInfo, MetricsSnapshot, NodeState

LOOK_S = 10.0
"""Seconds between two looks."""
WINDOW_S, WINDOW_STEPS = 60.0, 3
"""A vote is on at least this time and this many steps, without a change in between."""
STARVING, PRESSED = 0.1, 0.1
"""Vote for more: shares of time that the learner waits for groups, and that turns wait for engines."""
FED, SPARE = 0.05, 1.3
"""Vote for one less: share of time that the learner waits, at most, and the number of engines that are idle."""
VOTES_UP, VOTES_DOWN = 3, 10
"""Equal votes in a row."""
RETRIEVING = 0.25
"""Share of time that searches wait for retrievers, from which more engines would not help."""
CALM_STEPS = 60
"""No engine is removed within this many steps after a removal turned out to be wrong."""
USABLE, CHANGING = (NodeState.READY, NodeState.LOADING), (NodeState.JOINING, NodeState.SYNCING, NodeState.DRAINING)


class Seen(Protocol):
    """What a look needs of `deploy.run.snapshot.RunSnapshot`. now: seconds on the Redis clock."""

    @property
    def now(self) -> float: ...
    @property
    def processes(self) -> tuple[MetricsSnapshot, ...]: ...
    @property
    def engines(self) -> tuple[EngineInfo, ...]: ...


def wait_shares(seen: Seen, before: Seen | None) -> dict[tuple[str, str], float]:
    """Return the share of time that each kind of process waits, by (process, cause).

    The share is of the time between the two snapshots (or since the start of a new process), averaged over the
    processes of a kind. Waits are counted as they pass and with the clock of the uptime, so a share cannot exceed
    100 %; a process that waits for two things at once counts for both.
    """
    earlier = {(p.process, p.id): p for p in before.processes} if before else {}
    shares: dict[tuple[str, str], list[float]] = {}
    apart = {("node", e.id) for e in seen.engines if e.role == "eval"}  # training does not wait for these
    for now in (p for p in seen.processes if (p.process, p.id) not in apart):
        old = earlier.get((now.process, now.id))
        # a restarted process with the same name counts from zero again
        old = old if old is not None and old.uptime_s < now.uptime_s else None
        seconds = now.uptime_s - (old.uptime_s if old else 0.0)
        for cause, total in now.waits.items():
            waited = total - (old.waits.get(cause, 0.0) if old else 0.0)
            shares.setdefault((now.process, cause), []).append(waited / seconds if seconds > 0 else 0.0)
    return {key: sum(found) / len(found) for key, found in shares.items()}


def usable(seen: Seen) -> list[EngineInfo]:
    """Return the engines that generate for training."""
    return [e for e in seen.engines if e.role == "rollout" and e.state in USABLE]


def frozen(seen: Seen) -> bool:
    """Return whether `seen` says nothing about the number of engines: not training, evaluating, an engine comes or
    goes."""
    learner = _learner(seen)
    training = learner is not None and learner.text.get("state") == "training" and not learner.text.get("validating")
    evaluating = any(p.values.get("pinned_evaluations") for p in seen.processes)
    changing = any(e.role == "rollout" and e.state in CHANGING for e in seen.engines)
    return not training or evaluating or changing


def vote(before: Seen, now: Seen, trajectories: int) -> int:
    """Return how many engines more (or -1: less) the time between two snapshots with the same engines calls for.

    trajectories  the most that may be in flight: more engines than have places for them would be idle
    """
    shares, engines = wait_shares(now, before), usable(now)
    count, places = len(engines), sum(e.max_running for e in engines)
    starving = shares.get(("learner", "data"), 0.0)
    pressed = max(shares.get(("rollout", cause), 0.0) for cause in ("window", "engine", "backlog"))
    if shares.get(("rollout", "retriever"), 0.0) > RETRIEVING:
        return 0
    if starving > STARVING and pressed > PRESSED:
        bound = math.ceil(trajectories * count / places) if places else count + 1
        # with `missing` more the learner would not wait, if it waited for engines only; half of it: that is a model
        missing = count * min(starving, pressed) / max(1 - starving, 0.1)
        return max(0, min(math.ceil(missing / 2), count, bound - count))
    if starving < FED and places and count > 1:
        busy = _engine_seconds(before, now) / (now.now - before.now) / places * count
        return -1 if count - busy > SPARE else 0
    return 0


class Autoscaler:
    """The number of engines that a run wants, with hysteresis. trajectories: as in `vote`."""

    def __init__(self, trajectories: int) -> None:
        self._trajectories = trajectories
        self._looks: deque[Seen] = deque()
        self._votes: list[int] = []
        self._last, self._calm_until = 0, 0.0
        self._count = 0
        self.wanted = 0
        """0 until an engine is ready."""

    def look(self, seen: Seen) -> int:
        """Return the number wanted after another look, `LOOK_S` after the last one."""
        count, looks = len(usable(seen)), self._looks
        if frozen(seen) or not count or (looks and len(usable(looks[-1])) != count):
            self._forget()
        if not self.wanted or count > self._count:  # an engine that started slowly, or was added by others, stays
            self.wanted = max(self.wanted, count)
        self._count = count
        if frozen(seen) or not count:
            return self.wanted
        looks.append(seen)
        while len(looks) > 1 and _suffices(looks[1], seen):
            looks.popleft()
        if not _suffices(looks[0], seen):
            return self.wanted
        change = vote(looks[0], seen, self._trajectories)
        if self._votes and (self._votes[-1] > 0) - (self._votes[-1] < 0) != (change > 0) - (change < 0):
            self._votes.clear()
        self._votes.append(change)
        if len(self._votes) >= (VOTES_UP if change > 0 else VOTES_DOWN):
            self._decide(count, min(self._votes), _step(seen))
        return self.wanted

    def _decide(self, count: int, change: int, step: float) -> None:
        if change > 0 and self._last < 0:
            self._calm_until = step + CALM_STEPS
        if change < 0 and step < self._calm_until:
            change = 0
        self.wanted, self._last = count + change, change or self._last
        self._forget()

    def _forget(self) -> None:
        self._looks.clear()
        self._votes.clear()


def _suffices(before: Seen, now: Seen) -> bool:
    return now.now - before.now >= WINDOW_S and _step(now) - _step(before) >= WINDOW_STEPS


def _learner(seen: Seen) -> MetricsSnapshot | None:
    return next((p for p in seen.processes if p.process == "learner"), None)


def _step(seen: Seen) -> float:
    learner = _learner(seen)
    return learner.values.get("step", 0.0) if learner is not None else 0.0


def _engine_seconds(before: Seen, now: Seen) -> float:
    """Return the seconds that requests spent at engines in between, added up over the requests."""

    def total(seen: Seen, ids: set[str]) -> float:
        return sum(p.values.get("engine_ms", 0.0) for p in seen.processes if p.process == "rollout" and p.id in ids)

    both = {p.id for p in before.processes if p.process == "rollout"} & {
        p.id for p in now.processes if p.process == "rollout"
    }
    return (total(now, both) - total(before, both)) / 1000
