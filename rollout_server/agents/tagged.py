"""Foray's tags as a renderer: the texts of the built-in loop, for agents that speak in messages.

`<search>q</search>` is a call of the tool `search`, the tag of another tool a call of it, `<answer>a</answer>` the
content `a`; the text before it is reasoning. Ids are those of the built-in loop for the same question, turns and
results. The prompt is the template's and does not describe the agent's tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from rollout_server.agents.formats import json_or_text, without_start_of
from rollout_server.agents.renderer import Call, Message, Said, TemplateVerdict, Tool, content_of, function_of, new_id
from rollout_server.environment import actions
from rollout_server.environment.environment import Environment

_TAG = re.compile(r"[A-Za-z][\w-]*")
_THINK = re.compile(r"</?think>")


@dataclass(frozen=True)
class TaggedRenderer:
    """Renders with the prompt template of `environment`.

    The messages before the first turn are the question, results of tools are observations, and a later message of the
    user is a line of its own. The template's hint after an invalid turn keeps its tags.
    """

    environment: Environment

    def stops(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Return the template's stop strings and the closing tags of the tools."""
        return (*self.environment.template.stops, *(f"</{tag}>" for tag in _tags(tools)))

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the ids of a whole prompt."""
        asked = list(takewhile(lambda message: message["role"] != "assistant", messages))
        ids = self.environment.prompt("\n\n".join(filter(None, map(content_of, asked))))
        for message in messages[len(asked) :]:
            ids += self._said(message, tools) if message["role"] == "assistant" else self._heard(message, tools)
        return ids

    def go_on(self, new: Sequence[Message], tools: Sequence[Tool], last: Sequence[int], said: Said) -> list[int]:
        """Return the ids of the observations and lines after a turn."""
        return [i for message in new for i in self._heard(message, tools)]

    def read(self, ids: Sequence[int], tools: Sequence[Tool]) -> Said:
        """Return the first action of a turn, as the built-in loop reads it. Without one the text is the content."""
        text, template = self.environment.tokenizer.decode_turn(ids), self.environment.template
        action = actions.parse(text, box=template.boxed, tools=_tags(tools))
        if isinstance(action, actions.InvalidAction):
            return Said(text.strip())
        before = thoughts_before(text, action)
        if isinstance(action, actions.AnswerAction):
            return Said(action.text or "", before)
        name = action.tool if isinstance(action, actions.ToolAction) else "search"
        key = next((key for tool, key in map(_named, tools) if tool == name), None)
        if key is None:  # `search`, which this agent does not offer
            return Said(text.strip())
        argument = action.query if isinstance(action, actions.SearchAction) else action.argument
        return Said("", before, (Call(new_id(), name, json.dumps({key: argument}, ensure_ascii=False)),))

    def so_far(self, ids: Sequence[int], tools: Sequence[Tool]) -> Said:
        """Return nothing: without an action the whole text is the content, with one the text before it is thoughts."""
        return Said("")

    def verdict(self) -> TemplateVerdict:
        """Return that a trajectory is one sequence."""
        return TemplateVerdict("one")

    def _heard(self, message: Message, tools: Sequence[Tool]) -> list[int]:
        environment, limit = self.environment, self.environment.settings.max_obs_tokens
        tags, text = (*environment.tags, *_tags(tools)), content_of(message)
        if message["role"] != "tool" and text.strip() == environment.template.invalid.strip():
            return list(environment.invalid)
        if message["role"] != "tool":
            return environment.tokenizer.encode_untrusted(f"\n{actions.escape_tags(text, tags).strip()}\n")
        if not text.strip():
            return environment.observation((), limit)
        text = text[: limit * actions.MAX_CHARS_PER_TOKEN]
        return environment.text_observation(actions.escape_tags(text, tags), limit)

    def _said(self, message: Message, tools: Sequence[Tool]) -> list[int]:
        """Return the ids of an earlier turn, written as the policy would."""
        content, known = content_of(message), ("search", *_tags(tools))
        calls = [function_of(call) for call in message.get("tool_calls") or ()]
        parts = [("think", content_of(message, "reasoning_content")), ("think", content if calls else "")]
        parts += [(str(call["name"]), _argument(str(call["arguments"]))) for call in calls if call["name"] in known]
        if not calls:
            parts.append(("answer", f"\\boxed{{{content}}}" if self.environment.template.boxed else content))
        trusted, untrusted = self.environment.tokenizer.encode_trusted, self.environment.tokenizer.encode_untrusted
        written = [(name, actions.escape_tags(text, known)) for name, text in parts if text]
        return [
            i
            for name, text in written
            for i in (*trusted(f"<{name}>"), *untrusted(f" {text} "), *trusted(f"</{name}>"))
        ]


def thoughts_before(text: str, action: actions.Action) -> str:
    """Return what a turn says before its first action (all, if that is invalid), without the marks of thoughts."""
    if not isinstance(action, actions.InvalidAction):
        name = "answer" if isinstance(action, actions.AnswerAction) else getattr(action, "tool", "search")
        text = text.partition(f"<{name}>")[0]
    return _THINK.sub("", text).strip()


def thoughts_so_far(text: str, tags: Sequence[str]) -> str:
    """Return with what `thoughts_before` begins for a turn that begins with `text`. `tags`: those of the tools."""
    opening = [f"<{tag}>" for tag in ("search", "answer", *tags)]
    text = text[: min((at for tag in opening if (at := text.find(tag)) >= 0), default=len(text))]
    return _THINK.sub("", without_start_of(text, (*opening, "<think>", "</think>"))).strip()


def _tags(tools: Sequence[Tool]) -> tuple[str, ...]:
    """Return the names of tools that can be tags, without those of the protocol."""
    names = (name for name, _ in map(_named, tools))
    return tuple(name for name in names if _TAG.fullmatch(name) and name not in actions.RESERVED_TAGS)


def _named(tool: Tool) -> tuple[str, str]:
    """Return the name of a tool and of its argument: the first required one, or else the first."""
    function = function_of(tool)
    schema = function.get("parameters") or {}
    names = [*(schema.get("required") or ()), *(schema.get("properties") or ()), "query"]
    return str(function["name"]), str(names[0])


def _argument(arguments: str) -> str:
    """Return the only argument of a call as text."""
    given = json_or_text(arguments)
    values = list(given.values()) if isinstance(given, dict) else [given]
    return str(values[0]) if len(values) == 1 else arguments
