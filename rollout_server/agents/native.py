"""A model's chat template as a renderer: prompts with tools, and turns appended token for token.

Sampled tokens are never rendered again. What follows a turn is its tail: the template renders a stand-in turn once
alone and once with the new messages; the second text must begin with the first, and the rest is the tail.

Texts of others (contents, results, descriptions of tools) cannot become control tokens: one that could is replaced by
a mark before rendering and encoded apart. The joined text is the template's own.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from protocol.errors import UserError
from rollout_server.agents import formats
from rollout_server.agents.config import OwnAgentSettings
from rollout_server.agents.renderer import (
    Call,
    Message,
    NotAppendable,
    Renderer,
    Said,
    TemplateVerdict,
    Tool,
    content_of,
    function_of,
)
from rollout_server.agents.tagged import TaggedRenderer
from rollout_server.environment.environment import Environment
from rollout_server.environment.tokenizer import ChatTemplate, TrajectoryTokenizer

_STAND_IN, _THOUGHT = "stand-in-8d1f4c", "thought-1f4c8d"
"""What the policy wrote in a stand-in turn."""
USER: Message = {"role": "user", "content": "question-4c8d1f"}
"""The question before a stand-in turn. Templates compare messages, so no other has this text."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields in which templates look for thoughts."""
_TOOLS = ("tools", "xml_tools")
"""Variables in which templates look for tools; the second one is SmolLM3's."""
_Escape = Callable[[str], str]


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_ESCAPES: tuple[_Escape, ...] = (
    lambda text: text,
    _json,
    lambda text: json.dumps(text)[1:-1],
    lambda text: _json(_json(text)),
    lambda text: repr(text)[1:-1],
)
"""How templates write a text: as it is, as JSON, as JSON in JSON, as Python's repr."""
_STRIPS: tuple[_Escape, ...] = (lambda text: text, str.strip, str.lstrip, str.rstrip)


class _Borders:
    """Proper starts and ends of control tokens: a text with one at its border could complete a control token."""

    def __init__(self, tokenizer: TrajectoryTokenizer) -> None:
        controls = [tokenizer.decode([i]) for i in tokenizer.control_ids]
        self.starts = {text[:n] for text in controls for n in range(1, len(text))}
        self.ends = {text[n:] for text in controls for n in range(1, len(text))}
        self.lengths = range(1, max(map(len, controls), default=1))


