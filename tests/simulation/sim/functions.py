"""protocol/functions.lua in Python, line by line, over the model. The contract test compares the two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from redis import exceptions
from sim.sim_redis import SimRedis
from sim.streams import Fields, id_of, text_of
from sim.values import key_fault

Call = Callable[[SimRedis, list[str], list[bytes]], Any]
FUNCTIONS: dict[str, tuple[Call, bool]] = {}
"""name -> (function, whether it works when Redis is full)"""


def function(name: str, *, oom: bool = False) -> Callable[[Call], Call]:
    """Registers; `oom`: it carries the flag allow-oom."""

    def keep(call: Call) -> Call:
        FUNCTIONS[name] = (call, oom)
        return call

    return keep


def own(r: SimRedis, lease: str, epoch: bytes, token: bytes) -> bool:
    """Whether this learner holds the lease."""
    return r.hget(lease, "epoch") == epoch and r.hget(lease, "token") == token


def fenced() -> Exception:
    return exceptions.ResponseError("FENCED this learner no longer holds the lease")


def lost(stream: str) -> Exception:
    return exceptions.ResponseError(f"NOSTREAM {stream} is gone: state lost")


def trim(r: SimRedis, stream: str, group: str) -> None:
    """Trim below the floor: entries there have been delivered and acknowledged."""
    _, facts = r.group(stream, group)
    ids = facts.ids()
    last = (facts.last[0], facts.last[1] + (facts.last[1] < 10**15))
    r.trim_below(stream, text_of(ids[0] if ids else last))


def acknowledge(r: SimRedis, stream: str, group: str, id_: bytes) -> int:
    """Acknowledge and delete an entry."""
    done = r.xack(stream, group, id_)
    r.xdel(stream, id_)
    return done


def number_at(r: SimRedis, key: str) -> int:
    """Return the integer at `key`, 0 if it is missing."""
    text = r.get(key) or b"0"
    if len(text) > 15 or not text.isdigit():
        raise key_fault(key, "it holds no count")
    return int(text)


@function("foray_acquire", oom=True)
def acquire(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    lineage = r.hget(k[2], "lineage_id") if len(k) > 2 else None
    mine = a[4] if len(a) > 4 else b""
    if lineage is not None and mine and lineage != mine and a[3] != b"1":
        return [2, lineage]
    holder = r.hget(k[0], "token")
    if holder is not None and holder not in (a[0], *a[5:]) and a[3] != b"1":
        return [0, int(r.hget(k[0], "epoch") or 0), r.pttl(k[0]), holder]
    epoch = max(number_at(r, k[1]), int(a[1])) + 1
    r.set(k[1], epoch)
    r.delete(k[0])
    r.hset(k[0], mapping={"epoch": epoch, "token": a[0], "ttl": a[2], "since": r.time()[0]})
    r.pexpire(k[0], a[2])
    if len(k) > 2 and mine:
        r.hsetnx(k[2], "lineage_id", mine)
    return [1, epoch]


def replace(r: SimRedis, key: str, a: list[bytes]) -> None:
    """Replace the hash by the arguments."""
    r.delete(key)
    if len(a) > 2:
        r.hset(key, mapping=dict(zip(a[2::2], a[3::2], strict=True)))


@function("foray_meta", oom=True)
def meta(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    if not own(r, k[0], a[0], a[1]):
        raise fenced()
    replace(r, k[1], a)
    return 1


@function("foray_reset", oom=True)
def reset(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    if not own(r, k[0], a[0], a[1]):
        raise fenced()
    for key in k[2:]:
        r.delete(key)
    r.xgroup_create(k[2], "rollout", id="0", mkstream=True)
    r.xgroup_create(k[3], "learner", id="0", mkstream=True)
    replace(r, k[1], a)
    return 1


@function("foray_renew", oom=True)
def renew(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    return int(r.pexpire(k[0], a[2])) if own(r, k[0], a[0], a[1]) else 0


@function("foray_release", oom=True)
def release(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    return r.delete(k[0]) if own(r, k[0], a[0], a[1]) else 0


@function("foray_issue")
def issue(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    if not own(r, k[0], a[0], a[1]):
        raise fenced()
    if not r.exists(k[2]):
        raise lost(k[2])
    issued = number_at(r, k[1])
    issued = max(0 if issued > int(a[3]) else issued, int(a[2]))
    for seq, body in zip(a[4::2], a[5::2], strict=True):
        if int(seq) > issued:
            r.xadd(k[2], {"seq": seq, "b": body})
            issued = int(seq)
    r.set(k[1], issued)
    trim(r, k[2], "rollout")
    return issued


@function("foray_reissue")
def reissue(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    if not own(r, k[0], a[0], a[1]):
        raise fenced()
    if not r.exists(k[1]):
        raise lost(k[1])
    for seq, body in zip(a[2::2], a[3::2], strict=True):
        r.xadd(k[1], {"seq": seq, "b": body})
    return (len(a) - 2) // 2


@function("foray_beat", oom=True)
def beat(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    mine = []
    for id_ in a[1:]:
        if r.xpending_range(k[0], "rollout", id_, id_, 1, a[0]):
            r.xclaim(k[0], "rollout", a[0], 0, [id_], justid=True)
            mine.append(id_)
    return mine


def count(r: SimRedis, keys: list[str], place: int, field: str, args: list[bytes], number: int) -> None:
    """Count tokens of a finished attempt. It is a statistic: an error does not stop delivery."""
    if len(keys) > place and len(args) > number and int(args[number]) > 0:
        with suppress(exceptions.RedisError):
            r.hincrby(keys[place], field, int(args[number]))


def leased(r: SimRedis, tasks: str, id_: bytes, consumer: bytes | None) -> bool:
    """Return whether `consumer` has leased the task; None: any consumer. Without the group none has."""
    stream = r.stream(tasks)
    return bool(stream and b"rollout" in stream.groups and r.xpending_range(tasks, "rollout", id_, id_, 1, consumer))


@function("foray_publish")
def publish(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    if not r.exists(k[1]):
        raise lost(k[1])
    if not leased(r, k[0], a[0], a[5] if len(a) > 5 else None):
        return b"DUP"
    fields = {"seq": a[1], "h": a[2], "b": a[3], "t": a[4] if len(a) > 4 else b"0"}
    new = r.xadd(k[1], fields, nomkstream=True)
    acknowledge(r, k[0], "rollout", a[0])
    count(r, k, 2, "published", a, 4)
    return new


@function("foray_retry")
def retry(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    if not leased(r, k[0], a[0], a[4] if len(a) > 4 else None):
        return b"DUP"
    new = r.xadd(k[0], {"seq": a[1], "b": a[2]}, nomkstream=True)
    acknowledge(r, k[0], "rollout", a[0])
    count(r, k, 1, "rejected", a, 3)
    return new


@function("foray_ack", oom=True)
def ack(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    if not own(r, k[0], a[0], a[1]):
        raise fenced()
    done = sum(acknowledge(r, k[1], "learner", id_) for id_ in a[2:])
    trim(r, k[1], "learner")
    return done


@function("foray_target", oom=True)
def target(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    if not own(r, k[0], a[0], a[1]):
        raise fenced()
    r.hset(k[1], mapping={"b": a[2], "state": a[3]})
    return 1


@function("foray_view", oom=True)
def view(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    if not own(r, k[0], a[0], a[1]):
        raise fenced()
    r.set(k[1], a[2], px=int(a[3]))
    return 1


@function("foray_register", oom=True)
def register(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    r.hset(k[0], a[0], a[1])
    r.pexpire(k[0], a[2])
    if len(k) > 1:
        r.zadd(k[1], {a[4]: float(a[3])})
    return 1


@function("foray_report", oom=True)
def report(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    r.set(k[0], a[0], px=int(a[1]))
    r.zadd(k[1], {a[3]: float(a[2])})
    return 1


PAGE_BYTES, ENTRY_BYTES = 1 << 20, 512


def page(entries: Iterable[Fields | None]) -> Iterator[bytes]:
    """The field t of each entry, up to the size of a page."""
    read = 0
    for fields in entries:
        if read >= PAGE_BYTES:
            return
        yield (fields or {}).get(b"t", b"0")
        read += ENTRY_BYTES + sum(map(len, fields.values())) if fields is not None else 0


@function("foray_census", oom=True)
def census(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    stream = r.stream(k[0])
    if stream is None:
        raise lost(k[0])
    group = stream.groups.get(b"learner")
    counts = [part for pair in r.hgetall(k[1]).items() for part in pair]
    return [counts, text_of(stream.last), text_of(group.last) if group else b"0-0"]


@function("foray_unread", oom=True)
def unread(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    stream = r.stream(k[0])
    if stream is None:
        raise lost(k[0])
    ids = [id_ for id_ in stream.after(id_of(a[0])) if id_ <= id_of(a[1])]
    tokens = page(stream.entries[id_] for id_ in ids)
    return [part for id_, t in zip(ids, tokens, strict=False) for part in (text_of(id_), t)]


@function("foray_tokens_of", oom=True)
def tokens_of(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
    found = (r.xrange(k[0], id_, id_) for id_ in a)
    return list(page(entry[0][1] if entry else None for entry in found))
