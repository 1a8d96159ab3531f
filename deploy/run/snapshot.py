"""A snapshot of a run: reports of its processes, lengths of the streams, totals of the ledger. Read-only.

All data come from Redis, in one round trip, and from the run directory. `foray status` and `foray top` show the same
values and work on any host that reaches both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deploy.run.history import RunHistory
from deploy.run.redis_server import connect
from protocol import events
from protocol.arrays import Message
from protocol.codec import decode_as, number_of
from protocol.errors import ForayError, ProtocolError, UserError
from protocol.keys import TASK_GROUP, TRAJ_GROUP, Keys
from protocol.ledger import Ledger
from protocol.messages import EngineInfo, MetricsSnapshot, WeightUpdate
from protocol.run_meta import another_run_error, lineage_id_of
from protocol.runtime.files import lineage_of
from protocol.runtime.redis.url import redacted
from protocol.versions import PolicyVersion

if TYPE_CHECKING:
    import redis

M = TypeVar("M", bound=Message)
ENDS = ("done", "stopped", "interrupted", "failed")
"""States in run.json of a launcher that has ended."""
LETTERS, EVENTS = 20, 5
"""Number of newest dead letters to read: they may be large."""


@dataclass(frozen=True)
class Stream:
    """Entries of a stream: `waiting` have not been read, `held` have been read but not acknowledged."""

    waiting: int = 0
    held: int = 0

    @property
    def total(self) -> int:
        """Return the number of entries that are not acknowledged."""
        return self.waiting + self.held


@dataclass(frozen=True)
class LedgerTotals:
    """The ledger of the last checkpoint: durable, and a few steps behind the learner.

    lineage: first version of each learner start, which shows the steps that a crash rolled back.
    """

    step: int
    epoch: int
    settled: int
    counts: dict[str, int]
    lineage: tuple[PolicyVersion, ...] = ()
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens with a recorded outcome: "generated", and the number per outcome. {}: not counted."""

    @property
    def closes(self) -> bool:
        """Return whether the outcomes add up to the number of settled seqs."""
        return sum(self.counts.values()) == self.settled


@dataclass(frozen=True)
class RunEvent:
    """One entry of the run's event log (`protocol/events.py`). `at`: seconds since 1970 on the Redis clock."""

    at: float
    process: str
    id: str
    kind: str
    text: str


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment. `error`: why Redis could not be read, "" if it could; `todo`: what to do about it."""

    run: str
    redis_url: str
    error: str = ""
    todo: str = ""
    now: float = 0.0
    processes: tuple[MetricsSnapshot, ...] = ()
    engines: tuple[EngineInfo, ...] = ()
    target: WeightUpdate | None = None
    target_state: str = ""
    learner_epoch: int = 0
    lease_ms: int = 0
    issued: int = 0
    tasks: Stream = Stream()
    traj: Stream = Stream()
    dead_letters: int = 0
    letters: tuple[tuple[float, str], ...] = ()
    """(time, reason) of the newest LETTERS dead letters, the newest first."""
    events: tuple[RunEvent, ...] = ()
    """The newest EVENTS, the oldest first."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens of finished attempts, counted by the Redis functions: published, rejected. (Next to them is the name that
    the learner gave these counts.)"""
    memory: int = 0
    max_memory: int = 0
    totals: LedgerTotals | None = None
    unreadable: tuple[str, ...] = field(default=())
    stopped: bool = False
    """The user stopped the run; the command `again` resumes it."""
    again: str = ""
    launch: str = ""
    """State of the launcher in run.json: starting, running, stopping, stopped, done, interrupted, failed. "": started
    manually."""
    launch_error: str = ""
    """What ended the run, if `launch` is "failed" or "interrupted"."""
    launcher_lives: bool = False
    awaits_learner: bool = False
    """The launcher has not started the learner yet, or has just done so."""
    trains: bool = True
    """Whether the run has a learner. False: its model is only served and evaluated."""
    steps: int = 0
    """Number of steps in the run's configuration."""
    history: RunHistory = field(default_factory=RunHistory)

    @property
    def figures(self) -> Mapping[str, float]:
        """Return the values of the newest step, from the learner or, if it does not report, from `metrics.jsonl`."""
        return self.learner.values if self.learner else {"steps": float(self.steps), **self.history.last}

    @property
    def only_serves(self) -> bool:
        """Return whether the run has no learner: none will be started, and none has ever held its lease."""
        return not self.trains and not self.learner_epoch

    @property
    def evaluations(self) -> int:
        """Return the number of evaluation requests in progress."""
        return int(sum(p.values.get("evaluations", 0.0) for p in self.of("rollout")))

    @property
    def validations(self) -> dict[str, str]:
        """Return what the learner says of its validation in progress ("validates") and of the last ("validated")."""
        text = self.learner.text if self.learner else {}
        found = {"validates": text.get("validating", ""), "validated": text.get("validation", "")}
        return {name: line for name, line in found.items() if line}

    @property
    def pinned_evaluations(self) -> int:
        """Return the number of evaluations for which training engines delay new weights."""
        return int(sum(p.values.get("pinned_evaluations", 0.0) for p in self.of("rollout")))

    @property
    def eta_s(self) -> float | None:
        """Return the estimated seconds to the last step; None while nothing trains or before the first step."""
        stopping = self.launcher_lives and self.launch == "stopping"
        if self.learner is None or self.is_done or stopping or not self.history.step_s:
            return None
        return max(0.0, self.figures.get("steps", 0.0) - self.figures.get("step", 0.0)) * self.history.step_s

    @property
    def is_over(self) -> bool:
        """Return whether the launcher has ended, so that nothing changes any more."""
        return self.launch in ENDS and not self.launcher_lives and self.learner is None

    def of(self, process: str) -> tuple[MetricsSnapshot, ...]:
        """Return the snapshots of all processes of one kind: learner, rollout or node."""
        return tuple(p for p in self.processes if p.process == process)

    def urls(self, process: str) -> list[str]:
        """Return the addresses that processes of one kind registered: learner, rollout or retriever."""
        return [url for p in self.of(process) if (url := p.text.get("url"))]

    @property
    def learner(self) -> MetricsSnapshot | None:
        """Return the learner's snapshot."""
        return next(iter(self.of("learner")), None)

    @property
    def is_done(self) -> bool:
        """Return whether the learner has finished the run."""
        return self.target_state == "done"


