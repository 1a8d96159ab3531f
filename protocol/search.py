"""HTTP bodies of the retriever, in Search-R1's dialect.

    POST /retrieve {"queries": ["..."], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "..", "contents": "\"Title\"\ntext"}, "score": 0.87}, ...], ...]}

With `return_scores` false each inner list holds the bare documents: [{"id": .., "contents": ..}, ...].
SkyRL sends one `query` in place of `queries`; rLLM sends `query` and `top_k`, and reads `results`.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationInfo, model_validator

MAX_QUERY_CHARS = 4096
"""Maximum length of a query in characters; longer ones are truncated."""
MAX_TOPK = 1000


def _searchable(query: object, info: ValidationInfo) -> object:
    """Return a searchable query: no lone surrogates (UTF-8 cannot encode them), no NUL, at most MAX_QUERY_CHARS.

    Policies write such queries; refusing one would fail the whole batch of a client. If the validation context is a
    Counter, it counts them by cause: surrogate, nul, long.
    """
    if not isinstance(query, str):
        return query
    odd = info.context if isinstance(info.context, Counter) else Counter[str]()
    if "\x00" in query:
        query = query.replace("\x00", " ")
        odd["nul"] += 1
    if len(query) > MAX_QUERY_CHARS:
        query = query[:MAX_QUERY_CHARS]
        odd["long"] += 1
    clean = query.encode("utf-8", "replace").decode()
    if clean != query:
        odd["surrogate"] += 1
    return clean


Query = Annotated[str, BeforeValidator(_searchable)]
"""A search query: any text."""
Queries = Annotated[list[Query], FailFast()]
"""Validation stops at the first item that is not text: a list of a million numbers must not yield a million errors."""


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SearchRequest(_Body):
    """Body of `POST /retrieve`. `topk` None or 0 means the server's default."""

    queries: Queries
    topk: int | None = Field(default=None, ge=0)
    return_scores: bool = False
    partial: bool = False
    """Answer the other queries when one fails (`SearchResponse.errors`). Otherwise one failure fails the request, so
    that a client that ignores `errors` does not take a failure for an empty result."""
    results: bool = False
    """Also return `results`: the hits of the first query in rLLM's form. Implied by `top_k`, which rLLM sends."""

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, body: Any) -> Any:
        """Accept `query` (one text or several) as `queries`, and `top_k` as `topk`."""
        if not isinstance(body, dict):
            return body
        body = dict(body)
        if "queries" not in body and "query" in body:
            query = body["query"]
            body["queries"] = query if isinstance(query, list) else [query]
        if "topk" not in body and "top_k" in body:
            body |= {"topk": body["top_k"], "results": True}
        return body


class Passage(_Body):
    """One document: `contents` is `"Title"` (in double quotes), a newline, then the text.

    Further fields of the corpus (`url`, `source`, ..) are in `model_extra`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str = ""
    contents: str

    @property
    def title(self) -> str:
        """Return the first line of the contents, without its quotes."""
        return unquoted(self.contents.partition("\n")[0].strip())

    @property
    def text(self) -> str:
        """Return the text after the title line."""
        return self.contents.partition("\n")[2]


def unquoted(title: str) -> str:
    """Return a title without the pair of double quotes around it; its own ones stay."""
    return title[1:-1] if len(title) >= 2 and title[0] == title[-1] == '"' else title


class ScoredPassage(_Body):
    """One hit. Higher scores are better; the scale depends on the index."""

    document: Passage
    score: float


class SearchResponse(_Body):
    """Body of the answer to `/retrieve` with `return_scores` true: one list of hits per query, best first."""

    result: list[list[ScoredPassage]]
    errors: list[str | None] | None = None
    """Cause of failure per query (None: answered). Present only if the request set `partial` and a query failed."""
