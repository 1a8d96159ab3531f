"""The dialect of `POST /v1/responses`. Earlier items may be given by their ids, as Vercel's `ai` does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from protocol.runtime.http import sse
from rollout_server.agents.chat_completions import FunctionTool, Items
from rollout_server.agents.messages import (
    MAX_MESSAGES,
    Ask,
    BodyBase,
    CallRefused,
    Content,
    Part,
    ToolName,
    Turn,
    text_of,
    validated,
)


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = None


class _FunctionCall(BaseModel):
    call_id: str
    name: str = ToolName
    arguments: str = ""


class _Output(BaseModel):
    call_id: str
    output: Content = None


class _Reasoning(BaseModel):
    summary: list[dict[str, Any]] = []
    content: list[dict[str, Any]] | None = None

    def text(self) -> str:
        return "".join(str(part.get("text") or "") for part in self.content or self.summary)


class _Reference(BaseModel):
    id: str


_KINDS: Mapping[str, type[BaseModel]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _Output,
    "reasoning": _Reasoning,
    "item_reference": _Reference,
}


class _ResponsesBody(BodyBase):
    input: str | list[dict[str, Any]] = Field(max_length=1 << 24)
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=MAX_MESSAGES)
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
        validated(FunctionTool, tool | {"function": tool}, ("tools", number))
        for number, tool in enumerate(given.tools or ())
    ]
    return Ask(
        messages=tuple(history),
        tools=tuple(tool.cleaned() for tool in tools),
        limit=given.max_output_tokens,
        model=given.model,
        stream=bool(given.stream),
        ignored=given.ignored(),
    )


def _add(history: list[dict[str, Any]], item: Mapping[str, Any], items: Items, number: int) -> None:
    """Append an item to the messages. What the assistant said without an interruption is one message."""
    where = ("input", number)
    name = item.get("type") or "message"
    if name not in _KINDS:
        wrong = f"input.{number}.type"
        raise CallRefused(f"{wrong}: items of type {str(name)[:40]!r} are not supported", field=wrong)
    one = validated(_KINDS[name], item, where)
    if isinstance(one, _Reference):
        if one.id not in items:
            raise CallRefused(f"input.{number}.id: there is no item {one.id[:80]!r}", code="not_found", field=where[0])
        _add(history, items[one.id], items, number)
    elif isinstance(one, _Output):
        history.append({"role": "tool", "content": text_of(one.output), "tool_call_id": one.call_id})
    elif isinstance(one, _Message) and one.role != "assistant":
        role = "system" if one.role == "developer" else one.role
        history.append({"role": role, "content": text_of(one.content)})
    else:
        if not history or history[-1]["role"] != "assistant":
            history.append({"role": "assistant", "content": ""})
        last = history[-1]
        if isinstance(one, _Message):
            last["content"] += text_of(one.content)
        elif isinstance(one, _Reasoning):
            last["reasoning_content"] = last.get("reasoning_content", "") + one.text()
        elif isinstance(one, _FunctionCall):
            function = {"name": one.name, "arguments": one.arguments}
            last.setdefault("tool_calls", []).append({"id": one.call_id, "type": "function", "function": function})


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
    kind, field, index = ("output_text", "content", "content_index")
    added = "response.content_part"
    if item["type"] == "reasoning":
        kind, field, index, added = (
            *("reasoning_summary_text", "summary", "summary_index"),
            "response.reasoning_summary_part",
        )
    part = item[field][0]
    at = {index: 0}
    extra: dict[str, Any] = {"logprobs": []} if field == "content" else {}
    yield f"{added}.added", {**at, "part": {**part, "text": ""}}
    yield f"response.{kind}.delta", {**at, **extra, "delta": part["text"]}
    yield f"response.{kind}.done", {**at, **extra, "text": part["text"]}
    yield f"{added}.done", {**at, "part": part}


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
        text = {**Part(type="output_text", text=turn.said.content).model_dump(), "annotations": [], "logprobs": []}
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
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if turn.length else None,
        "instructions": None,
        "max_output_tokens": ask.limit,
        "model": ask.model,
        "output": list(output),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "metadata": {},
        "temperature": None,
        "top_p": None,
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
