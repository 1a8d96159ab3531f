"""A tokenizer's chat template, rendered in jinja2's sandbox: the template came with a checkpoint, so it is not ours.

The same text as transformers' `apply_chat_template(..., add_generation_prompt=True, tokenize=False)`, but for the
date: `strftime_now` is not offered, so that a prompt is a pure function of its question (templates that use it fall
back to a fixed date).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from protocol.errors import UserError

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """`source` is jinja2; `special` the spellings of the named special tokens. Raises UserError when it is broken."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self.source = source
        self._special = dict(special)
        self._broken = TemplateError
        try:
            self._template = environment.from_string(source)
            self.render("")
        except TemplateError as error:
            raise UserError(
                "the tokenizer's chat template cannot be used",
                why=str(error),
                todo="mend chat_template in the model directory, or remove it to prompt with plain text",
            ) from None

    def render(self, message: str) -> str:
        """The conversation of one user message, up to where the assistant begins."""
        return self._render([{"role": "user", "content": message}], True, {})

    def render_messages(self, messages: list[dict[str, Any]], begin: bool, variables: Mapping[str, Any]) -> str:
        """A conversation that a client sent, up to where the assistant begins if `begin`, with further variables of
        the template. Raises UserError for what the template does not take."""
        try:
            return self._render(messages, begin, variables)
        except (self._broken, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise UserError("the chat template does not take these messages", why=str(error)) from None

    def _render(self, messages: list[dict[str, Any]], begin: bool, variables: Mapping[str, Any]) -> str:
        given = {"tools": None, **variables, **self._special, "messages": messages, "add_generation_prompt": begin}
        return self._template.render(given)


def load_chat_template(model_dir: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a model directory: `chat_template.jinja`, else the one in tokenizer_config.json, else None."""
    path = model_dir / "chat_template.jinja"
    found: Any = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(found, list):
        by_name = {entry["name"]: entry["template"] for entry in found}
        found = by_name.get("default")
    if not found:
        return None
    special = {name: _spelling(config.get(name)) for name in _NAMED}
    return ChatTemplate(str(found), {name: text for name, text in special.items() if text})


def _spelling(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja2's own filter escapes for HTML, which no template means here.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
