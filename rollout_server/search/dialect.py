"""The two JSON dialects of retrievers: what is asked, and passages from what is answered. Pure.

    search_r1  POST /retrieve      {"queries": [q], "topk": k, "return_scores": true}
               -> {"result": [[{"document": {"id", "contents"}, "score"}, ..]], "errors": [null]?}
    flashrag   POST /batch_search  {"query": [q], "top_n": k, "return_score": false}
               -> [[{"id", "contents"}, ..]]                          (ReSearch, ReCall)

Scores are not read: passages come best first. An answer is a stranger's, so its parts are checked one by one, each
failure has a name, and only the first k hits are looked at.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from protocol.search import Passage
from rollout_server.search.fault import BAD_SHAPE, NOT_JSON, WRONG_COUNT, Fault, named_by_server

Dialect = Literal["search_r1", "flashrag"]
PATHS: dict[Dialect, str] = {"search_r1": "/retrieve", "flashrag": "/batch_search"}


class _Document(BaseModel):
    """A hit's document. Corpora with numbers as ids exist."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True)

    id: str = ""
    contents: str


def request_body(dialect: Dialect, query: str, topk: int, run: str) -> bytes:
    """The body that asks one query. `run`: whose memory the server uses, "" for none (search_r1 only)."""
    body: dict[str, Any]
    if dialect == "flashrag":
        body = {"query": [query], "top_n": topk, "return_score": False}
    else:
        # `partial`: with one query a failure that is named says more than a 500. Other servers ignore it.
        body = {"queries": [query], "topk": topk, "return_scores": True, "partial": True}
        body |= {"run": run} if run else {}
    return json.dumps(body).encode()


def read_answer(dialect: Dialect, raw: bytes, topk: int) -> tuple[Passage, ...]:
    """At most `topk` passages, best first. Raises Fault: not_json, bad_shape, wrong_count or failed_WORD."""
    try:
        answer = from_json(raw)
    except ValueError:
        raise Fault(NOT_JSON) from None
    try:
        lists = answer if dialect == "flashrag" else answer["result"]
        errors = None if dialect == "flashrag" else answer.get("errors")
        if not isinstance(lists, list) or not isinstance(errors, list | None):
            raise TypeError("no list of lists")
        if len(lists) != 1 or (errors is not None and len(errors) != 1):
            raise Fault(WRONG_COUNT)
        if errors and errors[0] is not None:
            raise named_by_server(str(errors[0]))
        if not isinstance(lists[0], list):
            raise TypeError("no list of hits")
        hits = lists[0][:topk]
        found = [_Document.model_validate(hit if dialect == "flashrag" else hit["document"]) for hit in hits]
    except (TypeError, KeyError, AttributeError, IndexError, ValidationError):
        raise Fault(BAD_SHAPE) from None
    return tuple(Passage(id=document.id, contents=document.contents) for document in found)
