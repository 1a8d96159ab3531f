"""Parse the action of a turn, and build the observation. Pure.

The parser reads only the text of one policy-owned segment, so examples in the prompt and passages cannot act. Passages
are escaped before they are shown, so they cannot contain a protocol tag. They are not changed otherwise.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from protocol.search import Passage
from rollout_server.environment.prompts.base import PromptTemplate

ESCAPE_VERSION = 2
"""Stored with every group, because a change of `escape_tags` changes the training distribution. The tags of enabled
tools are escaped too; the name of the group's template lists these tools."""
MAX_CHARS_PER_TOKEN = 64
"""Passages are cut to this many characters per token of their budget before they are tokenised, because tokenising
megabytes would take seconds."""

RESERVED_TAGS = ("think", "search", "information", "answer", "result", "tool_call", "tool_response")
"""Tags of the protocols. A tool may not have one of these names."""
_BOX = "\\boxed{"
_STYLED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")


@dataclass(frozen=True)
class SearchAction:
    """The policy searches for `query`."""

    query: str


@dataclass(frozen=True)
class AnswerAction:
    """The policy answers `text`, which may be empty. None: the answer must be boxed and is not."""

    text: str | None


@dataclass(frozen=True)
class ToolAction:
    """The policy calls the tool `tool`. `argument` is the unchanged text between its tags: white space may matter."""

    tool: str
    argument: str


@dataclass(frozen=True)
class InvalidAction:
    """No valid action. `reason`: no_action, empty_query or empty_argument."""

    reason: str


Action = SearchAction | AnswerAction | ToolAction | InvalidAction


@lru_cache
def _action(tools: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<({'|'.join(('search', 'answer', *tools))})>")


def parse(text: str, *, box: bool = False, tools: tuple[str, ...] = ()) -> Action:
    """Return the first complete action in the text of one turn; later text is ignored (Search-R1's rule).

    Search-R1 cuts at `</search>` first, so an answer before a search is lost; here the first action counts.
    box    the answer is the content of `\\boxed{}` between its tags (ReSearch)
    tools  tags of the enabled tools, which are actions too
    """
    unclosed: set[str] = set()  # no closing tag follows; searching again after every opening tag would be quadratic
    for opened in _action(tools).finditer(text):
        kind = opened[1]
        end = -1 if kind in unclosed else text.find(f"</{kind}>", opened.end())
        if end >= 0:
            return _meaning(kind, text[opened.end() : end], box=box)
        unclosed.add(kind)
    return InvalidAction("no_action")


def _meaning(kind: str, inside: str, *, box: bool) -> Action:
    body = inside.strip()
    if kind == "answer":
        return AnswerAction(boxed(body) if box else body)
    if kind == "search":
        return SearchAction(body) if body else InvalidAction("empty_query")
    return ToolAction(kind, inside) if body else InvalidAction("empty_argument")


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} in a text; None if there is none or its braces do not close.

    Nested braces are counted, so \boxed{a_{1}} contains a_{1}. A style around the whole content, as in
    \boxed{\text{Emma}}, is removed.
    """
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 0
    for position in range(start + len(_BOX) - 1, len(text)):
        if text[position - 1] != "\\":
            depth += (text[position] == "{") - (text[position] == "}")
        if not depth:
            inner = text[start + len(_BOX) : position].strip()
            styled = _STYLED.fullmatch(inner)
            return styled[1].strip() if styled else inner
    return None


# Invisible characters could split a tag for the patterns below, but not for the model: control characters other than
# white space, format characters (Cc, Cf), fillers, variation selectors, the Unicode tag block.
_HIDDEN = (
    "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160"
    "\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_LESS = "<\ufe64\uff1c"
"""All characters that are `<` after NFKC."""
_INVISIBLE = re.compile(f"[{_HIDDEN}]")
_MOST_SEEN = 8192
"""Maximum number of cached characters: a hostile page may contain all of Unicode."""


class _Nfkc(dict[int, str]):
    """Table for `str.translate`: NFKC of each single character, computed on first use; "" for `without`.

    Unlike NFKC of the whole text, it does not compose the last letter of a tag with a combining mark after it.
    """

    def __init__(self, without: re.Pattern[str] | None = None) -> None:
        self._without = without

    def __missing__(self, code: int) -> str:
        if len(self) >= _MOST_SEEN:
            self.clear()
        plain = unicodedata.normalize("NFKC", chr(code))
        made = self[code] = self._without.sub("", plain) if self._without else plain
        return made


_READINGS = (_Nfkc(), _Nfkc(_INVISIBLE))
"""Two tables: with invisible characters, and without."""


# only one way to match white space without a slash: two would be quadratic in white space after a `<`
@lru_cache
def _tag(tools: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<(?=\s*(?:/\s*)?(?:{'|'.join((*RESERVED_TAGS, *tools))})\b)", re.IGNORECASE)


@lru_cache
def _beginning(tools: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of a `<` with the text needed to decide whether it starts a tag.

    A match contains no other `<`, so all matches together are not longer than the text.
    """
    names = RESERVED_TAGS + tools
    longest = max(map(len, names))  # one more character, which ends the name
    # rejects most `<` of a page at once: no name starts with the ASCII letter after it
    first = "".join({case for name in names for case in (name[0].lower(), name[0].upper())})
    visible = f"[^{_LESS}{_HIDDEN}][{_HIDDEN}]*"
    return re.compile(f"[{_LESS}][\\s/\uff0f{_HIDDEN}]*+(?=[{first}]|[^\\x00-\\x7f])(?:{visible}){{1,{longest + 1}}}")


def fold_text(text: str) -> str:
    """Return the text in NFKC without invisible characters, for comparing texts as a reader sees them."""
    return _INVISIBLE.sub("", unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)))


def escape_tags(text: str, tools: tuple[str, ...] = ()) -> str:
    """Replace the `<` of anything like a protocol tag by `‹` (escape version 2). Other characters stay unchanged.

    Tags in other widths and with invisible characters are found too: the pattern is applied after NFKC of each
    character, once with the invisible ones and once without.
    tools  tags of the enabled tools, which are escaped too
    """
    tag = _tag(tools)
    if text.isascii() and not _INVISIBLE.search(text):
        return tag.sub("\u2039", text)

    def shown(beginning: re.Match[str]) -> str:
        found = beginning[0]
        if any(tag.match(found.translate(reading)) for reading in _READINGS):
            return "\u2039" + found[1:]
        return found

    return _beginning(tools).sub(shown, text)


def passages_text(
    template: PromptTemplate, passages: Sequence[Passage], max_tokens: int, tools: tuple[str, ...] = ()
) -> str:
    """Return the text between the tags of an observation: the passages, roughly cut and escaped."""
    return escape_tags(template.format_passages(passages)[: max_tokens * MAX_CHARS_PER_TOKEN], tools)


def enclose(before: Sequence[int], body: Sequence[int], after: Sequence[int], limit: int) -> list[int]:
    """Return `before + body + after` in at most `limit` tokens. The body is cut if necessary, the tags are not.

    Raises ValueError if the tags alone exceed the limit.
    """
    room = limit - len(before) - len(after)
    if room < 0:
        raise ValueError(f"the tags of an observation take {limit - room} tokens, more than the limit of {limit}")
    return [*before, *body[:room], *after]
