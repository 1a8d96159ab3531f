"""Count how often each recovery path was taken, from the logs of every life and the counters of the processes.

A path is a log line or counter of the product that shows its reaction to a fault. Together with the evidence of the
faults it shows that a run without losses had faults to recover from.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import dataclass, field

from ring import Ring
from wholeness import Wholeness

from protocol.codec import decode_as
from protocol.errors import ProtocolError
from protocol.messages import MetricsSnapshot


@dataclass(frozen=True)
class Said:
    """A path that a log shows: kind of process and pattern (group 1, if any, is the number of times)."""

    kind: str
    words: str


MADE_ROOM = "a starving learner made room"
LOGS: dict[str, tuple[Said, ...]] = {
    "resumed from a checkpoint": (Said("learner", r"resuming from "),),
    "taken over from the dead": (Said("learner", r"taking over from .* which has ended"),),
    "pending groups taken over": (Said("learner", r"took over (\d+) pending entries"),),
    "state made again": (Said("learner", r"repairing the run in Redis: (?:NO|UNBLOCKED|.*(?:not found|no such))"),),
    "lease taken again": (Said("learner", r"repairing the run in Redis: (?:the lease|FENCED)"),),
    "seqs found nowhere, issued again": (Said("learner", r"reissuing (\d+) lost seqs"),),
    "fenced": (Said("learner", r"^(?:error: )?fenced: "),),
    "second learner refused": (Said("second", r"is held by "),),
    "disk refused a checkpoint": (Said("learner", r"checkpoint of step \d+ remains current"),),
    "disk refused weights or journal": (Said("learner", r"^(?:error: )?cannot write (?:the weights|step)"),),
    "disk refused a start": (
        Said("learner", r"^(?:error: )?.*(?:cannot be written|could not be written|No space left)"),
    ),
    "descriptors used up": (Said("", r"Too many open files"),),
    "dead letters": (Said("learner", r"is unusable"), Said("rollout", r"cannot read task")),
    "Redis away and back": (
        Said("rollout", r"recovered after \d+ failures"),
        Said("engine", r"recovered after \d+ failures"),
        Said("learner", r"waiting for Redis|Redis is unavailable"),
    ),
    MADE_ROOM: (Said("learner", r"Redis is full and no batch arrives"),),
    "leases lost": (Said("rollout", r"lost the lease on seq \d+"),),
    "tasks released": (Said("rollout", r"releasing the task of seq"),),
    "groups dropped as poison": (Said("rollout", r"dropping seq \d+ as poison"),),
    "weights refused": (Said("engine", r"cannot be verified"),),
    "hang found": (Said("engine", r"hung"),),
    "engine restarted by its node": (Said("engine", r"restart"),),
}
COUNTERS = {
    "reclaimed": "tasks reclaimed",
    "duplicates": "duplicate publications refused",
    "failovers": "failovers",
    "search_retries": "searches retried",
}
"""Counters of rollout servers -> paths."""
LETTERS = {"poison": "batch set aside"}
"""Reasons of dead letters -> paths."""
LEARNER_COUNTERS = {"duplicates": "duplicate groups refused", "redelivered": "groups read again"}


def from_logs(ring: Ring) -> Counter[str]:
    """Paths shown by logs."""
    found: Counter[str] = Counter()
    for path in sorted(ring.logs.glob("*.log")):
        text = path.read_text(errors="replace")
        for name, sayings in LOGS.items():
            for said in sayings:
                if path.name.startswith(said.kind):
                    for match in re.finditer(said.words, text, re.MULTILINE):
                        found[name] += int(match[1]) if match.groups() and match[1] else 1
    found["lease taken again"] = max(0, found["lease taken again"] - found["fenced"])  # it retries, and finds another
    letters = ring.run_dir / "dead_letters.jsonl"
    text = letters.read_text() if letters.exists() else ""
    found.update({path: text.count(f'"reason": "{reason}') for reason, path in LETTERS.items()})
    found["restarted"] = sum(max(0, len(ward.lives) - 1) for ward in ring.wards.values())
    return found


@dataclass
class Observer:
    """Read the processes' counters from Redis twice a second, in a thread, and add up their increments; also the
    highest seq ever issued, which a wiped Redis loses. `with Observer(ring)`.
    """

    ring: Ring
    counts: Counter[str] = field(default_factory=Counter)
    issued: int = 0
    refused: int = 0
    """Commands that Redis refused for lack of memory, in all of its lives."""
    _refused: int = 0
    _before: dict[tuple[str, str], float] = field(default_factory=dict)
    _published: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wholeness = Wholeness(self.ring)

    def __enter__(self) -> Observer:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.4):
            self.issued = max(self.issued, self.ring.issued())
            stats = self.ring.ask(lambda db: db.info("errorstats"), {})
            refused = int(stats.get("errorstat_OOM", {}).get("count", 0))
            self.refused += refused - (self._refused if refused >= self._refused else 0)
            self._refused = refused
            for name in self.ring.wards:
                kind = name.partition("-")[0]
                if kind in ("rollout", "learner"):
                    self._read(name, "rollout" if kind == "rollout" else "learner")
            self.wholeness.look(self._published)

    def _read(self, name: str, kind: str) -> None:
        key = self.ring.keys.metrics(kind, name if kind == "rollout" else "0")
        raw = self.ring.ask(lambda db: db.get(key))
        if not raw:
            return
        try:
            values = decode_as(MetricsSnapshot, raw).values
        except ProtocolError:
            return
        if kind == "rollout":
            self._published[name] = values.get("groups_published", 0.0)
        for counter, path in (COUNTERS if kind == "rollout" else LEARNER_COUNTERS).items():
            now, before = float(values.get(counter, 0)), self._before.get((name, counter), 0.0)
            # less than before: another life, which started at 0 (or with its checkpoint's count)
            self.counts[path] += int(now - before if now >= before else (now if kind == "rollout" else 0))
            self._before[name, counter] = now

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)
