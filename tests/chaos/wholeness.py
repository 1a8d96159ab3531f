"""How long the ring needs after a fault, and which engines were ejected though they were healthy.

The ring is whole again when, since the end of the fault, the learner has trained a step and every rollout server has
published a group, every process runs, and every engine is READY. What another fault holds meanwhile is not asked for:
neither steps nor groups while it holds the learner, no groups while it holds the retriever. Such a recovery is
`disturbed`, as is one during which Redis or the machine stands still, which is measured from the end of that. Figures
by kind are of undisturbed recoveries, where there are any.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from battle import Injected
from ring import Ring

from protocol.codec import decode_as
from protocol.errors import ProtocolError
from protocol.messages import EngineInfo, NodeState

BLIND = frozenset({"redis", "machine"})
"""While one of them stands still, nothing can be seen."""
EJECTED = re.compile(r"^chaos: ([\d.]+) ejected ([\w-]+)/\S+ (.*)", re.M)
GRACE_S = 25.0
"""Time after the end of a fault of an engine in which it may still be ejected: it starts, or its last requests end."""


@dataclass
class Recovery:
    """One fault that is over. `ended`: monotonic; `seconds`: until the ring was whole again; None: not yet."""

    kind: str
    target: str
    lasted: float
    ended: float
    disturbed: bool = False
    seconds: float | None = None


@dataclass
class Wholeness:
    """`look` after each reading of the counters, by one thread. `recoveries`: one of each fault that is over."""

    ring: Ring
    injected: Sequence[Injected] = ()
    recoveries: list[Recovery] = field(default_factory=list)
    _progress: dict[str, tuple[float, float]] = field(default_factory=dict)
    """process -> (its counter, when it changed last, monotonic)"""
    _taken: set[int] = field(default_factory=set)

    def look(self, counters: Mapping[str, float]) -> None:
        """counters: groups published, by rollout server."""
        now = time.monotonic()
        metrics = self.ring.run_dir / "metrics.jsonl"
        steps = float(metrics.stat().st_size) if metrics.exists() else 0.0
        for name, value in {**counters, "learner": steps}.items():
            if self._progress.get(name, (None, 0.0))[0] != value:
                self._progress[name] = value, now
        faults = list(self.injected)
        for number, item in enumerate(faults):
            if item.ended and number not in self._taken:
                self._taken.add(number)
                lasted = item.ended - item.began
                self.recoveries.append(Recovery(item.kind, item.planned.target, lasted, item.ended))
        waiting = [recovery for recovery in self.recoveries if recovery.seconds is None]
        if not waiting:
            return
        busy = {held.removeprefix("link ") for item in faults if not item.healed for held in item.fault.held}
        if self.ring.standing & BLIND:
            for recovery in waiting:
                recovery.ended, recovery.disturbed = now, True
            return
        if not self._everything_is_up(busy):
            return
        asked = {name for name in self.ring.wards if name.startswith(("rollout", "learner"))}
        seen = {
            name for name in asked - busy if "learner" not in busy and (name == "learner" or "retriever" not in busy)
        }
        for recovery in waiting:
            recovery.disturbed = recovery.disturbed or seen != asked
            if all(self._progress.get(name, (0.0, 0.0))[1] > recovery.ended for name in seen):
                recovery.seconds = now - recovery.ended

    def _everything_is_up(self, busy: set[str]) -> bool:
        wards = {name: ward for name, ward in self.ring.wards.items() if name not in busy}
        return all(ward.alive for ward in wards.values()) and all(
            self._ready(name) for name in wards if name.startswith("engine")
        )

    def _ready(self, engine: str) -> bool:
        raw = self.ring.ask(lambda db: db.hget(self.ring.keys.engine(engine), "b"))
        try:
            return raw is not None and decode_as(EngineInfo, raw).state is NodeState.READY
        except ProtocolError:
            return False

    @property
    def pending(self) -> bool:
        """Whether the ring is not whole again after some fault."""
        return len(self._taken) < len(self.injected) or any(recovery.seconds is None for recovery in self.recoveries)

    def by_kind(self) -> dict[str, dict[str, float]]:
        """Return for each kind the number of undisturbed recoveries, and the median and longest time in seconds."""
        times: defaultdict[str, dict[bool, list[float]]] = defaultdict(lambda: {False: [], True: []})
        for recovery in self.recoveries:
            if recovery.seconds is not None:
                times[recovery.kind][recovery.disturbed].append(recovery.seconds)
        return {
            kind: {
                "undisturbed": len(found[False]),
                "median": round(statistics.median(found[False] or found[True]), 1),
                "longest": round(max(found[False] or found[True]), 1),
            }
            for kind, found in sorted(times.items())
        }


@dataclass
class Ejections:
    """Ejections of engines by rollout servers: of healthy ones (each in words), and of those that a fault had hit."""

    healthy: list[str] = field(default_factory=list)
    faulty: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    """Of healthy engines, by the faults that lasted at that moment."""


def ejections(logs: Iterable[tuple[str, str]], faults: Sequence[Injected]) -> Ejections:
    """Judge the ejections in the logs (name, text) of rollout servers.

    A server that stood still learns late of an engine's fault: what happened meanwhile counts as present.
    """
    found = Ejections()
    for name, text in logs:
        server = name.partition(".")[0]
        slept = [item for item in faults if item.planned.target == server and item.kind == "standstill"]
        for at, engine, why in EJECTED.findall(text):
            when = float(at)
            near = [item.began for item in slept if item.began <= when <= (item.ended or when) + GRACE_S]
            since = min(near, default=when)
            if any(
                engine in item.fault.sick and item.began <= when and since <= (item.ended or when) + GRACE_S
                for item in faults
            ):
                found.faulty += 1
                continue
            during = sorted({i.kind for i in faults if i.began <= when <= (i.ended or when) + GRACE_S})
            found.healthy.append(f"{name} ejected {engine}: {why}")
            found.by_kind.update(during)
    return found
