"""The dialect of `POST /v1/responses`. Earlier items may be given by their ids, as Vercel's `ai` does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from protocol.runtime.http import sse
from rollout_server.agents.chat_completions import Function, FunctionTool, Items
from rollout_server.agents.messages import (
    MAX_MESSAGES,
    Ask,
    BodyBase,
    CallRefused,
    Content,
    Given,
    Role,
    Turn,
    validated,
)
from rollout_server.agents.renderer import content_of


class _Message(Given):
    role: Annotated[Literal["system", "developer", "user", "assistant"], Role]
    content: Content = ""


class _FunctionCall(Function):
    call_id: str


class _Output(Given):
    call_id: str
    output: Content = ""


class _Reasoning(Given):
    summary: tuple[dict[str, Any], ...] = ()
    content: tuple[dict[str, Any], ...] = ()


class _Reference(Given):
    id: str


_KINDS: Mapping[str, type[Given]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _Output,
    "reasoning": _Reasoning,
    "item_reference": _Reference,
}


class _ResponsesBody(BodyBase):
    input: str | list[dict[str, Any]] = Field(max_length=1 << 24)
    instructions: str = ""
    tools: tuple[dict[str, Any], ...] = Field(default=(), max_length=MAX_MESSAGES)
    max_output_tokens: int | None = Field(default=None, ge=1)


def parse(body: Mapping[str, Any], items: Items) -> Ask:
    """Return what a body asks for. `items` are those of earlier answers. Raises CallRefused."""
    given = validated(_ResponsesBody, body)
    asked = [{"role": "user", "content": given.input}] if isinstance(given.input, str) else given.input
    if not 0 < len(asked) <= MAX_MESSAGES:
        raise CallRefused(f"input: 1 to {MAX_MESSAGES} items", code="invalid_value", field="input")
    history = [{"role": "system", "content": given.instructions}] if given.instructions else []
    for number, item in enumerate(asked):
        _add(history, item, items, number)
    tools = [
        validated(FunctionTool, tool | {"function": tool}, ("tools", number)) for number, tool in enumerate(given.tools)
    ]
    return Ask(
        messages=tuple(history),
        tools=tuple(tool.model_dump() for tool in tools),
        limit=given.max_output_tokens,
        model=given.model,
        stream=given.stream,
        ignored=given.ignored(),
    )


def _add(history: list[dict[str, Any]], item: Mapping[str, Any], items: Items, number: int) -> None:
    """Append an item to the messages. What the assistant said without an interruption is one message."""
    where = ("input", number)
    name = str(item.get("type") or "message")
    if name not in _KINDS:
        wrong = f"input.{number}.type"
        raise CallRefused(f"{wrong}: items of type {name[:40]!r} are not supported", field=wrong)
    one = validated(_KINDS[name], item, where)
    if isinstance(one, _Reference):
        if one.id not in items:
            raise CallRefused(f"input.{number}.id: there is no item {one.id[:80]!r}", code="not_found", field=where[0])
        _add(history, items[one.id], items, number)
    elif isinstance(one, _Output):
        history.append({"role": "tool", "content": one.output, "tool_call_id": one.call_id})
    elif isinstance(one, _Message) and one.role != "assistant":
        history.append(one.model_dump())
    else:
        if not history or history[-1]["role"] != "assistant":
            history.append({"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []})
        last = history[-1]
        if isinstance(one, _Message):
            last["content"] += one.content
        elif isinstance(one, _Reasoning):
            last["reasoning_content"] += content_of({"content": one.content or one.summary})
        elif isinstance(one, _FunctionCall):
            function = one.model_dump(exclude={"call_id"})
            last["tool_calls"].append({"id": one.call_id, "type": "function", "function": function})


def whole(ask: Ask, turn: Turn, items: Items) -> dict[str, Any]:
    """Return the answer to a call without stream; its items can be referred to from now on."""
    output = _output(turn)
    items.update({item["id"]: item for item in output})
    return _response(ask, turn, output)


def events(ask: Ask, turn: Turn, items: Items) -> Iterator[str]:
    """Yield the server-sent events of a finished turn."""
    done = whole(ask, turn, items)
    begun = {**done, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    number = 0

    def event(kind: str, **data: Any) -> str:
        nonlocal number
        number += 1
        return sse.event(kind, json.dumps({"type": kind, "sequence_number": number - 1, **data}))

    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(done["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        yield event("response.output_item.added", output_index=index, item=_empty(item))
        for kind, data in _pieces(item):
            yield event(kind, **at, **data)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.incomplete" if turn.length else "response.completed", response=done)


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as it is before its first piece."""
    empty = {"content": [], "summary": [], "arguments": "", "status": "in_progress"}
    return {name: empty.get(name, value) for name, value in item.items()}


def _pieces(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of one item."""
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
        yield "response.function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
        return
    field, kind, added = "content", "output_text", "content_part"
    if item["type"] == "reasoning":
        field, kind, added = "summary", "reasoning_summary_text", "reasoning_summary_part"
    part, at = item[field][0], {f"{field}_index": 0}
    yield f"response.{added}.added", {**at, "part": {**part, "text": ""}}
    yield f"response.{kind}.delta", {**at, "delta": part["text"], "logprobs": []}
    yield f"response.{kind}.done", {**at, "text": part["text"], "logprobs": []}
    yield f"response.{added}.done", {**at, "part": part}


def failed(error: CallRefused) -> str:
    """Return the event of an error in a stream."""
    data = {"type": "error", "sequence_number": 0, **error.body()["error"]}
    return sse.event("error", json.dumps(data))


def _output(turn: Turn) -> Sequence[dict[str, Any]]:
    output: list[dict[str, Any]] = []
    if turn.said.reasoning:
        summary = [{"type": "summary_text", "text": turn.said.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{turn.id}", "summary": summary})
    if turn.said.content or not turn.said.calls:
        text = {"type": "output_text", "text": turn.said.content, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{turn.id}", "role": "assistant", "status": "completed"}
        output.append(message | {"content": [text]})
    for number, call in enumerate(turn.said.calls):
        item = {"type": "function_call", "id": f"fc_{turn.id}_{number}", "status": "completed"}
        output.append(item | {"call_id": call.id, "name": call.name, "arguments": call.arguments})
    return output


def _response(ask: Ask, turn: Turn, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the Response object, with the constant fields that clients' types require."""
    return {
        "id": f"resp_{turn.id}",
        "object": "response",
        "created_at": turn.created,
        "status": "incomplete" if turn.length else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if turn.length else None,
        "max_output_tokens": ask.limit,
        "model": ask.model,
        "output": list(output),
        "parallel_tool_calls": True,
        "metadata": {},
        **dict.fromkeys(("error", "instructions", "previous_response_id", "temperature", "top_p")),
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": None, **tool["function"]} for tool in ask.tools],
        "usage": {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": turn.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.prompt_tokens + turn.completion_tokens,
        },
    }