class _Marks:
    """Texts of others that could become control tokens, and the marks that stand for them while a template renders."""

    def __init__(self, tokenizer: TrajectoryTokenizer, borders: _Borders) -> None:
        self._tokenizer, self._borders = tokenizer, borders
        self._core = f"{uuid.uuid4().int:039d}"
        self._texts: list[str] = []

    def hide(self, value: Any) -> Any:
        """Return messages or tools with marks in place of texts that hold, begin or end a control token."""
        if isinstance(value, Mapping):
            return {self.hide(k): v if k in ("role", "type") else self.hide(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(given) for given in value]
        if not isinstance(value, str) or not self._could_be_control(value):
            return value
        self._texts.append(value)
        return self._mark(len(self._texts) - 1)

    def _mark(self, number: int) -> str:
        # a template that strips or escapes it shows how it would write the text
        return f'\n "\u00e9{self._core}{number:06d}\u00e9" \n'

    def _could_be_control(self, text: str) -> bool:
        if any(i in self._tokenizer.control_ids for i in self._tokenizer.encode_trusted(text)):
            return True
        return any(text[:n] in self._borders.ends or text[-n:] in self._borders.starts for n in self._borders.lengths)

    def encode(self, rendered: str) -> list[int]:
        """Return the ids of a rendered text. Raises UserError if the template changed a hidden text."""
        ids: list[int] = []
        end = 0
        for found in re.finditer(rf"{self._core}(\d{{6}})", rendered):
            number, forms = int(found[1]), []
            for strip, escape in product(_STRIPS, _ESCAPES):
                form = escape(strip(self._mark(number)))
                start = found.start() - form.find(self._core)
                if start >= end and rendered.startswith(form, start):
                    forms.append((start, start + len(form), escape(strip(self._texts[number]))))
            if not forms:
                raise UserError(
                    "the chat template changes a text that contains a control token",
                    why="the changed text cannot be encoded apart from the template's own",
                    todo="remove the control token from the message",
                )
            start, after, text = max(forms, key=lambda form: form[1] - form[0])
            ids += self._tokenizer.encode_trusted(rendered[end:start]) + self._tokenizer.encode_untrusted(text)
            end = after
        return ids + (self._tokenizer.encode_trusted(rendered[end:]) if rendered[end:] else [])


class NativeRenderer:
    """Renders with the chat template of a model.

    variables  further variables of the template: `{"enable_thinking": False}`

    Raises UserError if the template cannot render one message of a user.
    """

    def __init__(
        self, tokenizer: TrajectoryTokenizer, template: ChatTemplate, variables: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer, self._template, self._variables = tokenizer, template, dict(variables or {})
        self._borders = _Borders(tokenizer)
        self._ends = [tokenizer.decode([i]) for i in tokenizer.eos_ids]
        self._failure = "the chat template leaves out calls"
        shown = self._attempt([USER], True, [formats.PROBE_TOOL])
        self._opened = formats.is_inside_thoughts(shown or self._text([USER], True, []))
        self._thinks = formats.has_thoughts(template.source)
        self._shows_tools = formats.NAME in shown
        self._one, two = (self._written(shown, number) for number in (1, 2))
        self._read = formats.find_format(self._one, two)

    def stops(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Return nothing: an end token ends a turn."""
        return ()

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the ids of a whole prompt.

        Raises UserError if the template rejects the messages, or leaves out tools.
        """
        if tools and not self._shows_tools:
            raise UserError(
                "the model's chat template leaves out tools",
                why="the policy would not know them",
                todo="use a model whose template renders tools, or an agent without tools",
            )
        marks = _Marks(self._tokenizer, self._borders)
        hidden, shown = marks.hide(_plain(messages, {})), marks.hide(tools)
        try:
            text = self._text(hidden, True, shown)
        except UserError:  # gpt-oss takes no message with thoughts, a text and calls
            plain = [{key: part for key, part in message.items() if key not in _THOUGHTS} for message in hidden]
            text = self._text(plain, True, shown)
        return marks.encode(text)

    def go_on(self, new: Sequence[Message], tools: Sequence[Tool], last: Sequence[int], said: Said) -> list[int]:
        """Return the tail of a turn and the new messages.

        Raises NotAppendable if the template then renders earlier turns in another way. A message of a user must leave
        a turn with thoughts unchanged too: otherwise thoughts stay that the template removes.
        """
        tails: list[list[int]] = []
        reason = ""
        for thoughts in ("", _THOUGHT):
            try:
                tails.append(self._tail(new, tools, last, said, thoughts))
            except UserError as error:
                reason = error.why or error.what
            except NotAppendable as error:
                reason = str(error)
        both = any(message["role"] != "tool" for message in new)
        if not tails or (both and (reason or tails[0] != tails[1])):
            raise NotAppendable(reason or "the template treats thoughts in another way")
        return tails[0]

    def read(self, ids: Sequence[int], tools: Sequence[Tool]) -> Said:
        """Return the thoughts, the text and the calls of a turn. Without tools, calls are text."""
        text = self._tokenizer.decode_turn(ids)
        if self._read is formats.read_channels:
            return formats.read_channels(text, tools)
        thoughts, text = formats.split_thoughts(text, self._opened)
        return replace(self._read(text, tools) if self._read and tools else Said(text), reasoning=thoughts)

    def so_far(self, ids: Sequence[int], tools: Sequence[Tool]) -> Said:
        """Return the thoughts so far, and the text if it cannot be the start of a call."""
        said = self.read(ids, tools)
        content = "" if tools or self._read is formats.read_channels else said.content
        content, thoughts = (
            formats.without_start_of(text, formats.THOUGHT_MARKS).strip() for text in (content, said.reasoning)
        )
        return Said(content, thoughts)

    def verdict(self) -> TemplateVerdict:
        """Return what agents can do with this template, tried with a conversation of two calls and two questions."""
        if not self._shows_tools:
            return TemplateVerdict("no_tools", "the chat template leaves out tools")
        if self._read is None:
            shown = self._one.strip()[:60]
            return TemplateVerdict(
                "refused", f"no parser reads calls that begin with {shown!r}" if shown else self._failure
            )
        call, again = (Said("", "", (Call(name, formats.NAME, json.dumps(formats.ARGUMENTS)),)) for name in formats.IDS)
        result = {"role": "tool", "name": formats.NAME, "content": "?"}
        results: list[Message] = [result | {"tool_call_id": name} for name in formats.IDS]
        reasons = [
            self._rewritten([USER, _stand_in(call, thoughts), results[0], _stand_in(again, thoughts), results[1]])
            for thoughts in ("", _THOUGHT)
        ]
        if all(reasons):
            return TemplateVerdict("refused", reasons[0])
        try:
            self.go_on(results[:1], [formats.PROBE_TOOL], [], call)
        except NotAppendable as error:
            return TemplateVerdict("refused", str(error))
        try:
            self.go_on([{"role": "user", "content": "?"}], [formats.PROBE_TOOL], [], Said("?"))
        except NotAppendable as error:
            return TemplateVerdict("user", str(error))
        return TemplateVerdict("one")

    def _rewritten(self, messages: Sequence[Message]) -> str:
        """Return why a conversation is not its turns appended to each other; "" if it is."""
        try:
            whole = self._text(messages, True, [formats.PROBE_TOOL])
            for number in (number for number, message in enumerate(messages) if message["role"] == "assistant"):
                if not whole.startswith(alone := self._text(messages[: number + 1], False, [formats.PROBE_TOOL])):
                    return "the chat template renders earlier turns in another way after a result of a tool"
                start = self._text(messages[:number], True, [formats.PROBE_TOOL])
                if not formats.only_thought_marks(start[len(formats.common_start(alone, start)) :]):
                    return "the chat template starts a turn in another way than it renders it later"
        except UserError as error:
            return error.why or error.what
        return ""

    def _tail(
        self, new: Sequence[Message], tools: Sequence[Tool], last: Sequence[int], said: Said, thoughts: str
    ) -> list[int]:
        turn, marks = _stand_in(said, thoughts), _Marks(self._tokenizer, self._borders)
        hidden, names = marks.hide(tools), {call.id: call.name for call in said.calls}
        alone = self._text([USER, turn], False, hidden)
        whole = self._text([USER, turn, *marks.hide(_plain(new, names))], True, hidden)
        if thoughts and self._thinks and thoughts not in whole:
            raise NotAppendable("the chat template removes the thoughts of earlier turns")
        if not whole.startswith(alone):
            raise NotAppendable(f"the chat template renders a turn in another way before a message of {new[0]['role']}")
        written = alone.rfind(_STAND_IN)
        if written < 0:  # a template that leaves out calls
            written = len(formats.common_start(alone, self._text([USER], True, hidden)))
        end = max((alone.rfind(mark, written) for mark in self._ends), default=-1)
        ids = marks.encode((alone[end:] if end >= 0 else "") + whole[len(alone) :])
        if not last or last[-1] not in self._tokenizer.eos_ids:
            return ids
        if ids and (ids[0] == last[-1] or (end >= 0 and ids[0] in self._tokenizer.eos_ids)):
            return ids[1:]
        ended = self._tokenizer.decode(last[-1:])
        raise NotAppendable(f"the turn ended with {ended}, after which the chat template writes no {new[0]['role']}")

    def _written(self, shown: str, number: int) -> str:
        """Return what the template writes for a turn of `number` calls; "" if it cannot."""
        turn = {"role": "assistant", "content": "", "tool_calls": formats.probe_calls(number)}
        text = self._attempt([USER, turn], False, [formats.PROBE_TOOL])
        prompt = formats.common_start(text, shown).removesuffix("<")
        return formats.split_thoughts(text[len(prompt) :], False)[1]

    def _attempt(self, messages: Sequence[Message], begin: bool, tools: Sequence[Tool]) -> str:
        try:
            return self._text(messages, begin, tools)
        except UserError as error:
            self._failure = f"the chat template fails: {error.why}"
            return ""

    def _text(self, messages: Sequence[Message], begin: bool, tools: Sequence[Tool]) -> str:
        return self._template.render_messages(
            messages, begin, {**self._variables, **dict.fromkeys(_TOOLS, list(tools) or None)}
        )


def build_renderer(settings: OwnAgentSettings, environment: Environment) -> Renderer:
    """Return the renderer of the settings. Raises UserError if the model's chat template cannot be used."""
    chat, kind = environment.tokenizer.chat, settings.renderer
    if kind == "tags" or (kind == "auto" and chat is None):
        return TaggedRenderer(environment)
    reason = "the model has no chat template"
    if chat is not None:
        renderer = NativeRenderer(environment.tokenizer, chat, settings.chat_template_kwargs)
        verdict = renderer.verdict()
        if verdict.sequences != "refused":
            return renderer
        reason = verdict.reason
    raise UserError(
        "the model's chat template cannot be used by agents",
        why=reason,
        todo="use a model of a family in docs/agents.md, or set rollout.agent.renderer = tags",
    )


def _stand_in(said: Said, thoughts: str) -> Message:
    """Return a turn with the same calls in place of the sampled one."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": {"query": _STAND_IN}}}
        for call in said.calls
    ]
    turn = {
        "role": "assistant",
        "content": "" if calls else _STAND_IN,
        **dict.fromkeys(_THOUGHTS if thoughts else (), thoughts),
    }
    return turn | ({"tool_calls": calls} if calls else {})


def _plain(messages: Sequence[Message], names: dict[str, str]) -> list[Message]:
    """Return messages as templates expect them: contents as texts, arguments as objects, results with their tool."""
    plain: list[Message] = []
    for message in messages:
        role = message["role"]
        made: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content_of(message)}
        if thoughts := content_of(message, "reasoning_content"):
            made |= dict.fromkeys(_THOUGHTS, thoughts)
        if calls := [_call(call) for call in message.get("tool_calls") or ()]:
            made["tool_calls"] = calls
            names |= {call["id"]: call["function"]["name"] for call in calls}
        if role == "tool":
            made["tool_call_id"] = called = str(message.get("tool_call_id") or "")
            made["name"] = str(message.get("name") or names.get(called, ""))
        plain.append(made)
    return plain


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = function_of(call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):  # the template decides about text that is no JSON
        arguments = formats.json_or_text(arguments)
    given = {"name": str(function["name"]), "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": given}
