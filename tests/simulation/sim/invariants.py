"""The invariants of every schedule, checked at every move from outside the product.

They depend only on the commands to Redis, the files on disk, and the seqs that the policy was trained on. Each counts
its checks, which shows that it was tested.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from sim.clock import Clock, Process
from sim.sim_redis import SimRedis
from sim.streams import Fields, Id, text_of

from protocol.errors import ForayError
from protocol.keys import Keys
from protocol.ledger import Ledger, Outcome
from protocol.settings import RunSettings

STRANGE = 1_000_000
"""Seqs from this one on are never issued: they occur in foreign entries."""
FENCED = {
    "foray_issue": 0,
    "foray_reissue": 0,
    "foray_ack": 0,
    "foray_target": 0,
    "foray_view": 0,
    "foray_meta": 0,
    "foray_reset": 0,
}
"""Functions that only the holder of the lease may call with effect."""


class Invariants:
    """Observer of the simulated Redis and of commits."""

    def __init__(self, clock: Clock, redis: SimRedis, run: RunSettings) -> None:
        self._clock, self._redis, self._run = clock, redis, run
        self._keys = Keys(run.id)
        self.checks: Counter[str] = Counter()
        self.durable = Ledger()
        self.trained: list[int] = []
        """Seqs in the policy of the durable checkpoint, in order of training."""
        self.step = self.epoch = 0
        self._decided: set[bytes] = set()
        """Entries whose outcome is in the durable checkpoint: unusable ones, whose seq is due again."""
        self.owners: dict[bytes, Process] = {}
        """token of a learner -> its process"""
        self._paid = self._added = 0
        """Tasks that the present function has acknowledged, and trajectory entries that it has added."""
        self._function = ""
        self._looks: dict[Process, list[set[int]]] = {}
        redis.observer = self

    def _must(self, invariant: str, holds: bool, text: str) -> None:
        self.checks[invariant] += 1
        if not holds:
            self._clock.violated(f"{invariant}: {text}")

    # --- commands to Redis ---

    def called(self, function: str, keys: list[str], args: list[bytes]) -> None:
        self._function, self._paid, self._added = function, 0, 0

    def refused(self) -> None:
        self._must("refused as a whole", not self._paid and not self._added, f"half of {self._function} was done")
        self._function = ""

    def done(self, function: str, keys: list[str], args: list[bytes]) -> None:
        if function in FENCED:
            holder = (self._redis.hget(self._keys.lease, "epoch"), self._redis.hget(self._keys.lease, "token"))
            said = (args[0], args[1])
            self._must("fenced", holder == said, f"{function} by {said} while the lease is of {holder}")
        if function == "foray_acquire" and self._clock.current is not None:
            self.owners[args[0]] = self._clock.current
        if function == "foray_issue":
            self._issued(args)
        if function == "foray_publish":
            self._must("published once", self._added == self._paid, f"seq {args[1]!r} published without its task")
        self._function = ""

    def _issued(self, args: list[bytes]) -> None:
        state = getattr(self.owners.get(args[1]), "state", None)
        if state is None or len(args) < 6:
            return
        batch = self._run.groups_per_step
        window = (self._run.max_lag + 1) * batch
        settled, watermark = state.ledger.settled, state.ledger.watermark
        rest = settled + max(0, self._run.steps - state.step) * batch
        limit = min(settled + window, max(watermark + 4 * window, settled + batch), rest)
        highest = int(args[-2])
        self._must("credit", highest <= limit, f"seq {highest} issued: {settled} settled up to {watermark}, {limit=}")

    def added(self, stream: str, id_: Id, fields: Fields) -> None:
        if stream == self._keys.traj and self._function:
            self._added += 1

    def acknowledged(self, stream: str, group: str, id_: Id, fields: Fields | None) -> None:
        if stream == self._keys.tasks:
            self._paid += 1
        elif fields is not None:
            raw = fields.get(b"seq", b"")
            seq = int(raw) if raw.isdigit() else STRANGE
            known = seq >= STRANGE or seq in self.durable or text_of(id_) in self._decided
            self._must("acknowledged is durable", known, f"seq {seq} acknowledged, the checkpoint knows nothing of it")

    def placed(self) -> set[int]:
        """Seqs with a waiting or leased task in Redis, or an entry that was not delivered to a learner."""
        seqs = set()
        for key, group in ((self._keys.tasks, b"rollout"), (self._keys.traj, b"learner")):
            stream = self._redis.stream(key)
            if stream is None or group not in stream.groups:
                continue
            facts = stream.groups[group]
            for id_, fields in stream.entries.items():
                waits = id_ > facts.last or (key == self._keys.tasks and id_ in facts.pending)
                if waits and fields.get(b"seq", b"").isdigit():
                    seqs.add(int(fields[b"seq"]))
        return seqs

    # --- the reconciler ---

    def looked(self) -> None:
        """A learner checks where seqs are."""
        if self._clock.current is not None:
            self._looks.setdefault(self._clock.current, []).append(self.placed())

    def reissues(self, again: list[int]) -> None:
        """Its reconciler has found these missing."""
        looks = self._looks.get(self._clock.current, [])[-2:] if self._clock.current else []
        for seq in again:
            seen = len(looks) < 2 or any(seq in look for look in looks)
            self._must("missing twice", not seen, f"seq {seq} is issued again, and was there in the last two looks")

    # --- the disk ---

    def committed(self, process: Process, folder: Path) -> None:
        """Check a commit: CURRENT now names this checkpoint."""
        facts = json.loads((folder / "manifest.json").read_text())
        history = json.loads((folder / "state" / "history.json").read_text())
        epoch, step = int(facts["epoch"]), int(facts["step"])
        self._clock.tell(f"commits step {step}, epoch {epoch}")
        self._must("one epoch commits", epoch >= self.epoch, f"epoch {epoch} commits after epoch {self.epoch} did")
        try:
            ledger = Ledger.from_state(facts["ledger"])
        except ForayError as error:
            self._clock.violated(f"accounting is consistent: {error}")
            return
        self.durable, self.trained, self.epoch, self.step = ledger, history, epoch, step
        self._decided = {name.encode() for name in facts.get("entries", ())}
        twice = [seq for seq, n in Counter(history).items() if n > 1]
        self._must("trained once", not twice, f"seqs {twice} are trained twice in the surviving lineage")
        both = [seq for seq in history if seq not in ledger or seq in ledger.notes]
        self._must("the ledger is true", not both, f"seqs {both} were trained, the ledger says otherwise")
        count = ledger.counts[Outcome.TRAINED]
        self._must(
            "accounting is consistent",
            ledger.closes() and count == len(history),
            f"{count} trained, {len(history)} in fact",
        )
        self._must("whole steps", len(history) == step * self._run.groups_per_step, f"{len(history)} at step {step}")

    def ended(self) -> None:
        """Check the state when a learner reports the end of the run."""
        steps, ledger = self._run.steps, self.durable
        self._must("the end is durable", self.step == steps, f"the run ends at step {steps}, the disk has {self.step}")
        self._must(
            "all settled", not ledger.above, f"seqs {ledger.missing(max(ledger.above, default=0))} are not settled"
        )
        issued = int(self._redis.get(self._keys.issued) or 0)
        missing = ledger.missing(issued)
        self._must("all settled", not missing, f"{issued} issued, {missing} neither trained nor settled")
