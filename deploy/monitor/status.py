"""What a snapshot means: token balance, states, problems with what to do about them, and the page that is printed.

Pure but for `look`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from deploy.launcher.progress import read_history
from deploy.launcher.run_dir import Located, is_held, read_record
from deploy.monitor.snapshot import RunSnapshot, take_snapshot
from deploy.terminal import escape_untrusted
from protocol.messages import NodeState
from rollout_server.search.base import NO_SUCH_PATH

BUCKETS = ("trained", "masked", "filtered", "stale", "failed", "duplicate", "in_flight")
GROWING = 3
"""Dead letters within WINDOW_S that are more than an accident."""
WINDOW_S = 60.0
SPOOLING_S = 5.0
"""A group that has waited this long for Redis waits for more than a reply."""
LATE = 3
"""A checkpoint is old when its age is this many times the expected one."""


@dataclass(frozen=True)
class Problem:
    """Something that keeps the run from going on (or from going well), and the way out."""

    what: str
    todo: str


@dataclass(frozen=True)
class TokenBalance:
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
        """`generated 10 = trained 6 + masked 0 + ... + in flight 4 (closes)`"""
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


def token_balance(seen: RunSnapshot) -> TokenBalance | None:
    """Return the learner's own balance, else that of the last checkpoint; None where neither counts tokens."""
    values, rejected = (seen.learner.values if seen.learner is not None else {}), seen.tokens.get("rejected", 0)
    if "tokens_generated_total" in values:
        parts = {name: int(values.get(f"token_accounting_{name}", 0)) for name in BUCKETS}
        lost = int(values.get("token_accounting_redis_lost", 0))
        return TokenBalance(int(values["tokens_generated_total"]), parts, rejected, lost)
    if seen.learner is None and seen.totals is not None and seen.totals.tokens:
        # what was not decided then is not in it: it comes again
        parts = {name: seen.totals.tokens.get(name, 0) for name in BUCKETS}
        return TokenBalance(seen.totals.tokens["generated"], parts, rejected)
    return None


def letters_line(seen: RunSnapshot) -> str:
    """`37 (of the last 20: 12 corrupt, 8 foreign_run)`"""
    if not seen.letters:
        return str(seen.dead_letters)
    reasons = Counter(reason for _, reason in seen.letters)
    told = ", ".join(f"{number} {escape_untrusted(reason, 32)}" for reason, number in reasons.most_common())
    some = f"of the last {len(seen.letters)}: " if len(seen.letters) < seen.dead_letters else ""
    return f"{seen.dead_letters} ({some}{told})"


def event_lines(seen: RunSnapshot) -> list[str]:
    """Return the last events, the oldest first: `12:31:07  rollout r1  lease-lost: another server has taken seq 7`."""
    return [
        f"{time.strftime('%H:%M:%S', time.gmtime(event.at))}  {escape_untrusted(event.process, 32)} "
        f"{escape_untrusted(event.id, 64)}  "
        f"{escape_untrusted(event.kind, 32)}: {escape_untrusted(event.text, 300)}"
        for event in seen.events
    ]


def delivery_problems(seen: RunSnapshot) -> list[Problem]:
    """Return what is wrong with delivery, while the run goes on."""
    return [*of_tokens(seen), *_of_letters(seen), *_of_learner(seen), *_of_spools(seen)]


def of_tokens(seen: RunSnapshot) -> list[Problem]:
    """Return a problem if tokens are unaccounted for, also in a run that is over."""
    balance = token_balance(seen)
    if balance is None or balance.closes:
        return []
    return [Problem(f"tokens do not close: {balance.line()}", "this is a bug: keep the run directory and report it")]


