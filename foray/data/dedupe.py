"""Find repeated questions: exact ones, and near ones by their words. Pure.

Exact: the same text after NFKC and case folding; or the same words, without punctuation and signs, and a gold answer in
common: "What is 7 + 3?" and "What is 7 - 3?" differ. Near: the Jaccard similarity of the sets of
words is at least a threshold, and a gold answer is the same: "who wrote Emma" and "who wrote Persuasion" have most
words in common, but not the answer. The search is exact, by prefix filtering (Chaudhuri et al., A Primitive Operator
for Similarity Joins in Data Cleaning, ICDE 2006; Bayardo et al., Scaling Up All Pairs Similarity Search, WWW 2007): two
sets with similarity t share one of the |x| - ceil(t |x|) + 1 rarest words of each.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from protocol.messages import Question

EXAMPLES = 5


class Match(NamedTuple):
    """A question that was removed, and the one that it repeats.

    kind        "repeated" (in the file itself), "exact" or "near" (in a test set)
    similarity  Jaccard similarity of the words; 1 for equal texts
    """

    kind: str
    question: Question
    other: Question
    similarity: float


@dataclass(frozen=True)
class Deduped:
    """The questions that remain, and why the others do not."""

    kept: list[Question]
    removed: list[Match]

    def counts(self) -> dict[str, int]:
        """Return kind -> number of removed questions."""
        found = Counter(match.kind for match in self.removed)
        return {kind: found[kind] for kind in ("repeated", "exact", "near")}

    def lines(self) -> list[str]:
        """Return the report for a terminal."""
        counts = self.counts()
        lines = [
            f"{counts['repeated']} repeated in the file, {counts['exact']} also in a test set, {counts['near']} near "
            "one of a test set"
        ]
        for kind in counts:
            some = [match for match in self.removed if match.kind == kind][:EXAMPLES]
            lines += [
                f"  {kind} ({m.similarity:.2f}): {m.question.text!r} ~ {m.other.text!r} ({m.other.id})" for m in some
            ]
        return lines

    def report(self) -> dict[str, Any]:
        """Return the report as JSON."""
        removed = [
            {
                "kind": m.kind,
                "id": m.question.id,
                "of": m.other.id,
                "similarity": round(m.similarity, 4),
                "question": m.question.text,
                "other": m.other.text,
            }
            for m in self.removed
        ]
        return {"kept": len(self.kept), **self.counts(), "removed": removed}


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text: NFKC, case folded, letters and digits only."""
    folded = _folded(text)
    found = "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in folded).split()
    return tuple(found or [folded])


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def dedupe(train: Sequence[Question], tests: Sequence[Question], near: float) -> Deduped:
    """Remove from `train` what repeats in it, and what `tests` has too; `near` 0 disables near duplicates."""
    of_test: dict[Any, Question] = {key: question for question in reversed(tests) for key in _keys(question)}
    seen: dict[Any, Question] = {}
    index = _Index(tests, near) if near and tests else None
    kept, removed = [], []
    for question in train:
        keys = _keys(question)
        if same := [of_test[key] for key in keys if key in of_test]:
            removed.append(Match("exact", question, same[0], 1.0))
        elif same := [seen[key] for key in keys if key in seen]:
            removed.append(Match("repeated", question, same[0], 1.0))
        elif index is not None and (match := index.nearest(question)) is not None:
            removed.append(match)
        else:
            kept.append(question)
            seen |= dict.fromkeys(keys, question)
    return Deduped(kept, removed)


def _keys(question: Question) -> list[Any]:
    """Return what equal questions have in common: the text, or the words and an answer."""
    words = words_of(question.text)
    return [_folded(question.text), *((words, gold) for gold in sorted(_golds(question)))]


class _Index:
    """Finds the most similar question with a common answer, at `threshold` or above."""

    def __init__(self, questions: Sequence[Question], threshold: float) -> None:
        self._questions, self._threshold = questions, threshold
        self._words = [frozenset(words_of(question.text)) for question in questions]
        self._golds = [_golds(question) for question in questions]
        self._counts = Counter(word for words in self._words for word in words)
        self._by_word: defaultdict[str, list[int]] = defaultdict(list)
        for number, words in enumerate(self._words):
            for word in self._prefix(words):
                self._by_word[word].append(number)

    def nearest(self, question: Question) -> Match | None:
        words, golds = frozenset(words_of(question.text)), _golds(question)
        best: tuple[float, int] = (0.0, -1)
        for number in {n for word in self._prefix(words) for n in self._by_word.get(word, ())}:
            if golds.isdisjoint(self._golds[number]):
                continue
            common = len(words & self._words[number])
            best = max(best, (common / (len(words) + len(self._words[number]) - common), -number))
        similarity, number = best
        if similarity < self._threshold:
            return None
        return Match("near", question, self._questions[-number], similarity)

    def _prefix(self, words: frozenset[str]) -> list[str]:
        """Return the rarest words, of which similar sets share one. The order must be the same for all sets."""
        ordered = sorted(words, key=lambda word: (self._counts[word], word))
        # a rounding error of the product must not shorten the prefix
        return ordered[: len(words) - math.ceil(self._threshold * len(words) - 1e-9) + 1]


def _golds(question: Question) -> frozenset[tuple[str, ...]]:
    return frozenset(words_of(answer) for answer in question.answers)
