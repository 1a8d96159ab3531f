"""Porter's stemmer (Porter 1980, "An algorithm for suffix stripping"), with the two later changes of its author that
Lucene's PorterStemFilter has: `bli` becomes `ble`, `logi` becomes `log`. Words of up to two characters stay.
"""

from __future__ import annotations

from functools import lru_cache

_STEP2 = (
    *(("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"), ("bli", "ble")),
    *(("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous"), ("ization", "ize"), ("ation", "ate")),
    *(("ator", "ate"), ("alism", "al"), ("iveness", "ive"), ("fulness", "ful"), ("ousness", "ous")),
    *(("aliti", "al"), ("iviti", "ive"), ("biliti", "ble"), ("logi", "log")),
)
_STEP3 = (
    *(("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""), ("ness", "")),
)
_STEP4 = (
    *("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "sion", "tion", "ou", "ism"),
    *("ate", "iti", "ous", "ive", "ize"),
)


def _shape(word: str) -> str:
    """Return `c` or `v` for each letter: `y` is a vowel after a consonant."""
    shape = ""
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and shape.endswith("c"))
        shape += "v" if vowel else "c"
    return shape


def _measure(word: str) -> int:
    """Return how often a vowel is followed by a consonant."""
    return _shape(word).count("vc")


def _ends_double(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _shape(word)[-1] == "c"


def _ends_cvc(word: str) -> bool:
    return _shape(word)[-3:] == "cvc" and word[-1] not in "wxy"


def _plural(word: str) -> str:
    if word.endswith(("sses", "ies")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _past(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    stem = word[:-2] if word.endswith("ed") else word[:-3] if word.endswith("ing") else word
    if stem == word or "v" not in _shape(stem):
        return word
    if stem.endswith(("at", "bl", "iz")):
        return stem + "e"
    if _ends_double(stem):
        return stem if stem[-1] in "lsz" else stem[:-1]
    return stem + "e" if _measure(stem) == 1 and _ends_cvc(stem) else stem


def _replaced(word: str, table: tuple[tuple[str, str], ...]) -> str:
    """Apply the first suffix of the table that the word has, whether or not its condition allows a replacement."""
    for suffix, other in table:
        if word.endswith(suffix):
            stem = word.removesuffix(suffix)
            return stem + other if _measure(stem) > 0 else word
    return word


def _cut(word: str) -> str:
    for suffix in _STEP4:
        if word.endswith(suffix):
            stem = word[:-3] if suffix in ("sion", "tion") else word.removesuffix(suffix)
            return stem if _measure(stem) > 1 else word
    return word


def _last(word: str) -> str:
    if word.endswith("e"):
        measure = _measure(word[:-1])
        if measure > 1 or (measure == 1 and not _ends_cvc(word[:-1])):
            word = word[:-1]
    return word[:-1] if word.endswith("ll") and _measure(word) > 1 else word


@lru_cache(maxsize=1 << 18)
def stem(word: str) -> str:
    """Return the stem of a lower-case word."""
    if len(word) < 3:
        return word
    word = _past(_plural(word))
    if word.endswith("y") and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    return _last(_cut(_replaced(_replaced(word, _STEP2), _STEP3)))
