"""`<mcp> name {"argument": ..} </mcp>`: a tool of an MCP server (Model Context Protocol), by streamable HTTP.

Only tools of the allow-list are called, and the policy is told what the settings say about them: the server's own
descriptions would be text of others in every prompt. Results are untrusted, like passages. A name that is not allowed,
arguments that are no JSON object and a result marked as an error are mistakes of the policy, which sees a text; all
other failures are errors of the tool.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from protocol.runtime.http.body import parse_json
from protocol.runtime.timing import loop_timeout
from rollout_server.search.base import BAD_SHAPE, NOT_JSON, TIMEOUT, SearchError
from rollout_server.search.transport import HttpConnections
from rollout_server.tools.base import CONNECTIONS, InflightCalls, RemoteToolSettings, ToolResult

VERSION = "2025-06-18"
"""Version of the protocol that is asked for. A server may answer with an older one, in which these calls are equal."""
INVALID_PARAMS = -32602
_VERSION = re.compile(r"[\w.-]{1,64}")
CLIENT = {"name": "foray", "version": "1"}


class McpSettings(RemoteToolSettings):
    """Tools of an MCP server."""

    sentence: ClassVar[str] = (
        'You can call a tool by <mcp> name {{"argument": "value"}} </mcp>, and its result will be returned between '
        "{open} and {close}."
    )
    retrieves: ClassVar[bool] = True

    type: Literal["mcp"] = "mcp"
    url: str = Field(pattern=r"^https?://\S+$")
    """Address of the server, e.g. `http://127.0.0.1:8000/mcp` (streamable HTTP)."""
    allow: dict[str, str] = Field(min_length=1)
    """Tools that the policy may call -> what the prompt says about each, with its arguments."""

    @property
    def told(self) -> str:
        """The sentence, and the tools of the allow-list."""
        tools = "; ".join(f"{name}: {text}" for name, text in self.allow.items())
        return f"{self.sentence} Tools: {tools.replace('{', '{{').replace('}', '}}')}."


class Mcp:
    """The MCP tool. The session at the server begins with the first call, and again when the server has lost it."""

    name = "mcp"

    def __init__(self, settings: McpSettings, urls: Sequence[str]) -> None:
        self._settings, self._calls = settings, InflightCalls(self.name)
        self._connections = HttpConnections(limit=CONNECTIONS)
        self._session: dict[str, str] = {}
        self._begun, self._lock, self._numbers = False, asyncio.Lock(), itertools.count(1)

    async def __call__(self, argument: str) -> ToolResult:
        name, _, given = argument.strip().partition(" ")
        if name not in self._settings.allow:
            known = ", ".join(self._settings.allow)
            return ToolResult(f"There is no such tool. Tools: {known}.", mistake="unknown_tool")
        arguments = read_arguments(given)
        if arguments is None:
            return ToolResult("The arguments must be a JSON object.", mistake="bad_arguments")
        return await self._calls.run(self._call({"name": name, "arguments": arguments}))

    async def close(self) -> None:
        await self._calls.close()
        await self._connections.close()

    async def _call(self, call: dict[str, Any]) -> ToolResult:
        try:
            async with loop_timeout(self._settings.deadline_s):
                try:
                    result = await self._begin_and_ask(call)
                except SearchError as error:
                    if error.cause != "http_404" or not self._session:
                        raise
                    self._begun = False  # the server has lost the session
                    result = await self._begin_and_ask(call)
            return read_content(result, self._settings.max_chars)
        except TimeoutError:
            return ToolResult(error=TIMEOUT)
        except SearchError as error:
            return ToolResult(error=error.cause)

    async def _begin_and_ask(self, call: dict[str, Any]) -> Any:
        async with self._lock:
            if not self._begun:
                self._session = {}
                hello = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": CLIENT}
                agreed = await self._ask("initialize", hello, first=True)
                version = agreed.get("protocolVersion") if isinstance(agreed, dict) else None
                if not isinstance(version, str) or not _VERSION.fullmatch(version):  # it becomes a header
                    raise SearchError(BAD_SHAPE)
                self._session["MCP-Protocol-Version"] = version
                await self._post({"method": "notifications/initialized"})
                self._begun = True
        return await self._ask("tools/call", call)

    async def _ask(self, method: str, params: dict[str, Any], *, first: bool = False) -> Any:
        """Return the result of a request. Raises SearchError."""
        number = next(self._numbers)
        raw, headers = await self._post({"id": number, "method": method, "params": params})
        if first and (session := headers.get("mcp-session-id")):
            self._session["Mcp-Session-Id"] = session
        return read_reply(raw, number)

    async def _post(self, message: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
        headers = {"Accept": "application/json, text/event-stream", **self._session}
        received: dict[str, str] = {}
        body = json.dumps({"jsonrpc": "2.0"} | message).encode()
        exchange = self._connections.exchange
        timeout_s = self._settings.deadline_s
        _, raw = await exchange(
            "POST", self._settings.url, timeout_s, body, also=(202,), headers=headers, received=received
        )
        return raw, received


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments that the policy has written; None if they are no JSON object."""
    try:
        given = parse_json(text.strip().encode(errors="replace") or b"{}")
    except ValueError:
        return None
    return given if isinstance(given, dict) else None


def read_reply(raw: bytes, number: int) -> Any:
    """Return the result of request `number`. Raises SearchError: the server's own errors are `failed`.

    The error for invalid arguments is a result, because the policy wrote them.
    """
    try:
        answers = [m for m in _messages(raw) if isinstance(m, dict) and m.get("id") == number]
    except ValueError:
        raise SearchError(NOT_JSON) from None
    if answers and "error" not in answers[0] and "result" in answers[0]:
        return answers[0]["result"]
    error = answers[0].get("error") if answers else None
    if not isinstance(error, dict):
        raise SearchError(BAD_SHAPE)
    if error.get("code") != INVALID_PARAMS:
        raise SearchError("failed", retryable=False)
    return {"content": [{"type": "text", "text": str(error.get("message"))}], "isError": True}


def read_content(result: object, max_chars: int) -> ToolResult:
    """Return the texts of a result, cut. Raises SearchError."""
    try:
        parts = [str(part["text"]) for part in result["content"] if part.get("type") == "text"]  # type: ignore[index]
        wrong = result.get("isError")  # type: ignore[attr-defined]
    except (KeyError, TypeError, AttributeError):
        raise SearchError(BAD_SHAPE) from None
    return ToolResult("\n".join(parts)[:max_chars], mistake="tool_error" if wrong else "")


def _messages(raw: bytes) -> list[Any]:
    """Return the messages of a reply: one JSON text, or events with one each. Raises ValueError."""
    if raw.lstrip()[:1] in (b"{", b"["):
        return [parse_json(raw)]
    data = (line.removeprefix(b"data:").strip() for line in raw.splitlines() if line.startswith(b"data:"))
    return [parse_json(text) for text in data if text]
