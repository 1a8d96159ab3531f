"""Standstills: a process, an event loop or the whole machine makes no progress for a while, and then goes on."""

from __future__ import annotations

import signal
import time
from typing import ClassVar

from faults import Fault, state_of
from faults_process import _OfProcess
from ring import send

LENGTHS = (5.0, 20.0, 90.0)
ALL = "machine"


class Standstill(_OfProcess):
    """SIGSTOP of one process for 5, 20 or 90 s, longer than all leases. Of a node: the node or its engine alone."""

    name = "standstill"
    weight = 4.5
    late_s = 30.0
    targets = ("learner", "rollout-1", "rollout-2", "engine-1 node", "engine-2 engine", "retriever", "redis")
    lengths = LENGTHS
    recovery = ("lease taken again", "tasks reclaimed", "hang found", "searches retried", "Redis away and back")
    seen = ""

    @property
    def held(self) -> frozenset[str]:
        # while Redis stands still no learner can take over from another
        return frozenset({"redis", "rival"} if self.target == "redis" else {self.target.partition(" ")[0]})

    @property
    def sick(self) -> frozenset[str]:
        return self.held if self.target.endswith(" engine") else frozenset()

    def inject(self) -> bool:
        name, _, part = self.target.partition(" ")
        ward = self.ring.wards.get(name)
        if ward is None or not ward.alive or (name == "redis" and self.ring.standing):
            return False
        self.life = ward.life
        tree = self.ring.tree(self.life)
        if part == "engine" and len(tree) < 3:
            return False  # the node is starting it
        self.pid, self.at = (tree[-1] if part == "engine" else self.life.pid), time.monotonic()
        send(self.pid, signal.SIGSTOP)
        self.ring.standing.add(name)
        self.ring.prolong(self.seconds, name)  # it may be stopped between its last words and its end
        if name == "redis":  # whoever starts meanwhile may give up
            for other in self.ring.wards:
                self.ring.excuse(other, self.name, self.seconds + 20, starts_only=True)
        return True

    def tick(self) -> None:
        if state_of(self.pid) == "T":
            self.seen = f"process {self.pid} in state T for {time.monotonic() - self.at:.1f} s"

    @property
    def over(self) -> bool:
        return state_of(self.pid) in ("", "Z")  # another one ended it: its node, or the user of a second learner

    def heal(self) -> None:
        self.ring.standing.discard(self.target.partition(" ")[0])
        send(self.pid, signal.SIGCONT)

    def happened(self) -> str:
        return self.seen


class Suspended(Fault):
    """SIGSTOP of every process at once, Redis and the engines too, then SIGCONT: a machine that was suspended."""

    name = "suspended machine"
    weight = 0.3
    targets = (ALL,)
    lengths = LENGTHS
    exclusive = True
    late_s = 30.0
    recovery = ("lease taken again", "tasks reclaimed", "searches retried", "Redis away and back")
    seen = ""
    sick: ClassVar[frozenset[str]] = frozenset()  # type: ignore[assignment]
    """To a server on the same machine no engine was silent."""

    def inject(self) -> bool:
        if self.ring.standing & {"redis"}:
            return False
        self.ring.standing.add(ALL)
        self.at = time.monotonic()
        self.stopped = [pid for pid in self.ring.everything() if state_of(pid) not in ("", "T", "Z")]
        for pid in self.stopped:
            send(pid, signal.SIGSTOP)
        return bool(self.stopped)

    def tick(self) -> None:
        if all(state_of(pid) in ("T", "", "Z") for pid in self.stopped):
            self.seen = f"{len(self.stopped)} processes in state T for {time.monotonic() - self.at:.1f} s"

    def heal(self) -> None:
        for pid in self.stopped:
            send(pid, signal.SIGCONT)
        self.ring.standing.discard(ALL)

    def happened(self) -> str:
        return self.seen


class BlockedLoop(_OfProcess):
    """Block the event loop of a rollout server, longer than it lets engines be silent (hooks.py)."""

    name = "blocked event loop"
    weight = 1.5
    targets = ("rollout-1", "rollout-2")
    lasts = (2.0, 12.0)
    recovery = ("tasks reclaimed", "searches retried", "failovers", "leases lost", "Redis away and back")

    def inject(self) -> bool:
        if not self.ready() or not self.life.text:
            return False
        (self.ring.hooks / f"{self.target}.block").write_text(f"{self.seconds:.3f}")
        self.before = self.life.text.count("the event loop stood still")
        return self.life.send(signal.SIGUSR1)

    def happened(self) -> str:
        lines = [line for line in self.life.text.splitlines() if "the event loop stood still" in line]
        return lines[-1] if len(lines) > self.before else ""
