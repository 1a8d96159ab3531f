"""Seeded synthetic text: the same bytes for `synthetic:N:SEED` on every machine, for benchmarks of any size.

A passage has a title of three words and about a hundred words of text in sentences. Words follow Zipf's law, and a
third of them come from the passage's topic, so that passages with one topic are near each other, as in real text. All
arithmetic is on 64-bit integers (SplitMix64: Steele et al. 2014), identical on every platform.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from retriever.corpus.formats.base import Document

PREFIX = "synthetic:"
VOCABULARY = 20_000
TOPICS = 1000
TITLE_WORDS, MIN_WORDS, MAX_WORDS = 3, 80, 120
MEAN_BYTES = 800
"""Bytes of a passage as a line of a corpus, roughly."""
_TOPIC_WORDS = 64
_SENTENCE = 13
"""Words in a sentence."""
_BLOCK = 1024
_U = np.uint64
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Synthetic:
    """A parsed `synthetic:N[:SEED]`."""

    passages: int
    seed: int

    @classmethod
    def parse(cls, spec: str) -> Synthetic:
        """Parse the specification. Raises UserError for another form."""
        count, _, seed = spec.removeprefix(PREFIX).partition(":")
        if not count.isdecimal() or not int(count) or (seed and not seed.isdecimal()):
            raise UserError(
                f"{spec!r} is not of the form synthetic:N or synthetic:N:SEED", todo="write e.g. synthetic:1000000"
            )
        return cls(int(count), int(seed or 0))

    def __str__(self) -> str:
        return f"{PREFIX}{self.passages}:{self.seed}"

    def documents(self) -> Iterator[Document]:
        """Yield documents "0", "1", ... in order; a shorter corpus is a prefix of a longer one with the same seed."""
        forms = _word_forms()
        choose = _zipf_table()
        for first in range(0, self.passages, _BLOCK):
            rows = np.arange(first, min(first + _BLOCK, self.passages), dtype=_U)
            words, lengths = _draw(rows, self.seed, choose)
            for row, places, length in zip(rows.tolist(), words.tolist(), lengths.tolist(), strict=True):
                chosen = [forms[place] for place in places[: TITLE_WORDS + length]]
                text = " ".join(chosen[TITLE_WORDS:])
                yield Document(str(row), " ".join(chosen[:TITLE_WORDS]), text if text.endswith(".") else text + ".")


def corpus_spec(corpus: Path | str) -> str:
    """Return a corpus's name in manifests: `synthetic:N:SEED`, or its absolute path. It need not exist."""
    return str(Synthetic.parse(str(corpus)) if str(corpus).startswith(PREFIX) else Path(corpus).absolute())


def _mix(values: Words) -> Words:
    """Return SplitMix64's output function of `values`."""
    values = (values ^ (values >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U(27))) * _U(0x94D049BB133111EB)
    return values ^ (values >> _U(31))


def _draw(rows: Words, seed: int, choose: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (indices into `_word_forms` int64 [rows, TITLE_WORDS + MAX_WORDS], words of each text int64 [rows])."""
    golden = _U(0x9E3779B97F4A7C15)
    base = _mix((rows + _U(1)) * golden ^ _mix(np.array([seed + 1], dtype=_U) * golden))
    position = np.arange(TITLE_WORDS + MAX_WORDS, dtype=_U)
    random = _mix(base[:, None] + (position + _U(1)) * golden)
    common = choose[(random & _U(0xFFFF)).astype(np.int64)]
    topic = _mix(base) % _U(TOPICS)
    of_topic = _mix(topic[:, None] * _U(_TOPIC_WORDS) + ((random >> _U(16)) % _U(_TOPIC_WORDS))) % _U(VOCABULARY)
    from_topic = ((random >> _U(32)) % _U(3)) == 0
    from_topic[:, :TITLE_WORDS] = True
    words = np.where(from_topic, of_topic.astype(np.int64), common)
    place = np.arange(MAX_WORDS) % _SENTENCE
    words[:, :TITLE_WORDS] += VOCABULARY
    words[:, TITLE_WORDS:] += np.where(place == 0, VOCABULARY, np.where(place == _SENTENCE - 1, 2 * VOCABULARY, 0))
    lengths = (base >> _U(40)) % _U(MAX_WORDS - MIN_WORDS + 1) + _U(MIN_WORDS)
    return words, lengths.astype(np.int64)


def _word_forms() -> list[str]:
    """Return every word as it is, capitalised, and with a full stop: 3 * VOCABULARY."""
    onsets, vowels, codas = "bdfgklmnprstvz", "aeiou", ("", "n", "r", "s", "l")
    syllables = [onset + vowel + coda for coda in codas for onset in onsets for vowel in vowels]
    words, count = [], len(syllables)
    for i in range(VOCABULARY):
        # frequent words are short: one syllable, then two, then three
        parts = [i] if i < count else [i % count, i // count] if i < count * 40 else [i % count, i // 7 % count, i % 97]
        words.append("".join(syllables[part] for part in parts))
    return [*words, *(word.capitalize() for word in words), *(f"{word}." for word in words)]


def _zipf_table() -> npt.NDArray[np.int64]:
    """Return 65,536 entries: word i has a share of about 1 / (i + 10) of them."""
    weights = [10_000_000 // (i + 10) for i in range(VOCABULARY)]
    ends, total = np.cumsum(np.array(weights, dtype=np.int64)), sum(weights)
    return np.searchsorted(ends, np.arange(65536, dtype=np.int64) * total // 65536, side="right")
