"""Bodies of `POST /retrieve`: the names that other trainers' clients use."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.search import Passage, SearchRequest


@pytest.mark.parametrize(
    ("body", "queries", "topk", "results"),
    [
        ({"queries": ["a"]}, ["a"], None, False),
        ({"queries": ["a", "b"], "topk": 3}, ["a", "b"], 3, False),
        ({"queries": ["a"], "topk": 0}, ["a"], 0, False),
        ({"query": "a"}, ["a"], None, False),
        ({"query": ["a", "b"]}, ["a", "b"], None, False),
        ({"query": "a", "top_k": 5}, ["a"], 5, True),
        ({"query": "a", "queries": ["b"]}, ["b"], None, False),
        ({"queries": ["a"], "topk": 3, "top_k": 5}, ["a"], 3, False),
        ({"queries": ["a"], "results": True}, ["a"], None, True),
    ],
)
def test_both_names_of_a_field_are_accepted(
    body: dict[str, Any], queries: list[str], topk: int | None, results: bool
) -> None:
    given = dict(body)
    request = SearchRequest.model_validate(body)
    assert (list(request.queries), request.topk, request.results) == (queries, topk, results)
    assert not (request.return_scores or request.partial) and body == given


@pytest.mark.parametrize("body", [{}, {"topk": 3}, {"queries": ["a"], "topk": -1}, {"queries": [1]}, [], None, "a"])
def test_other_bodies_are_refused(body: Any) -> None:
    with pytest.raises(ValidationError):
        SearchRequest.model_validate(body)


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('"Emma"\na\nb', "Emma", "a\nb"),
        ("Emma\na", "Emma", "a"),
        ('"Emma"', "Emma", ""),
        ("", "", ""),
        ('""Weird Al" Yankovic"\nx', '"Weird Al" Yankovic', "x"),
        ('"Heroes" (song)\nx', '"Heroes" (song)', "x"),
    ],
)
def test_the_first_line_of_a_passage_is_its_title(contents: str, title: str, text: str) -> None:
    passage = Passage(contents=contents)
    assert (passage.title, passage.text) == (title, text)
