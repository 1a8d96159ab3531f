"""A tokenizer's chat template, rendered in jinja2's sandbox: the template came with a checkpoint, so it is not ours.

The same text as transformers' `apply_chat_template(..., add_generation_prompt=True, tokenize=False)`, with one
difference: `strftime_now` is the run's day (`run.date`) and not the clock's, so that a prompt is a pure function of its
question. Without a day, templates that can do without get none, and others are refused when they are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from protocol.errors import UserError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_NOW = "strftime_now"
Message = Mapping[str, Any]


class ChatTemplate:
    """`source` is jinja2; `special` the spellings of the named special tokens; `day` what `strftime_now` tells.

    Raises UserError when it is broken.
    """

    def __init__(self, source: str, special: Mapping[str, str], day: date | None = None) -> None:
        from jinja2 import TemplateError

        self.source, self.day = source, day
        self._special = dict(special)
        try:
            self._template = _environment(day).from_string(source)
        except (TemplateError, RecursionError) as error:
            raise _unusable(error) from None
        if day is not None or _NOW not in source:
            self.render("")

    def render(self, message: str) -> str:
        """The conversation of one user message, up to where the assistant begins. Raises UserError."""
        return self.render_messages([{"role": "user", "content": message}], True, {})

    def render_messages(self, messages: Sequence[Message], begin: bool, variables: Mapping[str, Any]) -> str:
        """A conversation, up to where the assistant begins if `begin`, with further variables of the template (`tools`,
        `enable_thinking`, ..). Raises UserError where the template refuses it, or fails."""
        given = {"tools": None, "documents": None, **variables, **self._special}
        try:
            return self._template.render(given | {"messages": messages, "add_generation_prompt": begin})
        except Exception as error:  # a template is a program: whatever it raises is its own fault
            if self.day is None and _NOW in str(error):
                raise UserError(
                    "the tokenizer's chat template asks for the day",
                    why="a prompt must not change over night, so it is the day of the run and not the clock's",
                    todo="set run.date, e.g. run.date=2026-01-31 (`foray up` sets it to the run's first day)",
                ) from None
            raise _unusable(error) from None


def load_chat_template(model_dir: Path, config: Mapping[str, Any], day: date | None = None) -> ChatTemplate | None:
    """The template of a model directory: `chat_template.jinja`, else the one in tokenizer_config.json, else None."""
    path = model_dir / "chat_template.jinja"
    found: Any = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(found, list):
        by_name = {entry["name"]: entry["template"] for entry in found}
        found = by_name.get("default")
    if not found:
        return None
    special = {name: _spelling(config.get(name)) for name in _NAMED}
    return ChatTemplate(str(found), {name: text for name, text in special.items() if text}, day)


def _environment(day: date | None) -> ImmutableSandboxedEnvironment:
    """What transformers gives a template: its settings, extensions, filter and functions."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant wrote, for training; here its content passes through. A block
        that is called, as in transformers: what is set inside is not seen outside."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller: Any) -> Any:
            return caller()

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    if day is not None:
        environment.globals[_NOW] = datetime.combine(day, time()).strftime
    return environment


def _unusable(error: Exception) -> UserError:
    return UserError(
        "the tokenizer's chat template cannot be used",
        why=str(error) or type(error).__name__,
        todo="mend chat_template in the model directory, or remove it to prompt with plain text",
    )


def _spelling(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which no template means here.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