def take_snapshot(redis_url: str, run: str, run_dir: Path | None = None, *, timeout_s: float = 3.0) -> RunSnapshot:
    """Return a snapshot of `run`. If Redis is down or a message is unreadable, the snapshot reports it."""
    import redis

    totals = read_ledger_totals(run_dir) if run_dir is not None else None
    with connect(redis_url, timeout_s=timeout_s) as client:
        try:
            if run_dir is not None:
                refuse_stranger(client, redis_url, run, run_dir)
            return _look(client, redis_url, run, totals)
        except (redis.RedisError, OSError) as error:
            return RunSnapshot(run, redacted(redis_url), error=f"{type(error).__name__}: {error}", totals=totals)
        except UserError as error:
            return RunSnapshot(
                run, redacted(redis_url), error=f"{error.what}: {error.why}", todo=error.todo, totals=totals
            )


def refuse_stranger(client: redis.Redis, url: str, run: str, run_dir: Path) -> None:
    """Raise UserError if the Redis at `url` holds another run of this id than `run_dir`: port or id is reused."""
    raw: Any = client.hgetall(Keys(run).meta)
    ours = lineage_of(run_dir)
    if ours and lineage_id_of(raw) not in ("", ours):
        todo = "name the directory of that run; what this run left is in its files: foray report"
        raise another_run_error(raw, run=run, redis=redacted(url), ours=f"{run_dir}, lineage {ours[:8]}", todo=todo)


def read_ledger_totals(run_dir: Path) -> LedgerTotals | None:
    """Return the ledger totals of the checkpoint in CURRENT, None before the first. Raises ForayError if invalid."""
    found = _read(run_dir)
    if found is None:
        return None
    manifest, ledger = found
    counts = {str(outcome): number for outcome, number in ledger.counts.items()}
    lineage = tuple(PolicyVersion(*pair) for pair in manifest.get("lineage", ()))
    counted = manifest.get("tokens") or {}
    tokens = {"generated": int(counted["generated"]), **counted.get("buckets", {})} if "generated" in counted else {}
    return LedgerTotals(int(manifest["step"]), int(manifest["epoch"]), ledger.settled, counts, lineage, tokens)


def read_ledger(run_dir: Path) -> Ledger | None:
    """Return the complete ledger of that checkpoint, with the same errors. It must not be changed."""
    found = _read(run_dir)
    return found[1] if found is not None else None


