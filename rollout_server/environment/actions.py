"""What a turn of the policy means, and what the environment answers. Pure.

Parsing sees the text of one policy-owned segment and nothing else, so neither the prompt's examples nor a passage can
act. Passages are escaped before they are shown: whatever they say, they cannot spell one of the protocol's tags.
Nothing else of them is changed.
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
"""Stored on every group: a change of `escape_tags` changes the training distribution. Enabled tools add their tags to
what it escapes; the name of the group's template says which they are."""
MAX_CHARS_PER_TOKEN = 64
"""Passages are cut to this many characters a token of their budget before they are tokenised: a passage of megabytes
must not cost seconds."""

RESERVED_TAGS = ("think", "search", "information", "answer", "result", "tool_call", "tool_response")
"""Tags of the protocols: no tool may have one of these names."""
_BOX = "\\boxed{"
_STYLED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")


@dataclass(frozen=True)
class SearchAction:
    """The policy searches for `query`."""

    query: str


@dataclass(frozen=True)
class AnswerAction:
    """The policy answers `text`, which may be empty; None: it was to be boxed and is not."""

    text: str | None


@dataclass(frozen=True)
class ToolAction:
    """The policy calls the tool `tool`. `argument` is everything between its tags: blanks may mean something to it."""

    tool: str
    argument: str


@dataclass(frozen=True)
class InvalidAction:
    """None of them. `reason`: no_action, empty_query or empty_argument."""

    reason: str


Action = SearchAction | AnswerAction | ToolAction | InvalidAction


@lru_cache
def _action(tools: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<({'|'.join(('search', 'answer', *tools))})>")


def parse(text: str, *, box: bool = False, tools: tuple[str, ...] = ()) -> Action:
    """The first complete action in the text of one turn, whatever follows it (Search-R1's rule).

    Search-R1 first cuts at `</search>`, so that a search after an answer loses the answer; here the first one counts.
    box    the answer is what stands in `boxed` between its tags (ReSearch)
    tools  tags of the enabled tools, which are actions too
    """
    unclosed: set[str] = set()  # no end of these tags follows: to look for one after every beginning takes for ever
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
    r"""What the last \boxed{...} of a text holds, None without one or when its braces do not close.

    Braces inside are counted, so \boxed{a_{1}} holds a_{1}; a style around all of it, as in \boxed{\text{Emma}}, is
    not part of the answer.
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


# What a reader does not see may split a tag for the patterns below and not for the model: control characters that are
# no blanks and format characters (Cc, Cf), fillers, variation selectors, the Unicode tag block.
_HIDDEN = (
    "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160"
    "\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_LESS = "<\ufe64\uff1c"
"""Every character that is `<` after NFKC."""
_INVISIBLE = re.compile(f"[{_HIDDEN}]")
_MOST_SEEN = 8192
"""Characters that a reading remembers: a hostile page may bring all million."""


class _Nfkc(dict[int, str]):
    """For `str.translate`: NFKC of each character alone, made when it is first seen; "" for `without`.

    Unlike NFKC of the whole text it never composes the last letter of a tag with a mark that follows.
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
"""The two readings of a text: with what is invisible, and without."""


# one way to match blanks without a slash: with two, a page of blanks after a `<` takes the square of its length
@lru_cache
def _tag(tools: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<(?=\s*(?:/\s*)?(?:{'|'.join((*RESERVED_TAGS, *tools))})\b)", re.IGNORECASE)


@lru_cache
def _beginning(tools: tuple[str, ...]) -> re.Pattern[str]:
    """A `<` with as much behind it as decides whether it begins a tag, and never another `<`: so all matches together
    are no longer than the text."""
    names = RESERVED_TAGS + tools
    longest = max(map(len, names))  # one more character ends the name
    # most `<` of a page are settled here: no name begins with the ASCII letter behind it
    first = "".join({case for name in names for case in (name[0].lower(), name[0].upper())})
    visible = f"[^{_LESS}{_HIDDEN}][{_HIDDEN}]*"
    return re.compile(f"[{_LESS}][\\s/\uff0f{_HIDDEN}]*+(?=[{first}]|[^\\x00-\\x7f])(?:{visible}){{1,{longest + 1}}}")


def fold_text(text: str) -> str:
    """NFKC without invisible characters: what two texts look like to a reader, for comparing them."""
    return _INVISIBLE.sub("", unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)))


def escape_tags(text: str, tools: tuple[str, ...] = ()) -> str:
    """Escape version 2: `‹` for the `<` of anything like a protocol tag; every other character stays as it is.

    A tag counts in any width and with invisible characters in it: the pattern reads the text after NFKC of each
    character, once with the invisible ones and once without.
    tools  tags of the enabled tools, which are protocol tags then
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
    """What stands between the tags of an observation: the passages, cut roughly, escaped."""
    return escape_tags(template.format_passages(passages)[: max_tokens * MAX_CHARS_PER_TOKEN], tools)


def enclose(before: Sequence[int], body: Sequence[int], after: Sequence[int], limit: int) -> list[int]:
    """`before + body + after` in at most `limit` tokens: the body is cut, the tags never are.

    Raises ValueError when the tags alone are longer than the limit.
    """
    room = limit - len(before) - len(after)
    if room < 0:
        raise ValueError(f"an observation's tags take {limit - room} tokens, more than the limit of {limit}")
    return [*before, *body[:room], *after]
