"""Whether a corpus contains what questions ask for, and whether its retriever finds it.

By supporting passage, where questions name them: exact. By answer text, for the others: a passage with the words of an
answer may be about something else, so this is an upper bound; yes and no are not judged.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from foray.data.demonstrate import YES_NO, NotDemonstrated, demonstrate, search_with
from protocol.messages import Question
from protocol.search import Passage
from rollout_server.environment.prompts import TEMPLATES

if TYPE_CHECKING:
    from retriever.backends.index import Searcher

DEPTHS = (3, 10, 100)
"""Numbers of first results in which passages are looked for, with the question as query."""
BATCH = 32
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class Covered:
    """What the corpus has for one question.

    missing   supporting passages (ids or titles) that the corpus lacks
    answered  whether a passage contains an answer; None: there is no answer, or it is yes or no
    ranks     rank, from 1, of each supporting passage among the results
    answer    rank of the first result that contains an answer
    """

    question: Question
    missing: tuple[str, ...]
    answered: bool | None
    ranks: Mapping[str, int]
    answer: int | None

    @property
    def lacking(self) -> bool:
        """Return whether the question cannot be answered from the corpus, by its passages if it names some."""
        return bool(self.missing) if self.question.supporting else self.answered is False


def coverage(
    questions: Sequence[Question],
    searcher: Searcher,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Covered]:
    """Look for each question's passages and answers in the whole corpus and in the results of its search.

    progress  called with the number of passages and questions so far
    """
    names = {name for question in questions for name in question.supporting}
    absent = {name for name in names if searcher.find(name) is None}
    phrases = [answer_phrases(question) for question in questions]
    titles, texts = _scan(searcher.passages(), absent, set().union(*phrases), progress)
    found = []
    for start in range(0, len(questions), BATCH):
        some = questions[start : start + BATCH]
        for place, result in enumerate(searcher.search([q.text for q in some], max(DEPTHS)), start):
            passages = [Passage.model_validate_json(document) for document in result.documents]
            question, wanted = questions[place], phrases[place]
            found.append(
                Covered(
                    question,
                    tuple(name for name in question.supporting if name in absent - titles),
                    bool(wanted & texts) if wanted else None,
                    {name: rank for name in question.supporting if (rank := _rank(name, passages))},
                    next((n for n, p in enumerate(passages, 1) if _contains(_folded(p.contents), wanted)), None),
                )
            )
        progress(searcher.num_passages + len(found))
    return found


def searched(questions: Sequence[Question], searcher: Searcher, topk: int) -> dict[str, Any]:
    """Return the shares of multi-hop questions whose supporting passages one search finds, and a second one.

    The first query is that of `demonstrate`; the second, the title of a missing passage that the question or a result
    spells. In all, and by source and hops.
    """
    search, template = search_with(searcher, topk), next(iter(TEMPLATES.values()))
    ends: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for question in questions:
        if len(question.supporting) > 1:
            try:
                made = demonstrate(question, search, searcher.find, template, 2)
                end = ("", "first", "second")[sum("passages" in segment for segment in made["segments"])]
            except NotDemonstrated as why:
                end = str(why)
            for kind in ("all", kind_of(question)):
                ends[kind][end] += 1
    return {
        kind: {
            "questions": (total := count.total()),
            "first": count.pop("first", 0) / total,
            "second": count.pop("second", 0) / total,
            "not": {why: number / total for why, number in count.most_common()},
        }
        for kind, count in sorted(ends.items(), key=lambda item: (item[0] != "all", item[0]))
    } | {"topk": topk}


def kind_of(question: Question) -> str:
    """Return the source and the number of hops of a question, as in `hotpotqa 2`."""
    return f"{question.source or 'unknown'} {question.meta.get('hops', len(question.supporting) or '')}".strip()


def answer_phrases(question: Question) -> set[str]:
    """Return the answers as words between spaces, without yes and no."""
    folded = {_folded(answer) for answer in question.answers}
    return {phrase for phrase in folded if phrase.strip() and phrase.strip() not in YES_NO}


def report(found: Sequence[Covered], passages: int) -> dict[str, Any]:
    """Return the shares of questions as JSON: of those that name supporting passages, and of those with an answer."""
    named = [one for one in found if one.question.supporting]
    judged = [one for one in found if one.answered is not None]
    both = [one for one in named if one.answered is not None]
    flagged = [one for one in both if not one.answered]
    lacking = [one for one in both if one.missing]
    right = sum(not one.answered for one in lacking)
    return {
        "questions": len(found),
        "passages": passages,
        "supporting": {
            "questions": len(named),
            "in_corpus": _share(not one.missing for one in named),
            "found": {str(k): _share(_all_within(one, k) for one in named) for k in DEPTHS},
        },
        "answer": {
            "questions": len(judged),
            "in_corpus": _share(bool(one.answered) for one in judged),
            "found": {str(k): _share((one.answer or k + 1) <= k for one in judged) for k in DEPTHS},
        },
        "answer_text_tells_missing_passages": {
            "precision": right / len(flagged) if flagged else None,
            "recall": right / len(lacking) if lacking else None,
        },
        "without": [{"id": one.question.id, "missing": one.missing} for one in found if one.lacking],
    }


def render(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a report."""
    yield f"{facts['questions']} questions, {facts['passages']:,} passages"
    heads = "".join(f"{f'first {k}':>11}" for k in DEPTHS)
    yield f"{'':<44}{'questions':>10}{'in corpus':>11}{heads}"
    for kind, label in (("supporting", "all supporting passages"), ("answer", "a passage with the words of an answer")):
        row = facts[kind]
        shares = [row["in_corpus"], *row["found"].values()]
        yield f"{label:<44}{row['questions']:>10}" + "".join(f"{_percent(share):>11}" for share in shares)
    told = facts["answer_text_tells_missing_passages"]
    if told["recall"] is not None:
        precision, recall = (_percent(told[name]) for name in ("precision", "recall"))
        yield f"questions without a passage, told by answer text: precision {precision}, recall {recall}"
    searches = dict(facts.get("searches", {}))
    if topk := searches.pop("topk", 0):
        label = f"all supporting passages within {topk} results"
        yield f"{label:<44}{'questions':>10}{'1 search':>11}{'2 searches':>11}"
    for kind, shares in searches.items():
        both = (shares["first"], shares["first"] + shares["second"])
        yield f"  {kind:<42}{shares['questions']:>10}" + "".join(f"{_percent(share):>11}" for share in both)
    for why, share in searches.get("all", {}).get("not", {}).items():
        yield f"  not in two searches: {_percent(share)}, {why}"
    without = facts["without"]
    yield f"without: {len(without)} questions" + (
        ", e.g. " + ", ".join(one["id"] for one in without[:5]) if without else ""
    )


