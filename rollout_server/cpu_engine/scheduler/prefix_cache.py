"""Which keys and values are already there: finished sequences kept for reuse, and the rows of running requests.

A sequence is found by a chain of hashes, one for each BLOCK tokens, that starts from (extra_key, generation of the
weights): so nothing is ever shared across weights or across keys. A hit is compared token by token before it is
believed. Kept sequences leave in order of last use. Pure bookkeeping: `payload` is whatever the caller stores.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_server.cpu_engine.scheduler.request import Request

BLOCK = 8
"""Tokens for each link of the chain; a shorter common prefix is not worth a copy."""


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """A finished sequence: `ids` are exactly the tokens whose keys and values `payload` holds."""

    ids: list[int]
    keys: list[int]
    payload: Any


def chain(ids: Sequence[int], extra_key: str, generation: int) -> list[int]:
    """Hash of ids[:BLOCK], ids[:2 * BLOCK], ... under one extra key and one generation of weights."""
    key = hash((extra_key, generation))
    keys = []
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        key = hash((key, *ids[start : start + BLOCK]))
        keys.append(key)
    return keys


class PrefixCache:
    """`tokens` counts the kept ones; the caller trims it to what memory allows."""

    def __init__(self) -> None:
        self.tokens = 0
        self._kept: OrderedDict[CachedPrefix, None] = OrderedDict()
        self._holders: dict[int, CachedPrefix | Request] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, ids: list[int], keys: list[int], most: int) -> tuple[CachedPrefix | Request | None, int]:
        """The holder of the longest known prefix of `ids` and its length, at most `most`; (None, 0) without one."""
        for depth in range(len(keys), 0, -1):
            holder = self._holders.get(keys[depth - 1])
            if holder is None:
                continue
            held = holder.ids if isinstance(holder, CachedPrefix) else holder.prompt_ids
            shared = depth * BLOCK
            if held[:shared] != ids[:shared]:
                continue
            end = min(len(held), len(ids), most)
            while shared < end and held[shared] == ids[shared]:
                shared += 1
            if isinstance(holder, CachedPrefix):
                self._kept.move_to_end(holder)
            return (holder, min(shared, most)) if most >= BLOCK else (None, 0)
        return None, 0

    def lend(self, request: Request) -> None:
        """A running request's prompt is now in its row: others may copy what no kept sequence holds already."""
        for key in request.block_keys:
            self._holders.setdefault(key, request)

    def withdraw(self, request: Request) -> None:
        """The request's row goes away."""
        self._forget(request, request.block_keys)

    def keep(self, ids: list[int], keys: list[int], payload: Any) -> None:
        """Keep a finished sequence; what it extends is let go, since it holds the same tokens and more."""
        for key in reversed(keys):
            older = self._holders.get(key)
            if isinstance(older, CachedPrefix) and older.ids == ids[: len(older.ids)]:
                self._drop(older)
                break
        kept = CachedPrefix(ids, keys, payload)
        self._kept[kept] = None
        self.tokens += len(ids)
        for key in keys:
            self._holders[key] = kept

    def trim(self, most: int) -> None:
        """Let the least recently used sequences go until at most `most` tokens are kept."""
        while self.tokens > max(most, 0):
            self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        """Let all kept sequences go; running requests stay known."""
        self.trim(0)

    def _drop(self, kept: CachedPrefix) -> None:
        del self._kept[kept]
        self.tokens -= len(kept.ids)
        self._forget(kept, kept.keys)

    def _forget(self, holder: CachedPrefix | Request, keys: list[int]) -> None:
        for key in keys:
            if self._holders.get(key) is holder:
                del self._holders[key]
