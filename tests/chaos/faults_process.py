"""Faults of processes: SIGKILL, SIGSTOP for about as long as the leases, SIGTERM."""

from __future__ import annotations

import signal

from faults import Fault, state_of
from processes import Life
from ring import send

EVERY = ("learner", "rollout-1", "rollout-2", "engine-1", "engine-2", "retriever", "redis")
HANG_S = 45.0
"""Seconds after SIGTERM; a process that still runs then hangs."""


class _OfProcess(Fault):
    """A fault of a running process."""

    targets = EVERY
    life: Life

    def ready(self) -> bool:
        """Take the present life as the target; False if there is none."""
        ward = self.ring.wards.get(self.target)
        if ward is None or not ward.alive:
            return False
        self.life = ward.life
        return True


class Kill(_OfProcess):
    """SIGKILL. Of a node: the node, its engine, or both at once."""

    name = "kill"
    weight = 10.0
    recovery = ("restarted",)
    part = "process"
    victim = 0

    def inject(self) -> bool:
        if not self.ready():
            return False
        tree = self.ring.tree(self.life)
        self.part = self.rng.choice(("process", "engine", "both")) if len(tree) > 2 else "process"
        if self.part == "engine":
            self.victim = tree[-1]
            # killed in a node's first launch it looks like an engine that cannot start, which the user must fix
            self.ring.excuse(self.life.name, self.name, 10)
            send(self.victim, signal.SIGKILL)
            return True
        self.life.doomed = self.name
        if self.part == "both":
            for pid in tree[1:]:
                send(pid, signal.SIGKILL)
        return self.life.send(signal.SIGKILL)

    def happened(self) -> str:
        if self.part == "engine":
            return f"engine {self.victim} is gone" if state_of(self.victim) in ("", "Z") else ""
        return f"{self.part}: exit status -9" if self.life.status == -signal.SIGKILL else ""


class Stop(_OfProcess):
    """SIGSTOP, then SIGCONT: pause the process for less or more time than its leases. For a node: its tree, or its
    engine alone, which then hangs.
    """

    name = "stop"
    weight = 6.0
    lasts = (1.0, 7.0)
    recovery = ("lease taken again", "tasks reclaimed", "failovers", "hang found", "searches retried")
    seen = ""

    def inject(self) -> bool:
        if not self.ready():
            return False
        tree = self.ring.tree(self.life)
        self.stopped = tree[-1:] if len(tree) > 2 and self.rng.random() < 0.5 else tree
        for pid in self.stopped:
            send(pid, signal.SIGSTOP)
        return True

    def tick(self) -> None:
        if not self.seen and all(state_of(pid) == "T" for pid in self.stopped):
            self.seen = f"{len(self.stopped)} processes in state T for {self.seconds:.1f} s"

    def heal(self) -> None:
        if self.life.status is None:
            for pid in reversed(self.stopped):
                send(pid, signal.SIGCONT)

    def happened(self) -> str:
        return self.seen


class Term(_OfProcess):
    """SIGTERM: an orderly shutdown. A process that takes longer than HANG_S is a finding."""

    name = "term"
    weight = 4.0
    recovery = ("restarted",)
    patience_s = HANG_S

    def inject(self) -> bool:
        if not self.ready():
            return False
        self.life.doomed = self.name
        self.at = self.ring.now
        return self.life.send(signal.SIGTERM)

    def tick(self) -> None:
        if self.ring.standing & {"redis", "machine", self.target}:
            self.at = self.ring.now
        if self.life.status is None and self.ring.now > self.at + HANG_S - 2:
            self.ring.finding(f"{self.target} does not end {HANG_S - 2:.0f} s after SIGTERM", self.life.log)
            self.life.send(signal.SIGKILL)

    def happened(self) -> str:
        return "" if self.life.status is None else f"exit status {self.life.status}"