def _share(values: Iterable[bool]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _all_within(one: Covered, depth: int) -> bool:
    return all(one.ranks.get(name, depth + 1) <= depth for name in one.question.supporting)


def _rank(name: str, passages: Sequence[Passage]) -> int:
    """Return the rank of the first passage with the id or title `name`, 0 if there is none."""
    return next((rank for rank, p in enumerate(passages, 1) if name in (p.id, p.title)), 0)


def _folded(text: str) -> str:
    """Return the words of `text` in lower case, between spaces."""
    return f" {' '.join(_WORD.findall(unicodedata.normalize('NFKC', text).casefold()))} "


def _contains(folded: str, phrases: Iterable[str]) -> bool:
    return any(phrase in folded for phrase in phrases)


def _scan(
    passages: Iterable[Passage], names: set[str], phrases: set[str], progress: Callable[[int], None]
) -> tuple[set[str], set[str]]:
    """Return which of `names` are titles, and which of `phrases` occur. Each is looked for until it is found."""
    by_word: defaultdict[str, set[str]] = defaultdict(set)
    for phrase in phrases:
        by_word[max(phrase.split(), key=len)].add(phrase)  # long words are rare
    titles, occurring = set[str](), set[str]()
    count, passages = 0, iter(passages)
    while batch := list(islice(passages, 1000)):
        for passage in batch:
            if names and passage.title in names:
                titles.add(passage.title)
            folded = _folded(passage.contents)
            for word in by_word.keys() & folded.split():
                here = {phrase for phrase in by_word[word] if phrase in folded}
                occurring |= here
                by_word[word] -= here
                if not by_word[word]:
                    del by_word[word]
        count += len(batch)
        progress(count)
    return titles, occurring
