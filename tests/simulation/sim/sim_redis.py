"""A model of Redis 7.0: the commands that Foray uses, with redis-py's names, arguments and replies.

`test_sim_redis.py` makes random sequences of the same calls on this and on a real Redis and compares every reply.
The clock is a parameter and may jump. A full Redis (set so, or with more than `limit`) refuses commands that add data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from redis import exceptions
from sim.streams import LAST, Fields, Group, Id, Pending, Stream, id_of, text_of
from sim.values import Values, key_fault, name_of, raw, size_of

from protocol.runtime.redis.server import function_library

DENIED_WHEN_FULL = frozenset(
    ["xadd", "set", "hset", "hincrby", "zadd", "sadd", "xgroup_create", "function_load", "hsetnx"]
)


class Nothing:
    """An observer that does not look."""

    def looked(self) -> None: ...
    def called(self, function: str, keys: list[str], args: list[bytes]) -> None: ...
    def refused(self) -> None: ...
    def done(self, function: str, keys: list[str], args: list[bytes]) -> None: ...
    def acknowledged(self, stream: str, group: str, id_: Id, fields: Fields | None) -> None: ...
    def added(self, stream: str, id_: Id, fields: Fields) -> None: ...


class SimRedis(Values):
    """State and commands; every call is atomic. clock_ms: the wall clock of this Redis' host."""

    def __init__(self, clock_ms: Callable[[], float]) -> None:
        self._clock_ms = clock_ms
        self.made_full = False
        self.limit = 0
        """maxmemory in bytes of names, keys and values; 0: none."""
        self.lives = self.refused = 0
        self.observer: Any = Nothing()
        self.added = 0
        """Counts entries added to any stream."""
        self.listeners: list[Callable[[], None]] = []
        """Called when an entry is added to any stream: blocked readers look again."""
        self.wipe()

    # --- the whole ---

    def wipe(self) -> None:
        """As after a restart without persistence."""
        self.data: dict[str, Any] = {}
        self.expires: dict[str, float] = {}
        self.functions = False

    def copy(self) -> tuple[Any, ...]:
        """What an append-only file would bring back."""
        return copy.deepcopy((self.data, self.expires, self.functions))

    def restore(self, saved: tuple[Any, ...]) -> None:
        self.data, self.expires, self.functions = copy.deepcopy(saved)
        self.woken()

    def woken(self) -> None:
        """Blocked readers look again."""
        self.added += 1
        for listener in list(self.listeners):
            listener()

    def used(self) -> int:
        """Bytes of all that has not expired."""
        return sum(len(name) + size_of(found) for name in list(self.data) if (found := self.find(name)) is not None)

    @property
    def full(self) -> bool:
        """Whether what adds is refused."""
        return self.made_full or (bool(self.limit) and self.used() > self.limit)

    def guard(self, command: str) -> None:
        """Raise the error of a full Redis."""
        if command in DENIED_WHEN_FULL and self.full:
            self._refuse()

    def _refuse(self) -> None:
        self.refused += 1
        raise exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")

    # --- streams ---

    def stream(self, key: Any) -> Stream | None:
        found: Stream | None = self.of_kind(key, Stream)
        return found

    def group(self, key: Any, group: Any) -> tuple[Stream, Group]:
        stream = self.stream(key)
        if stream is None or raw(group) not in stream.groups:
            text = f"NOGROUP No such key '{name_of(key)}' or consumer group '{name_of(group)}'"
            raise exceptions.ResponseError(text)
        return stream, stream.groups[raw(group)]

    def xadd(
        self, name: Any, fields: Mapping[Any, Any], id: str = "*", maxlen: int | None = None,
        approximate: bool = True, nomkstream: bool = False,
    ) -> bytes | None:  # fmt: skip
        stream = self.stream(name)
        if stream is None:
            if nomkstream:
                return None
            stream = self.data[name_of(name)] = Stream()
        body = {raw(k): raw(v) for k, v in fields.items()}
        if stream.last == LAST:
            raise key_fault(name, "The stream has exhausted the last possible ID, unable to add more items")
        if id != "*" and id_of(id) <= stream.last:
            raise exceptions.ResponseError("The ID specified in XADD is equal or smaller than the target's top item")
        new = stream.add(body, stream.next(self.now_ms()) if id == "*" else id_of(id))
        if maxlen is not None and not approximate:
            stream.trim(list(stream.entries)[-maxlen] if len(stream.entries) > maxlen else (0, 0))
        self.observer.added(name_of(name), new, body)
        self.woken()
        return text_of(new)

    def xgroup_create(self, name: Any, groupname: Any, id: Any = "$", mkstream: bool = False) -> bool:
        stream = self.stream(name)
        if stream is None:
            if not mkstream:
                raise exceptions.ResponseError("The XGROUP subcommand requires the key to exist.")
            stream = self.data[name_of(name)] = Stream()
        if raw(groupname) in stream.groups:
            raise exceptions.ResponseError("BUSYGROUP Consumer Group name already exists")
        stream.groups[raw(groupname)] = Group(stream.last if id == "$" else id_of(id))
        return True

    def xgroup_delconsumer(self, name: Any, groupname: Any, consumername: Any) -> int:
        if self.stream(name) is None:
            raise exceptions.ResponseError("The XGROUP subcommand requires the key to exist.")
        _, group = self.group(name, groupname)
        who = raw(consumername)
        theirs = [id_ for id_, p in group.pending.items() if p.consumer == who]
        for id_ in theirs:
            del group.pending[id_]
        group.consumers.discard(who)
        return len(theirs)

    def xreadgroup(
        self, groupname: Any, consumername: Any, streams: Mapping[Any, Any], count: int | None = None,
        block: int | None = None,
    ) -> list[Any]:  # fmt: skip
        """Read once; the caller implements `block`."""
        out = []
        for key, after in streams.items():
            assert after == ">", "history is not modelled"
            stream, group = self.group(key, groupname)
            group.consumers.add(raw(consumername))
            ids = stream.after(group.last, count)
            for id_ in ids:
                group.last = id_
                group.pending[id_] = Pending(raw(consumername), self.now_ms(), 1)
            if ids:
                out.append([raw(key), [(text_of(i), dict(stream.entries[i])) for i in ids]])
        return out

    def xack(self, name: Any, groupname: Any, *ids: Any) -> int:
        stream = self.stream(name)
        group = stream.groups.get(raw(groupname)) if stream else None
        done = 0
        for id_ in map(id_of, ids):
            if group and stream and group.pending.pop(id_, None):
                done += 1
                self.observer.acknowledged(name_of(name), name_of(groupname), id_, stream.entries.get(id_))
        return done

    def claimable(self, key: Any, group: Any, consumer: Any, least_ms: int, start: Any, count: int, just: bool) -> Any:
        """XAUTOCLAIM: (cursor, ids, ids whose entry is gone)."""
        stream, found = self.group(key, group)
        found.consumers.add(raw(consumer))
        now, ids, gone, looks = self.now_ms(), [], [], count * 10
        waiting = [i for i in found.ids() if i >= id_of(start)]
        for place, id_ in enumerate(waiting):
            if looks == 0 or count == len(ids) + len(gone):
                return text_of(waiting[place]), ids, gone
            looks -= 1
            pending = found.pending[id_]
            if id_ not in stream.entries:
                del found.pending[id_]
                gone.append(text_of(id_))
                continue
            if max(0, now - pending.at_ms) < least_ms:
                continue
            found.pending[id_] = Pending(raw(consumer), now, pending.deliveries + (0 if just else 1))
            ids.append(id_)
        return b"0-0", ids, gone

    def xautoclaim(
        self, name: Any, groupname: Any, consumername: Any, min_idle_time: int, start_id: Any = "0-0",
        count: int | None = None, justid: bool = False,
    ) -> Any:  # fmt: skip
        cursor, ids, gone = self.claimable(name, groupname, consumername, min_idle_time, start_id, count or 100, justid)
        if justid:
            return [text_of(i) for i in ids]
        stream, _ = self.group(name, groupname)
        return [cursor, [(text_of(i), dict(stream.entries[i])) for i in ids], gone]

    def xclaim(
        self, name: Any, groupname: Any, consumername: Any, min_idle_time: int, message_ids: Any,
        retrycount: int | None = None, justid: bool = False,
    ) -> Any:  # fmt: skip
        stream, group = self.group(name, groupname)
        group.consumers.add(raw(consumername))
        now, claimed = self.now_ms(), []
        for id_ in map(id_of, message_ids):
            pending = group.pending.get(id_)
            if pending is None:
                continue
            if id_ not in stream.entries:
                del group.pending[id_]
                continue
            if max(0, now - pending.at_ms) < min_idle_time:
                continue
            count = pending.deliveries + (0 if justid else 1) if retrycount is None else retrycount
            group.pending[id_] = Pending(raw(consumername), now, count)
            claimed.append(id_)
        return [text_of(i) if justid else (text_of(i), dict(stream.entries[i])) for i in claimed]

    def xpending(self, name: Any, groupname: Any) -> dict[str, Any]:
        _, group = self.group(name, groupname)
        ids = group.ids()
        return {"pending": len(ids), "min": text_of(ids[0]) if ids else None, "max": text_of(ids[-1]) if ids else None}

    def xpending_range(
        self, name: Any, groupname: Any, min: Any, max: Any, count: int, consumername: Any = None,
        idle: int | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        _, group = self.group(name, groupname)
        above = raw(min).startswith(b"(")
        low, high, now, out = id_of(raw(min).lstrip(b"(")), id_of(max, end=True), self.now_ms(), []
        for id_ in group.ids():
            pending = group.pending[id_]
            waited = now - pending.at_ms if now > pending.at_ms else 0
            if not low <= id_ <= high or (above and id_ == low):
                continue
            if consumername is not None and pending.consumer != raw(consumername):
                continue
            if idle is not None and waited < idle:
                continue
            facts = (text_of(id_), pending.consumer, waited, pending.deliveries)
            out.append(
                dict(zip(("message_id", "consumer", "time_since_delivered", "times_delivered"), facts, strict=True))
            )
        return out[:count]

    def xrange(self, name: Any, min: Any = "-", max: Any = "+", count: int | None = None) -> list[tuple[bytes, Fields]]:
        stream = self.stream(name)
        ids = stream.between(id_of(min), id_of(max, end=True), count) if stream else []
        return [(text_of(i), dict(stream.entries[i])) for i in ids if stream]

    def xrevrange(self, name: Any, max: Any = "+", min: Any = "-", count: int | None = None) -> Any:
        return self.xrange(name, min, max)[::-1][:count]

    def xlen(self, name: Any) -> int:
        stream = self.stream(name)
        return len(stream.entries) if stream else 0

    def xdel(self, name: Any, *ids: Any) -> int:
        stream = self.stream(name)
        return sum(stream.entries.pop(id_of(i), None) is not None for i in ids) if stream else 0

    def xtrim(self, name: Any, maxlen: int, approximate: bool = True) -> int:
        stream = self.stream(name)
        ids = list(stream.entries) if stream else []
        return stream.trim(ids[-maxlen] if maxlen else (1 << 62, 0)) if stream and len(ids) > maxlen else 0

    def trim_below(self, name: Any, lowest: Any) -> int:
        """XTRIM MINID =."""
        stream = self.stream(name)
        return stream.trim(id_of(lowest)) if stream else 0

    def xinfo_groups(self, name: Any) -> list[dict[str, Any]]:
        stream = self._existing(name)
        return [
            {
                "name": group,
                "consumers": len(facts.consumers),
                "pending": len(facts.pending),
                "last-delivered-id": text_of(facts.last),
            }
            for group, facts in sorted(stream.groups.items())
        ]

    def xinfo_stream(self, name: Any) -> dict[str, Any]:
        stream = self._existing(name)
        newest = next(reversed(stream.entries), None)
        return {
            "length": len(stream.entries),
            "last-generated-id": text_of(stream.last),
            "last-entry": None if newest is None else (text_of(newest), stream.entries[newest]),
            "groups": len(stream.groups),
        }

    def xinfo_consumers(self, name: Any, groupname: Any) -> list[dict[str, Any]]:
        stream = self._existing(name)
        _, group = self.group(name, groupname)
        del stream
        count = dict.fromkeys(sorted(group.consumers), 0)
        for pending in group.pending.values():
            count[pending.consumer] = count.get(pending.consumer, 0) + 1
        return [{"name": who, "pending": n} for who, n in count.items()]

    def _existing(self, name: Any) -> Stream:
        stream = self.stream(name)
        if stream is None:
            raise exceptions.ResponseError("no such key")
        return stream

    # --- functions and raw commands ---

    def function_load(self, code: str, replace: bool = False) -> bytes:
        self.functions = True
        return b"foray"

    def function_list(self, library: str = "*", withcode: bool = False) -> list[Any]:
        code = function_library().encode()
        return [[b"library_name", library.encode(), b"library_code", code]] if self.functions else []

    def fcall(self, function: str, numkeys: int, *keys_and_args: Any) -> Any:
        from sim.functions import FUNCTIONS

        if not self.functions or function not in FUNCTIONS:
            raise exceptions.ResponseError("Function not found")
        call, oom = FUNCTIONS[function]
        if not oom and self.full:
            self._refuse()
        keys, args = [name_of(k) for k in keys_and_args[:numkeys]], [raw(a) for a in keys_and_args[numkeys:]]
        self.observer.called(function, keys, args)
        try:
            reply = call(self, keys, args)
        except exceptions.RedisError as error:
            self.observer.refused()
            if hasattr(error, "key"):
                raise exceptions.ResponseError(f"BADKEY {error.key}: {error}") from None
            raise
        self.observer.done(function, keys, args)
        return reply

    def execute_command(self, command: str, *args: Any) -> Any:
        from sim.commands import COMMANDS

        name = command.upper()
        self.guard(name.lower())
        return COMMANDS[name](self, *args)
