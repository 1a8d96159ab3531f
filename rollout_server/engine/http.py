"""One HTTP call to an engine, with a deadline and typed errors. Everything that can go wrong is an EngineError.

SGLang with `--admin-api-key` wants that key for control, and `--api-key` for everything else. Both come from the
environment, or from the node that launched the engine (`node/launch.py`).
"""

from __future__ import annotations

import os
from typing import Any

import aiohttp

from rollout_server.engine.base import EngineError

API_KEY_VARIABLE, ADMIN_KEY_VARIABLE = "FORAY_ENGINE_API_KEY", "FORAY_ENGINE_ADMIN_KEY"

CONTROL_TIMEOUT_S = 30.0
"""Deadline of a control call that computes nothing."""


KEEP_ALIVE_S = 4.0
"""An idle connection is closed from here after so long. SGLang's server does it after 5 s, and a request that crosses
that closing would look like an engine that has died."""


def connector() -> aiohttp.TCPConnector:
    """Pooled connections to engines, as many as there are requests: how many an engine runs together is decided by
    windows and by the engines themselves."""
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)


class EngineHttp:
    """Calls to the engine at `url`. `session` is shared and owned by the caller; `name` goes into errors."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, name: str = "", key: str = "") -> None:
        self.session, self.url, self.name = session, url.rstrip("/"), name or url
        self.use_keys(os.environ.get(API_KEY_VARIABLE, "") or key, os.environ.get(ADMIN_KEY_VARIABLE, ""))

    def use_keys(self, api_key: str, admin_key: str) -> None:
        """Calls from now on bring these keys, "" for none; without an admin key control calls bring the API key."""
        self.open_headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.admin_headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else self.open_headers

    async def control(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Any:
        """A call that the admin key opens; the decoded JSON, or the text where the engine answers with that."""
        return await self.call(method, path, body, timeout_s=timeout_s, headers=self.admin_headers)

    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        timeout_s: float,
        headers: dict[str, str],
        parse: bool = True,
    ) -> Any:
        """One request and its whole answer, within timeout_s. Raises EngineError."""
        deadline = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(5.0, timeout_s))
        try:
            async with self.session.request(
                method, self.url + path, json=body, headers=headers, timeout=deadline, allow_redirects=False
            ) as response:
                if response.status >= 400:
                    cause = "http_500" if response.status >= 500 else "refused"
                    raise EngineError(cause, self.name, f"{path}: {response.status} {(await response.text())[:500]}")
                return await _content(response) if parse else None
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise EngineError("unreachable", self.name, f"{path}: {error}") from None
        except TimeoutError:
            raise EngineError("timeout", self.name, f"{path}: no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError("unreachable", self.name, f"{path}: {type(error).__name__}: {error}") from None
        except ValueError as error:
            raise EngineError("bad_output", self.name, f"{path}: not JSON: {str(error)[:200]}") from None


async def _content(response: aiohttp.ClientResponse) -> Any:
    # flush_cache, pause, abort and metrics answer with plain text or nothing
    return await (response.json() if response.content_type == "application/json" else response.text())


def json_object(reply: Any, name: str) -> dict[str, Any]:
    if not isinstance(reply, dict):
        raise EngineError("bad_output", name, f"expected a JSON object, got {type(reply).__name__}")
    return reply
