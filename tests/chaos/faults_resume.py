"""Faults of a learner that stops or starts: killed in a checkpoint, a rival during its resume, a batch that ends it."""

from __future__ import annotations

import json
import signal
import threading
import time
from contextlib import suppress

from faults import Fault
from faults_learner import SecondLearner
from ring import LEASE_S


class KillInCheckpoint(Fault):
    """SIGKILL of the learner while it writes a checkpoint: its unfinished folder remains."""

    name = "kill in checkpoint"
    weight = 1.5
    lasts = (14.0, 14.0)
    recovery = ("resumed from a checkpoint",)
    left = ""

    def inject(self) -> bool:
        ward = self.ring.wards["learner"]
        if not ward.alive:
            return False
        self.life, self.folder = ward.life, self.ring.run_dir / "checkpoints"
        self._over, wait_s = threading.Event(), self.rng.uniform(0.0, 0.02)
        self._thread = threading.Thread(target=self._watch, args=(wait_s,), name="killer", daemon=True)
        self._thread.start()
        return True

    def _watch(self, wait_s: float) -> None:
        known = {path.name for path in self.folder.glob(".step_*.tmp")}
        while not self._over.wait(0.001):
            if new := [path for path in self.folder.glob(".step_*.tmp") if path.name not in known]:
                time.sleep(wait_s)
                if not new[0].exists():
                    continue  # it was quicker: the next one
                self.life.doomed = self.name
                self.life.send(signal.SIGKILL)
                time.sleep(0.05)
                self.left = new[0].name if new[0].exists() else ""
                return

    @property
    def over(self) -> bool:
        return self.life.status is not None

    def heal(self) -> None:
        self._over.set()
        self._thread.join(5)

    def happened(self) -> str:
        return f"exit status -9, {self.left} is left" if self.left and self.life.status == -signal.SIGKILL else ""


class SecondInResume(SecondLearner):
    """Kill the learner, and start a second one while the next life verifies its checkpoint for longer than its lease:
    the second must be refused, and the first must train on.
    """

    name = "second in resume"
    weight = 1.0
    lasts = (40.0, 40.0)
    recovery = ("second learner refused",)
    slow_s = LEASE_S + 3.5
    loading = 0.0
    launched = False

    def inject(self) -> bool:
        ward = self.ring.wards["learner"]
        if not ward.alive or "begins at step" not in ward.life.text or not self.ring.manifest():
            return False
        self.old, self.flag = ward.life, self.ring.hooks / "learner.slow_load"
        self.flag.write_text(str(self.slow_s))
        self.old.doomed, self.status = self.name, None
        self.excuse_learner()
        return self.old.send(signal.SIGKILL)

    def tick(self) -> None:
        if not self.launched:  # afterwards it is the life whose load the second one met, though others may follow
            self.new = self.ring.wards["learner"].life
        if self.new is self.old:
            return
        if not self.loading and "verifying the checkpoint takes" in self.new.text:
            self.loading = time.monotonic()
        elif self.loading and not self.launched and time.monotonic() > self.loading + LEASE_S + 1.0:
            self.launched = True
            self.start()
        if self.launched:
            super().tick()

    @property
    def over(self) -> bool:
        return self.status is not None and (self.new.status is not None or "begins at step" in self.new.text)

    def heal(self) -> None:
        self.flag.unlink(missing_ok=True)
        if self.launched:
            super().heal()
            # one that another fault ended (a full disk) leaves the run to the second; 75: it was fenced
            if not super().happened() and self.new.status in (None, 75):
                self.ring.finding(f"a second learner during a resume ended with {self.status}, not refused", self.log)

    def happened(self) -> str:
        if not self.launched or self.status is None:
            return ""
        return f"a second one ended with {self.status}, {LEASE_S + 1.0} s after the first began to verify"


class DeadlyBatch(Fault):
    """Training the batch of a certain seq ends the learner, at every start, until the batch is set aside (hooks.py)."""

    name = "deadly batch"
    weight = 0.4
    lasts = (75.0, 75.0)
    recovery = ("batch set aside",)

    def inject(self) -> bool:
        self.seq = self.ring.issued() + 1
        ward = self.ring.wards["learner"]
        if self.seq < 2 or not ward.alive:
            return False
        self.file = self.ring.hooks / "learner.deadly"
        self.file.write_text(str(self.seq))
        self.excuse_learner()
        return True

    @property
    def over(self) -> bool:
        return self.dead_letter() != ""

    def dead_letter(self) -> str:
        """Return the reason for which the seq was set aside, "" if it was not."""
        with suppress(OSError):
            for line in (self.ring.run_dir / "dead_letters.jsonl").read_text().splitlines():
                with suppress(ValueError):
                    found = json.loads(line)
                    if int(found.get("seq") or 0) == self.seq and "poison" in found["reason"]:
                        return str(found["reason"])
        return ""

    def heal(self) -> None:
        self.file.unlink(missing_ok=True)

    def happened(self) -> str:
        line = f"training seq {self.seq} ends this process"
        ends = [life.status for life in self.ring.lives("learner") if life.status is not None and line in life.text]
        return f"seq {self.seq}: {len(ends)} lives ended with {set(ends)}" if ends else ""
