"""Asking in batches and remembering: what rewards over a service have in common.

Trajectories end at all times, each with a question or two. Keys that come within a short window of each other go out
as one request; a key that is asked already or was answered lately is not asked again. The trajectories of a group
often give the same answer, so most of them cost nothing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from rollout_server.reward.base import RewardError
from rollout_server.reward.endpoint import Refused
from rollout_server.reward.io import Io

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Fetch = Callable[[Sequence[K]], Awaitable[Sequence[V]]]
"""Answers for distinct keys, in their order. Raises RewardError."""


class Asking(Generic[K, V]):
    """`await asking(key)`: the answer for a key, from memory, from a request in flight, or from the next batch.

    window_s    how long the first key of a batch waits for others; 0: each goes at once
    batch_size  most keys of one request
    cache       answers remembered; failures never are
    """

    def __init__(
        self, io: Io, fetch: Fetch[K, V], *, window_s: float = 0.0, batch_size: int = 1, cache: int, name: str
    ) -> None:
        self._io, self._fetch, self._name = io, fetch, name
        self._window_s, self._batch_size, self._capacity = window_s, batch_size, cache
        self._known: OrderedDict[K, V] = OrderedDict()
        self._asked: dict[K, asyncio.Future[V]] = {}
        self._line: list[K] = []
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, key: K) -> V:
        """Raises RewardError when it could not be had. Cancelling one who waits leaves the others their answer."""
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if self._io.closed:
            raise RewardError(f"{self._name}: closed")
        future = self._asked.get(key)
        if future is None:
            future = self._asked[key] = asyncio.get_running_loop().create_future()
            # when nobody waits any more, a failure is nobody's business
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._line.append(key)
            if len(self._line) >= self._batch_size or not self._window_s:
                self._send()
            elif self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._window_s, self._send)
        return await asyncio.shield(future)

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        keys, self._line = self._line, []
        if keys:
            task = self._io.spawn(self._run(keys), self._name)
            # whatever ended it, even before it began: nobody is left waiting
            task.add_done_callback(lambda _: self._fail(keys, RewardError(f"{self._name}: closed")))

    async def _run(self, keys: Sequence[K]) -> None:
        """Consumes a batch; settles the future of every key in it; waits for `fetch`, which has a deadline."""
        try:
            values = await self._fetch(keys)
            if len(values) != len(keys):
                raise RewardError(f"{self._name}: {len(values)} answers for {len(keys)} keys")
        except Refused as error:
            if len(keys) == 1:
                self._fail(keys, error)
                return
            # One key that the service will not take must not cost the others theirs.
            async with asyncio.TaskGroup() as tasks:
                for key in keys:
                    tasks.create_task(self._run([key]))
        except Exception as error:
            self._fail(keys, error)
        else:
            for key, value in zip(keys, values, strict=True):
                self._remember(key, value)
                self._asked.pop(key).set_result(value)

    def _fail(self, keys: Sequence[K], error: Exception) -> None:
        for key in keys:
            future = self._asked.pop(key, None)
            if future is not None:
                future.set_exception(error)

    def _remember(self, key: K, value: V) -> None:
        self._known[key] = value
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)
