"""The learner's typed calls to Redis. They may raise the errors of `protocol/runtime/redis/errors.py`.

`redis_setup.py` creates streams and functions; `redis_accounts.py` has counters, events and requests.

Two clients are needed with redis-py 8: its retries would duplicate an XADD whose reply was lost, and a blocking read
needs a socket timeout longer than its block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import redis

from learner.delivery.redis_accounts import AccountingStore
from learner.delivery.redis_setup import prepare
from protocol import functions
from protocol.arrays import Message
from protocol.codec import decode_as, encode, number_of
from protocol.errors import ProtocolError, StateLost
from protocol.keys import TASK_GROUP, TRAJ_GROUP, Keys
from protocol.messages import EngineInfo, MetricsSnapshot, ViewAnswer, WeightUpdate, WeightView
from protocol.runtime.redis.client import connect
from protocol.runtime.redis.errors import translate_errors, unusable
from protocol.runtime.redis.server import SETTING
from protocol.runtime.redis.url import redacted
from protocol.versions import PolicyVersion, VersionPin

BLOCK_MS = 500
METRICS_TTL_MS = 10_000
CHUNK = 256
MAX_DIGITS = 15
"""Maximum digits of a count: numbers in the functions are exact up to this."""
LAST_ID = (2**64 - 1, 2**64 - 1)
"""The largest id: a stream with this entry accepts no other."""
CHUNK_BYTES = 1 << 16
"""Maximum tasks, and bytes of tasks, per call: a request counts as used memory, and Redis refuses one too large."""

Fields = dict[bytes, bytes]
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class LeaseHolder:
    """The holder of the lease: epoch, token, and seconds until it expires.

    renewed_s  seconds since it was last renewed; None if the holder does not report it (an older Foray)
    since      time of acquisition on Redis' clock, in seconds since 1970; 0.0 likewise
    """

    epoch: int
    token: str
    ttl_s: float
    renewed_s: float | None = None
    since: float = 0.0


@dataclass(frozen=True)
class StreamSnapshot:
    """Atomic snapshot of where the seqs are.

    tasks     seqs with a task that is undelivered or leased
    unread    whether undelivered trajectory entries exist: their seqs are unknown
    foreign_consumers    whether trajectory entries were delivered to another learner
    ahead_s   seconds by which the ids of trajectory entries are ahead of the clock of Redis, which generates them
    """

    tasks: frozenset[int]
    unread: bool
    foreign_consumers: bool
    ahead_s: float = 0.0


@dataclass(frozen=True)
class Look:
    """learner.delivery.autoscale.Seen."""

    now: float
    processes: tuple[MetricsSnapshot, ...]
    engines: tuple[EngineInfo, ...]


class RunStore(AccountingStore):
    """The learner's access to one run in Redis. Thread-safe except `read`, which belongs to one thread."""

    def __init__(self, url: str, run: str) -> None:
        self.keys = Keys(run)
        self.url = redacted(url)
        self._owner: tuple[str, str] = ("0", "")
        self._db = connect(url)
        self._reader = connect(url, timeout_s=BLOCK_MS / 1000 + 10)
        # redis-py's own parser hides the cursor of a claim that returns only ids.
        self._db.set_response_callback("XAUTOCLAIM", lambda reply, **_: reply)

    def close(self) -> None:
        """Close both clients."""
        self._db.close()
        self._reader.close()

    def set_owner(self, epoch: int, token: str) -> None:
        """Set the owner of fenced calls."""
        self._owner = (str(epoch), token)

    @property
    def epoch(self) -> int:
        """Return the epoch of fenced calls; 0 before the first."""
        return int(self._owner[0])

    def prepare(self) -> bool:
        """Load the functions and create missing streams and groups; return whether a stream or group was missing.

        Idempotent.
        """
        return prepare(self._db, self.keys)

    def eviction_policy(self) -> str:
        """Return `maxmemory-policy` of the server; "" without permission."""
        with translate_errors():
            try:
                return str(self._db.info("memory").get("maxmemory_policy", ""))
            except redis.exceptions.NoPermissionError:
                pass
            try:
                return str(self._db.config_get(SETTING).get(SETTING, ""))
            except redis.exceptions.NoPermissionError:
                return ""

    def _call(self, name: str, keys: Sequence[str], *args: str | bytes | int) -> Any:
        with translate_errors():
            return self._db.fcall(name, len(keys), *keys, *cast(tuple[str, ...], args))

    # --- lease ---

    def acquire(
        self, token: str, floor: int, ttl_ms: int, *, takeover: bool, lineage_id: str = "", ended: str = ""
    ) -> int | LeaseHolder | None:
        """Return the new epoch, above `floor`, or the holder of the lease; None if the run in this Redis is another
        one.

        ended  token of a holder that is known to have ended: only its lease is taken over
        """
        keys = (self.keys.lease, self.keys.epoch, self.keys.meta)
        whose = (lineage_id, ended) if ended else (lineage_id,) if lineage_id else ()
        reply = self._call(functions.ACQUIRE, keys, token, floor, ttl_ms, "1" if takeover else "0", *whose)
        if int(reply[0]) == 2:
            return None
        if int(reply[0]) == 1:
            return int(reply[1])
        found = self.holder()
        if found is not None and found.token == reply[3].decode(errors="replace"):
            return found
        return LeaseHolder(int(reply[1]), reply[3].decode(errors="replace"), max(0, int(reply[2])) / 1000)

    def renew(self, ttl_ms: int) -> bool:
        """Extend the lease by `ttl_ms`. Return False if it is not ours."""
        return bool(self._call(functions.RENEW, (self.keys.lease,), *self._owner, ttl_ms))

    def release(self) -> None:
        """Free the lease if it is ours."""
        self._call(functions.RELEASE, (self.keys.lease,), *self._owner)

    def holder(self) -> LeaseHolder | None:
        """Return the current holder of the lease."""
        with translate_errors(self.keys.lease):
            lease = cast(Fields, self._db.hgetall(self.keys.lease))
            left_s = max(0, self._db.pttl(self.keys.lease)) / 1000
        if b"token" not in lease:
            return None
        epoch, ttl, since = (number_of(lease.get(name, b"")) for name in (b"epoch", b"ttl", b"since"))
        renewed_s = max(0.0, ttl / 1000 - left_s) if ttl else None
        return LeaseHolder(epoch, lease[b"token"].decode(errors="replace"), left_s, renewed_s, float(since))

    # --- run metadata ---

    def meta(self) -> Fields:
        """Return the metadata that the run's learner wrote; {} if there is none."""
        with translate_errors(self.keys.meta):
            return cast(Fields, self._db.hgetall(self.keys.meta))

    def write_meta(self, fields: Mapping[str, str]) -> None:
        """Write the values on which all processes of the run must agree."""
        self._call(functions.META, (self.keys.lease, self.keys.meta), *self._owner, *_flat(fields))

    def reset(self, fields: Mapping[str, str]) -> None:
        """Delete the run's state in this Redis, and write `fields` as its new metadata."""
        k = self.keys
        work = (k.tasks, k.traj, k.issued, k.tokens, k.requeue, k.target, k.view, k.plan, k.wake, k.dlq)
        self._call(functions.RESET, (k.lease, k.meta, *work), *self._owner, *_flat(fields))

    # --- tasks ---

    def issued(self) -> int:
        """Return the highest seq ever issued, according to Redis."""
        with translate_errors(self.keys.issued):
            found = cast(bytes | None, self._db.get(self.keys.issued)) or b"0"
        if not found.isdigit() or len(found) > MAX_DIGITS:
            raise unusable(self.keys.issued, "it is not a number")
        return int(found)

    def issue(self, floor: int, pairs: Sequence[tuple[int, bytes]], *, ceiling: int = 10**MAX_DIGITS) -> int:
        """Add tasks (seq ascending); skip those already issued. Return the highest issued.

        ceiling  a higher count in Redis is not trusted, and corrected
        """
        issued = floor
        for flat in _chunks(pairs):
            keys = (self.keys.lease, self.keys.issued, self.keys.tasks)
            issued = int(self._call(functions.ISSUE, keys, *self._owner, floor, ceiling, *flat))
        return issued

    def reissue(self, pairs: Sequence[tuple[int, bytes]]) -> None:
        """Add tasks, including those already issued."""
        for flat in _chunks(pairs):
            self._call(functions.REISSUE, (self.keys.lease, self.keys.tasks), *self._owner, *flat)

    def snapshot(self) -> StreamSnapshot:
        """Return where the seqs are, in one transaction: a task that moves during separate reads would be missed."""
        with translate_errors(), self._db.pipeline(transaction=True) as pipe:
            pipe.xinfo_groups(self.keys.tasks)
            pipe.xpending_range(self.keys.tasks, TASK_GROUP, "-", "+", 1_000_000)
            pipe.xrange(self.keys.tasks)
            pipe.xinfo_groups(self.keys.traj)
            pipe.xinfo_stream(self.keys.traj)
            pipe.xinfo_consumers(self.keys.traj, TRAJ_GROUP)
            pipe.time()
            groups, pending, tasks, readers, stream, consumers, (now_s, _) = pipe.execute()
        last = entry_order(stream["last-generated-id"])
        if last == LAST_ID:
            raise unusable(self.keys.traj, "an entry in it has the largest possible id: no other can be added")
        leased = {item["message_id"] for item in pending}
        delivered = entry_order(_group(groups, TASK_GROUP)["last-delivered-id"])
        # The stream also holds acknowledged tasks until the floor passes them.
        # A task added by another program may have no seq.
        seqs = [fields.get(b"seq", b"") for id_, fields in tasks if id_ in leased or entry_order(id_) > delivered]
        read = entry_order(_group(readers, TRAJ_GROUP)["last-delivered-id"])
        mine = self.consumer.encode()
        return StreamSnapshot(
            tasks=frozenset(seq for raw in seqs if (seq := number_of(raw))),
            unread=stream["last-entry"] is not None and entry_order(stream["last-entry"][0]) > read,
            foreign_consumers=any(c["pending"] for c in consumers if c["name"] != mine),
            ahead_s=last[0] / 1000 - now_s,
        )

    # --- trajectories ---

    @property
    def consumer(self) -> str:
        """Return this learner's consumer name in the stream group, one per epoch."""
        return f"L{self._owner[0]}"

    def read(self, count: int) -> list[tuple[bytes, Fields]]:
        """Return up to `count` undelivered entries; wait up to BLOCK_MS for the first."""
        with translate_errors(self.keys.traj):
            reply: Any = self._reader.xreadgroup(
                TRAJ_GROUP, self.consumer, {self.keys.traj: ">"}, count=count, block=BLOCK_MS
            )
        return [(id_, fields) for _, entries in reply or [] for id_, fields in entries]

    def claim(self) -> list[bytes]:
        """Claim every pending entry for this consumer; return their ids, oldest first."""
        ids: list[bytes] = []
        cursor: bytes | str = "0-0"
        while True:
            with translate_errors(self.keys.traj):
                # JUSTID: K steps of groups may be pending; their bodies are fetched as the buffer has capacity.
                reply: Any = self._db.execute_command(  # type: ignore[no-untyped-call]
                    "XAUTOCLAIM", self.keys.traj, TRAJ_GROUP, self.consumer, 0, cursor, "COUNT", 500, "JUSTID"
                )
            cursor = reply[0]
            ids += reply[1]
            if cursor == b"0-0":
                return ids

    def ack(self, ids: Sequence[bytes]) -> int:
        """Acknowledge entries; return how many were pending."""
        done = 0
        for start in range(0, len(ids), CHUNK):
            part = ids[start : start + CHUNK]
            done += int(self._call(functions.ACK, (self.keys.lease, self.keys.traj), *self._owner, *part))
        return done

    def redeliver(self, id_: bytes) -> tuple[int, Fields | None]:
        """Return how often Redis has delivered a pending entry, this time included, and its fields.

        The fields are None if the entry does not exist (any more).
        """
        with translate_errors(), self._db.pipeline(transaction=False) as pipe:
            pipe.xpending_range(self.keys.traj, TRAJ_GROUP, id_, id_, 1)
            pipe.xclaim(self.keys.traj, TRAJ_GROUP, self.consumer, 0, [id_])
            pending, claimed = pipe.execute()
        deliveries = int(pending[0]["times_delivered"]) + 1 if pending else 1
        return deliveries, claimed[0][1] if claimed else None

    def reset_deliveries(self, id_: bytes) -> None:
        """Reset the delivery count of an entry that was read successfully."""
        with translate_errors(self.keys.traj):
            self._db.xclaim(self.keys.traj, TRAJ_GROUP, self.consumer, 0, [id_], retrycount=0, justid=True)

    # --- announcements ---

    def target(self, update: WeightUpdate, state: str) -> None:
        """Announce the version that engines must load; `state` is "ready" or "done"."""
        keys = (self.keys.lease, self.keys.target, self.keys.wake)
        self._call(functions.TARGET, keys, *self._owner, encode(update), state)

    def announced(self) -> PolicyVersion | None:
        """Return the version that engines must load, according to Redis."""
        with translate_errors(self.keys.target):
            raw = self._db.hget(self.keys.target, "b")
        update = _decoded(WeightUpdate, cast(bytes, raw)) if raw else None
        return update.version if update else None

    def view(self, view: WeightView, ttl_s: float, plan: bytes = b"") -> None:
        """Write the state of a transfer, and its plan if given; they expire after `ttl_s`."""
        keys, plans = (self.keys.lease, self.keys.view, self.keys.wake, self.keys.plan), (plan,) if plan else ()
        self._call(functions.VIEW, keys, *self._owner, encode(view), int(ttl_s * 1000), *plans)

    def answers(self, epoch: int, number: int) -> dict[str, ViewAnswer]:
        """Return the last answer of each member of a view."""
        with translate_errors(key := self.keys.answers(epoch, number)):
            found = cast(Fields, self._db.hgetall(key))
        return _by_member(found.values())

    def next_answers(self, epoch: int, number: int, after: str, wait_s: float) -> tuple[dict[str, ViewAnswer], str]:
        """Return the answers of a view that follow the place `after` ("0": all), and the place of the last one.

        Waits up to `wait_s` for the first.
        """
        with translate_errors(key := self.keys.new_answers(epoch, number)):
            reply: Any = self._reader.xread({key: after}, block=int(1000 * wait_s) or None)
        entries = [entry for _, found in reply or [] for entry in found]
        return _by_member(fields.get(b"b", b"") for _, fields in entries), entries[-1][0].decode() if entries else after

    def engines(self) -> list[EngineInfo]:
        """Return engines whose registration is alive."""
        with translate_errors(self.keys.engines):
            names = cast(list[bytes], self._db.zrange(self.keys.engines, 0, -1))
            with self._db.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hget(self.keys.engine(name.decode(errors="replace")), "b")
                raws = pipe.execute()
        # registrations of another version of Foray may lack what they load
        return [info for raw in raws if raw is not None and (info := _decoded(EngineInfo, raw)) is not None]

    def _rollout_snapshots(self) -> list[MetricsSnapshot]:
        with translate_errors(self.keys.processes):
            names = [
                name.decode(errors="replace") for name in cast(list[bytes], self._db.zrange(self.keys.processes, 0, -1))
            ]
            with self._db.pipeline(transaction=False) as pipe:
                for _, _, id_ in (name.partition(":") for name in names if name.startswith("rollout:")):
                    pipe.get(self.keys.metrics("rollout", id_))
                raws = pipe.execute()
        return [info for raw in raws if raw is not None and (info := _decoded(MetricsSnapshot, raw)) is not None]

    def pin(self) -> VersionPin | None:
        """Return the pin of a running evaluation."""
        with translate_errors():
            return VersionPin.parse(cast(bytes | None, self._db.get(self.keys.evaluation)))

    def validate(self, update: WeightUpdate, ttl_s: float) -> None:
        """Let engines load `update` after a later version was announced, if a validation needs it."""
        with translate_errors():
            self._db.set(self.keys.validated, encode(update), px=int(ttl_s * 1000))

    def look(self, learner: MetricsSnapshot) -> Look:
        """Return the engines, and the metrics of the rollout servers beside `learner`."""
        return Look(self.now(), (learner, *self._rollout_snapshots()), tuple(self.engines()))

    def rollout_urls(self) -> list[str]:
        """Return the addresses of the rollout servers, in the order of their names."""
        found = {info.id: info.text.get("url", "") for info in self._rollout_snapshots()}
        return [url for _, url in sorted(found.items()) if url]

    def now(self) -> float:
        """Return seconds on Redis' clock, which all hosts share."""
        with translate_errors():
            seconds, micros = self._db.time()
        return float(seconds) + float(micros) / 1e6

    def report(self, snapshot: MetricsSnapshot) -> None:
        """Publish this second's metrics."""
        key = self.keys.metrics(snapshot.process, snapshot.id)
        with translate_errors():
            expiry = self.now() + METRICS_TTL_MS / 1000
        member = f"{snapshot.process}:{snapshot.id}"
        keys = (key, self.keys.processes)
        self._call(functions.REPORT, keys, encode(snapshot), METRICS_TTL_MS, f"{expiry:.6f}", member)


