"""How a model writes thoughts and calls of tools: found in what its chat template writes, not by the model's name.

A template renders one call and two; the text around their names and arguments is the format. This covers JSON between
marks (Hermes, Qwen, Granite: `<tool_call>`; Mistral: `[TOOL_CALLS]`; DeepSeek), JSON alone (Llama), and an element for
each argument (Qwen3.5, GLM, MiniMax: `<parameter=k>`). The channels of gpt-oss have a separate parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from rollout_server.agents.renderer import Call, Said, Tool, function_of, new_id

_MARKS = (
    ("<think>", "[THINK]", "<seed:think>", "<|channel>thought"),
    ("</think>", "[/THINK]", "</seed:think>", "<channel|>"),
)
_OPENS, _CLOSES = ("|".join(map(re.escape, marks)) for marks in _MARKS)
THOUGHT_MARKS = _MARKS[0] + _MARKS[1]
"""Marks around thoughts."""
_THOUGHT = re.compile(rf"(?:\s*(?:{_OPENS}))?(.*?)(?:{_CLOSES})", re.DOTALL)
_OPENED = re.compile(rf"\s*(?:{_OPENS})")

NAME, ARGUMENTS, IDS = "probe_tool", {"alpha_1": "beta_1", "gamma_2": 271828}, ("aAbBcC123", "dDeEfF456")
"""A call that no prompt contains."""
_PROPERTIES = {"alpha_1": {"type": "string", "description": "."}, "gamma_2": {"type": "integer", "description": "."}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES}
PROBE_TOOL: Tool = {
    "type": "function",
    "function": {"name": NAME, "description": "Find.", "parameters": _PARAMETERS},
}
_FUNCTION = re.compile(r"[\w.-]+")
_ID = re.compile(r"[A-Za-z0-9]{9}")
_MESSAGE = re.compile(r"(.*?)<\|message\|>(.*?)(?:<\|(?:end|call|return)\|>|$)", re.DOTALL)
_TO = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_QUOTED = re.compile(r'<\|"\|>(.*?)<\|"\|>|(?<=[{,])([\w.-]+)(?=:)', re.DOTALL)
Read = Callable[[str, Sequence[Tool]], Said]
"""Reads the text of a turn after its thoughts."""


def probe_calls(number: int) -> list[dict[str, Any]]:
    """Return calls to be rendered, so that their format is found."""
    function = {"name": NAME, "arguments": dict(ARGUMENTS)}
    return [{"id": name, "type": "function", "function": function} for name in IDS[:number]]


def has_thoughts(template: str) -> bool:
    """Return whether a chat template knows marks of thoughts."""
    return bool(re.search(_OPENS, template))


def only_thought_marks(text: str) -> bool:
    """Return whether a text has nothing but marks around thoughts, and white space."""
    return not re.sub(rf"{_OPENS}|{_CLOSES}", "", text).strip()


def is_inside_thoughts(prompt: str) -> bool:
    """Return whether a prompt ends in the thoughts of the turn to come."""
    marks = re.findall(rf"({_OPENS})|{_CLOSES}", prompt)
    return bool(marks and marks[-1])


def split_thoughts(text: str, opened: bool) -> tuple[str, str]:
    """Return the thoughts at the start of a turn, and the rest. `opened`: the prompt ends with the mark before them."""
    if found := _THOUGHT.match(text):
        return found[1].strip(), text[found.end() :].strip()
    mark = _OPENED.match(text)
    return (text[mark.end() if mark else 0 :].strip(), "") if mark or opened else ("", text.strip())


def without_start_of(text: str, marks: Sequence[str]) -> str:
    """Return a text in progress without half a character, and without an end that may be the start of a mark."""
    text = text.rstrip("\ufffd")
    starts = (text.endswith(mark[:n]) and n for mark in marks for n in range(1, len(mark)))
    return text[: len(text) - max(starts, default=0)]


def common_start(one: str, two: str) -> str:
    """Return the text with which both begin."""
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def common_end(one: str, two: str) -> str:
    """Return the text with which both end."""
    return common_start(one[::-1], two[::-1])[::-1]


def find_format(one: str, two: str) -> Read | None:
    """Return the reader of calls for a template that renders one call as `one`, and two as `two` ("": it cannot).

    None if the format is unknown: what is read back is not the call.
    """
    if "<|channel|>" in one and "<|message|>" in one:
        return read_channels
    read = _json_or_elements(_plain(one), _plain(two))
    texts = {1: one, 2: two} if two else {1: one}
    expected = [(NAME, ARGUMENTS)]
    for number, text in texts.items():
        calls = read(text, [PROBE_TOOL]).calls if read else ()
        if [(call.name, json.loads(call.arguments)) for call in calls] != expected * number:
            return None
    return read


def read_channels(text: str, tools: Sequence[Tool]) -> Said:
    """Return what stands in the channels of a turn (gpt-oss): analysis, commentary that calls a function, final."""
    content, thoughts, end = "", "", 0
    calls: list[Call] = []
    for message in _MESSAGE.finditer(text):
        head, body = message.groups()
        end = message.end()
        if (to := _TO.search(head)) and isinstance(json_or_text(body), dict):
            calls.append(Call(new_id(), to[1], body.strip()))
        elif "analysis" in head:
            thoughts += body
        else:
            content += body
    return Said((content or text[end:]).strip(), thoughts.strip(), tuple(calls))


@dataclass(frozen=True)
class _Format:
    """The text around the name and the arguments of a call.

    first    before the name of the first call
    again    before the name of each further call
    middle   between the name and the arguments: a JSON object, or the elements `argument` until `close`
    after    behind a JSON object, up to the id
    """

    first: re.Pattern[str]
    again: re.Pattern[str]
    middle: re.Pattern[str]
    after: re.Pattern[str]
    argument: re.Pattern[str] | None = None
    close: re.Pattern[str] | None = None

    def read(self, given: str, tools: Sequence[Tool]) -> Said:
        """Return the text before the first call, and the calls. Text that does not parse is no call."""
        text = _plain(given)
        calls: list[Call] = []
        found = first = self.first.search(text)
        while found:
            name = _FUNCTION.match(text, found.end())
            middle = self.middle.match(text, name.end()) if name else None
            if name is None or middle is None:
                return Said(given)
            arguments, end = self._arguments(text, middle.end(), _strings(name[0], tools))
            if arguments is None:
                return Said(given)
            after = self.after.match(text, end)
            written = (middle.groupdict().get("id") or (after and after.groupdict().get("id"))) or ""
            unique = _ID.fullmatch(written) and written not in [call.id for call in calls]
            calls.append(Call(written if unique else new_id(), name[0], json.dumps(arguments, ensure_ascii=False)))
            found = self.again.search(text, end)
        return Said(text[: first.start()].strip(), "", tuple(calls)) if first else Said(given)

    def _arguments(self, text: str, start: int, strings: set[str]) -> tuple[dict[str, Any] | None, int]:
        if self.argument is None or self.close is None:
            given, end = _decode(text, start)
            return (given if isinstance(given, dict) else None), end
        found: dict[str, Any] = {}
        while element := self.argument.match(text, start):
            key, value = element["key"], element["value"]
            found[key], start = (value if key in strings else json_or_text(value)), element.end()
        closed = self.close.match(text, start)
        return (found, closed.end()) if closed else (None, start)


def _json_or_elements(one: str, two: str) -> Read | None:
    head, name, rest = one.partition(NAME)
    between = two.split(NAME)[1] if two.count(NAME) == 2 else head
    again = common_end(head, between)
    if again != head and (start := re.search(r"[<\[{].*", again, re.DOTALL)):
        again = start[0]
    if not name or not head.strip() or not again or NAME in rest:
        return None
    # without a mark before it, JSON is a call only at the start of a turn
    first = re.compile((r"\A(?:<\|python_tag\|>)?" if head.lstrip()[0] == "{" else "") + _loose(head))
    for at in (found.start() for found in re.finditer(r"\{", rest)):
        given, end = _decode(rest, at)
        if given == ARGUMENTS:
            after, written, _ = rest[end:].partition(IDS[0])
            behind = _loose(after + written) if written else ""
            return _Format(first, re.compile(_loose(again)), re.compile(_loose(rest[:at])), re.compile(behind)).read
    keys_and_values = "(.*?)".join(str(part) for item in ARGUMENTS.items() for part in item)
    found = re.fullmatch(f"(.*?){keys_and_values}(.*)", rest, re.DOTALL)
    if not found or found[2] != found[4]:
        return None
    before = common_end(found[1], found[3])
    before = before[before.find("<") :] if "<" in before else before
    opening, ending = found[1].removesuffix(before), found[3].removesuffix(before)
    close = found[5].removeprefix(ending)
    # a value is what stands between the marks, without one line break on each side
    key, value = rf"{_loose(before)}(?P<key>[\w.-]+){_loose(found[2].strip())}", r"\n?(?P<value>.*?)\n?"
    element = re.compile(rf"{key}{value}{re.escape(ending.strip())}\s*+", re.DOTALL)
    tag = re.compile(_loose(close[: close.find(">") + 1]))
    return _Format(first, re.compile(_loose(again)), re.compile(_loose(opening)), re.compile(""), element, tag).read


def _loose(literal: str) -> str:
    """Return a pattern for a text of the template in which white space may differ. It never backtracks."""
    spaced = (
        r"\s*+" if c.isspace() else rf"\s*+{re.escape(c)}\s*+" if c in "{}[]:," else re.escape(c) for c in literal
    )
    return "".join(spaced).replace(IDS[0], r"(?P<id>[\w-]*)")


def _plain(text: str) -> str:
    """Return the text with Gemma 4's arguments as JSON: `{query:<|"|>x<|"|>}` is `{"query":"x"}`."""
    if '<|"|>' not in text:
        return text
    return _QUOTED.sub(lambda found: f'"{found[2]}"' if found[2] else json.dumps(found[1], ensure_ascii=False), text)


def _strings(name: str, tools: Sequence[Tool]) -> set[str]:
    """Return the arguments of a tool that may be strings."""
    found = next((function_of(tool) for tool in tools if function_of(tool)["name"] == name), {})
    properties = (found.get("parameters") or {}).get("properties") or {}
    return {key for key, schema in properties.items() if '"string"' in json.dumps(schema)}


def json_or_text(text: str) -> Any:
    """Return the value of a JSON text, or a text that is not JSON as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _decode(text: str, start: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start