def _of_letters(seen: RunSnapshot) -> list[Problem]:
    fresh = [reason for at, reason in seen.letters if seen.now - at < WINDOW_S]
    if len(fresh) < GROWING:
        return []
    told = ", ".join(f"{number} {escape_untrusted(reason, 32)}" for reason, number in Counter(fresh).most_common())
    return [
        Problem(
            f"dead letters keep coming: {told} within the last minute",
            "foray dlq list, then foray dlq show SEQ, says what they hold and who sent them",
        )
    ]


def _of_learner(seen: RunSnapshot) -> list[Problem]:
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
                f"{int(values.get('checkpoint_step', 0))}: "
                f"{escape_untrusted(learner.text.get('checkpoint_error', ''), 300)}",
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


def _of_spools(seen: RunSnapshot) -> list[Problem]:
    return [
        Problem(
            f"rollout server {p.id} cannot publish: {int(p.values['spooled_groups'])} groups "
            f"({p.values.get('spooled_bytes', 0) / 2**20:.1f} MiB) wait for Redis, the first for {age:.0f} s",
            "see its log: Redis is full, away or slow for it; it takes no more work at rollout.spool_groups",
        )
        for p in seen.of("rollout")
        if (age := p.values.get("spool_age_s", 0.0)) > SPOOLING_S and p.values.get("spooled_groups", 0)
    ]


@dataclass(frozen=True)
class Conservation:
    """Where every issued seq is. issued = settled (by outcome) + in flight, by seq; `closes` says whether it adds up.

    source  "learner" (live) or "checkpoint" (durable, a few steps behind) or "" when there is neither
    """

    source: str
    issued: int
    trained: int
    filtered: int
    stale: int
    dead: int
    in_flight: int

    @property
    def closes(self) -> bool:
        """Whether every issued seq is accounted for."""
        return self.issued == self.trained + self.filtered + self.stale + self.dead + self.in_flight

    def line(self) -> str:
        """`issued 480 = trained 470 + filtered 0 + stale 0 + dead 0 + in flight 10`"""
        sign = "=" if self.closes else "!="
        return (
            f"issued {self.issued} {sign} trained {self.trained} + filtered {self.filtered} + stale {self.stale} "
            f"+ dead {self.dead} + in flight {self.in_flight}"
        )


def conservation(seen: RunSnapshot) -> Conservation:
    """Return the balance by seq: from the learner while it lives, else from the last checkpoint and the streams."""
    learner = seen.learner
    if learner is not None and "issued" in learner.values:
        value = {name: int(learner.values.get(name, 0)) for name in ("issued", *_OUTCOMES, "in_flight")}
        return Conservation("learner", **value)
    if seen.totals is None:
        return Conservation("", seen.issued, 0, 0, 0, 0, seen.tasks.total + seen.traj.total)
    counts = {name: seen.totals.counts.get(name, 0) for name in _OUTCOMES}
    issued = max(seen.issued, seen.totals.settled)
    # Without a learner nothing more is known of a seq that is not settled than that it will be issued again.
    return Conservation("checkpoint", issued, **counts, in_flight=issued - seen.totals.settled)


_OUTCOMES = ("trained", "filtered", "stale", "dead")


STARTING_S = 60.0
"""A learner that was started so lately may not report yet: it imports, and reads its checkpoint."""


def look(found: Located) -> RunSnapshot:
    """Take a snapshot of a run from Redis, run.json as it is now, and `metrics.jsonl`."""
    record = read_record(found.directory)
    seen = take_snapshot(found.redis_url, found.run.id, found.directory)
    seen = with_record(seen, record, alive=is_held(found.directory))
    return replace(seen, steps=found.run.steps, history=read_history(found.directory / "metrics.jsonl"))


