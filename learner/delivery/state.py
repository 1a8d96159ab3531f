"""The learner's delivery state: ledger, unacknowledged entries, seqs to reissue.

Pure state under one lock, shared by the training thread and the I/O threads. It accesses neither Redis nor a disk, so
that the delivery rules can be read and tested in one place.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from learner.delivery.token_accounting import TOKEN_OUTCOME, ReceivedEntry, TokenAccounting, TokenOutcome, TokenSplit
from protocol.ledger import Ledger, NotReopenable, Outcome
from protocol.staleness import issue_limit


@dataclass
class RunCounters:
    """Counters of one run, stored in the checkpoint.

    taken       groups trained by completed steps, counted independently of the ledger to check it
    duplicates  entries whose seq had already arrived; redelivered: entries taken over or read a second time
    reissued    tasks issued a second time; dead_letters: unreadable entries; poisoned: those never tried
    requeued    seqs retried on request
    state_lost  times that Redis lost streams or functions; lease_lapsed: times that our lease lapsed
    tokens_sampled   tokens the policy sampled in the groups trained; tokens_trained: those of them with a gradient
    """

    taken: int = 0
    duplicates: int = 0
    redelivered: int = 0
    reissued: int = 0
    dead_letters: int = 0
    poisoned: int = 0
    requeued: int = 0
    state_lost: int = 0
    lease_lapsed: int = 0
    excess: int = 0
    skipped_steps: int = 0
    tokens_sampled: int = 0
    tokens_trained: int = 0


@dataclass
class DeliveryState:
    """Delivery state in memory. The reentrant `lock` guards all of it.

    step       optimiser steps done
    issued     highest seq that has or had a task in Redis
    credit     highest seq that this learner was ever allowed to issue; higher counts in Redis are not its own
    held       seqs that arrived and are not settled: buffered or in training
    unacked    stream entry id -> its seq (0: unknown), for every entry read and not acknowledged
    committed  the ledger as the last durable checkpoint has it
    durable    those of `unacked` whose outcome the checkpoint contains
    due        seqs to reissue as soon as Redis allows
    attempts   seq -> known attempts, if more than one
    accounting outcome of the tokens of every entry
    requests   seqs reopened on request, while Redis may still contain the request
    closed     the last step is done: nothing is reopened
    reported_tokens  tokens that had arrived when the last step was reported

    An entry is acknowledged once a durable checkpoint contains the outcome of its seq and its tokens. Until then it is
    in `unacked`, and a successor counts it as new. So nothing is counted twice or missed.
    """

    step: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    committed: Ledger = field(default_factory=Ledger)
    durable: set[bytes] = field(default_factory=set)
    counters: RunCounters = field(default_factory=RunCounters)
    issued: int = 0
    credit: int = 0
    pending: set[int] = field(default_factory=set)
    unacked: dict[bytes, int] = field(default_factory=dict)
    due: set[int] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)
    accounting: TokenAccounting = field(default_factory=TokenAccounting)
    requeue_requests: set[int] = field(default_factory=set)
    finished: bool = False
    reported_tokens: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def limit(self, *, max_lag: int, groups_per_step: int, steps: int) -> int:
        """Return the highest seq that may be issued now.

        Beyond the credit gate, the number of open seqs is limited to what the remaining steps need, so that a run ends
        with nothing in flight. A seq settled without training allows another one.
        """
        with self.lock:
            credit = issue_limit(
                settled=self.ledger.settled,
                watermark=self.ledger.watermark,
                max_lag=max_lag,
                groups_per_step=groups_per_step,
            )
            return min(credit, self.ledger.settled + max(0, steps - self.step) * groups_per_step)

    def receive(self, seq: int, arrived: ReceivedEntry) -> None:
        """Count an entry that was read, before its outcome is decided. seq: 0 if unknown."""
        with self.lock:
            self.unacked[arrived.id] = seq
            self.accounting.receive(arrived)

    def mark_pending(self, seq: int, arrived: ReceivedEntry) -> None:
        """Track the group of `seq`, which arrived and will be trained."""
        with self.lock:
            self.pending.add(seq)
            self.due.discard(seq)
            self.accounting.mark_pending(seq, arrived)

    def settle(self, seqs: Iterable[int], outcome: Outcome, reason: str = "", *, tokens: int = 0) -> None:
        """Record the outcome of seqs. Raises AlreadySettled.

        tokens  sampled tokens of those that had arrived, unless they were trained
        """
        with self.lock:
            for seq in seqs:
                self.ledger.settle(seq, outcome, reason)
                self.pending.discard(seq)
                self.due.discard(seq)
                self.attempts.pop(seq, None)
                self.accounting.settle(seq)
            # A Redis that rolled back may have lost its count; a settled seq was issued.
            self.issued = max(self.issued, self.ledger.watermark)
            if outcome is not Outcome.TRAINED:
                self.accounting.record(TOKEN_OUTCOME[outcome], tokens)

    def commit_step(self, seqs: Iterable[int], *, sampled: int, trained: int, own: TokenSplit | None = None) -> None:
        """Record the groups of a completed step atomically: a checkpoint contains all of it or nothing.

        trained  tokens with a gradient, mixed groups included
        own      tokens of these seqs; None: no groups were mixed in
        """
        with self.lock:
            seqs = list(seqs)
            self.settle(seqs, Outcome.TRAINED)
            self.step += 1
            self.counters.taken += len(seqs)
            self.counters.tokens_sampled += sampled
            self.counters.tokens_trained += trained
            if seqs:
                own = own or TokenSplit(trained, sampled - trained)
                self.accounting.record(TokenOutcome.TRAINED, own.trained)
                self.accounting.record(TokenOutcome.MASKED, own.masked)

    def reopen(self, seq: int) -> str:
        """Make a dead or stale seq due again, with all its attempts; return its previous outcome. Raises
        NotReopenable."""
        with self.lock:
            if self.finished:
                raise NotReopenable(f"seq {seq}: the run has completed its last step")
            outcome, reason = self.ledger.reopen(seq)
            self.attempts.pop(seq, None)
            self.due.add(seq)
            self.requeue_requests.add(seq)
            self.counters.requeued += 1
            return f"{outcome} ({reason})" if reason else str(outcome)

    def record_failed_attempt(self, seq: int, attempt: int, most: int, reason: str) -> None:
        """Make `seq`, whose group arrived unusable, due again, or dead after `most` attempts."""
        with self.lock:
            if seq in self.ledger or seq in self.pending or seq in self.due:
                return
            tried = max(attempt, self.attempts.get(seq, 0))
            if tried >= most:
                self.settle([seq], Outcome.DEAD, reason)
                return
            self.attempts[seq] = tried + 1
            self.due.add(seq)

    def filtered_counts(self) -> dict[str, int]:
        """Return the seqs filtered since the beginning of the run, by reason, for the metrics."""
        with self.lock:
            return {f"groups_filtered_{reason}": n for reason, n in self.ledger.filtered.items()}

    def step_counts(self, step_s: float) -> dict[str, float]:
        """Return the counts that belong to the report of a step of `step_s` seconds. The next step starts here."""
        with self.lock:
            arrived, self.reported_tokens = self.accounting.generated - self.reported_tokens, self.accounting.generated
            rate = arrived / max(step_s, 1e-9)
            dead = self.ledger.counts[Outcome.DEAD]
            return {"settled": self.ledger.settled, "dead": dead, "tokens_generated_per_s": rate}

    def in_flight(self) -> list[int]:
        """Return the seqs that are issued and not settled, ascending."""
        with self.lock:
            return self.ledger.missing(self.issued)

    def to_state(self) -> dict[str, Any]:
        """Return JSON values for the checkpoint."""
        with self.lock:
            undecided = {arrived.id for arrived in self.accounting.pending.values()}
            return {
                "step": self.step,
                "ledger": self.ledger.to_state(),
                "tally": asdict(self.counters),
                "tokens": self.accounting.to_state(),
                "entries": [id_.decode() for id_ in self.unacked if id_ not in undecided],
                "due": sorted(self.due),
                "attempts": {str(seq): n for seq, n in sorted(self.attempts.items())},
                "requests": sorted(self.requeue_requests),
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `to_state`, for a state that is still empty. Raises ForayError if the ledger is not consistent.

        Entries decided in the checkpoint may be unacknowledged: `mark_durable(state)` returns them.
        """
        known = {f.name for f in fields(RunCounters)}
        with self.lock:
            self.step = int(state["step"])
            self.ledger = Ledger.from_state(state["ledger"])
            self.committed = Ledger.from_state(state["ledger"])
            self.counters = RunCounters(**{k: int(v) for k, v in state["tally"].items() if k in known})
            self.accounting = TokenAccounting.from_state(state.get("tokens", {}))
            self.reported_tokens = self.accounting.generated
            self.unacked = {id_.encode(): 0 for id_ in state.get("entries", ())}
            self.durable = set(self.unacked)
            self.due = {int(seq) for seq in state.get("due", ())}
            self.attempts = {int(seq): int(n) for seq, n in state.get("attempts", {}).items()}
            self.requeue_requests = {int(seq) for seq in state.get("requests", ())}

    def mark_durable(self, state: dict[str, Any]) -> list[bytes]:
        """Record that a checkpoint with `state` is durable; return the entries that may now be acknowledged."""
        with self.lock:
            self.committed = Ledger.from_state(state["ledger"])
            decided = [id_ for name in state.get("entries", ()) if (id_ := name.encode()) in self.unacked]
            self.durable.update(decided)
            return decided

    def has_uncommitted(self) -> bool:
        """Return whether there are decisions that no durable checkpoint contains."""
        with self.lock:
            undecided = {arrived.id for arrived in self.accounting.pending.values()}
            return self.ledger != self.committed or not self.unacked.keys() <= undecided | self.durable

    def mark_acknowledged(self, ids: Iterable[bytes]) -> None:
        """Forget these entries: they are acknowledged."""
        with self.lock:
            for id_ in ids:
                self.unacked.pop(id_, None)
                self.durable.discard(id_)

    def inconsistency(self, *, whole: bool = True) -> str:
        """Return a description of the inconsistency, "" if the accounting is consistent.

        whole  also check `issued`: not during a repair of Redis, when it is recounted
        """
        with self.lock:
            counts, settled = self.ledger.counts, self.ledger.settled
            flying = self.ledger.open(self.issued)
            if not self.ledger.closes():
                return f"the outcomes add up to {sum(counts.values())}, not to the {settled} seqs settled"
            if counts[Outcome.TRAINED] != self.counters.taken:
                return (
                    f"{counts[Outcome.TRAINED]} seqs are recorded as trained, {self.counters.taken} groups were trained"
                )
            if whole and self.issued != settled + flying:
                return f"{self.issued} issued, but {settled} settled + {flying} in flight"
            return self.accounting.inconsistency()
