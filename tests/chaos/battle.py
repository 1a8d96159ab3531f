"""Run a schedule of faults against a ring: inject, witness, heal and record each."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from attacks import KINDS
from faults import Fault
from ring import Ring
from schedule import Planned

Say = Callable[[str], None]
LATE_S = 4.0
"""Seconds after which a fault is skipped that cannot be injected (its target is down, or in another fault)."""
LAST_S = 40.0
"""Seconds after the end of the schedule at which faults that still last are ended."""
TICK_S = 0.02


@dataclass
class Injected:
    """An injected fault."""

    planned: Planned
    fault: Fault
    until: float
    healed: bool = False
    evidence: str = ""
    done_at: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    """Monotonic; `ended` 0 until it is healed."""

    @property
    def kind(self) -> str:
        return self.planned.kind


@dataclass
class Battle:
    """Runs a schedule. `injected` and `left_out` are its record; `run` returns when the last fault is healed."""

    ring: Ring
    say: Say
    injected: list[Injected] = field(default_factory=list)
    left_out: list[Planned] = field(default_factory=list)
    late_s: float = LATE_S

    def run(self, planned: Sequence[Planned], seconds: float) -> None:
        """Consume the schedule until `seconds` have passed since the ring's beginning; produce faults."""
        waiting = list(planned)
        while self.ring.now < seconds or waiting or any(not item.healed for item in self.injected):
            self.ring.supervise()
            now = self.ring.now
            for item in [p for p in waiting if p.at <= now]:
                if self._try(item):
                    waiting.remove(item)
                elif now > item.at + max(self.late_s, KINDS[item.kind].late_s):
                    waiting.remove(item)
                    self.left_out.append(item)
            self._look(force=now >= seconds + max(LAST_S, self.late_s) and not waiting)
            time.sleep(TICK_S)

    def settle(self, seconds: float) -> None:
        """Wait for slow evidence (an exit status, a line in a log)."""
        self.ring.until(lambda: self._look() or all(i.evidence for i in self.injected if i.fault.patience_s), seconds)

    def _try(self, item: Planned) -> bool:
        fault = KINDS[item.kind](self.ring, item.target, item.seconds, random.Random(item.salt))
        busy = {held for other in self.injected if not other.healed for held in other.fault.held}
        alone = any(other.fault.exclusive for other in self.injected if not other.healed)
        if alone or fault.held & busy or not fault.inject():
            return False
        until = self.ring.now + item.seconds
        done = Injected(item, fault, until, done_at=self.ring.now, began=time.monotonic())
        if fault.exclusive:
            self.ring.prolong(item.seconds)
            for other in self.injected:
                other.until += 0.0 if other.healed else item.seconds
        self.injected.append(done)
        lasting = f", {item.seconds:.1f} s" if item.seconds else ""
        self.say(f"{self.ring.now:7.2f} s  {item.kind} {item.target}{lasting}")
        return True

    def _look(self, *, force: bool = False) -> None:
        now = self.ring.now
        for item in self.injected:
            if item.healed and (item.evidence or now > item.until + item.fault.patience_s):
                continue
            item.fault.tick()
            until = item.until + (0.0 if item.evidence else item.fault.lingers_s)
            if not item.healed and (now >= until or item.fault.over or force):
                item.fault.heal()
                item.healed, item.until = True, now
                item.ended = time.monotonic()
            item.evidence = item.evidence or item.fault.happened()

    # --- the record ---

    @property
    def done(self) -> Counter[str]:
        """Faults by kind."""
        return Counter(item.kind for item in self.injected)

    @property
    def witnessed(self) -> Counter[str]:
        """Faults by kind for which there is evidence."""
        return Counter(item.kind for item in self.injected if item.evidence)

    def blind(self) -> list[str]:
        """Kinds that were injected and never witnessed: the harness would not notice if they did nothing."""
        return sorted(kind for kind in self.done if not self.witnessed[kind])

    def unmended(self, paths: Counter[str]) -> list[str]:
        """Kinds that were witnessed and after which no path of recovery was taken."""
        return sorted(
            kind
            for kind in self.witnessed
            if KINDS[kind].recovery and not any(paths[path] for path in KINDS[kind].recovery)
        )

    def to_json(self) -> list[dict[str, object]]:
        """Every fault, with its evidence."""
        return [
            {"at": round(i.done_at, 2), "kind": i.kind, "target": i.planned.target, "evidence": i.evidence}
            for i in self.injected
        ]

    def write(self) -> None:
        """faults.jsonl in the ring's directory."""
        lines = [json.dumps(item) for item in self.to_json()]
        (self.ring.directory / "faults.jsonl").write_text("\n".join(lines) + "\n")
