"""Observe a fleet from outside: registrations, destinations of requests, and whether those were correct."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from by_hand import Shells

from protocol.codec import decode_as
from protocol.keys import Keys
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState
from protocol.versions import PolicyVersion
from rollout_server.node.guard import descendants

LOOK_S = 0.03
NOTICE_S = 3.0
"""Seconds for which a rollout server may act on an earlier state: its poll interval, and a slow machine."""


@dataclass
class Seen:
    """One incarnation of an engine: when it was first and last registered READY at each version, and when it ended."""

    ready: dict[PolicyVersion, list[float]] = field(default_factory=dict)
    left_at: float | None = None
    """First time it was seen in a state that never takes traffic again, or not registered."""


class Watcher:
    """Poll Redis in a thread, independently of the rollout servers. `with Watcher(shells, keys)`."""

    def __init__(self, shells: Shells, keys: Keys) -> None:
        self._shells, self._keys = shells, keys
        self.seen: dict[tuple[str, str], Seen] = {}
        """(engine, incarnation) -> what was seen of it"""
        self.states: list[tuple[float, str, NodeState | None, PolicyVersion | None]] = []
        """Every change of an engine's state: time, id, state and version; None when it is not registered."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watcher")

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        before: dict[str, EngineInfo] = {}
        with self._shells.client() as client:
            while not self._over.wait(LOOK_S):
                names = [raw.decode() for raw in client.zrange(self._keys.engines, 0, -1)]
                bodies = [client.hget(self._keys.engine(name), "b") for name in names]
                now = {n: decode_as(EngineInfo, raw) for n, raw in zip(names, bodies, strict=True) if raw}
                self._note(before, now)
                before = now

    def _note(self, before: dict[str, EngineInfo], now: dict[str, EngineInfo]) -> None:
        at = time.time()
        for name, info in now.items():
            seen = self.seen.setdefault((name, info.incarnation), Seen())
            if info.state is NodeState.READY:
                seen.ready.setdefault(info.version, []).append(at)
            elif info.state not in (NodeState.LOADING, NodeState.SYNCING) and seen.left_at is None:
                seen.left_at = at
            was = before.get(name)
            if was is None or (was.state, was.version) != (info.state, info.version):
                self.states.append((at, name, info.state, info.version))
        for name, was in before.items():
            there = now.get(name)
            if there is None:
                self.states.append((at, name, None, None))
            if there is None or there.incarnation != was.incarnation:
                seen = self.seen[name, was.incarnation]
                seen.left_at = seen.left_at or at


def read_routes(path: Path) -> list[dict[str, Any]]:
    """Return the destinations of requests, as the rollout server reports them."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def wrong_routes(routes: list[dict[str, Any]], watcher: Watcher, max_lag: int) -> list[str]:
    """Return the requests that went to a wrong engine, with the reason; empty in a correct run.

    By the router's own knowledge: READY, of the target's epoch, at most max_lag behind. By the watcher's: that very
    incarnation was registered READY at that version, which a node does for verified weights only (or before and after
    it: one that held for less than LOOK_S is not seen), and it had not left for longer than it takes to notice.
    """
    found = []
    for route in routes:
        version, target = PolicyVersion.parse(route["version"]), PolicyVersion.parse(route["target"] or "")
        seen = watcher.seen.get((route["engine"], route["incarnation"]))
        if route["state"] != NodeState.READY:
            found.append(f"not READY: {route}")
        elif version is None or target is None or version.epoch != target.epoch:
            found.append(f"not of the living epoch: {route}")
        elif target.step - version.step > max_lag:
            found.append(f"too far behind: {route}")
        elif seen is None or not (seen.ready and min(seen.ready) <= version <= max(seen.ready)):
            found.append(f"never registered so: {route}")
        elif seen.left_at is not None and route["at"] > seen.left_at + NOTICE_S:
            found.append(f"{route['at'] - seen.left_at:.1f} s after it left: {route}")
    return found


def rollout_values(shells: Shells, keys: Keys, name: str) -> Counter[str]:
    """The counters of a rollout server, from Redis."""
    with shells.client() as client:
        raw = client.get(keys.metrics("rollout", name))
    values = decode_as(MetricsSnapshot, raw).values if raw else {}
    return Counter({key: int(value) for key, value in values.items()})


def wait_until_busy(shells: Shells, keys: Keys, name: str, *, running: int, timeout_s: float = 60.0) -> int:
    """Wait until the engine reports at least this many running requests; return the number. Queries the engine."""
    deadline = time.monotonic() + timeout_s
    most = 0
    while time.monotonic() < deadline:
        info = shells.engines(keys)[name]
        try:
            with urllib.request.urlopen(info.url + "/v1/loads", timeout=5) as reply:
                now = int(json.loads(reply.read())["loads"][0]["num_running_reqs"])
        except OSError:
            now = 0
        most = max(most, now)
        if now >= running:
            return now
        time.sleep(0.005)
    raise AssertionError(f"{name} never ran {running} requests at once, but {most}")


def tree_of(pid: int) -> list[int]:
    """The node, the guard of its engine, and the engine."""
    return [pid, *descendants(pid)]


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it died with its parent
