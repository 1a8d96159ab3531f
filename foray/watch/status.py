"""Interpret a snapshot: token balance, run state, problems with suggested actions. `status_page.py` prints it.

Pure except `look`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from deploy.run.history import read_history
from deploy.run.learning import Problem as Problem
from deploy.run.learning import learning_problems, learning_state
from deploy.run.run_dir import Located, is_held, read_record
from deploy.run.snapshot import RunSnapshot, read_ledger_totals, take_snapshot
from deploy.terminal import escape_untrusted
from protocol.messages import NodeState
from rollout_server.search.base import NO_SUCH_PATH

BUCKETS = ("trained", "masked", "filtered", "stale", "failed", "duplicate", "in_flight")
GROWING = 3
"""Number of dead letters within WINDOW_S that is a problem."""
WINDOW_S = 60.0
SPOOLING_S = 5.0
"""A group that has waited longer than this for Redis, in seconds, is a problem."""
LATE = 3
"""A checkpoint is old if its age exceeds the expected age by this factor."""


@dataclass(frozen=True)
class TokenBalance:
    """Outcome of every token that reached the learner.

    rejected    tokens of attempts that were retried
    redis_lost  tokens published but never received, minus those received but no longer counted, across Redis restarts
    """

    generated: int
    parts: Mapping[str, int]
    rejected: int = 0
    redis_lost: int = 0

    @property
    def closes(self) -> bool:
        """Return whether every token is accounted for."""
        return self.generated == sum(self.parts.values())

    def line(self) -> str:
        """Return `generated 10 = trained 6 + masked 0 + ... + in flight 4 (consistent)`."""
        total = sum(self.parts.values())
        parts = " + ".join(f"{name.replace('_', ' ')} {number}" for name, number in self.parts.items())
        verdict = "consistent" if self.closes else f"INCONSISTENT: {abs(self.generated - total)} "
        if not self.closes:
            verdict += "missing" if total < self.generated else "too many"
        more = f"; {self.rejected} more in retried attempts" if self.rejected else ""
        if self.redis_lost:
            what = "published but not received" if self.redis_lost > 0 else "received but no longer counted by Redis"
            more += f"; {abs(self.redis_lost)} {what}, since Redis lost state"
        return f"generated {self.generated} {'=' if self.closes else '!='} {parts} ({verdict}){more}"


def token_balance(snapshot: RunSnapshot) -> TokenBalance | None:
    """Return the learner's balance, else that of the last checkpoint; None if neither counts tokens."""
    values, rejected = (
        (snapshot.learner.values if snapshot.learner is not None else {}),
        snapshot.tokens.get("rejected", 0),
    )
    if "tokens_generated_total" in values:
        parts = {name: int(values.get(f"token_accounting_{name}", 0)) for name in BUCKETS}
        lost = int(values.get("token_accounting_redis_lost", 0))
        return TokenBalance(int(values["tokens_generated_total"]), parts, rejected, lost)
    if snapshot.learner is None and snapshot.totals is not None and snapshot.totals.tokens:
        # it does not include what was undecided then: that is delivered again
        parts = {name: snapshot.totals.tokens.get(name, 0) for name in BUCKETS}
        return TokenBalance(snapshot.totals.tokens["generated"], parts, rejected)
    return None


def letters_line(snapshot: RunSnapshot) -> str:
    """Return `37 (of the last 20: 12 corrupt, 8 foreign_run)`."""
    if not snapshot.letters:
        return str(snapshot.dead_letters)
    listed = listed_reasons(Counter(reason for _, reason in snapshot.letters))
    some = f"of the last {len(snapshot.letters)}: " if len(snapshot.letters) < snapshot.dead_letters else ""
    return f"{snapshot.dead_letters} ({some}{listed})"


def listed_reasons(reasons: Counter[str]) -> str:
    """Return `12 corrupt, 8 foreign_run`."""
    return ", ".join(f"{number} {escape_untrusted(reason, 32)}" for reason, number in reasons.most_common())


def delivery_problems(snapshot: RunSnapshot) -> list[Problem]:
    """Return the problems with delivery in a run in progress."""
    return [*of_tokens(snapshot), *_of_letters(snapshot), *_of_learner(snapshot), *_of_spools(snapshot)]


