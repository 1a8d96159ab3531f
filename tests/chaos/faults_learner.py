"""Faults of the learner: a full disk, a second learner, a pause during which another learner takes over."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress

from faults import AFTER_S, Fault, state_of
from processes import Life


class DiskFull(Fault):
    """Limit the size of the learner's files (RLIMIT_FSIZE of the running process), so that writes fail. With a small
    limit weights and journal fail too, and it stops with an error; with a larger one only checkpoints fail.
    """

    name = "disk full"
    weight = 2.0
    lasts = (14.0, 14.0)
    lingers_s = 40.0
    recovery = ("disk refused a checkpoint", "disk refused weights or journal")

    def inject(self) -> bool:
        ward = self.ring.wards["learner"]
        weights = sorted((self.ring.run_dir / "weights").glob("v*/model.safetensors"))
        if not ward.alive or not weights:
            return False
        self.life = ward.life
        # a checkpoint's files are a little longer than the weights
        self.limit = 4096 if self.rng.random() < 0.3 else weights[-1].stat().st_size + 100
        self.excuse_learner()
        with suppress(ProcessLookupError):
            resource.prlimit(self.life.pid, resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))
            return True
        return False

    def heal(self) -> None:
        if self.life.status is None:
            with suppress(ProcessLookupError):
                resource.prlimit(self.life.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.ring.limit_excuses("learner", self.name, AFTER_S)

    @property
    def over(self) -> bool:
        return bool(self.happened())

    def happened(self) -> str:
        refused = [line for line in self.life.text.splitlines() if "File too large" in line]
        return f"limit {self.limit}: {refused[-1][-120:]}" if refused else ""


class _Rival(Fault):
    """A second learner, and the outcome for both."""

    recovery = ("fenced",)
    lasts = (12.0, 12.0)

    @property
    def held(self) -> frozenset[str]:
        return frozenset({self.target, "rival"})

    def launch(self, *arguments: str) -> Life | None:
        """Start it in the ward of the learner, whose present process is supervised until it ends."""
        ward = self.ring.wards["learner"]
        if not ward.alive or "begins at step" not in ward.life.text:
            return None
        old, log = ward.life, ward.next_log()
        self.excuse_learner()
        self.rival = ward.adopt(self.ring.launch("learner", "learner", log, *arguments), log)
        return old


class SecondLearner(_Rival):
    """Start a learner where one runs: it must refuse, and name the holder of the run."""

    name = "second learner"
    weight = 2.0

    recovery = ("second learner refused",)

    @property
    def held(self) -> frozenset[str]:
        # while the first cannot renew its lease, the second may take it
        return frozenset({"learner", "link learner", "redis"})

    def inject(self) -> bool:
        ward = self.ring.wards["learner"]
        if not ward.alive or "begins at step" not in ward.life.text:
            return False
        self.start()
        return True

    def start(self) -> None:
        """Start the second one, beside the ward."""
        self.log = self.ring.logs / f"second.{len(list(self.ring.logs.glob('second.*'))) + 1:04d}.log"
        self.excuse_learner()
        self.pid = self.ring.launch("second", "learner", self.log)
        self.handle = os.pidfd_open(self.pid)
        self.status: int | None = None

    def tick(self) -> None:
        self.status = self.ring.zygote.ended(self.pid)

    @property
    def over(self) -> bool:
        return self.status is not None

    def heal(self) -> None:
        # it acquired a free lease (a wiped Redis) and is the learner now: only one may remain in the end
        if self.ring.zygote.ended(self.pid) is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        os.close(self.handle)

    def happened(self) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "exit status 2: the run is held" if self.status == 2 and "is held by" in text else ""


class Takeover(_Rival):
    """Start a learner with --takeover: the previous one is fenced, and exits with 75."""

    name = "takeover"
    weight = 1.5

    def inject(self) -> bool:
        old = self.launch("--takeover")
        if old is None:
            return False
        self.old, old.doomed = old, self.name
        return True

    @property
    def over(self) -> bool:
        return self.old.status is not None

    def heal(self) -> None:
        if self.old.status is None:
            self.ring.finding("a learner that was taken over from goes on", self.old.log)
            self.old.send(signal.SIGKILL)

    def happened(self) -> str:
        return "the old one ended with 75" if self.old.status == 75 else ""


class Woken(_Rival):
    """Pause the learner until its lease expires and another one starts; then resume it: it must exit with 75."""

    name = "woken learner"
    weight = 1.5
    lasts = (16.0, 16.0)
    woken = False

    def inject(self) -> bool:
        ward = self.ring.wards["learner"]
        if not ward.alive or "begins at step" not in ward.life.text:
            return False
        ward.life.send(signal.SIGSTOP)
        old = self.launch()
        if old is None:
            ward.life.send(signal.SIGCONT)
            return False
        self.old, old.doomed, self.seen = old, self.name, ""
        return True

    def tick(self) -> None:
        if state_of(self.old.pid) == "T":
            self.seen = "T"
        if not self.woken and ("begins at step" in self.rival.text or self.rival.status is not None):
            self.woken = self.old.send(signal.SIGCONT)

    @property
    def over(self) -> bool:
        return self.old.status is not None

    def heal(self) -> None:
        self.old.send(signal.SIGCONT)

    def happened(self) -> str:
        return "it slept, woke and ended with 75" if self.old.status == 75 and self.seen == "T" else ""
