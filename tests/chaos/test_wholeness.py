"""Ejections of engines are judged by the faults of that moment; recoveries are measured from the end of a fault."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attacks import KINDS
from battle import Battle, Injected
from processes import Life
from ring import Ring
from schedule import Planned
from wholeness import GRACE_S, Wholeness, ejections

from protocol.codec import encode
from protocol.keys import Keys
from protocol.messages import EngineInfo, NodeState


def injected(kind: str, target: str, began: float, ended: float) -> Injected:
    planned = Planned(0.0, kind, target, ended - began, 1)
    fault = KINDS[kind](SimpleNamespace(), target, planned.seconds, random.Random(1))  # type: ignore[arg-type]
    return Injected(planned, fault, 0.0, healed=True, began=began, ended=ended)


@pytest.mark.parametrize(
    ("kind", "target", "engine", "healthy"),
    [
        ("standstill", "engine-2 engine", "engine-2", False),
        ("standstill", "engine-2 engine", "engine-1", True),
        ("standstill", "engine-1 node", "engine-1", True),
        ("standstill", "rollout-1", "engine-1", True),
        ("suspended machine", "machine", "engine-1", True),
        ("no descriptors", "rollout-1", "engine-1", True),
        ("kill", "engine-1", "engine-1", False),
    ],
)
def test_an_ejection_is_excused_only_by_a_fault_of_that_engine(
    kind: str, target: str, engine: str, healthy: bool
) -> None:
    fault = injected(kind, target, 100.0, 120.0)
    log = "\n".join(f"chaos: {at} ejected {engine}/ab12: ('stalled',)" for at in (110.0, 120.0 + GRACE_S / 2))
    found = ejections([("rollout-1.0001.log", log)], [fault])
    assert (len(found.healthy), found.faulty) == ((2, 0) if healthy else (0, 2))
    assert found.by_kind == ({kind: 2} if healthy else {})
    late = f"chaos: {120.0 + GRACE_S + 1} ejected {engine}/ab12: ('stalled',)"
    assert len(ejections([("rollout-1.0001.log", late)], [fault]).healthy) == 1


def test_a_suspended_server_may_notice_an_engine_failure_late() -> None:
    killed, slept = injected("kill", "engine-1", 100.0, 101.0), injected("standstill", "rollout-1", 95.0, 185.0)
    log = "chaos: 185.5 ejected engine-1/ab12: ('unreachable',)"
    for name, faults, faulty in (
        ("rollout-1.0001.log", [killed, slept], 1),
        ("rollout-2.0001.log", [killed, slept], 0),
        ("rollout-1.0001.log", [slept], 0),
        ("rollout-1.0001.log", [injected("kill", "engine-1", 60.0, 61.0), slept], 0),
    ):
        assert ejections([(name, log)], faults).faulty == faulty


class Watched(KINDS["no space"]):  # type: ignore[misc]
    """Full until it is healed; witnessed at the look `ring.slow`."""

    lingers_s, looks = 30.0, 0

    def inject(self) -> bool:
        return True

    def tick(self) -> None:
        self.looks += 1

    def heal(self) -> None:
        self.ring.healed_after = self.looks

    def happened(self) -> str:
        return "seen" if self.looks >= self.ring.slow else ""


@pytest.mark.parametrize(("slow", "least", "most"), [(1, 1, 50), (60, 60, 61)])
def test_a_fault_lasts_until_it_is_witnessed(monkeypatch: pytest.MonkeyPatch, slow: int, least: int, most: int) -> None:
    began = time.monotonic()

    class Quick:
        healed_after = 0
        now = property(lambda self: time.monotonic() - began)

        def supervise(self) -> None:
            """No process ends."""

    ring: Any = Quick()
    ring.slow = slow
    monkeypatch.setitem(KINDS, "no space", Watched)
    monkeypatch.setattr("battle.TICK_S", 0.002)
    battle = Battle(ring, lambda _: None)
    battle.run([Planned(0.0, "no space", "run directory", 0.02, 1)], 0.02)
    assert battle.witnessed == battle.done == {"no space": 1} and least <= ring.healed_after <= most


def test_an_end_that_a_standstill_delays_is_explained() -> None:
    now = time.time()
    ring: Any = SimpleNamespace(excuses={name: [(now + 5, "no space", 0.0)] for name in ("learner", "rollout-1")})
    late = {name: Life(name, 1, 1, -1, Path("x"), began=now, ended=now + 90) for name in ring.excuses}
    assert not any(Ring.explained(ring, life) for life in late.values())
    Ring.prolong(ring, 90, "learner")
    assert Ring.explained(ring, late["learner"]) and not Ring.explained(ring, late["rollout-1"])
    Ring.prolong(ring, 90)
    assert Ring.explained(ring, late["rollout-1"])
    for reason, left in (("another", True), ("no space", False)):
        Ring.limit_excuses(ring, "learner", reason, 5)
        late["learner"].doomed = ""
        assert Ring.explained(ring, late["learner"]) == left


class FakeRing:
    """Processes that run, and engines that are READY."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.keys = folder, Keys("demo")
        self.wards = {name: SimpleNamespace(alive=True) for name in ("redis", "learner", "rollout-1", "engine-1")}
        self.state, self.standing = NodeState.READY, set[str]()

    def ask(self, _: Callable[[Any], Any]) -> bytes:
        return encode(EngineInfo(id="engine-1", url="http://e", state=self.state))

    def step(self) -> None:
        with (self.run_dir / "metrics.jsonl").open("a") as file:
            file.write("{}\n")


def test_the_ring_is_whole_when_every_part_has_made_progress(tmp_path: Path) -> None:
    ring = FakeRing(tmp_path)
    now = time.monotonic()
    whole = Wholeness(ring, [injected("kill", "rollout-1", now - 3, now - 2)])  # type: ignore[arg-type]
    ring.step()
    whole.look({"rollout-1": 1.0})
    assert whole.by_kind()["kill"]["undisturbed"] == 1 and not whole.pending

    ended = time.monotonic() + 0.01
    later = injected("kill", "rollout-1", ended - 1, ended)
    whole = Wholeness(ring, [later])  # type: ignore[arg-type]
    whole.look({"rollout-1": 1.0})
    time.sleep(0.02)
    for part in ("nothing", "step", "engine", "process"):
        ring.state = NodeState.SYNCING if part == "engine" else NodeState.READY
        ring.wards["rollout-1"].alive = part != "process"
        if part == "step":
            ring.step()
        whole.look({"rollout-1": 1.0 if part in ("nothing", "step") else 2.0})
        assert whole.pending, part
    ring.wards["rollout-1"].alive = True
    whole.look({"rollout-1": 2.0})
    assert not whole.pending and whole.recoveries[0].seconds


def test_what_another_fault_holds_is_not_asked_for(tmp_path: Path) -> None:
    ring = FakeRing(tmp_path)
    ended = time.monotonic()
    other = injected("standstill", "learner", ended - 1, 0.0)
    other.healed = False
    whole = Wholeness(ring, [injected("kill", "rollout-1", ended - 1, ended), other])  # type: ignore[arg-type]
    ring.standing = {"redis"}
    whole.look({})
    assert whole.recoveries[0].seconds is None, "nothing can be seen"
    ring.standing = {"learner"}
    whole.look({})
    assert whole.recoveries[0].seconds is not None and whole.recoveries[0].disturbed
    assert whole.by_kind()["kill"]["undisturbed"] == 0 and whole.pending, "the other one lasts"
