"""The MCP tool against a server that behaves in every way that the protocol allows, and some that it does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout_server.search import transport
from rollout_server.search.base import SearchError
from rollout_server.tools import build_tool
from rollout_server.tools.base import ToolResult
from rollout_server.tools.mcp import Mcp, McpSettings, read_arguments, read_content, read_reply

ALLOW = {"find": 'finds texts, {"query": "..."}'}


@dataclass
class Server:
    """A scripted MCP server. `answer` returns the message for a call; `events`: as server-sent events."""

    answer: Callable[[dict[str, Any]], Any] = lambda params: {"result": {"content": [{"type": "text", "text": "x"}]}}
    events: bool = False
    session: str = "s1"
    version: Any = "2025-03-26"
    seen: list[tuple[str, str, Any]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        asked = await request.json()
        method, session = asked["method"], request.headers.get("Mcp-Session-Id", "")
        self.seen.append((method, session, asked.get("params")))
        assert "text/event-stream" in request.headers["Accept"] and asked["jsonrpc"] == "2.0"
        if method == "initialize":
            return self.reply(asked, {"result": {"protocolVersion": self.version}}, {"Mcp-Session-Id": self.session})
        assert request.headers["MCP-Protocol-Version"] == "2025-03-26"
        if session != self.session:
            return web.Response(status=404)
        if method == "notifications/initialized":
            return web.Response(status=202)
        made = self.answer(asked["params"])
        return made if isinstance(made, web.Response) else self.reply(asked, made, {})

    def reply(self, asked: dict[str, Any], message: Any, headers: dict[str, str]) -> web.Response:
        text = json.dumps({"jsonrpc": "2.0", "id": asked["id"], **message})
        if not self.events:
            return web.Response(text=text, content_type="application/json", headers=headers)
        other = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
        stream = f"id: 1\ndata:\n\nevent: message\ndata: {other}\n\nevent: message\r\ndata: {text}\n\n"
        return web.Response(text=stream, content_type="text/event-stream", headers=headers)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    scripted, app = Server(), web.Application()
    app.router.add_post("/mcp", scripted.handle)
    async with TestServer(app) as running:
        yield scripted, str(running.make_url("/mcp"))


@pytest.fixture
async def tool(server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(transport, "MAX_BYTES", 2000)
    built = build_tool(McpSettings(url=server[1], allow=ALLOW, deadline_s=5, max_chars=10), ())
    assert isinstance(built, Mcp)
    yield built
    await built.close()


@pytest.mark.parametrize("events", [False, True])
async def test_a_call_begins_one_session(server: tuple[Server, str], tool: Mcp, events: bool) -> None:
    scripted, _ = server
    scripted.events = events
    results = await asyncio.gather(*(tool(' find {"query": "a"} ') for _ in range(3)))
    assert [result.text for result in results] == ["x"] * 3 and not any(r.error or r.mistake for r in results)
    assert [method for method, _, _ in scripted.seen] == [
        "initialize",
        "notifications/initialized",
        *["tools/call"] * 3,
    ]
    assert scripted.seen[-1] == ("tools/call", "s1", {"name": "find", "arguments": {"query": "a"}})


async def test_a_lost_session_begins_again(server: tuple[Server, str], tool: Mcp) -> None:
    await tool("find")
    server[0].session = "s2"
    assert (await tool("find")).text == "x"
    assert [session for method, session, _ in server[0].seen if method == "tools/call"] == ["s1", "s1", "s2"]


@pytest.mark.parametrize(
    ("argument", "mistake", "text"),
    [
        ("drop {}", "unknown_tool", "There is no such tool. Tools: find."),
        ("", "unknown_tool", "There is no such tool. Tools: find."),
        ("find [1]", "bad_arguments", "The arguments must be a JSON object."),
        ("find {", "bad_arguments", "The arguments must be a JSON object."),
    ],
)
async def test_a_mistake_of_the_policy_reaches_no_server(
    server: tuple[Server, str], tool: Mcp, argument: str, mistake: str, text: str
) -> None:
    result = await tool(argument)
    assert (result.mistake, result.text, result.error) == (mistake, text, "") and not server[0].seen


def text_of(text: str, **more: Any) -> dict[str, Any]:
    return {"result": {"content": [{"type": "image", "data": ""}, {"type": "text", "text": text}], **more}}


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (text_of("b" * 20), ToolResult("b" * 10)),
        (text_of("no", isError=True), ToolResult("no", mistake="tool_error")),
        ({"error": {"code": -32602, "message": "no query"}}, ToolResult("no query", mistake="tool_error")),
        ({"error": {"code": -32603, "message": "bug"}}, ToolResult(error="failed")),
        ({"error": "bug"}, ToolResult(error="bad_shape")),
        ({"result": []}, ToolResult(error="bad_shape")),
        (text_of("c" * 3000), ToolResult(error="too_large")),
        (web.Response, ToolResult(error="bad_shape")),
        (lambda: web.Response(text="data: {"), ToolResult(error="not_json")),
        (lambda: web.Response(status=503), ToolResult(error="overloaded")),
        (lambda: web.Response(status=302, headers={"Location": "/else"}), ToolResult(error="http_302")),
    ],
)
async def test_every_answer_has_an_outcome(
    server: tuple[Server, str], tool: Mcp, answer: Any, result: ToolResult
) -> None:
    server[0].answer = lambda params: answer() if callable(answer) else answer
    found = await tool("find {}")
    assert (found.text, found.error, found.mistake) == (result.text, result.error, result.mistake)


async def test_a_server_that_is_away_is_an_error_by_name(tool: Mcp) -> None:
    away = build_tool(McpSettings(url="http://127.0.0.1:9/mcp", allow=ALLOW, deadline_s=5), ())
    assert (await away("find {}")).error == "unreachable"
    await away.close()


def test_the_policy_is_told_what_the_settings_allow() -> None:
    told = McpSettings(url="http://x/mcp", allow=ALLOW).told.format(open="<o>", close="</o>")
    assert told.endswith('between <o> and </o>. Tools: find: finds texts, {"query": "..."}.')
    assert 'by <mcp> name {"argument": "value"} </mcp>' in told


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["content", "type", "text", "isError", "error", "result", "code"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(["id", "result", "error", "method"]), JSON | st.just(1)), st.booleans())
@example({"id": 1, "error": {"code": [], "message": 1}}, False)
@example({"id": 1, "result": {"content": {"type": "text"}}}, True)
def test_any_reply_is_a_result_or_an_error_by_name(message: dict[str, Any], events: bool) -> None:
    text = json.dumps(message)
    try:
        result = read_content(read_reply((f"data: {text}\n\n" if events else text).encode(), 1), 10)
    except SearchError as error:
        assert error.cause in ("bad_shape", "not_json", "failed")
    else:
        assert len(result.text) <= 10 and not result.error


@settings(max_examples=50)
@given(st.text() | JSON.map(json.dumps))
@example('{"a": "\ud800"}')
@example("[" * 5000)
def test_any_arguments_of_the_policy_are_an_object_or_a_mistake(text: str) -> None:
    found = read_arguments(text)
    assert found is None or json.dumps(found).encode()


@pytest.mark.parametrize("version", ["2025\r\nX-Other: y", "\ud800", 7, None, "x" * 65])
async def test_a_version_that_is_no_header_is_an_error_by_name(
    server: tuple[Server, str], tool: Mcp, version: Any
) -> None:
    """aiohttp raises ValueError for such a header; that would count as a bug of Foray, not as an error of the tool."""
    server[0].version = version
    assert (await tool("find {}")).error == "bad_shape"
