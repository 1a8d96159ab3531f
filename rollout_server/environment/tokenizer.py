"""Tokenizer of a model directory, without transformers.

Three ways to encode, depending on the author of the text:
  prompt            Foray's text around a question: added tokens are recognised; includes the chat template or the
                    tokenizer's prefix
  encode_trusted    Foray's text inside a trajectory (tags, the invalid-action text): added tokens are recognised, and
                    no prefix is added
  encode_untrusted  text of others (a passage): cannot produce a control token. The tokenizer used for it does not know
                    them, and the id of one that its vocabulary contains as a word is dropped.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from protocol.errors import UserError
from protocol.runtime.files import read_json_object, reading

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer

FIRST_CHARS = 6
"""Characters per token with which a long text is cut first; English has 4 to 5."""
MARGIN = 8
"""Last tokens of a cut text that are dropped: a token at the cut might be another one in the whole text."""
BORDER_CHARS = 256
"""A text is cut at a border between two words in its last characters: tokens do not span it."""
_BORDER = re.compile(r"[^\W_](?= [^\W_])")
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_NOW = "strftime_now"
Message = Mapping[str, Any]


class TrajectoryTokenizer:
    """The tokenizer of one model.

    eos_ids       ids that end a generation
    control_ids   ids that only Foray and the policy may write: special tokens, and added tokens that look like a tag
    chat          the model's chat template; None without one
    fingerprint   sha256 of everything that determines the meaning of ids; must be equal in all processes of a run
    """

    def __init__(self, spec: dict[str, Any], *, eos_ids: Iterable[int] = (), chat: ChatTemplate | None = None) -> None:
        from tokenizers import Tokenizer

        spec = {**spec, "truncation": None, "padding": None}
        self._whole: Tokenizer = Tokenizer.from_str(json.dumps(spec))
        # Without added tokens it encodes any text as plain words.
        self._untrusted: Tokenizer = Tokenizer.from_str(
            json.dumps({**spec, "post_processor": None, "added_tokens": []})
        )
        self.chat = chat
        self._prefix: list[int] = list(self._whole.encode("", add_special_tokens=True).ids)
        self._expected: dict[tuple[str, str, bool], list[int]] = {}
        self.eos_ids = frozenset(eos_ids)
        control = {int(token["id"]) for token in spec.get("added_tokens") or [] if _is_control(token)}
        self.control_ids = frozenset(control | self.eos_ids) - _unknown_ids(spec, self._whole)
        self.fingerprint = _digest(spec, self.eos_ids, chat)

    def prompt(self, before: str, question: str, after: str, *, chat: bool) -> list[int]:
        """Return the ids of `before + question + after`: one user message if `chat` and there is a chat template.

        Otherwise plain text with the tokenizer's prefix (Llama's begin-of-sequence token). The question is untrusted.
        All is encoded as one text, as in the model's training, unless the question contains a control token: then it is
        encoded separately, as untrusted text.
        """
        key = (before, after, chat)
        if key not in self._expected:
            self._expected[key] = self._controls(self._wrapped(before + "x" + after, chat))
        ids = self._wrapped(before + question + after, chat)
        if self._controls(ids) == self._expected[key]:
            return ids
        left, right = self._frame(before, after, chat)
        return left + self.encode_untrusted(question) + right

    def _wrapped(self, text: str, chat: bool) -> list[int]:
        if chat and self.chat is not None:
            return self.encode_trusted(self.chat.render(text))  # the chat template adds the prefix itself
        return self._prefix + self.encode_trusted(text)

    def _frame(self, before: str, after: str, chat: bool) -> tuple[list[int], list[int]]:
        """Return the ids before and after the question."""
        if not (chat and self.chat is not None):
            return self._prefix + self.encode_trusted(before), self.encode_trusted(after)
        mark = uuid.uuid4().hex
        left, _, right = self.chat.render(before + mark + after).partition(mark)
        return self.encode_trusted(left), self.encode_trusted(right)

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i in self.control_ids]

    def encode_trusted(self, text: str) -> list[int]:
        """Return the ids of a trusted text. Tags are encoded as control tokens, if they are."""
        return list(self._whole.encode(text, add_special_tokens=False).ids)

    def encode_untrusted(self, text: str, count: int | None = None) -> list[int]:
        """Return the ids of an untrusted text, never a control id.

        count  stop early: more than `count` of its first ids are enough. Costs O(count) instead of O(len(text)), unless
               the tokens are very long, or there is no border between two words to cut the text at
        """
        chars = len(text) if count is None else FIRST_CHARS * (count + MARGIN)
        while count is not None and chars < len(text):
            cuts = [border.end() for border in _BORDER.finditer(text, max(0, chars - BORDER_CHARS), chars)]
            if cuts and len(ids := self._words(text[: cuts[-1]])) > count + MARGIN:
                return ids[:-MARGIN]
            chars *= 2
        return self._words(text)

    def _words(self, text: str) -> list[int]:
        ids = self._untrusted.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i not in self.control_ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of all ids, with control tokens."""
        return str(self._whole.decode(list(ids), skip_special_tokens=False))

    def decode_turn(self, ids: Sequence[int]) -> str:
        """Return the text of a turn of the policy, without its end-of-sequence token."""
        end = len(ids)
        while end and ids[end - 1] in self.eos_ids:
            end -= 1
        return self.decode(ids[:end])


