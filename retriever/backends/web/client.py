"""Requests to a provider: rate limit, budget, key, retries. Causes of failures:

    timeout  unreachable  auth  quota  http_NNN  too_large  garbage

Errors never contain an exception's text: aiohttp's include addresses, and some providers take the key in the address.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, quote_plus

import aiohttp
from yarl import URL

from protocol.errors import UserError
from protocol.runtime.timing import backoff_s, loop_timeout
from retriever.backends.web.config import WebBase
from retriever.backends.web.provider import Provider, ProviderRequest, WebSearchError

LONGEST_PAUSE_S = 60.0
"""Maximum pause of all queries by one `Retry-After`, in seconds."""
MIN_KEY_CHARS = 8
"""Minimum length of a key: shorter strings cannot be redacted from texts safely."""
QUOTA_STATUS = frozenset({402, 432, 433})
"""Payment required, and Tavily's two codes for a plan's limit."""
BACKOFF_S = 0.5
"""Pause before the second attempt, with +-50 % jitter; doubled for each further attempt."""
MAX_RETRY_AFTER_S = 10.0
"""Maximum `Retry-After` to wait for; a longer one fails the query."""
MAX_REPLY_BYTES = 4 << 20
"""Maximum reply of a provider after decompression: hits with texts have some 100 kB."""
Sleep = Callable[[float], Awaitable[None]]


class RetryableError(WebSearchError):
    """A failure that may succeed on retry, `after_s` seconds from now at the earliest."""

    def __init__(self, cause: str, detail: str, after_s: float = 0.0) -> None:
        super().__init__(cause, detail)
        self.after_s = after_s


class ProviderClient:
    """Sends requests to one provider. Belongs to the event loop of its first request."""

    def __init__(
        self,
        settings: WebBase,
        provider: Provider,
        key: Secret | None,
        proxy: Secret | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._settings, self._provider, self._key, self._proxy = settings, provider, key, proxy
        self._clock, self._sleep, self._random = clock, sleep, random.Random()
        self._rate_limit = TokenBucket(settings.rate, max(1, int(settings.rate)), clock)
        self._semaphore = asyncio.Semaphore(concurrency(settings.rate))
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self.budget = Budget(settings)
        self.retries = 0
        self.statuses: Counter[str] = Counter()

    async def send(self, request: ProviderRequest) -> dict[str, Any]:
        """Return the reply with the key redacted. Raises WebSearchError with the last attempt's cause if none arrives
        in time."""
        end = self._clock() + self._settings.deadline_s
        try:
            async with loop_timeout(self._settings.deadline_s):
                return await self._attempts(request, end)
        except TimeoutError:
            detail = f"no answer within {self._settings.deadline_s} s, including retries and pauses"
            raise WebSearchError("timeout", detail) from None

    def redact(self, text: str) -> str:
        """Return the text without key and proxy, to be logged, returned or recorded."""
        for secret in (self._key, self._proxy):
            text = text if secret is None else secret.redact(text)
        return text

    async def close(self) -> None:
        """Close the connections; later requests fail. Safe to call twice."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _attempts(self, request: ProviderRequest, end: float) -> dict[str, Any]:
        settings = self._settings
        for attempt in range(1, settings.attempts + 1):
            try:
                return await self._attempt(request, end)
            except RetryableError as error:
                pause = backoff_s(attempt, BACKOFF_S, settings.deadline_s) * self._random.uniform(0.5, 1.5)
                pause = max(pause, error.after_s)
                if error.after_s > 0:
                    self._rate_limit.pause(error.after_s)
                if attempt == settings.attempts or error.after_s > MAX_RETRY_AFTER_S:
                    raise WebSearchError(error.failure.cause, error.failure.detail) from None
                if self._clock() + pause >= end:
                    raise WebSearchError(
                        error.failure.cause, f"{error.failure.detail} (no time for another attempt)"
                    ) from None
            self.retries += 1
            await self._sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, request: ProviderRequest, end: float) -> dict[str, Any]:
        """Make one attempt. Raises RetryableError if a retry may help, otherwise WebSearchError."""
        async with self._semaphore:
            self.budget.check()
            wait = self._rate_limit.reserve(max(0.0, end - self._clock()))
            if wait > 0:
                await self._sleep(wait)
            self.budget.spend()
            try:
                async with loop_timeout(self._settings.timeout_s):
                    status, headers, body = await self._exchange(request)
            except TimeoutError:
                raise RetryableError("timeout", f"no reply within {self._settings.timeout_s} s") from None
            except aiohttp.ClientPayloadError:
                raise RetryableError("unreachable", "the connection broke during the reply") from None
            except (aiohttp.ClientConnectionError, aiohttp.ClientHttpProxyError, OSError) as error:
                raise RetryableError("unreachable", type(error).__name__) from None
            except (aiohttp.ClientError, ValueError) as error:
                raise WebSearchError("garbage", type(error).__name__) from None
        self.statuses[str(status)] += 1
        text = self.redact(body.decode("utf-8", "replace"))
        if status != 200:
            raise self._error_of(status, headers, text)
        reply = _parse(text)
        # a key with escaped characters (\u0041, \/) is recognisable only after decoding
        return _parse(self.redact(json.dumps(reply, ensure_ascii=False))) if "\\" in text else reply

    async def _exchange(self, request: ProviderRequest) -> tuple[int, Mapping[str, str], bytes]:
        params = {name: value for name, value in request.params.items() if value}
        headers: dict[str, str] = {}
        if self._key is not None:
            place = self._provider.key_location
            holder = headers if place.where == "header" else params
            holder[place.name] = place.prefix + self._key.reveal()
        # a query is model text: a lone surrogate cannot be encoded in an address
        params = {name: value.encode("utf-8", "replace").decode() for name, value in params.items()}
        url = URL(request.url).with_query(params) if params else URL(request.url)
        method = "GET" if request.body is None else "POST"
        proxy = self._proxy.reveal() if self._proxy is not None else None
        # a redirect would send the key to its target
        async with self._opened().request(
            method, url, json=request.body, headers=headers, allow_redirects=False, proxy=proxy, middlewares=(_once(),)
        ) as response:
            return response.status, response.headers, await self._read(response)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MAX_REPLY_BYTES:
                raise WebSearchError("too_large", f"the reply exceeds {MAX_REPLY_BYTES >> 20} MiB")
        return bytes(body)

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:
            raise WebSearchError("unreachable", "this backend is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Accept": "application/json", "User-Agent": "foray"},
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
                connector=aiohttp.TCPConnector(limit=0),
            )
        return self._session

    def _error_of(self, status: int, headers: Mapping[str, str], text: str) -> WebSearchError:
        detail = f"status {status}: {' '.join(text.split())[:200]}"
        lowered = text[:4096].lower()
        if status in QUOTA_STATUS or (400 <= status < 500 and any(w in lowered for w in self._provider.quota_words)):
            return WebSearchError("quota", detail)
        if status in (401, 403):
            return WebSearchError("auth", detail)
        if status == 429 or status >= 500:
            return RetryableError(f"http_{status}", detail, _retry_after_s(headers.get("Retry-After", "")))
        return WebSearchError(f"http_{status}", detail)