def _read(run_dir: Path) -> tuple[dict[str, Any], Ledger] | None:
    root = run_dir / "checkpoints"
    try:
        path = root / (root / "CURRENT").read_text().strip() / "manifest.json"
        status = path.stat()
        return _parsed(path, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        # no checkpoint yet, or it was replaced between the two reads
        return None


@lru_cache(maxsize=4)
def _parsed(path: Path, *version: int) -> tuple[dict[str, Any], Ledger]:
    """Read a manifest, once: a dashboard looks each second, and a checkpoint does not change (see `version`)."""
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ForayError(f"{path} is not JSON: {error}") from None
    return manifest, Ledger.from_state(manifest["ledger"])


def _look(client: redis.Redis, url: str, run: str, totals: LedgerTotals | None) -> RunSnapshot:
    from protocol.runtime.redis.errors import unusable_keys

    keys = Keys(run)
    seconds, micros = client.time()
    now = seconds + micros / 1e6
    names = _living(client, keys.processes, now)
    engine_ids = _living(client, keys.engines, now)
    with unusable_keys(), client.pipeline(transaction=False) as pipe:
        for name in names:
            process, _, process_id = name.partition(":")
            pipe.get(keys.metrics(process, process_id))
        for engine_id in engine_ids:
            pipe.hget(keys.engine(engine_id), "b")
        pipe.hgetall(keys.target)
        pipe.get(keys.epoch)
        pipe.pttl(keys.lease)
        pipe.get(keys.issued)
        pipe.xlen(keys.dlq)
        pipe.xrevrange(keys.dlq, count=LETTERS)
        pipe.xrevrange(keys.events, count=EVENTS)
        pipe.hgetall(keys.tokens)
        pipe.info("memory")
        answers: list[Any] = pipe.execute()
    unreadable: list[str] = []
    processes = _read_all(MetricsSnapshot, names, answers[: len(names)], unreadable)
    engines = _read_all(EngineInfo, engine_ids, answers[len(names) : len(names) + len(engine_ids)], unreadable)
    target, epoch, lease, issued, dead_letters, letters, newest, tokens, memory = answers[
        len(names) + len(engine_ids) :
    ]
    updates = _read_all(WeightUpdate, ["target"], [target.get(b"b")], unreadable)
    tasks, traj = _stream(client, keys.tasks, TASK_GROUP), _stream(client, keys.traj, TRAJ_GROUP)
    return RunSnapshot(
        run=run,
        redis_url=redacted(url),
        now=now,
        processes=processes,
        engines=engines,
        target=updates[0] if updates else None,
        target_state=target.get(b"state", b"").decode(errors="replace"),
        learner_epoch=number_of(epoch or b""),
        lease_ms=max(0, int(lease)),
        issued=number_of(issued or b""),
        tasks=tasks or Stream(),
        traj=traj or Stream(),
        dead_letters=int(dead_letters),
        letters=tuple((_time(id_), raw.get(b"reason", b"").decode("utf-8", "replace")) for id_, raw in letters),
        events=tuple(RunEvent(_time(id_), **events.parse(raw)) for id_, raw in reversed(newest)),
        tokens={name.decode(): number_of(number) for name, number in tokens.items() if number.isdigit()},
        memory=int(memory.get("used_memory", 0)),
        max_memory=int(memory.get("maxmemory", 0)),
        totals=totals,
        unreadable=tuple(unreadable),
    )


def _time(entry_id: bytes) -> float:
    milliseconds = entry_id.partition(b"-")[0]
    return int(milliseconds) / 1000 if len(milliseconds) < 16 else 0.0  # clients can choose ids


def _living(client: redis.Redis, key: str, now: float) -> list[str]:
    from protocol.runtime.redis.errors import unusable_keys

    with unusable_keys(key):
        members: list[Any] = client.zrangebyscore(key, now, "+inf")
    return [member.decode(errors="replace") for member in members]


def _read_all(kind: type[M], names: list[str], raws: list[Any], unreadable: list[str]) -> tuple[M, ...]:
    found: list[M] = []
    for name, raw in zip(names, raws, strict=True):
        if raw is None:
            continue
        try:
            found.append(decode_as(kind, raw))
        except ProtocolError as error:
            unreadable.append(f"{name}: {error}")
    return tuple(sorted(found, key=lambda m: str(getattr(m, "id", ""))))


def _stream(client: redis.Redis, key: str, group: str) -> Stream | None:
    """Return None if the stream or its group does not exist (the learner creates both)."""
    import redis

    try:
        groups = client.xinfo_groups(key)
    except redis.ResponseError:
        return None
    for entry in groups:
        if entry["name"] == group.encode():
            # After deletions in the middle Redis does not report the lag; then count entries that are not held.
            lag = entry.get("lag")
            held = int(entry["pending"])
            return Stream(int(lag) if lag is not None else max(0, client.xlen(key) - held), held)
    return None
