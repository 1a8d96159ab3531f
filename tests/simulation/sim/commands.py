"""Commands in the syntax of the Redis manual, for callers that use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.sim_redis import SimRedis
from sim.streams import text_of
from sim.values import name_of


def _xautoclaim(r: SimRedis, key: Any, group: Any, who: Any, idle: Any, start: Any, *more: Any) -> Any:
    words = [name_of(w).upper() for w in more]
    count = int(more[words.index("COUNT") + 1]) if "COUNT" in words else 100
    just = "JUSTID" in words
    cursor, ids, gone = r.claimable(key, group, who, int(idle), start, count, just)
    stream, _ = r.group(key, group)
    flat = {i: [part for pair in stream.entries[i].items() for part in pair] for i in ids}
    return [cursor, [text_of(i) if just else [text_of(i), flat[i]] for i in ids], gone]


def _xadd(r: SimRedis, key: Any, *words: Any) -> Any:
    rest, options = list(words), {}
    while name_of(rest[0]).upper() in ("MAXLEN", "NOMKSTREAM", "~", "="):
        word = name_of(rest.pop(0)).upper()
        if word == "MAXLEN":
            options["approximate"] = name_of(rest[0]) == "~"
            if name_of(rest[0]) in "~=":
                rest.pop(0)
            options["maxlen"] = int(rest.pop(0))
        elif word == "NOMKSTREAM":
            options["nomkstream"] = True
    assert name_of(rest.pop(0)) == "*"
    return r.xadd(key, dict(zip(rest[::2], rest[1::2], strict=True)), **options)


def _set(r: SimRedis, key: Any, value: Any, *words: Any) -> Any:
    options = {name_of(k).lower(): int(v) for k, v in zip(words[::2], words[1::2], strict=True)}
    return r.set(key, value, **options)


def _hset(r: SimRedis, key: Any, *pairs: Any) -> Any:
    return r.hset(key, mapping=dict(zip(pairs[::2], pairs[1::2], strict=True)))


COMMANDS: dict[str, Callable[..., Any]] = {
    "XAUTOCLAIM": _xautoclaim,
    "XADD": _xadd,
    "XACK": SimRedis.xack,
    "XLEN": SimRedis.xlen,
    "SET": _set,
    "GET": SimRedis.get,
    "DEL": SimRedis.delete,
    "EXISTS": SimRedis.exists,
    "PEXPIRE": SimRedis.pexpire,
    "HSET": _hset,
    "HGET": SimRedis.hget,
    "HMGET": SimRedis.hmget,
    "HGETALL": SimRedis.hgetall,
    "ZADD": lambda r, key, *pairs: r.zadd(key, {m: float(s) for s, m in zip(pairs[::2], pairs[1::2], strict=True)}),
    "ZRANGE": lambda r, key, low, high: r.zrange(key, int(low), int(high)),
    "ZRANGEBYSCORE": lambda r, key, low, high: r.zrangebyscore(key, float(low), float(high)),
    "ZREM": SimRedis.zrem,
    "SADD": SimRedis.sadd,
    "SMEMBERS": SimRedis.smembers,
    "SREM": SimRedis.srem,
    "TIME": SimRedis.time,
}