def _chunks(pairs: Sequence[tuple[int, bytes]]) -> Iterator[list[int | bytes]]:
    """Yield `pairs` flattened, in chunks of at least one pair and at most CHUNK_BYTES."""
    flat: list[int | bytes] = []
    size = 0
    for seq, body in pairs:
        if flat and (size + len(body) > CHUNK_BYTES or len(flat) >= 2 * CHUNK):
            yield flat
            flat, size = [], 0
        flat += (seq, body)
        size += len(body)
    if flat:
        yield flat


def _decoded(kind: type[M], raw: bytes) -> M | None:
    try:
        return decode_as(kind, raw)
    except ProtocolError:
        return None


def _by_member(raws: Iterable[bytes]) -> dict[str, ViewAnswer]:
    answers = (_decoded(ViewAnswer, raw) for raw in raws)
    return {answer.member: answer for answer in answers if answer is not None}


def _flat(fields: Mapping[str, str]) -> list[str]:
    return [part for pair in fields.items() for part in pair]


def _group(groups: list[dict[str, Any]], name: str) -> dict[str, Any]:
    for group in groups:
        if group["name"] == name.encode():
            return group
    raise StateLost(f"NOGROUP {name}")


def entry_order(id_: bytes) -> tuple[int, int]:
    """Return (milliseconds, number) of a stream entry's id: the newer of two entries compares greater."""
    ms, _, number = id_.partition(b"-")
    return int(ms), int(number)