def concurrency(rate: float) -> int:
    """Return the maximum number of concurrent requests: enough for `rate` requests per second of 2 s each."""
    return max(8, int(2 * rate))


class TokenBucket:
    """Token bucket: at most `rate` requests per second on average, at most `burst` in one go.

    Generic cell rate algorithm (ITU-T I.371): callers learn immediately when they may send, first come first served, so
    there is no queue to wake. Belongs to one event loop, shared by all queries of a service.
    """

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval, self._slack, self._clock = 1 / rate, (burst - 1) / rate, clock
        self._due = self._paused_until = float("-inf")

    def reserve(self, longest_s: float) -> float:
        """Reserve a request and return the seconds until it may be sent. Raises WebSearchError, without a reservation,
        if that exceeds `longest_s`."""
        now = self._clock()
        due = max(self._due, now)
        start = max(due - self._slack, now, self._paused_until)
        if start - now > longest_s:
            if start == self._paused_until:
                raise WebSearchError("http_429", f"the provider requested a pause; {start - now:.1f} s remain")
            raise WebSearchError(
                "timeout", f"the rate limit would delay it by {start - now:.1f} s, beyond its deadline"
            )
        self._due = max(due, start) + self._interval
        return start - now

    def pause(self, seconds: float) -> None:
        """Block all requests for `seconds`, at most LONGEST_PAUSE_S."""
        until = self._clock() + min(seconds, LONGEST_PAUSE_S)
        self._paused_until = max(self._paused_until, until)