def of_tokens(snapshot: RunSnapshot) -> Iterator[Problem]:
    """Yield a problem if tokens are unaccounted for, also in a finished run."""
    balance = token_balance(snapshot)
    if balance is not None and not balance.closes:
        what = f"the token accounting is not consistent: {balance.line()}"
        yield Problem(what, "this is a bug: keep the run directory and report it")


def _of_letters(snapshot: RunSnapshot) -> Iterator[Problem]:
    fresh = Counter(reason for at, reason in snapshot.letters if snapshot.now - at < WINDOW_S)
    if fresh.total() >= GROWING:
        what = f"new dead letters: {listed_reasons(fresh)} within the last minute"
        yield Problem(what, "inspect them with `foray dlq list`, then `foray dlq show SEQ`")


def _of_learner(snapshot: RunSnapshot) -> Iterator[Problem]:
    learner = snapshot.learner
    if learner is None:
        return
    values, current = learner.values, snapshot.learner_epoch
    if (epoch := int(values.get("epoch", current))) < current:
        what = f"a learner of epoch {epoch} is still running, but epoch {current} has taken over the lease"
        yield Problem(what, "it exits with code 75 by itself; make sure that only one learner is started")
    elif not snapshot.lease_ms:
        yield Problem(
            "the learner's lease has expired: another learner may take over",
            "the learner acquires it again when it reaches Redis; if this persists, it is stuck: check its log",
        )
    last = int(values.get("checkpoint_step", 0))
    if failures := int(values.get("checkpoint_failures", 0)):
        yield Problem(
            f"the last {failures} checkpoints could not be written; the newest is of step {last}: "
            f"{escape_untrusted(learner.text.get('checkpoint_error', ''), 300)}",
            "free space on the disk of run.dir; training continues meanwhile, after 3 failures without new tasks, "
            "and the learner retries by itself",
        )
    every, behind = int(values.get("checkpoint_every", 0)), int(values.get("step", 0)) - last
    if every and behind > LATE * every:
        yield Problem(
            f"the last checkpoint is {behind} steps old, expected at most {every}",
            "check the learner's log: groups trained since then are not acknowledged, and Redis fills up",
        )


def _of_spools(snapshot: RunSnapshot) -> Iterator[Problem]:
    for p in snapshot.of("rollout"):
        if (age := p.values.get("spool_age_s", 0.0)) > SPOOLING_S and p.values.get("spooled_groups", 0):
            yield Problem(
                f"rollout server {p.id} cannot publish: {int(p.values['spooled_groups'])} groups "
                f"({p.values.get('spooled_bytes', 0) / 2**20:.1f} MiB) wait for Redis, the oldest for {age:.0f} s",
                "check its log: Redis is full, down or slow; at rollout.spool_groups it stops leasing tasks",
            )


@dataclass(frozen=True)
class Throughput:
    """Tokens per second, None if unknown. `steps`: the number of past steps of which they are means; 0: at present."""

    generated: float | None
    trained: float | None
    steps: int = 0


def throughput(snapshot: RunSnapshot) -> Throughput:
    """Return the present throughput, or for a run without processes its mean over the last steps."""
    rollouts, history = snapshot.of("rollout"), snapshot.history
    if not rollouts and snapshot.learner is None:
        return Throughput(history.mean("tokens_generated_per_s"), history.trained_per_s, len(history.recent))
    generated = sum(p.values.get("tokens_generated_per_s", 0.0) for p in rollouts) if rollouts else None
    trained = snapshot.learner.values.get("tokens_trained_per_s", 0.0) if snapshot.learner else None
    return Throughput(generated, trained)


