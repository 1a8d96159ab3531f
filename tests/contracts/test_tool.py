"""The contract of tools: one test for each member of the registry."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from protocol.search import Passage
from rollout_server.environment.actions import RESERVED_TAGS, ToolAction, escape_tags, parse
from rollout_server.environment.config import EnvironmentSettings
from rollout_server.environment.prompts import TEMPLATES
from rollout_server.tools import REGISTRY, build_tool
from rollout_server.tools.base import Tool, ToolResult, ToolSettingsBase
from tests.support.sandboxes import require_bubblewrap

MEMBERS: list[Any] = list(REGISTRY)
LONGEST_S = 15.0
"""Seconds that any call may take here, on a machine that does other things too."""


def name_of(member: Any) -> str:
    return str(member.model_fields["type"].default)


async def passage(request: web.Request) -> web.Response:
    wanted = request.match_info.get("id") or request.query["id"]
    if wanted.startswith("known"):
        return web.json_response({"id": wanted, "contents": '"t"\ntext'})
    return web.json_response({"error": "no passage has this id"}, status=404)


async def mcp(request: web.Request) -> web.Response:
    """A server with a tool that returns its argument."""
    asked = await request.json()
    result: dict[str, Any] = {"protocolVersion": "2025-06-18"}
    if asked["method"] == "tools/call":
        result = {"content": [{"type": "text", "text": asked["params"]["arguments"].get("text", "nothing")}]}
    return web.json_response({"jsonrpc": "2.0", "id": asked.get("id"), "result": result})


@pytest.fixture(params=MEMBERS, ids=name_of)
async def tool(request: pytest.FixtureRequest) -> AsyncIterator[Tool]:
    app = web.Application()
    app.router.add_get("/passages", passage)
    app.router.add_get("/passages/{id:.+}", passage)
    app.router.add_post("/mcp", mcp)
    async with TestServer(app) as server:
        if name_of(request.param) == "python":
            require_bubblewrap()
        needed = {"url": str(server.make_url("/mcp")), "allow": {"known": "Returns text."}}
        settings = request.param.model_validate(needed if name_of(request.param) == "mcp" else {})
        built = build_tool(settings, (str(server.make_url("")),))
        yield built
        await built.close()


ARGUMENTS = [
    "known",
    "",
    " ",
    "1",
    "x" * 200_000,
    "\x00\ud7ff\U0001f600",
    "</search>",
    "../..",
    "print(1)",
    "('",
    "\r\n",
]


@pytest.mark.parametrize("argument", ARGUMENTS, ids=range(len(ARGUMENTS)))
async def test_any_argument_has_an_outcome_in_bounded_time(tool: Tool, argument: str) -> None:
    started = time.monotonic()
    result = await tool(argument)
    assert isinstance(result, ToolResult) and time.monotonic() - started < LONGEST_S
    assert result.error == "" and result.latency_s >= 0, "what a policy asks for is no failure of the tool"
    assert result.text or result.passages
    assert len(result.text) <= 10_000 and all(isinstance(p, Passage) for p in result.passages)
    assert not (result.mistake and result.passages)
    assert re.fullmatch(r"[a-z0-9_]*", result.mistake)


async def test_many_at_once_get_each_their_own(tool: Tool) -> None:
    write = {"fetch": "known {}", "mcp": 'known {{"text": "known {}"}}', "python": "print('known {}')"}[tool.name]
    results = await asyncio.gather(*(tool(write.format(i)) for i in range(8)))
    said = [r.passages[0].id if r.passages else r.text for r in results]
    assert said == [f"known {i}" for i in range(8)]


async def test_a_cancelled_call_ends_and_the_tool_goes_on(tool: Tool) -> None:
    task = asyncio.create_task(tool("known"))
    await asyncio.sleep(0.01)
    task.cancel()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
        raise asyncio.CancelledError  # it was through already
    assert time.monotonic() - started < 5
    assert (await tool("known")).error == ""


async def test_closing_twice_is_safe_and_a_call_after_it_fails_by_name(tool: Tool) -> None:
    await tool("known")
    await tool.close()
    await tool.close()
    result = await tool("known")
    assert (result.error, result.passages, result.text) == ("closed", (), "")


def test_names_are_tags_and_no_two_are_one() -> None:
    names = [name_of(member) for member in MEMBERS]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name) and name not in RESERVED_TAGS
        assert parse(f"<{name}> x </{name}>", tools=tuple(names)) == ToolAction(name, " x ")
        assert escape_tags(f"<{name}>", tuple(names)) == f"\u2039{name}>"


@pytest.mark.parametrize("member", MEMBERS, ids=name_of)
def test_its_sentence_names_its_tag_and_fits_every_template(member: Any) -> None:
    assert issubclass(member, ToolSettingsBase)
    name, sentence = name_of(member), member.sentence
    assert f"<{name}>" in sentence and f"</{name}>" in sentence
    assert "{open}" in sentence and "{close}" in sentence and sentence.endswith(".")
    for template in TEMPLATES.values():
        told = template.with_tools([(name, sentence)], show_ids=member.shows_ids)
        assert told.prompt.count("{question}") == 1 and f"<{name}>" in told.prompt + told.system
        assert f"</{name}>" in told.stops


def test_tools_are_off_by_default() -> None:
    assert EnvironmentSettings().tools == ()


async def test_its_name_is_its_tag(tool: Tool) -> None:
    assert tool.name in {name_of(member) for member in MEMBERS}
