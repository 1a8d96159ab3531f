"""Faults of the host for one process: a wall clock that jumps, no file descriptor left, no space on the disk."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import time
from contextlib import suppress

from disk import mountable
from faults import AFTER_S, Fault
from faults_process import _OfProcess
from hooks import FAR_S, JUMPED
from ring import FAKETIME

JUMPS = (20, 3600, -40, -3600, 86400)
REDIS_JUMPS = (20, 60, -30)
"""Of Redis, which measures by its wall clock how long a task is leased: one that was leased before a jump back is taken
over later by as much."""


class ClockJumps(_OfProcess):
    """The wall clock of one process jumps by up to a day, forward and back, with libfaketime: it is killed and started
    with the library. Its monotonic clock and all other clocks stay.
    """

    name = "clock jumps"
    weight = 1.0
    targets = ("learner", "rollout-2", "engine-1", "redis")
    late_s = 20.0
    lasts = (70.0, 70.0)  # most of it for its start, which imports everything
    recovery = ("restarted",)
    seen, offset, next_at, jumps, most = "", 0, 0.0, 0, 6

    @classmethod
    def lacking(cls) -> str:
        return "" if FAKETIME.exists() else f"{FAKETIME} is absent: apt-get install libfaketime"

    def inject(self) -> bool:
        if not self.ready():
            return False
        self.file = self.ring.hooks / f"{self.target}.clock"
        self.file.write_text("+0\n")
        self.ring.clocks[self.target] = self.file
        self.life.doomed = self.name
        return self.life.send(signal.SIGKILL)

    def tick(self) -> None:
        ward = self.ring.wards[self.target]
        text = "" if ward.life is self.life or not ward.alive else ward.life.text
        if not text or time.monotonic() < self.next_at or (self.target == "learner" and "begins at step" not in text):
            return
        self.seen = self.seen or self._differs(text)
        self.jumps += 1
        jumps = REDIS_JUMPS if self.target == "redis" else JUMPS
        self.offset = self.rng.choice([jump for jump in jumps if jump != self.offset])
        self._set(self.offset)
        self.next_at = time.monotonic() + self.rng.uniform(2.0, 4.0)

    @property
    def over(self) -> bool:
        return self.jumps > self.most

    def _differs(self, text: str) -> str:
        if self.target == "redis":
            now = self.ring.ask(lambda db: db.time())
            apart = abs(now[0] - time.time()) if now else 0.0
            return f"TIME of Redis differs by {apart:.0f} s" if apart > FAR_S else ""
        return next((line for line in text.splitlines() if JUMPED in line), "")

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
    """Lower RLIMIT_NOFILE of a running process to its open files and at most two more (EMFILE), then restore it."""

    name = "no descriptors"
    weight = 1.5
    lasts = (3.0, 10.0)
    lingers_s = 40.0
    recovery = ("descriptors used up", "Redis away and back", "searches retried", "failovers")
    seen = ""

    def inject(self) -> bool:
        if not self.ready() or time.time() < self.life.began + 3 or not self._begun():
            return False
        with suppress(OSError):
            self.limit = self._lowest_free() + self.rng.randint(0, 2)
            self.before = resource.prlimit(self.life.pid, resource.RLIMIT_NOFILE)
            if self.target == "learner":  # it stops with an error when it cannot write weights or journal
                self.excuse_learner()
            resource.prlimit(self.life.pid, resource.RLIMIT_NOFILE, (self.limit, self.before[1]))
            self.failed = self.life.text.count("Too many open files")
            return True
        return False

    def _begun(self) -> bool:
        return "begins at step" in self.life.text if self.target == "learner" else bool(self.life.text)

    def _lowest_free(self) -> int:
        used = {int(name) for name in os.listdir(f"/proc/{self.life.pid}/fd")}
        return next(number for number in itertools.count() if number not in used)

    def tick(self) -> None:
        with suppress(OSError):
            if not self.seen and self._lowest_free() >= self.limit:
                self.seen = f"all {self.limit} descriptors in use"

    def heal(self) -> None:
        if self.life.status is None:
            with suppress(ProcessLookupError):
                resource.prlimit(self.life.pid, resource.RLIMIT_NOFILE, self.before)
        self.ring.limit_excuses("learner", self.name, AFTER_S)

    def happened(self) -> str:
        refused = self.life.text.count("Too many open files") - self.failed
        return f"{refused} times: Too many open files" if refused > 0 else self.seen


class NoSpace(Fault):
    """Fill the small file system of the run directory, up to a random rest that changes: each write may fail."""

    name = "no space"
    weight = 1.5
    targets = ("run directory",)
    lasts = (4.0, 14.0)
    lingers_s = 40.0
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
        self.excuse_learner()
        return True

    def tick(self) -> None:
        if time.monotonic() >= self.next_at and not self.healed:
            self.next_at = time.monotonic() + self.rng.uniform(0.5, 2.0)
            self.ring.disk.free()
            self.ring.disk.fill(self.rng.choice((0, 0, 4096, 1 << 16, self.size, 2 * self.size, 4 * self.size)))

    def heal(self) -> None:
        self.healed = True
        self.ring.disk.free()
        self.ring.limit_excuses("learner", self.name, AFTER_S)

    def _refused(self) -> int:
        return sum(life.text.count("No space left on device") for life in self.ring.lives("learner"))

    def happened(self) -> str:
        more = self._refused() - self.before
        return f"{more} times: No space left on device" if more > 0 else ""
