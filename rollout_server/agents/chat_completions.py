"""The dialect of `POST /v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from rollout_server.agents.messages import (
    MAX_MESSAGES,
    Ask,
    BodyBase,
    CallRefused,
    Content,
    ToolName,
    Turn,
    text_of,
    validated,
)

Items = dict[str, dict[str, Any]]


class _Function(BaseModel):
    name: str = ToolName
    arguments: str = ""


class _Call(BaseModel):
    id: str
    function: _Function


class _ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None

    def cleaned(self) -> dict[str, Any]:
        calls = [
            {"id": call.id, "type": "function", "function": call.function.model_dump()}
            for call in self.tool_calls or ()
        ]
        given = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text_of(self.content),
            "reasoning_content": self.reasoning_content,
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
        }
        return {name: value for name, value in given.items() if value or name == "content"}


class _ToolFunction(BaseModel):
    name: str = ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FunctionTool(BaseModel):
    """A tool. Others than functions would have to be run by the server."""

    type: Literal["function"] = "function"
    function: _ToolFunction

    def cleaned(self) -> dict[str, Any]:
        """Return the tool for the renderer."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        empty = {"type": "object", "properties": {}}
        return {"type": "function", "function": function | {"parameters": self.function.parameters or empty}}


class _Body(BodyBase):
    messages: list[_ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[FunctionTool] | None = Field(default=None, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = Field(default=None, max_length=1 << 16)


def parse(body: Mapping[str, Any], items: Items) -> Ask:
    """Return what a body asks for. Raises CallRefused."""
    given = validated(_Body, body)
    stop = [given.stop] if isinstance(given.stop, str) else given.stop or []
    if not all(stop) or len(stop) > 16:
        raise CallRefused("stop: at most 16 strings, none of them empty", code="invalid_value", field="stop")
    return Ask(
        messages=tuple(message.cleaned() for message in given.messages),
        tools=tuple(tool.cleaned() for tool in given.tools or ()),
        limit=given.max_completion_tokens or given.max_tokens,
        stop=tuple(stop),
        model=given.model,
        stream=bool(given.stream),
        usage=bool(given.stream_options and given.stream_options.include_usage),
        ignored=given.ignored(),
    )


def whole(ask: Ask, turn: Turn, items: Items) -> dict[str, Any]:
    """Return the answer to a call without stream."""
    choice = {"index": 0, "message": turn.as_message(), "logprobs": None, "finish_reason": _finish(turn)}
    return _head(ask, turn, "chat.completion") | {"choices": [choice], "usage": _usage(turn)}


def events(ask: Ask, turn: Turn, items: Items) -> Iterator[str]:
    """Yield the server-sent events of a finished turn."""
    yield chunk(ask, turn, {"role": "assistant", "content": ""})
    message = turn.as_message()
    yield from (chunk(ask, turn, {key: message[key]}) for key in ("reasoning_content", "content") if message.get(key))
    yield from last_events(ask, turn, turn)


def chunk(ask: Ask, head: Turn, delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> str:
    """Return the event of a part of a turn. Of `head`, the id and the time are used; `more` are further fields."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _line(_head(ask, head, "chat.completion.chunk") | {"choices": [choice]} | more)


def last_events(ask: Ask, head: Turn, turn: Turn, **more: Any) -> Iterator[str]:
    """Yield the events after the texts of a turn: its calls, and its end with `more` fields."""
    for number, call in enumerate(turn.as_message().get("tool_calls", ())):
        yield chunk(ask, head, {"tool_calls": [{"index": number, **call}]})
    yield chunk(ask, head, {}, _finish(turn), **more)
    if ask.usage:
        yield _line(_head(ask, head, "chat.completion.chunk") | {"choices": [], "usage": _usage(turn)})
    yield "data: [DONE]\n\n"


def failed(error: CallRefused) -> str:
    """Return the event of an error in a stream."""
    return _line(error.body())


def _line(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _head(ask: Ask, turn: Turn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.id}", "object": kind, "created": turn.created, "model": ask.model}


def _finish(turn: Turn) -> str:
    return "tool_calls" if turn.said.calls else "length" if turn.length else "stop"


def _usage(turn: Turn) -> dict[str, int]:
    total = turn.prompt_tokens + turn.completion_tokens
    used = {"prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.completion_tokens}
    return used | {"total_tokens": total}
