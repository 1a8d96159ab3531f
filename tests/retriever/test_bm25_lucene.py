"""BM25 as pyserini has it: against scores of Lucene itself, and against the formula in plain loops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retriever.index import index_identity, open_index, write_index
from retriever.index.bm25 import TextAnalyzer, lucene_length
from retriever.index.config import Bm25Settings
from retriever.index.porter import stem
from tests.support.small_retriever import TextSource

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent.parent / "golden" / "lucene_bm25.json").read_text())
PYSERINI = Bm25Settings(k1=0.9, b=0.4, tokens="lucene", stopwords="lucene", stemming="porter")


def scores_of(settings: Bm25Settings, query: str, directory: Path) -> list[float]:
    """A score for each passage."""
    if not list(directory.iterdir()):
        write_index(settings, TextSource(GOLDEN["passages"]), directory)
    hits = open_index(settings, directory, threads=1).search([query], len(GOLDEN["passages"]))
    return [score for _, score in sorted(zip(hits.rows[0].tolist(), hits.scores[0].tolist(), strict=True))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lucene")


@pytest.mark.parametrize("golden", GOLDEN["queries"], ids=lambda golden: golden["query"])
def test_scores_are_those_that_anserini_computed(directory: Path, golden: dict[str, Any]) -> None:
    """The file says which program made it; its scores are rounded, and those of equal passages moved by 1e-6."""
    found = scores_of(PYSERINI, golden["query"], directory)
    expected = [golden["scores"].get(str(row), 0.0) for row in range(len(GOLDEN["passages"]))]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-4)
    assert any(expected) == (golden["query"] != "the of and")


@pytest.mark.parametrize("query", [golden["query"] for golden in GOLDEN["queries"]])
def test_scores_are_those_of_lucenes_formula_in_loops(directory: Path, query: str) -> None:
    terms = TextAnalyzer(PYSERINI)
    passages = [terms(text) for text in GOLDEN["passages"]]
    mean = sum(map(len, passages)) / len(passages)
    expected = []
    for passage in passages:
        total = 0.0
        for term in terms(query):
            holding = sum(term in other for other in passages)
            idf = math.log(1 + (len(passages) - holding + 0.5) / (holding + 0.5))
            tf = passage.count(term)
            total += idf * tf / (tf + 0.9 * (1 - 0.4 + 0.4 * in_one_byte(len(passage)) / mean)) if tf else 0.0
        expected.append(total)
    assert scores_of(PYSERINI, query, directory) == pytest.approx(expected, rel=1e-5)


def in_one_byte(length: int) -> int:
    """Lucene's SmallFloat: 24 values as they are, then three bits after the leading one."""
    if length < 24:
        return length
    rest, shift = length - 24, 0
    while rest >> shift >= 16:
        shift += 1
    return 24 + ((rest >> shift) << shift)


def test_lengths_are_kept_in_one_byte() -> None:
    lengths = np.arange(100_000, dtype=np.int64)
    kept = lucene_length(lengths)
    assert kept.tolist() == [in_one_byte(length) for length in lengths.tolist()]
    assert kept[[39, 40, 41, 42, 100, 1000]].tolist() == [39, 40, 40, 42, 96, 984]
    assert len(set(kept.tolist())) < 256


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The museum's and the sisters' o'clock", "the museum and the sisters o'clock"),
        ("3.14 1,000,000 12:30 U.S. x.1", "3.14 1,000,000 12 30 u.s x 1"),
        ("snake_case e-mail a/b 5k ²", "snake_case e mail a b 5k"),
        ("東京 は ラーメン 서울", "東 京 は ラーメン 서울"),
        ("cafe\u0301 हिन्दी ка́к", "cafe\u0301 हिन्दी ка́к"),
        ("It’s Émile’s", "it émile"),
    ],
)
def test_words_are_cut_as_lucene_does(text: str, expected: str) -> None:
    assert TextAnalyzer(Bm25Settings(tokens="lucene"))(text) == expected.split()


@pytest.mark.parametrize(
    ("words", "stems"),
    [  # Porter 1980, step by step
        ("caresses ponies ties caress cats", "caress poni ti caress cat"),
        ("feed agreed plastered bled motoring sing", "feed agre plaster bled motor sing"),
        ("conflated troubled sized hopping tanned falling hissing", "conflat troubl size hop tan fall hiss"),
        ("fizzed failing filing happy sky", "fizz fail file happi sky"),
        ("relational conditional rational valenci digitizer", "relat condit ration valenc digit"),
        ("radicalli differentli vileli analogousli vietnamization", "radic differ vile analog vietnam"),
        ("predication operator feudalism decisiveness hopefulness", "predic oper feudal decis hope"),
        ("callousness formaliti sensitiviti sensibiliti", "callous formal sensit sensibl"),
        ("triplicate formative formalize electriciti electrical", "triplic form formal electr electr"),
        ("revival allowance inference airliner gyroscopic adjustable", "reviv allow infer airlin gyroscop adjust"),
        ("defensible irritant replacement adjustment dependent", "defens irrit replac adjust depend"),
        ("adoption homologou communism activate angulariti", "adopt homolog commun activ angular"),
        ("probate rate cease controll roll", "probat rate ceas control roll"),
        ("possibly analogies apologies is as y oed", "possibl analog apolog is as y o"),  # with bli and logi
        ("naïve été 1990s 東京", "naïv été 1990 東京"),
    ],
)
def test_stems_are_porters(words: str, stems: str) -> None:
    assert [stem(word) for word in words.split()] == stems.split()


def test_stemming_joins_inflections_in_other_settings_too(tmp_path: Path) -> None:
    settings = Bm25Settings(stemming="porter")
    write_index(settings, TextSource(["the runners were running", "a city"]), tmp_path)
    index = open_index(settings, tmp_path, threads=1)
    assert index.search(["run"], 1).scores[0, 0] > 0 and index.search(["cities"], 1).rows[0, 0] == 1


def test_indexes_from_before_these_settings_fit_as_they_are() -> None:
    before = {"type": "bm25", "k1": 1.5, "b": 0.75, "stopwords": "none"}
    assert index_identity(Bm25Settings()) == before
    assert index_identity(Bm25Settings(stemming="porter")) == before | {"stemming": "porter"}
    assert index_identity(PYSERINI).keys() - before.keys() == {"tokens", "stemming"}


def test_lengths_without_effect_are_left_alone(tmp_path: Path) -> None:
    """b 0 or k1 0: no division by zero, and the scores of the formula."""
    for name, settings in (("b", {"k1": 0.9, "b": 0.0}), ("k1", {"k1": 0.0, "b": 0.4})):
        (tmp_path / name).mkdir()
        found = scores_of(Bm25Settings(**settings, tokens="lucene"), "museum founded", tmp_path / name)
        assert all(map(math.isfinite, found)) and max(found) > 0


@pytest.mark.filterwarnings("error")
def test_a_corpus_without_a_term_is_indexed_in_silence(tmp_path: Path) -> None:
    write_index(PYSERINI, TextSource(["the of", "and"]), tmp_path)
    assert open_index(PYSERINI, tmp_path, threads=1).search(["the word"], 2).scores.tolist() == [[0.0, 0.0]]
