"""Published clients of search services against a retriever."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

Client = Callable[..., Any]
Did = Callable[[str, str], None]
Serving = Callable[..., AbstractContextManager[str]]


def test_verl_reads_the_passages(peer: Client, retriever: str, did: Did) -> None:
    ((text, status, hits),) = peer("verl_search", retriever, [["number3", "number4"]], 2)
    did("verl 0.5.0 perform_single_search_batch", f"2 queries: {status}, {hits} passages")
    assert (status, hits) == ("success", 4)
    for query, part in zip(["number3", "number4"], text.split("\n---\n"), strict=True):
        assert part.startswith('Doc 1 (Title: "Title ') and query in part and part.count("(Title: ") == 2


@pytest.mark.parametrize(("overload", "all_answered"), [("wait", True), ("refuse", False)])
def test_verl_under_overload(peer: Client, serving: Serving, did: Did, overload: str, all_answered: bool) -> None:
    """It does not try again after 429, so with `refuse` some of its searches are lost: the control."""
    with serving("queue_limit=1", "window_ms=50", "cache_mb=0", f"overload={overload}") as url:
        found = peer("verl_search", url, [[f"number{i}"] for i in range(12)], 1)
    answered = sum(status == "success" for _, status, _ in found)
    did(f"verl 0.5.0, full queue, overload: {overload}", f"{answered} of 12 searches at once answered")
    assert (answered == 12) == all_answered and answered >= 1


def test_openai_embeds_and_lists_the_encoder(peer: Client, retriever: str, did: Did) -> None:
    models, vectors = peer("openai_embeddings", retriever, ["number3", "number3", "number4"])
    did("openai 3.54.0 embeddings, models.list", f"{len(vectors)} vectors of {len(vectors[0])} by {models[0]}")
    assert len(models) == 1 and len(vectors) == 3 and vectors[0] == vectors[1] != vectors[2]
    assert all(math.isclose(math.hypot(*vector), 1.0, rel_tol=1e-5) for vector in vectors)


def test_skyrl_reads_the_passages_of_its_one_query(peer: Client, retriever: str, did: Did) -> None:
    texts = peer("skyrl_search", retriever, ["number3", "number4 \ud800", "x" * 5000], 2)
    did("skyrl-gym 0.4.0 SearchToolGroup.search", f"{len(texts)} searches, one too long, one with a lone surrogate")
    assert [text.count("Doc ") for text in texts] == [2, 2, 2]
    assert texts[0].startswith('Doc 1: "Title ') and "number3" in texts[0] and "number4" in texts[1]