class Budget:
    """Remaining requests and their total cost: an upper bound of the bill, because a request counts when it is sent,
    whatever the response."""

    def __init__(self, settings: WebBase) -> None:
        self._price = settings.cost_per_request
        bounds = [] if settings.max_requests is None else [settings.max_requests]
        if settings.max_cost is not None and self._price > 0:
            bounds.append(int(settings.max_cost / self._price + 1e-9))
        self._bound = min(bounds, default=None)
        self.requests = 0

    @property
    def cost(self) -> float:
        """Return the cost of all requests since the start, in the unit of `cost_per_request`."""
        return self.requests * self._price

    @property
    def left(self) -> int | None:
        """Return the requests left; None if unlimited."""
        return None if self._bound is None else max(0, self._bound - self.requests)

    def check(self) -> None:
        """Raise WebSearchError("quota") if nothing is left."""
        if self.left == 0:
            raise WebSearchError("quota", f"the budget of this process is used up: {self._bound} requests")

    def spend(self) -> None:
        """Count one request. Raises WebSearchError("quota") if nothing is left."""
        self.check()
        self.requests += 1


class Secret:
    """A key from the environment, without a repr. Only code that sends it calls `reveal`."""

    def __init__(self, value: str) -> None:
        self._value = value
        forms = {value, quote(value, safe=""), quote(value), quote_plus(value), json.dumps(value)[1:-1]}
        self._forms = sorted(forms, key=len, reverse=True)

    def __repr__(self) -> str:
        return "Secret(..)"

    def reveal(self) -> str:
        """Return the key itself."""
        return self._value

    def redact(self, text: str) -> str:
        """Return the text with the key replaced by `[key]`, also in its URL-escaped and JSON-escaped forms."""
        for form in self._forms:
            text = text.replace(form, "[key]")
        return text


def read_secret(variable: str, what: str = "the key of the web search engine") -> Secret:
    """Read the key from an environment variable. Raises UserError, without the value, if it is unset or invalid."""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise UserError(
            f"the environment variable {variable} is not set",
            why=f"it must contain {what}",
            todo=f"export {variable}=..., or name another variable; retriever.online.record=replay needs none",
        )
    if len(value) < MIN_KEY_CHARS or not value.isascii() or not value.isprintable() or " " in value:
        raise UserError(
            f"the environment variable {variable} does not contain {what}",
            why=f"it must have {MIN_KEY_CHARS} or more printable ASCII characters and no blanks",
            todo=f"export {variable} again, without quotes or line breaks",
        )
    return Secret(value)


def _once() -> aiohttp.ClientMiddlewareType:
    """Disable aiohttp's automatic retry of a GET, which would bypass the budget, the rate limit and the counters."""
    sent = False

    async def middleware(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        nonlocal sent
        if sent:
            raise RetryableError("unreachable", "the connection was closed")
        sent = True
        return await handler(request)

    return middleware


def _retry_after_s(value: str) -> float:
    """Return the seconds (RFC 9110, 10.2.3: a number or a date); 0 for anything else."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return 0.0
    date = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


def _parse(text: str) -> dict[str, Any]:
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        raise WebSearchError("garbage", f"not JSON: {' '.join(text[:120].split())}") from None
    if not isinstance(reply, dict):
        raise WebSearchError("garbage", f"a JSON {type(reply).__name__}, not an object")
    return reply
