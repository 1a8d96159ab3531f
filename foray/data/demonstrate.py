"""Demonstrations of searching, made from questions, their supporting passages and the results of real searches.

The first query is the question, or the title of a supporting passage that the question names: whichever finds most
supporting passages. Each further query is the title of a missing one, if the policy could know it: the question or a
result so far spells it. Results are those of the index; none is added or exchanged, because a second passage that no
search found would teach to answer after one search. Deterministic.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from foray.data.dedupe import words_of
from protocol.messages import Question
from protocol.runtime.files import atomic_write
from protocol.search import Passage
from retriever.config import RetrieverSettings
from rollout_server.environment.prompts.base import PromptTemplate

if TYPE_CHECKING:
    from retriever.backends.index import Searcher

SearchPassages = Callable[[str], Sequence[Passage]]
"""Returns the best passages for a query."""
FindPassage = Callable[[str], Passage | None]
"""Returns the passage with an id."""
YES_NO = {"yes", "no"}

Reason = Literal[
    "the record names no supporting passage",
    "the first search finds no supporting passage",
    "the title of a missing passage is not in the question or the results",
    "a search for its title does not find a passage",
    "more searches would be needed",
]


class NotDemonstrated(Exception):
    """A question has no demonstration."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)


@dataclass(frozen=True)
class SearchShown:
    """One search of a demonstration: the query, and the passages that the index returned."""

    query: str
    passages: tuple[Passage, ...]


@contextmanager
def opened_searcher(settings: RetrieverSettings) -> Iterator[Searcher]:
    """Open the index of a run without a server; a missing one is built in a temporary folder.

    Raises UserError for a corpus that cannot be read, or that is too large to index here.
    """
    from retriever.backends.index import open_searcher
    from retriever.indexing.input import refuse_large

    with TemporaryDirectory(prefix="foray-index-") as folder:
        if not settings.index_path.exists():
            refuse_large(settings)
            settings = settings.model_copy(update={"index_dir": Path(folder) / "index"})
        yield open_searcher(settings)


def search_with(searcher: Searcher, topk: int) -> SearchPassages:
    """Return a function from a query to its `topk` best passages."""

    def search(query: str) -> list[Passage]:
        (result,) = searcher.search([query], topk)
        return [Passage.model_validate_json(document) for document in result.documents]

    return search


def demonstrate(
    question: Question, search: SearchPassages, find: FindPassage, template: PromptTemplate, most: int
) -> dict[str, Any]:
    """Return the record of one demonstration, which `foray sft` reads, with at most `most` searches.

    Raises NotDemonstrated.
    """
    titles = {name: _title(name, find) for name in question.supporting}
    if not titles:
        raise NotDemonstrated("the record names no supporting passage")
    named = [title for title in titles.values() if _contains(question.text, title)]
    tried = [SearchShown(query, tuple(search(query))) for query in dict.fromkeys([question.text.strip(), *named])]
    searches = [max(tried, key=lambda shown: len(_found(titles, shown.passages)))]  # the first of equal ones
    seen = _found(titles, searches[0].passages)
    if not seen:
        raise NotDemonstrated("the first search finds no supporting passage")
    while missing := [name for name in titles if name not in seen]:
        if len(searches) == most:
            raise NotDemonstrated("more searches would be needed")
        read = [question.text, *(p.contents for shown in searches for p in shown.passages)]
        wanted = next((n for n in missing if any(_contains(text, titles[n]) for text in read)), None)
        if wanted is None:
            raise NotDemonstrated("the title of a missing passage is not in the question or the results")
        searches.append(SearchShown(titles[wanted], tuple(search(titles[wanted]))))
        found = _found(titles, searches[-1].passages)
        if wanted not in found:
            raise NotDemonstrated("a search for its title does not find a passage")
        seen |= found
    return {
        "id": question.id,
        "question": question.text,
        "segments": list(_segments(question, titles, named, searches, template)),
    }


def write_demonstrations(
    path: Path,
    questions: Iterable[Question],
    make: Callable[[Question], dict[str, Any]],
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Write the demonstrations that `make` returns, one a line; return the report.

    progress  called with the number of questions so far
    """
    lines, searches, left_out = list[bytes](), Counter[int](), Counter[str]()
    for number, question in enumerate(questions, 1):
        try:
            made = make(question)
        except NotDemonstrated as reason:
            left_out[str(reason)] += 1
        else:
            searches[sum("passages" in segment for segment in made["segments"])] += 1
            lines.append(json.dumps(made, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        progress(number)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lines, durable=False)
    by_count = {str(count): searches[count] for count in sorted(searches)}
    return {"demonstrations": len(lines), "searches": by_count, "left_out": dict(left_out)}


def _segments(
    question: Question,
    titles: dict[str, str],
    named: Sequence[str],
    searches: Sequence[SearchShown],
    template: PromptTemplate,
) -> Iterable[dict[str, Any]]:
    """Yield the segments: turns of the policy, and the passages between them."""
    seen: set[str] = set()
    last: set[str] = set()
    for number, shown in enumerate(searches):
        if number == 0:
            thought = f"I need to find {' and '.join(named) or 'what the question is about'}."
        else:
            thought = f"I found {_titles(titles, last)}. Now I need {shown.query}."
        yield _turn(f"<think> {thought} </think> <search> {shown.query} </search>")
        yield {"passages": [{"id": p.id, "contents": p.contents} for p in shown.passages]}
        last = _found(titles, shown.passages) - seen
        seen |= last
    answer = question.answers[0].strip()
    several = (
        "passages on {} give" if len(evidence := _evidence(answer, titles, searches)) > 1 else "passage on {} gives"
    )
    thought = f"The {several.format(' and '.join(evidence))} the answer."
    said = f"\\boxed{{{answer}}}" if template.boxed else answer
    yield _turn(f"<think> {thought} </think> <answer> {said} </answer>")


def _turn(text: str) -> dict[str, Any]:
    return {"text": text, "train": True}


def _evidence(answer: str, titles: dict[str, str], searches: Sequence[SearchShown]) -> list[str]:
    """Return the title of the last supporting passage with the answer; all titles if there is none, for yes and no."""
    shown = [p for one in searches for p in one.passages if _found(titles, [p])]
    if answer.casefold() not in YES_NO:
        for passage in reversed(shown):
            if _contains(passage.text, answer):
                return [passage.title]
    return list(dict.fromkeys(titles.values()))


def _title(name: str, find: FindPassage) -> str:
    """Return the title of a supporting passage, given as an id or as the title itself."""
    passage = find(name)
    return name if passage is None else passage.title


def _found(titles: dict[str, str], passages: Sequence[Passage]) -> set[str]:
    """Return the supporting passages (ids or titles) that are among `passages`."""
    return {name for name, title in titles.items() if any(name == p.id or name == title == p.title for p in passages)}


def _titles(titles: dict[str, str], names: set[str]) -> str:
    return " and ".join(title for name, title in titles.items() if name in names)


def _contains(text: str, phrase: str) -> bool:
    """Return whether the words of `phrase` occur in `text`, one after the other."""
    return f" {' '.join(words_of(phrase))} " in f" {' '.join(words_of(text))} "