@dataclass(frozen=True)
class SeqBalance:
    """Accounting by seq: issued = settled (by outcome) + in flight. `closes`: whether it adds up.

    source  "learner" (live), "checkpoint" (durable, a few steps behind), or "" if there is neither
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
        """Return whether every issued seq is accounted for."""
        return self.issued == self.trained + self.filtered + self.stale + self.dead + self.in_flight

    def line(self) -> str:
        """Return `issued 480 = trained 470 + filtered 0 + stale 0 + dead 0 + in flight 10`."""
        sign = "=" if self.closes else "!="
        return (
            f"issued {self.issued} {sign} trained {self.trained} + filtered {self.filtered} + stale {self.stale} "
            f"+ dead {self.dead} + in flight {self.in_flight}"
        )


def seq_balance(snapshot: RunSnapshot) -> SeqBalance:
    """Return the balance by seq, from the learner if it reports, else from the last checkpoint and the streams."""
    learner = snapshot.learner
    if learner is not None and learner.values.get("issued", -1) >= learner.values.get("settled", 0):
        # a learner that resumes reports the settled seqs of its checkpoint before it has counted the issued ones
        value = {name: int(learner.values.get(name, 0)) for name in ("issued", *_OUTCOMES, "in_flight")}
        return SeqBalance("learner", **value)
    if snapshot.totals is None:
        return SeqBalance("", snapshot.issued, 0, 0, 0, 0, snapshot.tasks.total + snapshot.traj.total)
    counts = {name: snapshot.totals.counts.get(name, 0) for name in _OUTCOMES}
    issued = max(snapshot.issued, snapshot.totals.settled)
    # Without a learner, every seq that is not settled will be issued again.
    return SeqBalance("checkpoint", issued, **counts, in_flight=issued - snapshot.totals.settled)


_OUTCOMES = ("trained", "filtered", "stale", "dead")


STARTING_S = 60.0
"""Grace period for a starting learner, in seconds: it imports packages and reads its checkpoint."""


def look(found: Located) -> RunSnapshot:
    """Take a snapshot of a run from Redis, run.json and `metrics.jsonl`."""
    record = read_record(found.directory)
    if found.redis_url:
        snapshot = take_snapshot(found.redis_url, found.run.id, found.directory)
    else:
        why, totals = "its address is unknown", read_ledger_totals(found.directory)
        snapshot = RunSnapshot(found.run.id, "", error=why, totals=totals)
    snapshot = with_record(snapshot, record, alive=is_held(found.directory))
    return replace(snapshot, steps=found.run.steps, history=read_history(found.directory / "metrics.jsonl"))


def with_record(snapshot: RunSnapshot, record: Mapping[str, Any], *, alive: bool = False) -> RunSnapshot:
    """Return `snapshot` with the state from run.json. After a regular end, a Redis that is down is not a problem.

    alive  whether the launcher is running: the last state of a dead launcher is not the state of the run
    """
    launch, again = str(record.get("state", "")), str(record.get("again", ""))
    started = [p for p in record.get("processes", ()) if p.get("kind") == "learner"]
    trains = bool(record.get("trains", True))
    just_now = time.time() - float(record.get("updated", 0.0)) < STARTING_S
    snapshot = replace(
        snapshot,
        launch=launch,
        launch_error=str(record.get("error", "")),
        launcher_lives=alive,
        again=again,
        trains=trains,
        awaits_learner=alive and trains and (not started or just_now),
    )
    if launch == "stopped" and snapshot.learner is None:
        return replace(snapshot, error="", stopped=True)
    if launch == "done" and snapshot.error and not alive:
        return replace(snapshot, error="", target_state="done")
    return snapshot


def problems(snapshot: RunSnapshot, *, max_lag: int) -> list[Problem]:
    """Return the problems of the machinery and then of learning, the worst first."""
    if snapshot.todo:
        return [Problem(snapshot.error, snapshot.todo)]
    now = state(snapshot)
    learns = learning_problems(snapshot.history)
    if snapshot.stopped:
        return [*of_tokens(snapshot), *learns]
    if now in ("failed", "interrupted"):
        todo = f"fix the error in its logs, then resume with: {snapshot.again or 'the command that started the run'}"
        why = f": {escape_untrusted(snapshot.launch_error, 300)}" if snapshot.launch_error else ""
        what = "has failed" if now == "failed" else "was interrupted"
        return [*_no_signal(snapshot), Problem(f"the run {what}{why}", todo), *of_tokens(snapshot), *learns]
    if now == "stopping" or (now == "preparing" and snapshot.launch == "starting"):
        return []  # the launcher is starting or stopping processes, and monitors them
    if snapshot.error:
        todo = "start the run with `foray up`: it resumes from its checkpoint"
        return [Problem(f"Redis does not answer: {snapshot.error}", todo)]
    same = "run the same Foray version in all processes"
    unreadable = [Problem(f"unreadable message: {text}", same) for text in snapshot.unreadable]
    found = _of_end(snapshot) if snapshot.is_done else _of_progress(snapshot, max_lag)
    return [*unreadable, *found, *learns]


def _of_end(snapshot: RunSnapshot) -> Iterator[Problem]:
    totals = seq_balance(snapshot)
    if not totals.closes or totals.in_flight:
        yield Problem(f"the run is done, but {totals.line()}", "start the learner again: it settles the rest")
    yield from of_tokens(snapshot)


def _of_progress(snapshot: RunSnapshot, max_lag: int) -> Iterator[Problem]:
    if snapshot.max_memory and snapshot.memory > 0.9 * snapshot.max_memory:
        yield Problem(
            f"Redis uses {snapshot.memory / 2**20:.0f} of {snapshot.max_memory / 2**20:.0f} MiB",
            "raise maxmemory, or lower learner.checkpoint_every: groups stay in Redis until the next checkpoint",
        )
    yield from _no_signal(snapshot)
    if snapshot.learner is None and not snapshot.only_serves and not snapshot.awaits_learner:
        held = f"; its lease expires in {snapshot.lease_ms / 1000:.0f} s" if snapshot.lease_ms else ""
        yield Problem(f"no learner is running{held}", "start it again: it resumes from its checkpoint")
    if not snapshot.of("rollout"):
        yield Problem("no rollout server is running", "start one: foray rollout --config ...")
    for p in snapshot.of("rollout"):
        if outage := p.text.get("search_outage"):
            yield _no_retriever(p.id, outage)
    for p in snapshot.processes:
        if refusal := p.text.get("redis_refusal"):
            todo = "the process retries; find out which program writes to this run's keys (SECURITY.md)"
            yield Problem(f"Redis refuses {p.process} {p.id}: {refusal}", todo)
    yield from _of_engines(snapshot, max_lag)
    yield from delivery_problems(snapshot)


def _no_signal(snapshot: RunSnapshot) -> Iterator[Problem]:
    """Yield a problem if the last thing that a learner reported is that nothing can be learned."""
    last = next((event for event in reversed(snapshot.events) if event.process == "learner"), None)
    if last is not None and last.kind == "no-signal":
        todo = "the state is in its checkpoint: find the cause (docs/troubleshooting.md), then continue as its log says"
        yield Problem(escape_untrusted(last.text, 400), todo)


def _no_retriever(rollout: str, outage: str) -> Problem:
    """outage: each address with its cause (`rollout_server/search/base.py`)."""
    if any(cause in outage for cause in NO_SUCH_PATH):
        what = f"the search address of rollout server {rollout} is wrong, so it leases no tasks: {outage}"
        return Problem(what, "correct rollout.search.urls (base addresses) or rollout.search.dialect, and restart it")
    todo = "start the retriever again: searches wait for rollout.search.outage_wait_s, then they fail"
    return Problem(f"rollout server {rollout} has no healthy retriever: {outage}", todo)


def _of_engines(snapshot: RunSnapshot, max_lag: int) -> Iterator[Problem]:
    # without a learner every engine answers, else those of role eval do not generate training data
    serving = [e for e in snapshot.engines if e.role == "rollout" or snapshot.only_serves]
    if not serving:
        others = f": {len(snapshot.engines)} with role eval serve evaluations only" if snapshot.engines else ""
        yield Problem(f"no engine is registered{others}", "start one: foray engine --config ...")
        return
    for e in snapshot.engines:
        if e.state in (NodeState.QUARANTINED, NodeState.SUSPECT):
            yield Problem(
                f"engine {e.id} is {e.state}: {e.detail or 'no reason given'}",
                "it gets no requests until its node has loaded the complete target version, or restarted the engine. "
                "If it does not recover, check the logs of the node and of the engine",
            )
        if e.needs_broadcast and e.state in (NodeState.SYNCING, NodeState.READY):
            yield Problem(
                f"engine {e.id} is {e.state} at {e.version.label}: {e.detail}",
                "it takes part in the next broadcast. Only an engine that shares run.dir with the learner can also "
                "load a version after a failed broadcast; the learner's log has the reasons of failures",
            )
    target = snapshot.target
    usable = [e for e in serving if e.state is NodeState.READY]
    if target is not None:
        usable = [e for e in usable if e.epoch == target.epoch and target.step - e.step <= max_lag]
    moving = any(e.state in (NodeState.JOINING, NodeState.SYNCING, NodeState.LOADING) for e in serving)
    if not usable and not moving and not snapshot.pinned_evaluations:  # a pinned evaluation keeps an older version
        label = target.version.label if target is not None else "any version"
        yield Problem(f"no engine is ready at {label}", "check the logs of the nodes")


def to_json(snapshot: RunSnapshot, *, max_lag: int) -> dict[str, Any]:
    """Return the page as JSON values. Stable: names are added, never changed."""
    wrong, totals = problems(snapshot, max_lag=max_lag), seq_balance(snapshot)
    return {
        "run": snapshot.run,
        "healthy": not wrong,
        "state": state(snapshot),
        "learning": asdict(learning_state(snapshot.history)),
        "evaluations": snapshot.evaluations,
        "figures": dict(snapshot.figures),
        "step_s": snapshot.history.step_s or None,
        "tokens_per_s": asdict(throughput(snapshot)),
        "eta_s": snapshot.eta_s,
        "problems": [asdict(p) for p in wrong],
        "redis": {
            "url": snapshot.redis_url,
            "error": snapshot.error,
            "memory": snapshot.memory,
            "max_memory": snapshot.max_memory,
        },
        "target": {
            "version": snapshot.target.version.label if snapshot.target else None,
            "digest": snapshot.target.digest if snapshot.target else None,
            "state": snapshot.target_state,
        },
        "learner_epoch": snapshot.learner_epoch,
        "lease_ms": snapshot.lease_ms,
        "engines": [e.model_dump() | {"version": e.version.label} for e in snapshot.engines],
        "processes": [p.model_dump() for p in snapshot.processes],
        "streams": {
            "tasks_waiting": snapshot.tasks.waiting,
            "tasks_leased": snapshot.tasks.held,
            "traj_ready": snapshot.traj.waiting,
            "traj_unacked": snapshot.traj.held,
            "dead_letters": snapshot.dead_letters,
        },
        "letters": [{"at": at, "reason": reason} for at, reason in snapshot.letters],
        "events": [asdict(event) for event in snapshot.events],
        "tokens": asdict(balance) | {"closes": balance.closes} if (balance := token_balance(snapshot)) else None,
        "ledger": asdict(totals) | {"closes": totals.closes},
        "checkpoint": asdict(snapshot.totals) | {"closes": snapshot.totals.closes} if snapshot.totals else None,
    }


def state(snapshot: RunSnapshot) -> str:
    """Return the state in one word. With a learner: starting, training. Without one: preparing (it will start), serving
    (the run has none), evaluating, waiting (it does not run). Also stopping, stopped (by the user), interrupted (only
    its learner was stopped), done, failed, down.
    """
    if snapshot.stopped:
        return "stopped"
    if snapshot.launcher_lives and snapshot.launch == "stopping":
        return "stopping"
    if snapshot.launch in ("failed", "interrupted") and not snapshot.launcher_lives and snapshot.learner is None:
        return snapshot.launch
    if snapshot.error:
        return "preparing" if snapshot.launcher_lives and snapshot.launch == "starting" else "down"
    if snapshot.evaluations and (snapshot.learner is None or snapshot.is_done):
        return "evaluating"
    if snapshot.is_done:
        return "done"
    if snapshot.learner:
        return snapshot.learner.text.get("state", "training")
    if snapshot.only_serves:
        return "serving"
    return "preparing" if snapshot.awaits_learner else "waiting"


def step_line(snapshot: RunSnapshot) -> str:
    """Return `step 14 of 60, 3.9 s per step, about 3 min to go`, without unknown parts."""
    figures = snapshot.figures
    line = f"step {figures.get('step', 0):.0f} of {figures.get('steps', 0):.0f}"
    if snapshot.history.step_s:
        line += f", {snapshot.history.step_s:.1f} s per step"
    return line if snapshot.eta_s is None else f"{line}, about {span(snapshot.eta_s)} to go"


def span(seconds: float) -> str:
    """Format a duration: `45 s`, `12 min`, `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
