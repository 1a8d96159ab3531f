"""Plain keys, hashes, sets and sorted sets of the model of Redis, with redis-py's names, arguments and replies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from redis import exceptions
from sim.streams import Fields


def raw(value: Any) -> bytes:
    """A value as Redis stores it."""
    return value if isinstance(value, bytes) else str(value).encode()


def size_of(value: Any) -> int:
    """Return the bytes of a value, without Redis' overhead."""
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(len(k) + (len(v) if isinstance(v, bytes) else 8) for k, v in value.items())
    if isinstance(value, set):
        return sum(map(len, value))
    return sum(size_of(fields) for fields in value.entries.values())


def name_of(key: Any) -> str:
    return key.decode() if isinstance(key, bytes) else str(key)


def key_fault(key: Any, text: str) -> exceptions.ResponseError:
    """The error of a command for a key of another type; functions name the key."""
    error = exceptions.ResponseError(text)
    error.key = name_of(key)
    return error


class Values:
    """Keys and when they expire, in milliseconds by this Redis' clock.

    lives  restarts of the server so far; refused: commands refused for lack of memory
    """

    data: dict[str, Any]
    expires: dict[str, float]
    lives: int
    refused: int
    _clock_ms: Callable[[], float]

    def now_ms(self) -> int:
        return int(self._clock_ms())

    def find(self, key: Any) -> Any:
        name = name_of(key)
        if name in self.expires and self.expires[name] <= self.now_ms():
            del self.data[name], self.expires[name]
        return self.data.get(name)

    def of_kind(self, key: Any, kind: type) -> Any:
        """Return the value of `key`, None if it is missing. (Does not distinguish hashes and sorted sets.)"""
        found = self.find(key)
        if found is not None and not isinstance(found, kind):
            raise key_fault(key, "WRONGTYPE Operation against a key holding the wrong kind of value")
        return found

    # --- plain keys ---

    def get(self, name: Any) -> bytes | None:
        found: bytes | None = self.of_kind(name, bytes)
        return found

    def set(self, name: Any, value: Any, px: int | None = None, ex: int | None = None, **_: Any) -> bool:
        key = name_of(name)
        self.data[key] = raw(value)
        self.expires.pop(key, None)
        if px is not None or ex is not None:
            self.expires[key] = self.now_ms() + int(px if px is not None else (ex or 0) * 1000)
        return True

    def delete(self, *names: Any) -> int:
        done = 0
        for name in names:
            if self.find(name) is not None:
                del self.data[name_of(name)]
                self.expires.pop(name_of(name), None)
                done += 1
        return done

    def exists(self, *names: Any) -> int:
        return sum(self.find(name) is not None for name in names)

    def pexpire(self, name: Any, time: Any) -> bool:
        if self.find(name) is None:
            return False
        self.expires[name_of(name)] = self.now_ms() + int(time)
        return True

    def expire(self, name: Any, time: Any) -> bool:
        return self.pexpire(name, int(time) * 1000)

    def pttl(self, name: Any) -> int:
        if self.find(name) is None:
            return -2
        until = self.expires.get(name_of(name))
        return -1 if until is None else int(until - self.now_ms())

    def info(self, section: str = "") -> dict[str, Any]:
        errors = {"errorstat_OOM": {"count": self.refused}} if self.refused else {}
        return {"run_id": f"life-{self.lives}", "maxmemory": 0, **errors}

    def time(self) -> tuple[int, int]:
        micros = int(self._clock_ms() * 1000)
        return micros // 1_000_000, micros % 1_000_000

    # --- hashes, sets, sorted sets ---

    def _made(self, name: Any, kind: type) -> Any:
        found = self.of_kind(name, kind)
        if found is None:
            found = self.data[name_of(name)] = kind()
        return found

    def hset(self, name: Any, key: Any = None, value: Any = None, mapping: Mapping[Any, Any] | None = None) -> int:
        found = self._made(name, dict)
        pairs = dict(mapping or {}) | ({key: value} if key is not None else {})
        new = sum(raw(k) not in found for k in pairs)
        found.update({raw(k): raw(v) for k, v in pairs.items()})
        return new

    def hsetnx(self, name: Any, key: Any, value: Any) -> int:
        if raw(key) in (self.of_kind(name, dict) or {}):
            return 0
        return self.hset(name, key, value)

    def hget(self, name: Any, key: Any) -> bytes | None:
        return (self.of_kind(name, dict) or {}).get(raw(key))

    def hmget(self, name: Any, keys: Iterable[Any], *more: Any) -> list[bytes | None]:
        wanted = [keys, *more] if isinstance(keys, str | bytes) else [*keys, *more]
        return [self.hget(name, key) for key in wanted]

    def hgetall(self, name: Any) -> Fields:
        return dict(self.of_kind(name, dict) or {})

    def hincrby(self, name: Any, key: Any, amount: Any = 1) -> int:
        found = self._made(name, dict)
        text = found.get(raw(key), b"0")
        if not text.removeprefix(b"-").isdigit():
            raise exceptions.ResponseError("hash value is not an integer")
        number = int(text) + int(amount)
        if not -(2**63) <= number < 2**63:
            raise exceptions.ResponseError("increment or decrement would overflow")
        found[raw(key)] = b"%d" % number
        return number

    def hdel(self, name: Any, *keys: Any) -> int:
        found = self.of_kind(name, dict) or {}
        gone = sum(found.pop(raw(key), None) is not None for key in keys)
        self._drop_empty(name)
        return gone

    def _drop_empty(self, name: Any) -> None:
        if self.find(name) is not None and not self.find(name):
            self.delete(name)

    def sadd(self, name: Any, *values: Any) -> int:
        found = self._made(name, set)
        new = {raw(v) for v in values} - found
        found |= new
        return len(new)

    def smembers(self, name: Any) -> set[bytes]:
        return set(self.of_kind(name, set) or ())

    def srandmember(self, name: Any, number: int) -> list[bytes]:
        return sorted(self.of_kind(name, set) or ())[:number]

    def scard(self, name: Any) -> int:
        return len(self.of_kind(name, set) or ())

    def srem(self, name: Any, *values: Any) -> int:
        found = self.of_kind(name, set) or set()
        gone = found & {raw(v) for v in values}
        found -= gone
        self._drop_empty(name)
        return len(gone)

    def zadd(self, name: Any, mapping: Mapping[Any, Any]) -> int:
        found = self._made(name, dict)
        new = sum(raw(k) not in found for k in mapping)
        found.update({raw(k): float(v) for k, v in mapping.items()})
        return new

    def zrange(self, name: Any, start: int, end: int) -> list[bytes]:
        assert (start, end) == (0, -1)
        return [k for k, _ in sorted((self.of_kind(name, dict) or {}).items(), key=lambda item: (item[1], item[0]))]

    def zrangebyscore(self, name: Any, min: Any, max: Any) -> list[bytes]:
        found = self.of_kind(name, dict) or {}
        return [k for k in self.zrange(name, 0, -1) if float(min) <= found[k] <= float(max)]

    def zremrangebyscore(self, name: Any, min: Any, max: Any) -> int:
        gone = self.zrangebyscore(name, min, max)
        for key in gone:
            del self.find(name)[key]
        self._drop_empty(name)
        return len(gone)

    def zrem(self, name: Any, *values: Any) -> int:
        found = self.of_kind(name, dict) or {}
        gone = sum(found.pop(raw(v), None) is not None for v in values)
        self._drop_empty(name)
        return gone
