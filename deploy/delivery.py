"""What an observation says of delivery: the law by token, dead letters, the run's last events, and what is wrong. Pure.

Figures are the learner's own (`learner/token_law.py`), those of Redis' functions, and of each rollout server's spool.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from deploy.harmless import harmless
from deploy.observe import Observation

BUCKETS = ("trained", "untrained", "filtered", "stale", "failed", "duplicate", "in_flight")
GROWING = 3
"""So many dead letters within a minute are no accident of one entry."""
WINDOW_S = 60.0
SPOOLING_S = 5.0
"""A group that has waited so long for Redis waits for more than a reply."""
LATE = 3
"""A checkpoint is old when it is so many times later than it should be."""


@dataclass(frozen=True)
class Problem:
    """Something that keeps the run from going on (or from going well), and the way out."""

    what: str
    todo: str


@dataclass(frozen=True)
class TokenLaw:
    """Where every token went that reached the learner.

    rejected    of attempts that gave way to another one
    redis_lost  published and never received, less what was received and forgotten, across restarts of Redis
    """

    generated: int
    parts: Mapping[str, int]
    rejected: int = 0
    redis_lost: int = 0

    @property
    def closes(self) -> bool:
        """Whether every token is accounted for."""
        return self.generated == sum(self.parts.values())

    def line(self) -> str:
        """`generated 10 = trained 6 + untrained 0 + ... + in flight 4 (closes)`"""
        total = sum(self.parts.values())
        parts = " + ".join(f"{name.replace('_', ' ')} {number}" for name, number in self.parts.items())
        verdict = "closes" if self.closes else f"DOES NOT CLOSE: {abs(self.generated - total)} "
        if not self.closes:
            verdict += "are missing" if total < self.generated else "too many"
        more = f"; {self.rejected} more in attempts that were tried again" if self.rejected else ""
        if self.redis_lost:
            what = "published and not received" if self.redis_lost > 0 else "received and no longer in Redis' count"
            more += f"; {abs(self.redis_lost)} {what}, since Redis lost state"
        return f"generated {self.generated} {'=' if self.closes else '!='} {parts} ({verdict}){more}"


def token_law(seen: Observation) -> TokenLaw | None:
    """The law by the learner's own figures, else by the last checkpoint; None where neither keeps such books."""
    values, rejected = (seen.learner.values if seen.learner is not None else {}), seen.tokens.get("rejected", 0)
    if "tokens_generated_total" in values:
        parts = {name: int(values.get(f"tokens_law_{name}", 0)) for name in BUCKETS}
        lost = int(values.get("tokens_law_redis_lost", 0))
        return TokenLaw(int(values["tokens_generated_total"]), parts, rejected, lost)
    if seen.learner is None and seen.books is not None and seen.books.tokens:
        # what was not decided then is not in it: it comes again
        parts = {name: seen.books.tokens.get(name, 0) for name in BUCKETS}
        return TokenLaw(seen.books.tokens["generated"], parts, rejected)
    return None


def letters_line(seen: Observation) -> str:
    """`37 (of the last 20: 12 corrupt, 8 foreign_run)`"""
    if not seen.letters:
        return str(seen.dead_letters)
    reasons = Counter(reason for _, reason in seen.letters)
    told = ", ".join(f"{number} {harmless(reason, 32)}" for reason, number in reasons.most_common())
    some = f"of the last {len(seen.letters)}: " if len(seen.letters) < seen.dead_letters else ""
    return f"{seen.dead_letters} ({some}{told})"


def event_lines(seen: Observation) -> list[str]:
    """The last events, the oldest first: `12:31:07  rollout r1  lease-lost: another server has taken seq 7`."""
    return [
        f"{time.strftime('%H:%M:%S', time.gmtime(event.at))}  {harmless(event.process, 32)} {harmless(event.id, 64)}  "
        f"{harmless(event.kind, 32)}: {harmless(event.text, 300)}"
        for event in seen.events
    ]


def problems(seen: Observation) -> list[Problem]:
    """What is wrong with delivery, while the run goes on."""
    return [*of_tokens(seen), *_of_letters(seen), *_of_learner(seen), *_of_spools(seen)]


def of_tokens(seen: Observation) -> list[Problem]:
    """Whether the law by token holds: also of a run that is over."""
    law = token_law(seen)
    if law is None or law.closes:
        return []
    return [Problem(f"tokens do not close: {law.line()}", "this is a bug: keep the run directory and report it")]


def _of_letters(seen: Observation) -> list[Problem]:
    fresh = [reason for at, reason in seen.letters if seen.now - at < WINDOW_S]
    if len(fresh) < GROWING:
        return []
    told = ", ".join(f"{number} {harmless(reason, 32)}" for reason, number in Counter(fresh).most_common())
    return [
        Problem(
            f"dead letters keep coming: {told} within the last minute",
            "foray dlq list, then foray dlq show SEQ, says what they hold and who sent them",
        )
    ]


def _of_learner(seen: Observation) -> list[Problem]:
    learner = seen.learner
    if learner is None:
        return []
    found, values = [], learner.values
    epoch = int(values.get("epoch", seen.learner_epoch))
    if epoch < seen.learner_epoch:
        what = f"the learner that reports is of epoch {epoch} and fenced: epoch {seen.learner_epoch} has taken over"
        found.append(Problem(what, "it ends with code 75 by itself; look for the one that took over, and keep one"))
    elif not seen.lease_ms:
        found.append(
            Problem(
                "the learner's lease has lapsed: another one may take its place",
                "it takes it again when it reaches Redis; if this stays, it hangs: see its log",
            )
        )
    if failures := int(values.get("checkpoint_failures", 0)):
        found.append(
            Problem(
                f"{failures} checkpoints in a row could not be written; the last is of step "
                f"{int(values.get('checkpoint_step', 0))}: {harmless(learner.text.get('checkpoint_error', ''), 300)}",
                "make room on the disk below run.dir; training goes on meanwhile, after 3 failures without new tasks, "
                "and the next try is made by itself",
            )
        )
    every = int(values.get("checkpoint_every", 0))
    behind = int(values.get("step", 0)) - int(values.get("checkpoint_step", 0))
    if every and behind > LATE * every:
        found.append(
            Problem(
                f"the last checkpoint is {behind} steps old, it should be at most {every}",
                "see the learner's log: nothing that was trained since is acknowledged, and Redis fills up",
            )
        )
    return found


def _of_spools(seen: Observation) -> list[Problem]:
    return [
        Problem(
            f"rollout server {p.id} cannot publish: {int(p.values['spooled_groups'])} groups "
            f"({p.values.get('spooled_bytes', 0) / 2**20:.1f} MiB) wait for Redis, the first for {age:.0f} s",
            "see its log: Redis is full, away or slow for it; it takes no more work at rollout.spool_groups",
        )
        for p in seen.of("rollout")
        if (age := p.values.get("spool_age_s", 0.0)) > SPOOLING_S and p.values.get("spooled_groups", 0)
    ]
