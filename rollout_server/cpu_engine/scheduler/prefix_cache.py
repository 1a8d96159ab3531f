"""Prefix cache: finished sequences kept for reuse, and the rows of running requests.

A sequence is found by a chain of hashes, one per BLOCK tokens, that starts from (extra_key, generation of the weights),
so entries are never shared across weights or keys. A hit is verified token by token. Eviction is in order of last use.
Pure: `payload` is whatever the caller stores.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_server.cpu_engine.scheduler.request import Request

BLOCK = 8
"""Tokens per hash. A shorter common prefix is not worth a copy."""


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """A finished sequence. `ids` are the tokens whose keys and values are in `payload`."""

    ids: list[int]
    keys: list[int]
    payload: Any


def chain(ids: Sequence[int], extra_key: str, generation: int) -> list[int]:
    """Return the hashes of ids[:BLOCK], ids[:2 * BLOCK], ... for an extra key and a generation of weights."""
    key = hash((extra_key, generation))
    keys = []
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        key = hash((key, *ids[start : start + BLOCK]))
        keys.append(key)
    return keys


class PrefixCache:
    """`tokens` is the number of kept tokens. The caller trims the cache to the available memory."""

    def __init__(self) -> None:
        self.tokens = 0
        self._kept: OrderedDict[CachedPrefix, None] = OrderedDict()
        self._holders: dict[int, dict[CachedPrefix | Request, None]] = {}
        """Key -> all sequences that start with it, the newest last: any of them may go first."""

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, ids: list[int], keys: list[int], most: int) -> tuple[CachedPrefix | Request | None, int]:
        """Return the holder of the longest known prefix of `ids`, and its length (at most `most`), or (None, 0)."""
        for depth in range(len(keys), 0, -1):
            holder = next(reversed(self._holders.get(keys[depth - 1], {})), None)
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
        """Offer the prompt of a running request, now in its row, for copying."""
        self._remember(request, request.block_keys)

    def withdraw(self, request: Request) -> None:
        """Remove a request whose row is about to be freed."""
        self._forget(request, request.block_keys)

    def keep(self, ids: list[int], keys: list[int], payload: Any) -> None:
        """Keep a finished sequence. Drops the one that it extends, since it includes its tokens."""
        for depth in range(len(keys), 0, -1):
            held = (h for h in self._holders.get(keys[depth - 1], {}) if isinstance(h, CachedPrefix))
            older = next((h for h in held if len(h.keys) == depth and h.ids == ids[: len(h.ids)]), None)
            if older is not None:
                self._drop(older)
                break
        kept = CachedPrefix(ids, keys, payload)
        self._kept[kept] = None
        self.tokens += len(ids)
        self._remember(kept, keys)

    def trim(self, most: int) -> None:
        """Evict the least recently used sequences until at most `most` tokens are kept."""
        while self.tokens > max(most, 0):
            self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        """Drop all kept sequences. Running requests stay known."""
        self.trim(0)

    def _drop(self, kept: CachedPrefix) -> None:
        del self._kept[kept]
        self.tokens -= len(kept.ids)
        self._forget(kept, kept.keys)

    def _remember(self, holder: CachedPrefix | Request, keys: list[int]) -> None:
        for key in keys:
            self._holders.setdefault(key, {})[holder] = None

    def _forget(self, holder: CachedPrefix | Request, keys: list[int]) -> None:
        for key in keys:
            holders = self._holders.get(key, {})
            holders.pop(holder, None)
            if not holders:
                self._holders.pop(key, None)