def with_record(seen: RunSnapshot, record: Mapping[str, Any], *, alive: bool = False) -> RunSnapshot:
    """`seen` with what run.json says. A run whose launcher has ended it is no run whose Redis is away.

    alive  whether the launcher lives: what a dead one wrote last is no state of the run
    """
    launch, again = str(record.get("state", "")), str(record.get("again", ""))
    started = [p for p in record.get("processes", ()) if p.get("kind") == "learner"]
    trains = bool(record.get("trains", True))
    just_now = time.time() - float(record.get("updated", 0.0)) < STARTING_S
    seen = replace(
        seen,
        launch=launch,
        launcher_lives=alive,
        again=again,
        trains=trains,
        awaits_learner=alive and trains and (not started or just_now),
    )
    if launch == "stopped" and seen.learner is None:
        return replace(seen, error="", stopped=True)
    if launch == "done" and seen.error and not alive:
        return replace(seen, error="", target_state="done")
    return seen


def problems(seen: RunSnapshot, *, max_lag: int) -> list[Problem]:
    """Return what is wrong, the worst first; nothing for a run that goes well or has been finished."""
    if seen.todo:
        return [Problem(seen.error, seen.todo)]
    now = state(seen)
    if seen.stopped:
        return of_tokens(seen)
    if now == "failed":
        todo = f"its logs say why; fix that, then continue with: {seen.again or 'the command that started the run'}"
        return [Problem("the run has failed", todo), *of_tokens(seen)]
    if now == "stopping" or (now == "preparing" and seen.launch == "starting"):
        return []  # processes come and go, and the launcher watches them
    if seen.error:
        todo = "start the run (again) with `foray up`: it goes on from its checkpoint"
        return [Problem(f"Redis does not answer: {seen.error}", todo)]
    found = [
        Problem(f"a message cannot be read: {text}", "are all processes of one version?") for text in seen.unreadable
    ]
    totals = conservation(seen)
    if seen.is_done:
        if not totals.closes or totals.in_flight:
            found.append(
                Problem(f"the run is over but {totals.line()}", "start the learner again: it settles the rest")
            )
        return found + of_tokens(seen)
    if seen.max_memory and seen.memory > 0.9 * seen.max_memory:
        found.append(
            Problem(
                f"Redis uses {seen.memory / 2**20:.0f} of {seen.max_memory / 2**20:.0f} MiB",
                "raise maxmemory, or lower learner.checkpoint_every: what was trained stays until the checkpoint",
            )
        )
    if seen.learner is None and not seen.only_serves and not seen.awaits_learner:
        held = f"; its lease lasts {seen.lease_ms / 1000:.0f} s more" if seen.lease_ms else ""
        found.append(Problem(f"no learner reports{held}", "start it again: it goes on from its checkpoint"))
    if not seen.of("rollout"):
        found.append(Problem("no rollout server reports", "start one: python -m rollout_server --config ..."))
    for p in seen.of("rollout"):
        if outage := p.text.get("search_outage"):
            found.append(_no_retriever(p.id, outage))
    for p in seen.processes:
        if refusal := p.text.get("redis_refusal"):
            todo = "the process waits and tries again; find out who writes to this run's keys (SECURITY.md)"
            found.append(Problem(f"Redis refuses {p.process} {p.id}: {refusal}", todo))
    found += _engine_problems(seen, max_lag)
    found += delivery_problems(seen)
    return found


def _no_retriever(rollout: str, outage: str) -> Problem:
    """outage: each address with its cause (`rollout_server/search/base.py`)."""
    if any(cause in outage for cause in NO_SUCH_PATH):
        what = f"rollout server {rollout} sends searches where no retriever is, and leases no task: {outage}"
        return Problem(what, "correct rollout.search.urls (base addresses) or rollout.search.dialect, and restart it")
    todo = "start the retriever again: searches wait for it (rollout.search.outage_wait_s), then they fail"
    return Problem(f"rollout server {rollout} finds no retriever: {outage}", todo)


