"""Rewards that call a JSON service: one deadline over all attempts, retries with jitter, batches and a cache.

Replies are untrusted: their size is limited while reading, and the caller's `read` validates them. Redirects are not
followed, so that an API key is not sent elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from pydantic import Field

from protocol.errors import UserError
from protocol.runtime.http.body import AnswerTooLarge, read_bounded
from protocol.runtime.timing import backoff_s, loop_timeout
from rollout_server.rewards.base import RewardError, RewardSettingsBase
from rollout_server.rewards.resources import RewardResources

BACKOFF_S, MAX_BACKOFF_S = 0.1, 4.0
MAX_BYTES = 64 << 20
CACHE = 8192
"""Number of cached answers of a reward (the least recently used are evicted); failures are not cached."""
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Fetch = Callable[[Sequence[K]], Awaitable[Sequence[V]]]
"""Returns the answers for distinct keys, in order. Raises RewardError."""


class RewardServiceSettings(RewardSettingsBase):
    """A reward computed by a service."""

    url: str = Field(pattern=r"^https?://")
    """URL of the service."""
    api_key_variable: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """NAME of the environment variable with the API key. Empty: no key is sent."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Timeout of one answer in seconds: queueing, attempts and back-off."""
    attempts: int = Field(default=4, ge=1)
    """Maximum attempts within the deadline. A request that the service rejects (400, 401, ...) is not retried."""
    concurrency: int = Field(default=16, ge=1)
    """Maximum number of requests in flight."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of each request, e.g. `{chat_template_kwargs: {enable_thinking: false}}`. They override Foray's
    fields; null removes a field."""


class EndpointSettings(RewardServiceSettings):
    """A reward computed by an OpenAI-compatible service."""

    url: str = Field(pattern=r"^https?://")
    """Base URL including `/v1`, e.g. `http://127.0.0.1:8000/v1`."""
    model: str = Field(min_length=1)
    """Model name in each request."""


class RequestRefused(RewardError):
    """The service rejected this request; a retry cannot succeed."""


