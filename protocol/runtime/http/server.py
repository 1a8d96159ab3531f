"""Serve an aiohttp application: check that it may listen, bind, authorise requests. For every HTTP service."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from protocol.errors import UserError
from protocol.runtime.files import atomic_write
from protocol.runtime.http.auth import LOOPBACK, Access, RequestHead, Role, Verdict, check_bind, decide
from protocol.runtime.net import local_address
from protocol.runtime.redis.url import parse_redis_url

SERVER_OPTIONS: Mapping[str, Any] = {"auto_decompress": False, "lingering_time": 1.0}
"""`handler_args` of every aiohttp application. By default aiohttp decompresses bodies, even unread ones: for 10 s after
an early answer."""
BACKLOG = 4096
"""Listen backlog: a synchronous trainer opens the connections of a whole batch at the same time."""
EVERY_INTERFACE: Mapping[str, str] = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that mean every interface, with the address that this machine itself uses."""
SHUTDOWN_S = 2.0
"""Timeout for requests in flight when a service stops, in seconds."""

log = logging.getLogger(__name__)
Refuse = Callable[[web.Request, Verdict], web.Response]


@dataclass(frozen=True)
class Listener:
    """A service that listens at `url`."""

    port: int
    url: str
    _runner: web.AppRunner

    async def close(self) -> None:
        """Stop listening and finish requests in flight. Idempotent."""
        await self._runner.cleanup()


@asynccontextmanager
async def listening(
    app: web.Application,
    host: str,
    port: int,
    *,
    access: Access | None,
    setting: str,
    todo: str,
    off: str = "",
    shutdown_s: float = SHUTDOWN_S,
) -> AsyncIterator[Listener]:
    """Serve `app` while the block runs; port 0 selects a free port.

    access      tokens of this process; None if the caller has already checked that it may listen there
    setting     name of the setting of `host`, for error messages
    todo        advice if the address is taken
    off         override that disables the service, if there is one
    shutdown_s  timeout for requests in flight at the end

    A client that disconnects cancels its handler. Raises UserError if the address cannot be bound, or if it is not
    loopback and there is no token.
    """
    if access is not None:
        check_bind(host, access, setting, off=off)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_s)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError(f"cannot listen on {host}:{port}", why=why, todo=todo) from None
        bound = int(runner.addresses[0][1])
        yield Listener(bound, http_url(host, bound), runner)
    finally:
        await runner.cleanup()


def auth_middleware(
    access: Access, routes: Mapping[str, Role], *, default: Role, refuse: Refuse | None = None
) -> Middleware:
    """Return a middleware that refuses requests as `protocol.runtime.http.auth.decide` says, before it reads a body.

    routes   required role of each path
    default  required role of every other path
    refuse   makes the body of a refusal; default {"error": message}
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        head = RequestHead(request.path, request.headers)
        verdict = decide(head, needs=routes.get(request.path, default), access=access)
        if not verdict.status:
            return await handler(request)
        if refuse is not None:
            return refuse(request, verdict)
        return web.json_response({"error": verdict.message}, status=verdict.status)

    return middleware


def http_url(host: str, port: int) -> str:
    """Return the URL of a service; an IPv6 address is put in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def service_host(host: str, redis_url: str, access: Access, setting: str) -> str:
    """Return the address that a service listens on: `host`, or if that is empty this machine's on the route to Redis.

    That is loopback without a Redis or with one on this machine; and without a token, with a warning.

    setting  name of the setting of `host`, for messages
    Raises UserError if there is no route.
    """
    where = parse_redis_url(redis_url) if redis_url and not host else None
    if where is None or where.is_loopback:
        return host or LOOPBACK
    if access.open:
        why = "without a token this service listens on %s only: other hosts cannot use it. `foray init --secure` makes"
        log.warning(f"Redis is on another host, but {why} tokens; or set %s", LOOPBACK, setting)
        return LOOPBACK
    try:
        return local_address(where.hosts[0][0])
    except OSError as error:
        what = "cannot find the address of this host on the way to Redis"
        raise UserError(what, why=str(error), todo=f"set {setting}") from None


def reachable_url(host: str, port: int, redis_url: str) -> str:
    """Return the base URL for other processes of the run of a service that listens on `host`.

    For every interface (0.0.0.0, ::) it is this machine's address on the route to Redis. Raises OSError if there is no
    route.
    """
    if host not in EVERY_INTERFACE:
        return http_url(host, port)
    redis = parse_redis_url(redis_url)
    return http_url(EVERY_INTERFACE[host] if redis.is_loopback else local_address(redis.hosts[0][0]), port)


def announce(log: logging.Logger, host: str, port: int, port_file: Path | None) -> None:
    """Log the address of a service and write its port to `port_file`, atomically. Call it when the service listens."""
    log.info("listening on %s", http_url(host, port))
    if port_file is not None:
        port_file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(port_file, f"{port}\n", durable=False)


class ThreadedServer:
    """A service with its event loop in a daemon thread, for a process without an event loop.

    The constructor returns when the service listens. Raises UserError as `listening` does.
    """

    def __init__(self, serving: AbstractAsyncContextManager[Listener], name: str) -> None:
        self._failure: Exception | None = None
        self._started: Future[tuple[Listener, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(serving)), name=name, daemon=True)
        self._thread.start()
        listener, self._loop, self._closing = self._started.result()
        self.port, self.url = listener.port, listener.url

    async def _serve(self, serving: AbstractAsyncContextManager[Listener]) -> None:
        closing = asyncio.Event()
        try:
            async with serving as listener:
                self._started.set_result((listener, asyncio.get_running_loop(), closing))
                await closing.wait()
        except Exception as error:
            if not self._started.done():
                self._started.set_exception(error)
                return
            self._failure = error
            log.error("the service has ended: %s", error, exc_info=not isinstance(error, UserError))

    def wait(self) -> None:
        """Wait until the service has ended. Raises the error that ended it."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