def _engine_problems(seen: RunSnapshot, max_lag: int) -> list[Problem]:
    if not seen.engines:
        return [Problem("no engine is registered", "start one: python -m rollout_server.node --config ...")]
    found = [
        Problem(
            f"engine {e.id} is {e.state}: {e.detail or 'no reason given'}",
            "it gets no requests; its node loads the target whole, or restarts it, and only then it serves again. "
            "If that does not help, the reason is in the log of the node and of the engine",
        )
        for e in seen.engines
        if e.state in (NodeState.QUARANTINED, NodeState.SUSPECT)
    ]
    target = seen.target
    usable = [e for e in seen.engines if e.state is NodeState.READY]
    if target is not None:
        usable = [e for e in usable if e.epoch == target.epoch and target.step - e.step <= max_lag]
    moving = any(e.state in (NodeState.JOINING, NodeState.SYNCING, NodeState.LOADING) for e in seen.engines)
    if not usable and not moving and not seen.pinned_evaluations:  # for which it keeps its version
        label = target.version.label if target is not None else "any version"
        found.append(Problem(f"no engine is ready at {label}", "see the logs of the nodes"))
    return found


def to_json(seen: RunSnapshot, *, max_lag: int) -> dict[str, Any]:
    """Return the page as JSON values, for programs. Stable: names are added, never changed."""
    wrong, totals = problems(seen, max_lag=max_lag), conservation(seen)
    return {
        "run": seen.run,
        "healthy": not wrong,
        "state": state(seen),
        "evaluations": seen.evaluations,
        "figures": dict(seen.figures),
        "step_s": seen.history.step_s or None,
        "eta_s": seen.eta_s,
        "problems": [asdict(p) for p in wrong],
        "redis": {"url": seen.redis_url, "error": seen.error, "memory": seen.memory, "max_memory": seen.max_memory},
        "target": {
            "version": seen.target.version.label if seen.target else None,
            "digest": seen.target.digest if seen.target else None,
            "state": seen.target_state,
        },
        "learner_epoch": seen.learner_epoch,
        "lease_ms": seen.lease_ms,
        "engines": [e.model_dump(mode="json") | {"version": e.version.label} for e in seen.engines],
        "processes": [p.model_dump(mode="json") for p in seen.processes],
        "streams": {
            "tasks_waiting": seen.tasks.waiting,
            "tasks_leased": seen.tasks.held,
            "traj_ready": seen.traj.waiting,
            "traj_unacked": seen.traj.held,
            "dead_letters": seen.dead_letters,
        },
        "letters": [{"at": at, "reason": reason} for at, reason in seen.letters],
        "events": [asdict(event) for event in seen.events],
        "tokens": asdict(balance) | {"closes": balance.closes} if (balance := token_balance(seen)) else None,
        "ledger": asdict(totals) | {"closes": totals.closes},
        "checkpoint": asdict(seen.totals) | {"closes": seen.totals.closes} if seen.totals else None,
    }


def state(seen: RunSnapshot) -> str:
    """One word. What the learner says: starting, training. Without one: preparing (it is to come), serving (none is to
    come), evaluating, waiting (none comes). And stopping, stopped (by a person), done, failed, down.
    """
    if seen.stopped:
        return "stopped"
    if seen.launcher_lives and seen.launch == "stopping":
        return "stopping"
    if seen.launch == "failed" and not seen.launcher_lives and seen.learner is None:
        return "failed"
    if seen.error:
        return "preparing" if seen.launcher_lives and seen.launch == "starting" else "down"
    if seen.evaluations and (seen.learner is None or seen.is_done):
        return "evaluating"
    if seen.is_done:
        return "done"
    if seen.learner:
        return seen.learner.text.get("state", "training")
    if seen.only_serves:
        return "serving"
    return "preparing" if seen.awaits_learner else "waiting"


def step_line(seen: RunSnapshot) -> str:
    """`step 14 of 60, 3.9 s per step, about 3 min to go`; what is not known is left out."""
    figures = seen.figures
    line = f"step {figures.get('step', 0):.0f} of {figures.get('steps', 0):.0f}"
    if seen.history.step_s:
        line += f", {seen.history.step_s:.1f} s per step"
    return line if seen.eta_s is None else f"{line}, about {span(seen.eta_s)} to go"