def load_tokenizer(model_dir: str | Path, day: date | None = None) -> TrajectoryTokenizer:
    """Load the tokenizer of `model_dir`, a folder in Hugging Face layout. `day` is for its chat template.

    Raises UserError if tokenizer.json is missing or broken, or if the chat template is broken.
    """
    model_dir = Path(model_dir)
    path = model_dir / "tokenizer.json"
    config = read_json_object(model_dir / "tokenizer_config.json")
    try:
        with reading(path, "run.model must be a model directory in Hugging Face layout with a tokenizer.json"):
            spec = json.loads(path.read_text(encoding="utf-8"))
        return TrajectoryTokenizer(
            spec, eos_ids=_eos_ids(model_dir, spec, config), chat=load_chat_template(model_dir, config, day)
        )
    except UserError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise UserError(f"{path} is not a valid tokenizer", why=str(error)[:300]) from None


def _is_control(token: dict[str, Any]) -> bool:
    """Return whether a token is special or looks like a tag: <think>, <tool_call>, [INST]."""
    content = str(token["content"])
    bracketed = len(content) > 2 and (content[0], content[-1]) in (("<", ">"), ("[", "]"))
    return bool(token.get("special")) or bracketed


def _unknown_ids(spec: dict[str, Any], tokenizer: Tokenizer) -> set[int]:
    """Return the id of unknown words. It is not a control token, though it is listed as special."""
    model = spec.get("model") or {}
    found = {model.get("unk_id"), tokenizer.token_to_id(str(model.get("unk_token") or ""))}
    return {int(i) for i in found if i is not None}


def _eos_ids(model_dir: Path, spec: dict[str, Any], config: dict[str, Any]) -> set[int]:
    """Return the end tokens of generation_config.json, config.json and tokenizer_config.json together."""
    found: set[int] = set()
    model = read_json_object(model_dir / "config.json")
    for holder in (read_json_object(model_dir / "generation_config.json"), model, model.get("text_config") or {}):
        value = holder.get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    name = config.get("eos_token")
    spelling = name.get("content") if isinstance(name, dict) else name
    found.update(token["id"] for token in spec.get("added_tokens") or [] if token["content"] == spelling)
    return found


def _digest(spec: dict[str, Any], eos_ids: frozenset[int], chat: ChatTemplate | None) -> str:
    parts = [spec, sorted(eos_ids), chat.source if chat else ""]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


class ChatTemplate:
    """A tokenizer's chat template, rendered in jinja2's sandbox: it comes with a checkpoint and is untrusted.

    Renders the same text as transformers' `apply_chat_template(..., add_generation_prompt=True, tokenize=False)`, with
    one difference: `strftime_now` returns the run's date (`run.date`) and not the current one, so that a prompt depends
    only on its question. Without a date, a template that requires one raises UserError when it is used.

    source   jinja2 source
    special  texts of the named special tokens
    day      date that `strftime_now` returns

    Raises UserError if the template is broken.
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
            try:
                self.render("")
            except UserError:  # one for conversations with tools only
                self.render_messages([{"role": "user", "content": ""}], True, {"tools": []})

    def render(self, message: str) -> str:
        """Render a conversation of one user message, up to the start of the assistant's turn. Raises UserError."""
        return self.render_messages([{"role": "user", "content": message}], True, {})

    def render_messages(self, messages: Sequence[Message], begin: bool, variables: Mapping[str, Any]) -> str:
        """Render a conversation, up to the start of the assistant's turn if `begin`.

        `variables` are further variables of the template (`tools`, `enable_thinking`, ...). Raises UserError if the
        template rejects the conversation or fails.
        """
        given = {"tools": None, "documents": None, **variables, **self._special}
        try:
            return self._template.render(given | {"messages": messages, "add_generation_prompt": begin})
        except Exception as error:  # a template is a program and may raise anything
            if self.day is None and _NOW in str(error):
                raise UserError(
                    "the tokenizer's chat template requires a date",
                    why="prompts must not change during a run, so the current date is not used",
                    todo="set run.date, e.g. run.date=2026-01-31 (`foray up` sets it to the first day of the run)",
                ) from None
            raise _unusable(error) from None


def load_chat_template(model_dir: Path, config: Mapping[str, Any], day: date | None = None) -> ChatTemplate | None:
    """Load the template of a model directory: `chat_template.jinja`, else from tokenizer_config.json, else None."""
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
    """Return the same jinja2 environment as transformers: settings, extensions, filter and functions."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here its content is unchanged. As in
        transformers it is a call block: variables set inside are not visible outside."""

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
        todo="correct chat_template in the model directory, or remove it to prompt with plain text",
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
    # jinja2's filter escapes for HTML, which chat templates do not expect.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
