"""Faults of the host for one process: a wall clock that jumps, no file descriptor left, no space on the disk."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from contextlib import suppress
from datetime import datetime

from disk import mountable
from faults import Fault
from faults_process import _OfProcess
from ring import FAKETIME

STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d", re.M)
JUMPS = (20, 3600, -40, -3600, 86400)
REDIS_JUMPS = (20, 60, -30)
"""Of Redis, which measures by its wall clock how long a task is leased: one that was leased before a jump back is taken
over later by as much."""
FAR_S = 15.0


class ClockJumps(_OfProcess):
    """The wall clock of one process jumps by up to a day, forward and back, with libfaketime: it is killed and started
    with the library. Its monotonic clock and all other clocks stay.
    """

    name = "clock jumps"
    weight = 1.0
    targets = ("learner", "rollout-2", "engine-1", "redis")
    lasts = (25.0, 30.0)
    recovery = ("restarted",)
    seen, offset, next_at = "", 0, 0.0

    @classmethod
    def lacking(cls) -> str:
        return "" if FAKETIME.exists() else f"{FAKETIME} is absent: apt-get install libfaketime"

    def inject(self) -> bool:
        if not self.ready():
            return False
        self.file = self.ring.hooks / f"{self.target}.clock"
        self.file.write_text("+0\n")
        self.ring.clocks[self.target] = self.file
        self.life.doomed, self.began = self.name, time.time()
        return self.life.send(signal.SIGKILL)

    def tick(self) -> None:
        ward = self.ring.wards[self.target]
        if ward.life is self.life or not ward.alive or time.monotonic() < self.next_at:
            return
        self.seen = self.seen or self._differs(ward.life.text)
        jumps = REDIS_JUMPS if self.target == "redis" else JUMPS
        self.offset = self.rng.choice([jump for jump in jumps if jump != self.offset])
        self._set(self.offset)
        self.next_at = time.monotonic() + self.rng.uniform(2.0, 4.0)

    def _differs(self, text: str) -> str:
        if self.target == "redis":
            now = self.ring.ask(lambda db: db.time())
            apart = abs(now[0] - time.time()) if now else 0.0
            return f"TIME of Redis differs by {apart:.0f} s" if apart > FAR_S else ""
        for stamp in STAMP.findall(text):
            at = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S").timestamp()
            if not self.began - FAR_S < at < time.time() + FAR_S:
                return f"it logs at {stamp}"
        return ""

    def _set(self, seconds: int) -> None:
        part = self.file.with_suffix(".part")
        part.write_text(f"{seconds:+d}\n")
        part.replace(self.file)

    def heal(self) -> None:
        self.seen = self.seen or self._differs(self.ring.wards[self.target].life.text)
        self._set(0)
        self.ring.clocks.pop(self.target, None)  # from its next start on

    def happened(self) -> str:
        return self.seen


class NoDescriptors(_OfProcess):
    """Lower RLIMIT_NOFILE of a running process to the number of its open files (EMFILE), then restore it."""

    name = "no descriptors"
    weight = 1.5
    lasts = (3.0, 10.0)
    recovery = ("descriptors used up", "Redis away and back", "searches retried", "failovers")
    seen = ""

    def inject(self) -> bool:
        if not self.ready() or time.time() < self.life.began + 3 or not self._begun():
            return False
        with suppress(OSError):
            self.limit = self._open() + self.rng.randint(0, 2)
            self.before = resource.prlimit(self.life.pid, resource.RLIMIT_NOFILE)
            if self.target == "learner":  # it stops with an error when it cannot write weights or journal
                self.ring.excuse("learner", self.name, self.seconds + 20)
            resource.prlimit(self.life.pid, resource.RLIMIT_NOFILE, (self.limit, self.before[1]))
            self.failed = self.life.text.count("Too many open files")
            return True
        return False

    def _begun(self) -> bool:
        return "begins at step" in self.life.text if self.target == "learner" else bool(self.life.text)

    def _open(self) -> int:
        return len(os.listdir(f"/proc/{self.life.pid}/fd"))

    def tick(self) -> None:
        with suppress(OSError):
            if not self.seen and (now := self._open()) >= self.limit:
                self.seen = f"{now} of {self.limit} descriptors in use"

    def heal(self) -> None:
        if self.life.status is None:
            with suppress(ProcessLookupError):
                resource.prlimit(self.life.pid, resource.RLIMIT_NOFILE, self.before)

    def happened(self) -> str:
        refused = self.life.text.count("Too many open files") - self.failed
        return f"{refused} times: Too many open files" if refused > 0 else self.seen


class NoSpace(Fault):
    """Fill the small file system of the run directory, up to a random rest that changes: each write may fail."""

    name = "no space"
    weight = 1.5
    targets = ("run directory",)
    lasts = (4.0, 14.0)
    recovery = ("disk refused a checkpoint", "disk refused weights or journal", "disk refused a start")
    next_at, healed = 0.0, False

    @property
    def held(self) -> frozenset[str]:
        return frozenset({"disk"})

    @classmethod
    def lacking(cls) -> str:
        return "" if mountable() else "a small file system cannot be mounted (only root may)"

    def inject(self) -> bool:
        weights = sorted((self.ring.run_dir / "weights").glob("v*/model.safetensors"))
        if not weights or not self.ring.disk.mounted:
            return False
        self.size = weights[-1].stat().st_size
        self.before = self._refused()
        self.ring.excuse("learner", self.name, self.seconds + 20)
        return True

    def tick(self) -> None:
        if time.monotonic() >= self.next_at and not self.healed:
            self.next_at = time.monotonic() + self.rng.uniform(0.5, 2.0)
            self.ring.disk.free()
            self.ring.disk.fill(self.rng.choice((0, 0, 4096, 1 << 16, self.size, 2 * self.size, 4 * self.size)))

    def heal(self) -> None:
        self.healed = True
        self.ring.disk.free()

    def _refused(self) -> int:
        return sum(life.text.count("No space left on device") for life in self.ring.lives("learner"))

    def happened(self) -> str:
        more = self._refused() - self.before
        return f"{more} times: No space left on device" if more > 0 else ""
