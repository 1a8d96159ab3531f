"""An answer of a served policy as it arrives, and as a terminal shows it. Escapes what is not printable."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from protocol.redaction import for_terminal

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"thoughts": "dim", "search": "cyan", "answer": "bold", "note": "dim", "problem": "red"}


class FoundPassage(BaseModel):
    """A passage that a search of the policy found."""

    title: str = ""
    text: str = ""
    score: float | None = None


class PolicySearch(BaseModel):
    """A search of the policy. `error`: why it found nothing."""

    query: str = ""
    passages: list[FoundPassage] = []
    error: str | None = None


class _Extra(BaseModel):
    searches: list[PolicySearch] = []
    version: int | None = None
    turns: int = 0
    cause: str | None = None


class _Delta(BaseModel):
    reasoning_content: str | None = None
    content: str | None = None


class _Choice(BaseModel):
    delta: _Delta = Field(default_factory=_Delta)
    finish_reason: str | None = None


class ChatChunk(BaseModel):
    """A chunk of a streamed chat completion, with the field of `foray serve`."""

    choices: list[_Choice] = []
    foray: _Extra = Field(default_factory=_Extra)
    error: Any = None


@dataclass(frozen=True)
class ChatEndpoint:
    """A model at an endpoint. `loop`: the server plays the search loop, for one question at a time."""

    url: str
    model: str
    loop: bool = False
    token: str = field(default="", repr=False)


@dataclass
class ChatAnswer:
    """What a model has said so far to one question. parts: thoughts, searches and answer in their order."""

    endpoint: ChatEndpoint
    parts: list[tuple[str, Any]] = field(default_factory=list)
    end: _Extra = field(default_factory=_Extra)
    seconds: float = 0.0

    def take(self, chunk: ChatChunk) -> list[tuple[str, Any]]:
        """Add a chunk and return its parts."""
        choice = chunk.choices[0] if chunk.choices else _Choice()
        known = len(self.searches) if choice.finish_reason else 0  # the last chunk repeats all searches
        said = (("thoughts", choice.delta.reasoning_content), ("answer", choice.delta.content))
        new: list[tuple[str, Any]] = [("search", search) for search in chunk.foray.searches[known:]]
        new += [(kind, text) for kind, text in said if text]
        if choice.finish_reason:
            self.end = chunk.foray
            self.end.cause = self.end.cause or (choice.finish_reason if choice.finish_reason != "stop" else "")
        self.parts += new
        return new

    def text(self, kind: str = "answer") -> str:
        """Return all text of a kind, in one line for each stretch between searches."""
        groups = itertools.groupby(self.parts, lambda part: part[0])
        return "\n".join("".join(text for _, text in group).strip() for name, group in groups if name == kind)

    @property
    def searches(self) -> list[PolicySearch]:
        """Return the searches so far."""
        return [value for kind, value in self.parts if kind == "search"]

    def footer(self) -> str:
        """Return what is said of a whole answer, on one line."""
        count, version = len(self.searches), self.end.version
        facts = [self.endpoint.model, f"version {version}" if version is not None else ""]
        facts += [
            f"{count} search{'es' * (count != 1)}" if self.endpoint.loop else "",
            f"{self.seconds:.1f} s" if self.seconds else "...",
        ]
        return one_line(", ".join(filter(None, facts)))

    def problem(self) -> str:
        """Return why there is no answer, "" if there is one."""
        return "" if self.text() else for_terminal(f"no answer: {self.end.cause or 'the model wrote none'}")

    def to_json(self) -> dict[str, Any]:
        """Return the answer for --json and /save."""
        said = {"model": self.endpoint.model, "answer": self.text(), "thoughts": self.text("thoughts")}
        searches = [search.model_dump() for search in self.searches]
        return said | self.end.model_dump() | {"searches": searches, "seconds": round(self.seconds, 3)}


def one_line(text: str) -> str:
    """Return `text` on one line, as a terminal may show it."""
    return for_terminal(" ".join(text.split()))


def search_line(search: PolicySearch) -> str:
    """Return a search as one line."""
    titles = ", ".join(passage.title or passage.text[:40] for passage in search.passages)
    return f"⌕ {one_line(search.query)}: {one_line(search.error or titles or 'no passages')}"


@dataclass
class ChatScreen:
    """Prints parts of answers as they arrive; what is no answer goes to `notes`. Escapes what is not printable."""

    answers: Console
    notes: Console
    _kind: str = ""
    _open: bool = False

    def show(self, kind: str, value: Any) -> None:
        """Print a part, or the continuation of the one before."""
        if kind == "search":
            return self.line(kind, search_line(value))
        text = for_terminal(value)
        if kind != self._kind:
            text = text.lstrip()
            if text:
                self.end()
        if text:
            self._kind, self._open = kind, not text.endswith("\n")
            self._print(kind, text, end="", soft_wrap=True)

    def line(self, kind: str, text: str) -> None:
        """Print whole lines; a search is cut to the width of the terminal."""
        self.end()
        cut = kind == "search" and self.notes.is_terminal
        self._print(kind, text, soft_wrap=not cut, no_wrap=cut, overflow="ellipsis" if cut else None)

    def end(self) -> None:
        """End the line that has begun."""
        if self._open:
            self._print(self._kind, "\n", end="")
        self._kind, self._open = "", False

    def _print(self, kind: str, text: str, **options: Any) -> None:
        from rich.text import Text

        (self.answers if kind == "answer" else self.notes).print(Text(text, STYLES[kind]), **options)


def side_by_side(answers: list[ChatAnswer]) -> Any:
    """Return the answers in columns."""
    from rich.table import Table
    from rich.text import Text

    def column(answer: ChatAnswer) -> Text:
        whole = Text()
        for kind, parts in itertools.groupby(answer.parts, lambda part: part[0]):
            texts = [search_line(value) if kind == "search" else value for _, value in parts]
            whole.append(for_terminal(("\n" if kind == "search" else "").join(texts)).strip() + "\n", STYLES[kind])
        if answer.seconds and (problem := answer.problem()):
            whole.append(f"{problem}\n", STYLES["problem"])
        return whole.append(answer.footer(), STYLES["note"])

    names = (f"{answer.endpoint.model} at {answer.endpoint.url}" for answer in answers)
    table = Table(*map(one_line, names), expand=True, header_style="dim")
    for one in table.columns:
        one.ratio = 1
    table.add_row(*map(column, answers))
    return table
