"""Fusion by reciprocal ranks, compared with manual values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from retriever.encoder.config import HashedEncoderSettings
from retriever.index import index_identity, open_index, search_time, write_index
from retriever.index.config import (
    Bm25Settings,
    FaissFlatSettings,
    FaissIvfPqSettings,
    HybridSettings,
    IndexSettings,
    MemoryIndexSettings,
)
from retriever.index.hybrid import HybridIndex
from tests.support.small_retriever import TextSource

TEXTS = ["alpha beta", "beta gamma", "gamma delta", "alpha alpha alpha", "unrelated words here", "beta gamma"]


def opened(settings: HybridSettings, directory: Path, texts: list[str] = TEXTS) -> HybridIndex:
    write_index(settings, TextSource(texts), directory)
    index = open_index(settings, directory, threads=1)
    assert isinstance(index, HybridIndex)
    return index


def by_hand(found: list[tuple[list[int], list[float]]], weights: list[float]) -> dict[int, float]:
    total: dict[int, float] = {}
    for (rows, scores), weight in zip(found, weights, strict=True):
        for row, score in zip(rows, scores, strict=True):
            rank = 1 + sum(other > score for other in scores)
            total[row] = total.get(row, 0.0) + weight / (60 + rank)
    return total


@pytest.mark.parametrize("weights", [(), (2.0, 0.5)])
def test_scores_are_sums_of_reciprocal_ranks(tmp_path: Path, weights: tuple[float, ...]) -> None:
    members = (Bm25Settings(), FaissFlatSettings())
    index = opened(HybridSettings(members=members, weights=weights), tmp_path)
    hits = index.search(["beta gamma"], 6)
    lexical = open_index(members[0], tmp_path / "0-bm25", threads=1).search(["beta gamma"], 6)
    dense = open_index(members[1], tmp_path / "1-faiss_flat", threads=1).search(["beta gamma"], 6)
    matching = lexical.scores[0] > 0
    expected = by_hand(
        [
            (lexical.rows[0][matching].tolist(), lexical.scores[0][matching].tolist()),
            (dense.rows[0].tolist(), dense.scores[0].tolist()),
        ],
        list(weights or (1.0, 1.0)),
    )
    order = sorted(expected, key=lambda row: (-np.float32(expected[row]), row))
    assert hits.rows[0].tolist() == order
    assert hits.scores[0].tolist() == pytest.approx([expected[row] for row in order])
    assert hits.rows[0, :2].tolist() == [1, 5]  # equal passages: equal scores, in the order of the corpus
    assert hits.scores[0, 0] == hits.scores[0, 1]


def test_a_passage_without_a_word_of_the_query_gets_nothing_from_the_lexical_member(tmp_path: Path) -> None:
    index = opened(HybridSettings(members=(Bm25Settings(),)), tmp_path)
    hits = index.search(["delta", "nowhere"], 3)
    assert hits.rows.tolist() == [[2, -1, -1], [-1, -1, -1]]
    assert hits.scores[0, 0] == np.float32(1 / 61)
    assert (hits.scores[hits.rows == -1] == -np.inf).all()


def test_members_return_as_many_candidates_as_requested(tmp_path: Path) -> None:
    texts = [f"word{i} common" for i in range(30)]
    index = opened(HybridSettings(members=(MemoryIndexSettings(),), candidates=4), tmp_path, texts)
    assert (index.search(["common"], 2).rows >= 0).all()
    assert (index.search(["common"], 9).rows >= 0).all()


def test_the_encoder_is_that_of_the_first_dense_member(tmp_path: Path) -> None:
    small = HashedEncoderSettings(dim=16)
    both = HybridSettings(members=(Bm25Settings(), MemoryIndexSettings(encoder=small), FaissFlatSettings()))
    encoder = opened(both, tmp_path).encoder
    assert encoder is not None
    assert encoder.dim == 16
    (tmp_path / "lexical").mkdir()
    assert opened(HybridSettings(members=(Bm25Settings(),)), tmp_path / "lexical").encoder is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"members": [{"type": "hybrid"}]}, "cannot be a member of a hybrid"),
        ({"members": [HybridSettings()]}, "cannot be a member of a hybrid"),
        ({"members": []}, "at least 1"),
        ({"weights": [1.0]}, "1 weights for 2 members"),
        ({"weights": [1.0, 0.0]}, "above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        HybridSettings.model_validate(fields)


def test_the_identity_is_that_of_the_members_and_knobs_are_not_in_it() -> None:
    plain = HybridSettings(members=(Bm25Settings(), FaissIvfPqSettings()))
    assert index_identity(plain)["members"] == [index_identity(member) for member in plain.members]
    tuned = HybridSettings(members=(Bm25Settings(), FaissIvfPqSettings(nprobe=3)), weights=(1, 3), candidates=7)
    assert index_identity(tuned) == index_identity(plain)
    assert search_time(tuned) != search_time(plain)
    assert index_identity(HybridSettings(members=(Bm25Settings(k1=1), FaissIvfPqSettings()))) != index_identity(plain)


def test_it_is_read_from_a_tree() -> None:
    tree = {"type": "hybrid", "members": [{"type": "bm25", "b": 0.4}, {"type": "memory"}], "weights": [1, 2]}
    settings = TypeAdapter[Any](IndexSettings).validate_python(tree)
    assert settings.members == (Bm25Settings(b=0.4), MemoryIndexSettings())