def span(seconds: float) -> str:
    """Return a duration for a person: `45 s`, `12 min`, `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def render(seen: RunSnapshot, *, max_lag: int) -> str:
    """Return the page of `foray status`."""
    wrong, totals = problems(seen, max_lag=max_lag), conservation(seen)
    lines = [
        f"run {seen.run}: {state(seen)}, {'healthy' if not wrong else 'NOT healthy'}",
        f"redis     {seen.redis_url}",
    ]
    if seen.target:
        lines.append(f"target    {seen.target.version.label} ({seen.target_state}), epoch {seen.learner_epoch}")
    v = seen.figures
    if "step" in v:
        lag = f", lag {v['lag_mean']:.2f} (max {v.get('lag_max', 0):.0f})" if "lag_mean" in v else ""
        checkpoint = f", checkpoint at step {v['checkpoint_step']:.0f}" if "checkpoint_step" in v else ""
        lines.append(f"learner   {step_line(seen)}{lag}{checkpoint}")
    if "publish_bytes" in v:
        lines.append(_weights_line(v))
    if seen.evaluations:
        lines.append(f"episodes  {seen.evaluations} evaluation{'s' if seen.evaluations > 1 else ''} running")
    for p in seen.of("rollout"):
        v = p.values
        lines.append(
            f"rollout   {p.id}: {v.get('groups_in_flight', 0):.0f} groups in flight, "
            f"{v.get('groups_published', 0):.0f} published, {v.get('groups_failed', 0):.0f} failed"
        )
    for e in seen.engines:
        lines.append(
            f"engine    {e.id}: {e.state}, version {e.version.label}, {e.running} running, {e.waiting} waiting, "
            f"{e.tokens_per_s:.0f} tok/s, paused {e.pause_s:.2f} s at the last update, {e.url}"
        )
    lines.append(
        f"streams   tasks {seen.tasks.waiting} waiting, {seen.tasks.held} leased; "
        f"trajectory groups {seen.traj.waiting} ready, {seen.traj.held} unacknowledged; "
        f"dead letters {letters_line(seen)}"
    )
    if totals.source:
        lines.append(f"ledger    {totals.line()} ({totals.source})")
    if balance := token_balance(seen):
        lines.append(f"tokens    {balance.line()}")
    if seen.totals:
        verdict = "closes" if seen.totals.closes else "DOES NOT CLOSE"
        lines.append(
            f"checkpoint step {seen.totals.step}, epoch {seen.totals.epoch}: {seen.totals.settled} settled, {verdict}"
        )
    lines += [f"event     {line}" for line in event_lines(seen)]
    if seen.stopped:
        lines.append(f"next      {seen.again or 'the command that started the run'} goes on from the checkpoint")
    for problem in wrong:
        lines += [f"problem:  {problem.what}", f"   do:    {problem.todo}"]
    return "\n".join(lines)


def _weights_line(v: Mapping[str, float]) -> str:
    """How the last version went to the engines, phase by phase, and how versions went since the learner's start."""
    phases = ("gather", "prepare", "transfer", "verify", "commit", "disk")
    seconds = {phase: v.get(f"publish_{phase}_s", 0.0) for phase in phases}
    told = ", ".join(f"{phase} {s:.2f}" for phase, s in seconds.items() if s) or "nothing yet"
    line = f"weights   {v['publish_bytes'] / 1e6:.1f} MB, last version in {sum(seconds.values()):.2f} s ({told})"
    if "publish_distributed" in v:
        sent, files, fallbacks = (v.get(f"publish_{name}", 0.0) for name in ("distributed", "disk", "fallbacks"))
        line += f"; {sent:.0f} versions sent, {files:.0f} by files ({fallbacks:.0f} after a failed transfer)"
    return line