class _RetryLater(Exception):
    """An attempt failed, and another one may succeed after `retry_after_s` seconds."""

    def __init__(self, why: str, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class JsonEndpoint:
    """One route of a JSON service. Errors name the URL."""

    def __init__(self, settings: RewardServiceSettings, path: str, resources: RewardResources) -> None:
        """Append `path` to `settings.url`. Raises UserError if the API key is not in the environment."""
        self._resources, self._url, self._extra = resources, settings.url.rstrip("/") + path, dict(settings.extra)
        self._headers = {}
        if variable := settings.api_key_variable:
            key = os.environ.get(variable, "")
            if not key:
                raise UserError(
                    f"reward {settings.key!r} has no API key",
                    why=f"the environment variable {variable} is not set",
                    todo=f"export {variable}=... in the environment of the rollout server",
                )
            self._headers["Authorization"] = f"Bearer {key}"
        self._deadline_s, self._attempts = settings.deadline_s, settings.attempts
        self._slots = asyncio.Semaphore(settings.concurrency)

    async def ask(self, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """Send `body` and return `read(reply)`. If `read` raises (ValueError, KeyError, TypeError, ...), retry.

        Raises RewardError within the deadline, `RequestRefused` if the service rejects this request.
        """
        body = {name: value for name, value in {**body, **self._extra}.items() if value is not None}
        last = "no answer yet"
        try:
            async with loop_timeout(self._deadline_s) as deadline:
                for attempt in range(1, self._attempts + 1):
                    try:
                        async with self._slots:
                            return read(await self._attempt(body))
                    except _RetryLater as failed:
                        last, wait = str(failed), failed.retry_after_s
                    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
                        last, wait = f"unusable reply: {error!r}"[:300], 0.0
                    # Jitter: hundreds of trajectories must not retry at once.
                    wait = max(wait, random.uniform(0.5, 1.0) * backoff_s(attempt, BACKOFF_S, MAX_BACKOFF_S))
                    if attempt == self._attempts or wait >= deadline.left_s:
                        break
                    await asyncio.sleep(wait)
        except TimeoutError:
            last = f"no usable answer within {self._deadline_s:g} s ({last})"
        raise RewardError(f"{self._url}: {last}")

    async def _attempt(self, body: Mapping[str, Any]) -> Any:
        """Send one request. Raises _RetryLater, RequestRefused, or ValueError for a reply that is not JSON."""
        import aiohttp

        if self._resources.closed:
            raise RewardError(f"{self._url}: closed")
        try:
            async with self._resources.session().post(
                self._url, json=body, headers=self._headers, allow_redirects=False
            ) as response:
                if response.status in RETRIED:
                    after = response.headers.get("Retry-After", "")
                    raise _RetryLater(f"status {response.status}", float(after) if after.isdecimal() else 0.0)
                raw = await read_bounded(response, MAX_BYTES)
                if response.status != 200:
                    said = raw[:200].decode(errors="replace")
                    raise RequestRefused(f"{self._url}: status {response.status}: {said}")
        except AnswerTooLarge as error:
            raise RewardError(f"{self._url}: {error}") from error
        except aiohttp.ClientError as error:
            raise _RetryLater(f"{type(error).__name__}: {error}"[:300]) from error
        return json.loads(raw)


class BatchLoader(Generic[K, V]):
    """`await loader(key)` returns the answer for a key: from the cache, a request in flight, or the next batch.

    Keys that arrive within a short window are sent as one request. The trajectories of a group often give the same
    answer, so most keys need no request.

    window_s    how long the first key of a batch waits for others; 0: no batching
    batch_size  maximum keys per request
    """

    def __init__(
        self,
        resources: RewardResources,
        fetch: Fetch[K, V],
        *,
        window_s: float = 0.0,
        batch_size: int = 1,
        name: str,
    ) -> None:
        self._resources, self._fetch, self._name = resources, fetch, name
        self._window_s, self._batch_size = window_s, batch_size
        self._known: OrderedDict[K, V] = OrderedDict()
        self._in_flight: dict[K, asyncio.Future[V]] = {}
        self._waiting: list[K] = []
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, key: K) -> V:
        """Return the answer for `key`. Raises RewardError. Cancelling one caller does not affect the others."""
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if self._resources.closed:
            raise RewardError(f"{self._name}: closed")
        future = self._in_flight.get(key)
        if future is None:
            future = self._in_flight[key] = asyncio.get_running_loop().create_future()
            # retrieve the failure, or asyncio logs it if no caller is left
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._waiting.append(key)
            if len(self._waiting) >= self._batch_size or not self._window_s:
                self._send()
            elif self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._window_s, self._send)
        return await asyncio.shield(future)

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        keys, self._waiting = self._waiting, []
        if keys:
            task = self._resources.spawn(self._run(keys), self._name)
            # however the task ends, even before it starts, no caller is left waiting
            task.add_done_callback(lambda _: self._fail(keys, RewardError(f"{self._name}: closed")))

    async def _run(self, keys: Sequence[K]) -> None:
        """Fetch a batch and complete the future of each key. `fetch` has a deadline."""
        try:
            values = await self._fetch(keys)
            if len(values) != len(keys):
                raise RewardError(f"{self._name}: {len(values)} answers for {len(keys)} keys")
        except RequestRefused as error:
            if len(keys) == 1:
                self._fail(keys, error)
                return
            # A key that the service rejects must not fail the others.
            async with asyncio.TaskGroup() as tasks:
                for key in keys:
                    tasks.create_task(self._run([key]))
        except Exception as error:
            self._fail(keys, error)
        else:
            for key, value in zip(keys, values, strict=True):
                self._remember(key, value)
                self._in_flight.pop(key).set_result(value)

    def _fail(self, keys: Sequence[K], error: Exception) -> None:
        for key in keys:
            future = self._in_flight.pop(key, None)
            if future is not None:
                future.set_exception(error)

    def _remember(self, key: K, value: V) -> None:
        self._known[key] = value
        while len(self._known) > CACHE:
            self._known.popitem(last=False)
